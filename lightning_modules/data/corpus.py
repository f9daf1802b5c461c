"""Where text comes from: the standard library's own sources, files and folders, or a Hugging Face dataset."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lightning_modules.data.records import RECORD_READERS, hugging_face_documents

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".log", ".csv", ".tsv", ".html", ".xml", ".css", ".js", ".ts"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".rb", ".sh", ".sql"),
    *(".toml", ".yaml", ".yml", ".json", ".cfg", ".ini"),
)
"""Endings of the files that a folder's text is taken from, one document per file."""

SOURCE_HELP = (
    '"stdlib" (the sources of Python\'s standard library), a file or a folder of text files, .jsonl, .jsonl.gz or'
    ' .parquet files, "hf:NAME" or "hf:NAME:CONFIG" (a Hugging Face dataset), or a list of these'
)
"""What a source may be, for error messages."""

_STDLIB_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "turtledemo")
)


class Document(NamedTuple):
    """A text that stands by itself.

    Attributes:
        name: Name that does not depend on the machine, such as a path relative to the source. It decides the split.
        text: The text, not empty.
    """

    name: str
    text: str


def check_source(source: str | Sequence[str], max_documents: int | None) -> list[str]:
    """Check a source without reading any text.

    Args:
        source: One source or several. See ``SOURCE_HELP``.
        max_documents: Limit on the number of documents, or None.

    Returns:
        The sources as a list.

    Raises:
        ValueError: If the list is empty, ``max_documents`` is below 1, or there is a Hugging Face dataset without a
            limit or without a name.
        FileNotFoundError: If a source is not there.
    """
    sources = [source] if isinstance(source, str) else list(source)
    if not sources:
        raise ValueError(f"source is empty; it must be {SOURCE_HELP}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents must be at least 1 or null, got {max_documents}")
    for one in sources:
        if one.startswith("hf:"):
            if not one.removeprefix("hf:").split(":")[0]:
                raise ValueError(f"source {one!r} names no dataset; write hf:NAME or hf:NAME:CONFIG")
            if max_documents is None:
                raise ValueError(f"max_documents must be set for source {one!r}, because such a dataset may be endless")
        elif one != "stdlib" and not Path(one).expanduser().exists():
            raise FileNotFoundError(f"source {one!r} is not a file or folder here; source must be {SOURCE_HELP}")
    return sources


def iterate_documents(
    source: str | Sequence[str], text_field: str = "text", max_documents: int | None = None
) -> Iterator[Document]:
    """Yield the documents of a source, always in the same order.

    Files of a folder come in the order of their relative paths. Empty texts are left out and do not count.

    Args:
        source: One source or several, taken one after the other. See ``SOURCE_HELP``.
        text_field: Field or column that holds the text, in records of ``.jsonl``, ``.parquet`` and Hugging Face.
        max_documents: Stop after this many documents.

    Yields:
        The documents.

    Raises:
        ValueError: If the source is not valid, a record is broken, a file is not UTF-8, or there is no document.
        FileNotFoundError: If a source is not there.
        ImportError: If a package for this kind of source is not installed.
    """
    sources = check_source(source, max_documents)
    documents = (Document(name, text) for one in sources for name, text in _named_texts(one, text_field) if text != "")
    found = False
    for document in islice(documents, max_documents):
        found = True
        yield document
    if not found:
        raise ValueError(f"source {source!r} holds no text; source must be {SOURCE_HELP}")


def _named_texts(source: str, text_field: str) -> Iterator[tuple[str, str]]:
    if source == "stdlib":
        yield from _stdlib_texts()
    elif source.startswith("hf:"):
        name, _, config = source.removeprefix("hf:").partition(":")
        yield from hugging_face_documents(name, config or None, text_field)
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            for file in _files_below(path):
                if _ending(file) in RECORD_READERS or file.suffix.lower() in TEXT_SUFFIXES:
                    yield from _file_texts(file, file.relative_to(path).as_posix(), text_field)
        else:
            yield from _file_texts(path, path.name, text_field)


def _files_below(folder: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Files below a folder, without hidden ones and folders left out by name, sorted by relative path."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        # In place: what is left out is not walked through, which matters for a large site-packages.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        files.extend(Path(parent, name) for name in names if not name.startswith("."))
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _ending(file: Path) -> str:
    name = file.name.lower()
    return next((ending for ending in RECORD_READERS if name.endswith(ending)), "")


def _file_texts(file: Path, name: str, text_field: str) -> Iterator[tuple[str, str]]:
    ending = _ending(file)
    if ending:
        for number, text in RECORD_READERS[ending](file, text_field):
            yield f"{name}#{number}", text
        return
    try:
        # Bytes, not read_text, which would change line endings.
        yield name, file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); convert it or take it out") from error


def _stdlib_texts() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in _files_below(root, _STDLIB_LEFT_OUT):
        if file.suffix != ".py":
            continue
        try:
            yield file.relative_to(root).as_posix(), file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # A few files are there to try other encodings.
