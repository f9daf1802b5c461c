"""Sources of text: the standard library's code, files and folders, or a Hugging Face dataset."""

import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lightning_modules.data.readers import (
    RECORD_READERS,
    NotTextError,
    holds_json_lines,
    hugging_face_documents,
    kind_of,
    plain_text,
    shown,
)

SOURCE_HELP = (
    '"stdlib" (the sources of Python\'s standard library), a file or a folder of text, .jsonl, .ndjson or .parquet'
    ' files, also compressed (.gz, .zst), "hf:NAME" or "hf:NAME:CONFIG" (a Hugging Face dataset), or a list of these'
)
"""Valid sources, for error messages."""

_STDLIB_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "turtledemo")
)

_MARK = "\ufeff"


class Document(NamedTuple):
    """Text of one document, with its name.

    Attributes:
        name: Name that does not depend on the machine, such as a path relative to the source. It decides the split.
        text: The text, not empty.
    """

    name: str
    text: str


@dataclass
class LeftOut:
    """Counts of the files and records that a source holds and the corpus does not.

    Attributes:
        files: Files that were looked at, those that were read among them. Hidden ones are not looked at.
        records: Records of ``.jsonl``, ``.parquet`` and the like, and of datasets, that were read.
        reasons: Number of files left out by reason.
        empty_records: Number of records left out, whose text is null or empty.
        examples: First file or record by reason.
    """

    files: int = 0
    records: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    empty_records: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def add_file(self, name: str, reason: str) -> None:
        """Count a file that is left out."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.examples.setdefault(reason, name)

    def add_record(self, name: str) -> None:
        """Count a record that is left out."""
        self.empty_records += 1
        self.examples.setdefault("record", name)

    def summary(self) -> str:
        """Counts, reasons and examples in one line; empty if nothing is left out."""
        parts = []
        if count := sum(self.reasons.values()):
            listed = sorted(self.reasons.items(), key=lambda item: -item[1])
            reasons = ", ".join(f"{number:,} {reason} (as {self.examples[reason]})" for reason, number in listed)
            parts.append(f"{count:,} of {self.files:,} files ({count / self.files:.1%}): {reasons}")
        if self.empty_records:
            share = self.empty_records / self.records
            parts.append(
                f"{self.empty_records:,} of {self.records:,} records ({share:.1%}), which are null or empty"
                f" (as {self.examples['record']})"
            )
        return f"left out {'; and '.join(parts)}" if parts else ""


def check_source(source: str | Sequence[str], max_documents: int | None) -> list[str]:
    """Check a source without reading any text.

    Args:
        source: One source or several. See ``SOURCE_HELP``.
        max_documents: Limit on the number of documents, or None.

    Returns:
        The sources as a list.

    Raises:
        ValueError: If the list is empty or holds something else than texts, ``max_documents`` is below 1, a path cannot
            be looked up, or there is a Hugging Face dataset without a limit or without a name.
        FileNotFoundError: If a source is not there.
    """
    sources = [source] if isinstance(source, str) else source
    if not isinstance(sources, list | tuple) or not all(isinstance(one, str) for one in sources):
        raise ValueError(f"data.source: must be text or a list of texts, got {source!r}: {SOURCE_HELP}")
    sources = list(sources)
    if not sources or "" in sources:
        raise ValueError(f"data.source: is empty; it must be {SOURCE_HELP}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"data.max_documents: must be at least 1 or null, got {max_documents}")
    for one in sources:
        if one.startswith("hf:"):
            if not one.removeprefix("hf:").split(":")[0]:
                raise ValueError(f"data.source: {one!r} names no dataset; write hf:NAME or hf:NAME:CONFIG")
            if max_documents is None:
                raise ValueError(
                    f"data.max_documents: must be set for source {one!r}, because such a dataset may be endless"
                )
        elif one != "stdlib":
            try:
                there = Path(one).expanduser().exists()
            except (OSError, RuntimeError) as error:  # A name that is too long, a home directory that is not known.
                raise ValueError(f"data.source: {one!r} cannot be looked up: {error}") from error
            if not there:
                raise FileNotFoundError(f"data.source: {one!r} is not a file or folder here; it must be {SOURCE_HELP}")
    return sources


def iterate_documents(
    source: str | Sequence[str],
    text_field: str = "text",
    max_documents: int | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[Document]:
    """Yield the documents of a source, always in the same order.

    Files of a folder come in the order of their relative paths. Each is a document, or several if it holds records.
    A byte-order mark (U+FEFF) at the start of a document is dropped. Empty texts, and files of a folder that are no
    text, are left out and do not count.

    Args:
        source: One source or several, taken one after the other. See ``SOURCE_HELP``.
        text_field: Field or column that holds the text, in records of ``.jsonl``, ``.parquet`` and Hugging Face.
        max_documents: Stop after this many documents.
        left_out: Takes the counts of what is left out.

    Yields:
        The documents.

    Raises:
        ValueError: If the source is not valid, a record or a compressed file is broken, a source that is a single file
            is not text, or there is no document.
        FileNotFoundError: If a source is not there.
        OSError: If a file cannot be read for another reason than its permissions.
        ImportError: If a package for this kind of source is not installed.
    """
    sources = check_source(source, max_documents)
    counts = LeftOut() if left_out is None else left_out
    documents = (document for one in sources for document in _documents(one, text_field, counts))
    found = False
    for document in islice(documents, max_documents):
        found = True
        yield document
    if not found:
        raise ValueError(f"data.source: {source!r} holds no text; {counts.summary() or f'it must be {SOURCE_HELP}'}")


def _documents(source: str, text_field: str, left_out: LeftOut) -> Iterator[Document]:
    if source == "stdlib":
        yield from _stdlib_documents()
    elif source.startswith("hf:"):
        name, _, config = source.removeprefix("hf:").partition(":")
        yield from _records(hugging_face_documents(name, config or None, text_field), left_out)
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            for file in _files_below(path, left_out):
                yield from _folder_file(file, shown(file.relative_to(path).as_posix()), text_field, left_out)
        else:
            left_out.files += 1
            yield from _file_documents(path, shown(path.name), text_field, left_out)


def _records(texts: Iterator[tuple[str, str]], left_out: LeftOut) -> Iterator[Document]:
    for name, text in texts:
        left_out.records += 1
        if text := text.removeprefix(_MARK):
            yield Document(name, text)
        else:
            left_out.add_record(name)


def _file_documents(file: Path, name: str, text_field: str, left_out: LeftOut) -> Iterator[Document]:
    kind = kind_of(file)
    if kind == ".json" and file.suffix.lower() != kind and holds_json_lines(file, text_field):
        kind = ".jsonl"  # Large corpora of JSON Lines are commonly named .json.gz.
    if kind in RECORD_READERS:
        numbered = RECORD_READERS[kind](file, text_field)
        yield from _records(((f"{name}#{number}", text) for number, text in numbered), left_out)
    elif text := plain_text(file).removeprefix(_MARK):
        yield Document(name, text)
    else:
        left_out.add_file(name, "empty")


def _folder_file(file: Path, name: str, text_field: str, left_out: LeftOut) -> Iterator[Document]:
    left_out.files += 1
    try:
        # Looked at before it is opened, since opening a pipe waits for a writer.
        if not stat.S_ISREG(file.stat().st_mode):
            left_out.add_file(name, "not regular files")
            return
        yield from _file_documents(file, name, text_field, left_out)
    except NotTextError as error:
        left_out.add_file(name, error.reason)
    except FileNotFoundError:
        left_out.add_file(name, "links to nothing")
    except PermissionError:
        left_out.add_file(name, "not readable")


def _files_below(folder: Path, left_out: LeftOut, without: frozenset[str] = frozenset()) -> list[Path]:
    """Files below a folder, without hidden ones and folders left out by name, sorted by relative path."""

    def unreadable(error: OSError) -> None:
        left_out.files += 1
        left_out.add_file(shown(error.filename or folder), "folders not readable")

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        # In place: what is left out is not walked through, which matters for a large site-packages.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for linked in (path for path in map(Path(parent).joinpath, folders) if path.is_symlink()):
            left_out.files += 1
            left_out.add_file(shown(linked.relative_to(folder)), "links to folders")
        files.extend(Path(parent, name) for name in names if not name.startswith("."))
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    uncounted = LeftOut()  # Empty modules, and a few files that are there to try other encodings.
    for file in _files_below(root, uncounted, _STDLIB_LEFT_OUT):
        if file.suffix == ".py":
            yield from _folder_file(file, file.relative_to(root).as_posix(), "", uncounted)
