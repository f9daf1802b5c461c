"""Tokens of a split, kept in a cache file that is mapped into memory."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dsv41.files import unwritten, written_whole
from lightning_modules.data.corpus import Document
from lightning_modules.data.readers import first_line
from lightning_modules.data.splits import Split
from lightning_modules.data.tokenization import require_writable, token_byte_lengths, unknown_id

MOST_LOST = 0.1
"""Largest share of a split's bytes that a tokenizer may lose: text that its tokens do not give back."""

_BATCH_CHARACTERS = 1 << 20
"""Text that is tokenised at a time: enough for all cores, and little beside the tokens in memory."""


class TokenStore:
    """Tokens of all documents of a split, one after the other, as stored in the cache.

    Each document is a beginning-of-sentence token, its text's tokens and an end-of-sentence token. The file is opened
    at the first use, in each process for itself, so that the store can be sent to data workers.

    Args:
        tokens_file: The tokens, raw.
        starts_file: int64 ``[documents + 1]`` in NumPy's format: where each document starts, and where the last ends.
        dtype: Type of the tokens in their file.

    Raises:
        ValueError: If a file is damaged. The message names it.
    """

    def __init__(self, tokens_file: Path, starts_file: Path, dtype: np.dtype[Any]) -> None:
        self.tokens_file = tokens_file
        self.dtype = dtype
        try:
            self.starts: np.ndarray = np.load(starts_file)
            damaged = self.starts.dtype != np.int64 or self.starts.ndim != 1 or not len(self.starts)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{starts_file} is damaged: {first_line(error)}; remove it, to make it anew") from error
        if damaged:
            raise ValueError(f"{starts_file} does not hold the starts of documents; remove it, to make it anew")
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
        ValueError: If the tokenizer cannot encode a document, gives it one of the three special ids or an id of
            ``len(tokenizer)`` or more, or loses more than ``MOST_LOST`` of the text.
        OSError: If the tokens cannot be written.
    """
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    key = hashlib.sha256(json.dumps([split.digest, fingerprint]).encode()).hexdigest()[:32]
    tokens_file = cache_dir / "tokens" / f"{key}.{dtype.name}.bin"
    starts_file = cache_dir / "tokens" / f"{key}.starts.npy"
    if not (tokens_file.exists() and starts_file.exists()):
        _tokenize(split, name, tokenizer, tokens_file, starts_file, dtype)
    return TokenStore(tokens_file, starts_file, dtype)


def _tokenize(
    split: Split,
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    tokens_file: Path,
    starts_file: Path,
    dtype: np.dtype[Any],
) -> None:
    begin = time.perf_counter()
    documents = split.documents
    require_writable(tokens_file.parent)
    rank_zero_info(f"Tokenising {len(documents):,} {name} documents ...")
    encoder = _Encoder(tokenizer, name, split.bytes)
    starts = [0]
    console = Console(stderr=True)
    hidden = not console.is_terminal or getattr(rank_zero_only, "rank", 0) != 0
    try:
        # The starts appear last: they are what says that both files are there.
        with written_whole(starts_file) as partial_starts, written_whole(tokens_file) as partial_tokens:
            with partial_tokens.open("wb") as out, Progress(console=console, transient=True, disable=hidden) as bar:
                task = bar.add_task(f"Tokenising {name}", total=len(documents))
                for batch in _batches(documents):
                    for ids in encoder.encode(batch):
                        out.write(ids.astype(dtype).tobytes())
                        starts.append(starts[-1] + len(ids))
                    bar.advance(task, len(batch))
            with partial_starts.open("wb") as out:
                np.save(out, np.array(starts, dtype=np.int64))
    except OSError as error:
        # What the rest would have taken is not known yet, but how much text there is.
        needed = starts[-1] * dtype.itemsize * split.bytes / max(encoder.bytes, 1) + 8 * len(documents)
        raise unwritten(tokens_file, error.strerror or str(error), error.errno, int(needed)) from error
    encoder.report_loss()
    seconds = time.perf_counter() - begin
    rank_zero_info(f"Tokenised {len(documents):,} {name} documents into {starts[-1]:,} tokens in {seconds:.1f} s.")


class _Encoder:
    """Tokenizer of a split's documents that counts the bytes of text it loses.

    Args:
        tokenizer: The tokenizer.
        name: Name of the split.
        total: Bytes of all its documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, total: int) -> None:
        # A copy, because these settings would show in the caller's tokenizer.
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # This is how the library says: as plain text.
        self.special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        self.unknown = unknown_id(tokenizer)
        self.lengths: np.ndarray = token_byte_lengths(tokenizer).numpy()
        self.name = name
        self.total = total
        self.bytes = 0
        self.lost = 0
        self.most: tuple[int, str] = (0, "")  # Bytes lost in one document, and the document that loses most.

    def encode(self, documents: list[Document]) -> Iterator[np.ndarray]:
        """Ids of each document between those of its beginning and its end, int64 ``[tokens + 2]``."""
        bos, eos, _ = self.special
        for document, encoding in zip(documents, self._encodings(documents), strict=True):
            ids = np.array([bos, *encoding, eos], dtype=np.int64)
            inner = ids[1:-1]
            if inner.size and (inner.max() >= len(self.lengths) or np.isin(inner, self.special).any()):
                raise ValueError(
                    f"data.tokenizer: gives document {document.name!r} an id of {len(self.lengths)} or more, or one"
                    f" of the special ids {self.special}, which no text may have"
                )
            self._count(document, inner)
            yield ids

    def _encodings(self, documents: list[Document]) -> list[list[int]]:
        texts = [document.text for document in documents]
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # The library has no type of its own.
            raise ValueError(
                f"data.tokenizer: cannot encode one of the {self.name} documents {documents[0].name!r} to"
                f" {documents[-1].name!r}: {first_line(error)}"
            ) from error

    def _count(self, document: Document, ids: np.ndarray) -> None:
        size = len(document.text.encode())
        self.bytes += size
        if int(self.lengths[ids].sum()) == size:
            return
        known = ids if self.unknown is None else ids[ids != self.unknown]
        lost = size - len(self.backend.decode(known.tolist()).encode())
        if lost > 0:
            self.lost += lost
            self.most = max(self.most, (lost, document.name))
        if self.lost > MOST_LOST * self.total:  # Whatever the rest of the text is.
            raise ValueError(
                f"data.tokenizer: loses {self.lost:,} of the first {self.bytes:,} bytes of the {self.name} text (most"
                f" in {self.most[1]!r}), and at most {MOST_LOST:.0%} of all {self.total:,} may be lost; choose one that"
                ' has tokens for all of it, such as "bpe"'
            )

    def report_loss(self) -> None:
        """Log the share of the text that is lost, if any is."""
        if self.lost:
            rank_zero_info(
                f"data.tokenizer: loses {self.lost:,} of {self.total:,} bytes ({self.lost / self.total:.2%}) of the"
                f" {self.name} text, most in {self.most[1]!r}; bits per byte count the bytes of the text."
            )


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
