"""What folders of all kinds of files give: text by content, compressed files, and counts of what is left out."""

import bz2
import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from lightning_modules.data import readers
from lightning_modules.data.corpus import Document, LeftOut, iterate_documents
from lightning_modules.data.splits import split_documents

zstd = readers._zstd(Path("tests"))  # From the standard library or from the package, by the version of Python.

RECORDS = b'{"text": "one"}\n{"text": "two"}\n'
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def _read(path: Path, field: str = "text") -> tuple[list[Document], LeftOut]:
    left_out = LeftOut()
    return list(iterate_documents(str(path), field, left_out=left_out)), left_out


def test_folder_of_notes_is_read_whole_and_the_rest_is_counted(tmp_path: Path) -> None:
    contents = {
        "a.txt.zst": zstd.compress(b"a"),
        "b.json.gz": gzip.compress(RECORDS, mtime=0),
        "c.ndjson": RECORDS,
        "d": b"d",
        "e.org": b"e",
        "f.jsonl.zst": zstd.compress(RECORDS),
        "g.json.zst": zstd.compress(b'{"other": 1,\n"text": 2}'),  # One JSON value, no record of ours.
        "h.json": b'{"text": "h"}',  # As it is: a text among others.
        "i.NDJSON.GZ": gzip.compress(RECORDS, mtime=0),
        "p.png": PNG,
        "q.txt": b"caf\xe9",
        "r.bz2": bz2.compress(b"text " * 99),
        "s.txt": "ab".encode("utf-16-le") * 9,
        "t.tar.gz": gzip.compress(b"name" + bytes(508), mtime=0),
        "u.txt": b"",
        "v.txt": b"\xef\xbb\xbf",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    documents, left_out = _read(tmp_path)
    assert documents == [
        *(Document("a.txt.zst", "a"), Document("b.json.gz#1", "one"), Document("b.json.gz#2", "two")),
        *(Document("c.ndjson#1", "one"), Document("c.ndjson#2", "two"), Document("d", "d"), Document("e.org", "e")),
        *(Document("f.jsonl.zst#1", "one"), Document("f.jsonl.zst#2", "two")),
        *(Document("g.json.zst", '{"other": 1,\n"text": 2}'), Document("h.json", '{"text": "h"}')),
        *(Document("i.NDJSON.GZ#1", "one"), Document("i.NDJSON.GZ#2", "two")),
    ]
    assert left_out.reasons == {
        "binary, with NUL bytes": 3,
        "empty": 2,
        "links to folders": 1,
        "links to nothing": 1,
        "not UTF-8 text": 1,
        "not regular files": 1,
        "UTF-16 without a byte-order mark": 1,
    }
    assert left_out.files == len(contents) + 3
    summary = left_out.summary()
    assert "\n" not in summary
    assert summary.startswith("left out 10 of 19 files (52.6%): ")
    assert "3 binary, with NUL bytes (as p.png)" in summary


def test_nothing_left_out_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    assert _read(tmp_path)[1].summary() == ""


def test_unreadable_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand, since nothing is unreadable for root.
    for name in ("a", "b.jsonl"):
        (tmp_path / name).write_bytes(RECORDS)
    (tmp_path / "c").write_text("c")
    open_file = Path.open

    def refuse(self: Path, *args: str) -> object:
        if self.name in ("a", "b.jsonl"):
            raise PermissionError(13, "Permission denied", str(self))
        return open_file(self, *args)

    monkeypatch.setattr(Path, "open", refuse)
    documents, left_out = _read(tmp_path)
    assert documents == [Document("c", "c")]
    assert left_out.summary() == "left out 2 of 3 files (66.7%): 2 not readable (as a)"
    with pytest.raises(PermissionError, match=r"/a could not be read: Permission denied$"):
        _read(tmp_path / "a")


def test_large_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LARGEST_TEXT", 10)
    (tmp_path / "a").write_bytes(b"x" * 11)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 11, mtime=0))
    (tmp_path / "b").write_bytes(b"x" * 10)
    documents, left_out = _read(tmp_path)
    assert documents == [Document("b", "x" * 10)]
    assert left_out.reasons == {"larger than 10 bytes": 2}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_byte_order_mark_gives_the_encoding_and_is_dropped(tmp_path: Path, encoding: str, name: str) -> None:
    # With U+0A0A and U+FEFF inside, which are no line ends and no mark.
    text = "grün ਊ\ufeff 漢字"
    content = text if name == "a.txt" else f"{json.dumps({'text': text}, ensure_ascii=False)}\n" * 2
    mark = "\ufeff" if encoding.endswith("be") else ""  # The other codecs write it.
    (tmp_path / name).write_bytes((mark + content).encode(encoding))
    documents, _ = _read(tmp_path / name)
    assert [text for _, text in documents] == [text] * len(documents)
    assert len(documents) == (1 if name == "a.txt" else 2)


def test_mark_within_records_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\ufeffa"}\n{"text": "\ufeff"}\n{"text": null}\n{"text": ""}\n')
    parquet.write_table(pa.table({"text": ["\ufeffa", None, ""]}), tmp_path / "b.parquet")
    documents, left_out = _read(tmp_path)
    assert documents == [Document("a.jsonl#1", "a"), Document("b.parquet#0", "a")]
    assert left_out.summary() == "left out 5 of 7 records (71.4%), which are null or empty (as a.jsonl#2)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", PNG, r"a\.txt is binary, with NUL bytes$"),
        ("a.txt", "text".encode("utf-16-be"), r"a\.txt is UTF-16 without a byte-order mark; convert it to UTF-8$"),
        ("a.txt", b"\xff\xfea", r"a\.txt is not UTF-16 text \(byte 2\); convert it"),
        ("a.txt", b"x" * 9000 + b"\0", r"a\.txt is binary"),
        ("a.txt", b"", r"holds no text; left out 1 of 1 files \(100\.0%\): 1 empty \(as a\.txt\)$"),
        ("a.gz", b"no gzip", r"a\.gz cannot be decompressed, it is damaged or cut: Not a gzipped file"),
        ("a.gz", gzip.compress(os.urandom(999), mtime=0)[:500], r"a\.gz cannot be decompressed, .* ended before"),
        ("a.gz", gzip.compress(b"text " * 99, mtime=0)[:30] + b"\xff" * 30, r"a\.gz cannot be decompressed"),
        ("a.zst", b"no zstd", r"a\.zst cannot be decompressed, it is damaged or cut: "),
        ("a.zst", zstd.compress(os.urandom(999))[:500], r"a\.zst cannot be decompressed, "),
        ("a.jsonl.gz", gzip.compress(RECORDS * 99, mtime=0)[:-9], r"a\.jsonl\.gz cannot be decompressed"),
        ("a.json.gz", gzip.compress(os.urandom(999), mtime=0)[:500], r"a\.json\.gz cannot be decompressed"),
        ("a.jsonl", RECORDS + b'{"text": "caf\xe9"}', r"a\.jsonl:3: not valid JSON: 'utf-8' codec"),
        ("a.jsonl", b"\n" + b"[" * 200_000, r"a\.jsonl:2: not valid JSON: nested too deeply"),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", r"a\.jsonl:1: not valid JSON: nested too"),
        ("a.ndjson", '{"text": "a"}\n'.encode("utf-16-le"), r"a\.ndjson:1: holds NUL bytes; text in UTF-16 must"),
        ("a.jsonl", b'{"text": {}}', r"a\.jsonl:1: field 'text' must be text, found dict"),
        ("a.jsonl", b"null", r"a\.jsonl:1: expected an object with a field 'text', found NoneType"),
        ("a.jsonl", b'{"text": ' + b"1" * 9999 + b"}", r"a\.jsonl:1: not valid JSON: Exceeds the limit"),
        ("a.parquet", b"PAR1", r"a\.parquet is not a valid parquet file: "),
        ("a.parquet", b"", r"a\.parquet is not a valid parquet file: "),
        ("a.parquet", b"PAR1" + b"x" * 99 + b"\x50\0\0\0PAR1", r"a\.parquet is not a valid parquet file: "),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        _read(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_broken_utf_16_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16") + b"\0\xd8\0\0")
    with pytest.raises(ValueError, match=r"a\.jsonl, after line \d: not UTF-16 text"):
        _read(tmp_path)


def test_parquet_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"text {n}" * 50 for n in range(2000)]}), file, compression="zstd")
    content = bytearray(file.read_bytes())
    content[50:250] = b"\xaa" * 200
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet, after row 0: damaged: ") as caught:
        _read(file)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_utf_8_are_read_and_have_a_split(tmp_path: Path) -> None:
    (tmp_path / "ok.txt").write_text("ok")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(RECORDS + b"{}\n")
    with pytest.raises(ValueError, match=r"/\\xff\.jsonl:3: no field 'text'"):
        _read(tmp_path)
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(RECORDS)
    documents, _ = _read(tmp_path)
    names = [r"caf\xe9.txt", "ok.txt", r"\xff.jsonl#1", r"\xff.jsonl#2"]
    assert [name for name, _ in documents] == names
    assert sum(len(split.documents) for split in split_documents(documents, 0.3, 0.3).values()) == 4


def test_zstd_package_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"any")
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"a\.zst needs backports\.zstd: pip install -e '\.\[zst\]'"):
        _read(tmp_path)


def test_dataset_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"source: hf:.*/none cannot be opened: ") as caught:
        list(iterate_documents(f"hf:{tmp_path}/none", max_documents=1))
    assert "\n" not in str(caught.value)
    (tmp_path / "train.jsonl").write_bytes(RECORDS + b"{broken\n")
    with pytest.raises(ValueError, match=r"source: hf:.*, row \d: cannot be read: ") as caught:
        list(iterate_documents(f"hf:{tmp_path}", max_documents=9))
    assert "\n" not in str(caught.value)
