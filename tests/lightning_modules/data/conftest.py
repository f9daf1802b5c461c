"""A small corpus and a data module on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_modules.data import TextDataModule


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    """Forty text files with different content, in three folders."""
    root = tmp_path / "corpus"
    for number in range(40):
        file = root / f"part{number % 3}" / f"text{number:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Document {number}: " + f"the quick brown fox number {number} jumps. " * (3 + number % 7))
    return root


@pytest.fixture
def make_data(corpus_dir: Path) -> Callable[..., TextDataModule]:
    """Makes a data module on the small corpus; keyword arguments replace the defaults given here."""

    def make(**changes: Any) -> TextDataModule:
        settings = {
            "source": str(corpus_dir),
            "vocab_size": 300,
            "sequence_length": 16,
            "batch_size": 4,
            "val_fraction": 0.15,
            "test_fraction": 0.15,
        }
        return TextDataModule(**{**settings, **changes})

    return make
