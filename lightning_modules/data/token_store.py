"""The tokens of a split, kept in a cache file that is mapped into memory."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dsv41.files import written_whole
from lightning_modules.data.corpus import Document
from lightning_modules.data.splits import Split

_BATCH_CHARACTERS = 1 << 20
"""Text that is tokenised at a time: enough for all cores, and little beside the tokens in memory."""


class TokenStore:
    """The tokens of all documents of a split, one after the other, as they lie in the cache.

    Each document is a beginning-of-sentence token, its text's tokens and an end-of-sentence token. The file is opened
    at the first use, in each process for itself, so that the store can be sent to data workers.

    Args:
        tokens_file: The tokens, raw.
        starts_file: int64 ``[documents + 1]`` in NumPy's format: where each document starts, and where the last ends.
        dtype: Type of the tokens in their file.
    """

    def __init__(self, tokens_file: Path, starts_file: Path, dtype: np.dtype[Any]) -> None:
        self.tokens_file = tokens_file
        self.dtype = dtype
        self.starts: np.ndarray = np.load(starts_file)
        stored = tokens_file.stat().st_size
        if stored != len(self) * dtype.itemsize:
            raise ValueError(
                f"{tokens_file} has {stored} bytes instead of {len(self) * dtype.itemsize}; remove it, to make it anew"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens: uint16 or uint32 ``[len(self)]``, read-only. A split without documents has none."""
        if len(self) == 0:
            return np.empty(0, self.dtype)  # An empty file cannot be mapped.
        return np.memmap(self.tokens_file, self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # Without the mapping, which would be sent as a copy of all tokens.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def tokenized(
    split: Split, name: str, tokenizer: PreTrainedTokenizerFast, fingerprint: str, cache_dir: Path
) -> TokenStore:
    """Open the tokens of a split, tokenising it first if they are not in the cache.

    Text that looks like a special token is encoded as the characters it consists of.

    Args:
        split: The documents.
        name: The split's name, for messages.
        tokenizer: The tokenizer.
        fingerprint: Its fingerprint.
        cache_dir: Folder of the caches.

    Returns:
        The tokens.

    Raises:
        ValueError: If the tokenizer gives a document one of the three special ids, or an id of ``len(tokenizer)`` or
            more.
    """
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    key = hashlib.sha256(json.dumps([split.digest, fingerprint]).encode()).hexdigest()[:32]
    tokens_file = cache_dir / "tokens" / f"{key}.{dtype.name}.bin"
    starts_file = cache_dir / "tokens" / f"{key}.starts.npy"
    if not (tokens_file.exists() and starts_file.exists()):
        _tokenize(split.documents, name, tokenizer, tokens_file, starts_file, dtype)
    return TokenStore(tokens_file, starts_file, dtype)


def _tokenize(
    documents: Sequence[Document],
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    tokens_file: Path,
    starts_file: Path,
    dtype: np.dtype[Any],
) -> None:
    begin = time.perf_counter()
    rank_zero_info(f"Tokenising {len(documents):,} {name} documents ...")
    encode = _plain_text_encoder(tokenizer)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    starts = [0]
    console = Console(stderr=True)
    hidden = not console.is_terminal or getattr(rank_zero_only, "rank", 0) != 0
    # The starts appear last: they are what says that both files are there.
    with written_whole(starts_file) as partial_starts, written_whole(tokens_file) as partial_tokens:
        with partial_tokens.open("wb") as out, Progress(console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task(f"Tokenising {name}", total=len(documents))
            for batch in _batches(documents):
                for document, encoding in zip(batch, encode([text for _, text in batch]), strict=True):
                    ids = np.array([bos, *encoding, eos], dtype=np.int64)
                    inner = ids[1:-1]
                    if inner.size and (inner.max() >= len(tokenizer) or np.isin(inner, (bos, eos, pad)).any()):
                        raise ValueError(
                            f"the tokenizer gives document {document.name!r} an id of {len(tokenizer)} or more, or one"
                            f" of the special ids {[bos, eos, pad]}, which no text may have"
                        )
                    out.write(ids.astype(dtype).tobytes())
                    starts.append(starts[-1] + len(ids))
                bar.advance(task, len(batch))
        with partial_starts.open("wb") as out:
            np.save(out, np.array(starts, dtype=np.int64))
    seconds = time.perf_counter() - begin
    rank_zero_info(f"Tokenised {len(documents):,} {name} documents into {starts[-1]:,} tokens in {seconds:.1f} s.")


def _plain_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], list[list[int]]]:
    # A copy, because these settings would show in the caller's tokenizer.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # This is how the library says: as plain text.

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
