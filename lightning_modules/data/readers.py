"""Readers of text: plain or compressed files, JSON Lines, parquet and Hugging Face datasets.

All problems are raised with the file and the record they are in.
"""

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST_TEXT = 1 << 32
"""Most bytes of a file that is read as one document: 4 GiB."""

_COMPRESSED = (".gz", ".zst", ".zstd")
_HEAD_BYTES = 1 << 13
# The marks of UTF-32 first: that of UTF-16 is the beginning of one of them.
_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


class NotTextError(ValueError):
    """Content that is no text.

    Args:
        file: The file.
        reason: Why it is left out, in a few words that are the same for all such files.
        advice: Rest of the message when the file itself was asked for.
    """

    def __init__(self, file: Path, reason: str, advice: str = "") -> None:
        super().__init__(f"{shown(file)} is {reason}{advice}")
        self.reason = reason


def shown(path: Path | str) -> str:
    """Path as text that can be printed and hashed; bytes of a name that is not UTF-8 are written as ``\\xNN``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed if its name ends in ``.gz``, ``.zst`` or ``.zstd``.

    Args:
        file: The file.

    Yields:
        The file's bytes.

    Raises:
        ValueError: If it cannot be decompressed. Like the next, it may come while the block reads.
        OSError: If it cannot be read.
        ImportError: If the package that decompresses it is not installed.
    """
    suffix = file.suffix.lower()
    library: Any = gzip if suffix == ".gz" else _zstd(file) if suffix in _COMPRESSED else None
    damage = (EOFError, gzip.BadGzipFile, zlib.error) if library in (None, gzip) else (EOFError, library.ZstdError)
    try:
        with file.open("rb") if library is None else io.BufferedReader(library.open(file, "rb")) as stream:
            yield stream
    except damage as error:
        raise ValueError(f"{shown(file)} cannot be decompressed, it is damaged or cut: {first_line(error)}") from error
    except OSError as error:
        text = f"{shown(file)} could not be read: {error.strerror or error}"
        raise type(error)(text) from error  # Of the same type, since a folder leaves out what it may not read.


def _zstd(file: Path) -> Any:
    try:
        return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise ImportError(f"reading {shown(file)} needs backports.zstd: pip install -e '.[zst]'") from error


def kind_of(file: Path) -> str:
    """Ending that decides how a file is read, without that of a compression: ``.jsonl`` for ``a.jsonl.gz``."""
    name = Path(file.name.lower())
    compressed = name.suffix in _COMPRESSED
    kind = (name.with_suffix("") if compressed else name).suffix
    return "" if compressed and kind == ".parquet" else kind


def plain_text(file: Path) -> str:
    """Text of a file: UTF-8, or UTF-16 or UTF-32 with a byte-order mark.

    Args:
        file: The file, which may be compressed.

    Returns:
        The text, line endings as they are.

    Raises:
        NotTextError: If it is something else, holds NUL characters, or is too large.
        ValueError: If it cannot be decompressed.
        OSError: If it cannot be read.
        ImportError: If the package that decompresses it is not installed.
    """
    size, chunks = 0, []
    with opened(file) as stream:
        encoding = _encoding_by_mark(stream)
        head = stream.peek(_HEAD_BYTES)
        if encoding == "utf-8" and b"\0" in head:  # Decided here: a film need not be read.
            raise _with_nuls(file, head)
        while chunk := stream.read(1 << 20):
            size += len(chunk)
            if size > LARGEST_TEXT:
                raise NotTextError(file, f"larger than {LARGEST_TEXT:,} bytes", "; split it into documents")
            chunks.append(chunk)
    raw = b"".join(chunks)
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        reason = f"not {encoding.upper()} text"
        raise NotTextError(file, reason, f" (byte {error.start}); convert it or take it out") from error
    if "\0" in text:
        raise _with_nuls(file, raw[:_HEAD_BYTES])
    return text


def _encoding_by_mark(stream: io.BufferedReader) -> str:
    head = stream.peek(4)
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), "utf-8")


def _with_nuls(file: Path, head: bytes) -> NotTextError:
    # In UTF-16, most texts have a NUL in every other byte, and in the others none.
    even, odd = head[::2].count(0), head[1::2].count(0)
    if min(even, odd) == 0 and 4 * max(even, odd) > len(head):
        return NotTextError(file, "UTF-16 without a byte-order mark", "; convert it to UTF-8")
    return NotTextError(file, "binary, with NUL bytes")


def json_lines_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Texts of a file with a JSON object per line.

    Args:
        file: The file, which may be compressed.
        text_field: Field of the object that holds the text.

    Yields:
        Line number, from 1, and text, empty where it is null. Blank lines are passed over.

    Raises:
        ValueError: If a line is not a JSON object with a text or null in that field. The message names the line.
        OSError: If the file cannot be read.
        ImportError: If the package that decompresses it is not installed.
    """
    number = 0
    with opened(file) as stream:
        encoding = _encoding_by_mark(stream)
        lines: Iterator[bytes | str] = iter(stream)
        if encoding != "utf-8":
            lines = iter(io.TextIOWrapper(stream, encoding, newline="\n"))
        while True:
            try:
                line = next(lines, None)
            except UnicodeDecodeError as error:
                raise ValueError(f"{shown(file)}, after line {number}: not {encoding.upper()} text: {error}") from error
            if line is None:
                return
            number += 1
            if line.strip():
                where = f"{shown(file)}:{number}"
                yield number, _text_of(_json_value(line, where), text_field, where)


def _json_value(line: bytes | str, where: str) -> Any:
    if isinstance(line, bytes) and b"\0" in line:
        raise ValueError(f"{where}: holds NUL bytes; text in UTF-16 must begin with a byte-order mark")
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError(f"{where}: not valid JSON: nested too deeply") from error
    except ValueError as error:  # Broken JSON, and also bytes that are not UTF-8.
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def holds_json_lines(file: Path, text_field: str) -> bool:
    """Whether the first line of a file that is not blank is a JSON object with a certain field.

    Args:
        file: The file, which may be compressed.
        text_field: The field.
    """
    with opened(file) as stream:
        if _encoding_by_mark(stream) != "utf-8":
            return False
        line = next((line for line in stream if line.strip()), b"")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and text_field in record


def parquet_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Texts of a parquet file, read a batch of rows at a time.

    Args:
        file: A ``.parquet`` file.
        text_field: Column that holds the text.

    Yields:
        Row number, from 0, and text, empty where it is null.

    Raises:
        ValueError: If the file is damaged, the column is missing, or a row holds something else there. The message
            names the row.
        OSError: If the file cannot be read.
        ImportError: If pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"reading {shown(file)} needs pyarrow: pip install -e '.[parquet]'") from error
    number = 0
    with opened(file) as stream:  # Python's own file, whose errors name it.
        try:
            table = parquet.ParquetFile(stream)
            columns = table.schema_arrow.names
            batches = table.iter_batches(columns=[text_field]) if text_field in columns else None
        except (ArrowException, OSError) as error:
            raise ValueError(f"{shown(file)} is not a valid parquet file: {first_line(error)}") from error
        if batches is None:
            raise ValueError(f"{shown(file)} has no column {text_field!r}; set text_field to one of {columns}")
        while True:
            try:
                batch = next(batches, None)
            except (ArrowException, OSError) as error:
                raise ValueError(f"{shown(file)}, after row {number}: damaged: {first_line(error)}") from error
            if batch is None:
                return
            for text in batch.column(0).to_pylist():
                yield number, _text_of({text_field: text}, text_field, f"{shown(file)}, row {number}")
                number += 1


def hugging_face_documents(name: str, config: str | None, text_field: str) -> Iterator[tuple[str, str]]:
    """Texts of the train split of a Hugging Face dataset, streamed.

    Args:
        name: Name on the hub, or a local folder in one of the layouts that ``datasets.load_dataset`` reads.
        config: Configuration of the dataset, or None.
        text_field: Column that holds the text.

    Yields:
        Name of the document (the dataset's last name part and the row number, from 0) and text, empty where it is null.

    Raises:
        ValueError: If the dataset cannot be opened or read, or a row holds no text in that column. The message names
            the row.
        ImportError: If datasets is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"data.source: hf:{name} needs datasets: pip install -e '.[hf]'") from error
    # Only the last part, so that a local folder gives the same names wherever it lies.
    short = Path(name).name
    number = 0
    # Any error: what a library of readers and downloads may raise has no common type.
    try:
        records = iter(load_dataset(name, config, split="train", streaming=True))
    except Exception as error:
        raise ValueError(f"data.source: hf:{name} cannot be opened: {first_line(error)}") from error
    while True:
        try:
            record = next(records, None)
        except Exception as error:
            raise ValueError(f"data.source: hf:{name}, row {number}: cannot be read: {first_line(error)}") from error
        if record is None:
            return
        yield f"{short}#{number}", _text_of(record, text_field, f"data.source: hf:{name}, row {number}")
        number += 1


RECORD_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, str]]]] = {
    ".jsonl": json_lines_texts,
    ".ndjson": json_lines_texts,
    ".parquet": parquet_texts,
}
"""Reader of records by the kind of the file, see ``kind_of``."""


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with a field {text_field!r}, found {type(record).__name__}")
    if text_field not in record:
        raise ValueError(f"{where}: no field {text_field!r}; set text_field to one of {sorted(record)}")
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {text_field!r} must be text, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {text_field!r} holds half of a surrogate pair, which is not text") from error
    return text
