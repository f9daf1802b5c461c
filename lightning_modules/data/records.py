"""Readers of files and datasets that hold a document per record."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def json_lines_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Texts of a file with a JSON object per line.

    Args:
        file: A ``.jsonl`` file, or a ``.jsonl.gz`` file.
        text_field: Field of the object that holds the text.

    Yields:
        Line number, from 1, and text. Blank lines are passed over.

    Raises:
        ValueError: If a line is not a JSON object in UTF-8 with a text in that field. The message names the line.
    """
    with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # Broken JSON, and also bytes that are not UTF-8.
                raise ValueError(f"{file}:{number}: not valid JSON: {error}") from error
            yield number, _text_of(record, text_field, f"{file}:{number}")


def parquet_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Texts of a parquet file, read a batch of rows at a time.

    Args:
        file: A ``.parquet`` file.
        text_field: Column that holds the text.

    Yields:
        Row number, from 0, and text.

    Raises:
        ValueError: If the column is missing, or a row holds no text. The message names the row.
        ImportError: If pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"reading {file} needs pyarrow: pip install -e '.[parquet]'") from error
    with parquet.ParquetFile(file) as table:
        columns = table.schema_arrow.names
        if text_field not in columns:
            raise ValueError(f"{file} has no column {text_field!r}; set text_field to one of {columns}")
        number = 0
        for batch in table.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                yield number, _text_of({text_field: text}, text_field, f"{file}, row {number}")
                number += 1


def hugging_face_documents(name: str, config: str | None, text_field: str) -> Iterator[tuple[str, str]]:
    """Texts of the train split of a Hugging Face dataset, streamed.

    Args:
        name: Name on the hub, or a local folder in one of the layouts that ``datasets.load_dataset`` reads.
        config: Configuration of the dataset, or None.
        text_field: Column that holds the text.

    Yields:
        Name of the document (the dataset's last name part and the row number, from 0) and text.

    Raises:
        ValueError: If a row holds no text in that column. The message names the row.
        ImportError: If datasets is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"source hf:{name} needs datasets: pip install -e '.[hf]'") from error
    # Only the last part, so that a local folder gives the same names wherever it lies.
    short = Path(name).name
    for number, record in enumerate(load_dataset(name, config, split="train", streaming=True)):
        yield f"{short}#{number}", _text_of(record, text_field, f"hf:{name}, row {number}")


RECORD_READERS: dict[str, Callable[[Path, str], Iterator[tuple[int, str]]]] = {
    ".jsonl": json_lines_texts,
    ".jsonl.gz": json_lines_texts,
    ".parquet": parquet_texts,
}
"""Reader by the ending of the file's name, in small letters."""


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object with a field {text_field!r}, found {type(record).__name__}")
    if text_field not in record:
        raise ValueError(f"{where}: no field {text_field!r}; set text_field to one of {sorted(record)}")
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {text_field!r} must be text, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {text_field!r} holds half of a surrogate pair, which is not text") from error
    return text
