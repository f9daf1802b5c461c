"""Checks of the data module's settings that need no data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv41.files import default_cache_dir
from lightning_modules.data.corpus import check_source
from lightning_modules.data.tokenization import LEAST_VOCAB_SIZE, MOST_VOCAB_SIZE, check_tokenizer_spec

RANGES = {
    "vocab_size": (LEAST_VOCAB_SIZE, MOST_VOCAB_SIZE),
    "sequence_length": (2, 2**31 - 1),
    "batch_size": (1, 2**31 - 1),
    "max_documents": (1, 2**63 - 1),
    "num_workers": (0, 1024),
    "seed": (0, 2**63 - 1),
}
"""Least and largest values of the whole numbers."""


def check_settings(source: str | Sequence[str], tokenizer: str, text_field: str, **numbers: Any) -> None:
    """Check the settings of a data module, in the order of its arguments.

    Args:
        source: See ``TextDataModule`` for all of them.
        tokenizer: Which tokenizer.
        text_field: Field with the text.
        **numbers: The whole numbers of ``RANGES``, ``val_fraction`` and ``test_fraction``.

    Raises:
        ValueError: If a value is of another type or out of its range. The message names it, with the range.
        FileNotFoundError: If there is no such source or tokenizer.
    """
    for name, text in (("tokenizer", tokenizer), ("text_field", text_field)):
        if not isinstance(text, str):
            raise ValueError(f"data.{name}: must be text, got {text!r}")
    for name, (least, most) in RANGES.items():
        value = numbers[name]
        if name == "max_documents" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"data.{name}: must be a whole number, from {least} to {most}, got {value!r}")
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise ValueError(f"data.{name}: must be {bound}, got {value}")
    fractions = [numbers["val_fraction"], numbers["test_fraction"]]
    for name, fraction in zip(("val_fraction", "test_fraction"), fractions, strict=True):
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise ValueError(f"data.{name}: must be from 0 to below 1, got {fraction!r}")
    if sum(fractions) >= 1:
        raise ValueError(
            f"data.val_fraction + data.test_fraction: must be below 1, got {fractions[0]} + {fractions[1]}: nothing is"
            " left to train on"
        )
    if not text_field:
        raise ValueError("data.text_field: must be the name of a field, got an empty text")
    check_source(source, numbers["max_documents"])
    check_tokenizer_spec(tokenizer, numbers["vocab_size"])


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Folder of the caches.

    Args:
        cache_dir: The folder, or None for the default one.

    Returns:
        The folder, which need not exist.

    Raises:
        ValueError: If it is empty, or lies in a home directory that is not known.
    """
    if cache_dir is not None and (not isinstance(cache_dir, str | Path) or not str(cache_dir)):
        raise ValueError(f"data.cache_dir: must be the path of a folder or null, got {cache_dir!r}")
    try:
        return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"data.cache_dir: there is no home directory for {'the default' if cache_dir is None else repr(cache_dir)};"
            " give the folder for caches with --data.cache_dir or $DSV41_CACHE"
        ) from error
