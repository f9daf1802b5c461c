"""Compressed token map: token ids that the Engram hash treats as equal (ARCHITECTURE 6).

Ids whose text differs only in case, accents or white space share a compressed id: 99092 of 129280 remain in the
DeepSeek-V4 tokenizer. Building that map takes half a second, so the maps of large tokenizers are kept on disk, each
under the SHA-256 of the tokenizer that it was built from. A file holds its checksum; without a usable file
the map is built.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from dsv41.files import default_cache_dir

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    AnyTokenizer = PreTrainedTokenizerFast | tokenizers.Tokenizer

logger = logging.getLogger(__name__)

# Part of every key: count up when a tokenizer's map changes, or how it is stored.
FORMAT = 1
# Tokenizers from this many ids on are cached: the map of a smaller one takes a tenth of a second or two.
CACHED_FROM = 32768

_SENTINEL = "\ue000"  # private use: stands for "a single space" while the text is stripped
_WHITE_RUN = re.compile(r"[ \t\r\n]+")
_ASCII_WHITE = " \t\n\v\f\r"  # as `Strip` has it; Python's `strip()` takes \x1c to \x1f too


def fast_backend(tokenizer: AnyTokenizer) -> tokenizers.Tokenizer:
    """Backend `tokenizers.Tokenizer` inside a fast tokenizer; TypeError for any other."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "decode_batch"):
        raise TypeError(
            f"tokenizer: must be a fast tokenizer (PreTrainedTokenizerFast or tokenizers.Tokenizer), "
            f"got {type(tokenizer).__name__}"
        )
    return backend


def compressed_token_map(tokenizer: AnyTokenizer) -> npt.NDArray[np.int64]:
    """Compressed id of every token id, numbered in first-seen order.

    Two ids share an entry if their decoded texts normalise alike: NFKC, NFD, accents stripped, lower case, white-space
    runs to one space, stripped (a text that is one space stays one). A text that holds U+FFFD is a fragment of UTF-8
    and is kept apart by its raw token; a text that normalises to nothing is kept as it is.

    The maps of large tokenizers are kept in `default_cache_dir`, by the tokenizer's content. A cache that cannot be
    read or written is logged; the map is then built.

    Args:
        tokenizer: Fast tokenizer with ids 0 to ``len(tokenizer) - 1``.

    Returns:
        int64 array [len(tokenizer)]; its maximum plus one is the compressed vocabulary size.

    Raises:
        TypeError: Not a fast tokenizer.
        ValueError: An id below the tokenizer's length stands for no token.
    """
    backend = fast_backend(tokenizer)
    file = _cache_file(backend) if backend.get_vocab_size(with_added_tokens=True) >= CACHED_FROM else None
    mapping = None if file is None else _read(file)
    if mapping is None:
        mapping = _build(backend)
        if file is not None:
            _write(file, mapping)
    return mapping


def fingerprint(mapping: npt.NDArray[np.int64]) -> str:
    """SHA-256 of the map's little-endian int64 bytes: equal if and only if two tokenizers hash alike."""
    return hashlib.sha256(mapping.astype("<i8").tobytes()).hexdigest()


def _normalizer() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )


def _normalized_ascii(text: str) -> str:
    """Result of `_normalizer` for ASCII, several times faster; more than half of a vocabulary is ASCII."""
    folded = _WHITE_RUN.sub(" ", text.lower())
    return folded if folded == " " else folded.strip(_ASCII_WHITE)


def _build(backend: tokenizers.Tokenizer) -> npt.NDArray[np.int64]:
    length = backend.get_vocab_size(with_added_tokens=True)
    texts = backend.decode_batch([(index,) for index in range(length)], skip_special_tokens=False)
    normalize = _normalizer().normalize_str
    seen: dict[str | None, int] = {}
    mapping = np.empty(length, dtype=np.int64)
    for index, text in enumerate(texts):
        # An id that stands for no token decodes to nothing; asking for every token takes a tenth of a second.
        if not text and backend.id_to_token(index) is None:
            raise ValueError(f"tokenizer: id {index} of 0..{length - 1} stands for no token")
        key: str | None
        if text.isascii():
            key = _normalized_ascii(text) or text
        elif "\ufffd" in text:
            key = backend.id_to_token(index)
        else:
            key = normalize(text) or text
        mapping[index] = seen.setdefault(key, len(seen))
    return mapping


def _cache_file(backend: tokenizers.Tokenizer) -> Path | None:
    """Cache file of this tokenizer's map; None if it cannot be cached."""
    # Not at the top of the file: a model without Engram does not need the library.
    import tokenizers

    try:
        content = backend.to_str()
        folder = default_cache_dir() / "token_maps"
    except Exception as error:  # parts written in Python cannot be serialised, which is reported as a plain Exception
        logger.info("token map is not cached: %s", error)
        return None
    # The library's version stands for the Unicode tables that it normalises by.
    key = hashlib.sha256(f"{FORMAT} {tokenizers.__version__}\n{content}".encode())
    return folder / f"{key.hexdigest()}.map"


def _read(file: Path) -> npt.NDArray[np.int64] | None:
    """Map stored in a file as its `fingerprint`, a line feed and little-endian int64 ids; None if unusable."""
    try:
        stated, _, ids = file.read_bytes().partition(b"\n")
        mapping = np.frombuffer(ids, dtype="<i8").astype(np.int64)
        if fingerprint(mapping).encode() != stated:
            raise ValueError("its content is not what was written")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cached token map %s cannot be used, building it again: %s", file, error)
        return None
    return mapping


def _write(file: Path, mapping: npt.NDArray[np.int64]) -> None:
    # Processes that build the same map at once write the same bytes; each renames a separate file. Not by
    # `written_whole`, which would also take the place of a folder, and wait for the disk.
    partial = file.with_name(f"{file.name}.{uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(fingerprint(mapping).encode() + b"\n" + mapping.astype("<i8").tobytes())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("token map is not cached: %s", error)
