"""Splits of a corpus into training, validation and test documents."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from lightning_modules.data.corpus import Document

SPLITS = ("train", "val", "test")


class Split(NamedTuple):
    """Documents of one split.

    Attributes:
        documents: The documents, in the order of the corpus.
        digest: Hexadecimal SHA-256 of their names and texts.
        bytes: Length of their texts in UTF-8.
    """

    documents: list[Document]
    digest: str
    bytes: int


def split_of(name: str, val_fraction: float, test_fraction: float) -> str:
    """Split of a document, which depends on its name alone.

    Args:
        name: Name of the document.
        val_fraction: Share of the documents for validation, in [0, 1).
        test_fraction: Share of the documents for test, in [0, 1).

    Returns:
        ``"train"``, ``"val"`` or ``"test"``.
    """
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    if bucket < val_fraction:
        return "val"
    return "test" if bucket < val_fraction + test_fraction else "train"


def split_documents(documents: Iterable[Document], val_fraction: float, test_fraction: float) -> dict[str, Split]:
    """Divide a corpus.

    A corpus of a single document is cut by characters: first the train part, then val, then test.

    Args:
        documents: The corpus.
        val_fraction: Share for validation, in [0, 1).
        test_fraction: Share for test, in [0, 1).

    Returns:
        Split by its name. A split may have no documents.
    """
    parts: dict[str, list[Document]] = {name: [] for name in SPLITS}
    corpus = list(documents)
    if len(corpus) == 1:
        name, text = corpus[0]
        val, test = int(len(text) * val_fraction), int(len(text) * test_fraction)
        train = len(text) - val - test
        cuts = {"train": text[:train], "val": text[train : train + val], "test": text[train + val :]}
        parts = {split: [Document(name, part)] if part else [] for split, part in cuts.items()}
    else:
        for document in corpus:
            parts[split_of(document.name, val_fraction, test_fraction)].append(document)
    return {name: _with_digest(part) for name, part in parts.items()}


def corpus_digest(documents: Iterable[Document]) -> str:
    """Hash a corpus.

    Args:
        documents: The documents, whose order counts.

    Returns:
        Hexadecimal SHA-256 of their names and texts.
    """
    return _with_digest(documents).digest


def _with_digest(documents: Iterable[Document]) -> Split:
    kept, digest, size = list(documents), hashlib.sha256(), 0
    for name, text in kept:
        encoded = text.encode()
        size += len(encoded)
        for part in (name.encode(), encoded):
            # With its length, so that moving text from one document to the next changes the hash.
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return Split(kept, digest.hexdigest(), size)
