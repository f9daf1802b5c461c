"""Every kind of source, and what is said about bad ones."""

import gzip
import json
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from lightning_modules.data.corpus import Document, check_source, iterate_documents


def test_folder_gives_a_document_per_text_file_in_order_of_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("z.txt", "b/a.md", "a.py", "c.bin", ".hidden/d.txt", "b/.e.txt"):
        (tmp_path / name).write_bytes(f"in {name}\r\n".encode())
    (tmp_path / "empty.txt").touch()
    assert list(iterate_documents(str(tmp_path))) == [
        Document("a.py", "in a.py\r\n"),
        Document("b/a.md", "in b/a.md\r\n"),
        Document("c.bin", "in c.bin\r\n"),
        Document("z.txt", "in z.txt\r\n"),
    ]


def test_several_sources_follow_each_other_and_the_limit_holds_for_all(tmp_path: Path) -> None:
    sources = []
    for name in ("two", "one"):
        (tmp_path / name).write_text(name)
        sources.append(str(tmp_path / name))
    assert [text for _, text in iterate_documents(sources)] == ["two", "one"]
    assert [text for _, text in iterate_documents(sources, max_documents=1)] == ["two"]


def test_stdlib_is_sorted_source_without_tests() -> None:
    documents = list(iterate_documents("stdlib"))
    names = [name for name, _ in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "turtledemo", "__pycache__"}
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {}
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
        if not left_out & set(name.split("/")) and not any(part.startswith(".") for part in name.split("/")):
            with suppress(UnicodeDecodeError):
                expected[name] = file.read_bytes().decode()
    assert dict(documents) == {name: text for name, text in expected.items() if text}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"data{ending}"
    content = b'{"body": "one"}\n\n{"body": "zw\xc3\xb6lf"}\n'
    file.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    expected = [Document(f"data{ending}#1", "one"), Document(f"data{ending}#3", "zwölf")]
    assert list(iterate_documents(str(file), "body")) == expected
    assert list(iterate_documents(str(tmp_path), "body")) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"data\.jsonl:2: not valid JSON"),
        ('{"other": "x", "more": 1}', r"data\.jsonl:2: no field 'text'; set text_field to one of \['more', 'other'\]"),
        ('{"text": 3}', r"data\.jsonl:2: field 'text' must be text, found int"),
        ('["text"]', r"data\.jsonl:2: expected an object"),
        (r'{"text": "\ud800"}', r"data\.jsonl:2: field 'text' holds half of a surrogate pair"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(iterate_documents(str(file)))


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"text": ["a", "", "c"], "other": [1, 2, 3]}), file)
    assert list(iterate_documents(str(file))) == [Document("data.parquet#0", "a"), Document("data.parquet#2", "c")]
    with pytest.raises(ValueError, match=r"no column 'body'; set text_field to one of \['text', 'other'\]"):
        list(iterate_documents(str(file), "body"))
    with pytest.raises(ValueError, match="row 0: field 'other' must be text, found int"):
        list(iterate_documents(str(file), "other"))


def test_hugging_face_folder_is_streamed_up_to_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": f"text {n}"}) + "\n" for n in range(9)))
    documents = list(iterate_documents(f"hf:{folder}", "body", max_documents=3))
    assert documents == [Document(f"set#{n}", f"text {n}") for n in range(3)]
    with pytest.raises(ValueError, match=r"row 0: no field 'text'; set text_field to one of \['body'\]"):
        list(iterate_documents(f"hf:{folder}", max_documents=3))


@pytest.mark.parametrize(
    ("module", "source", "extra"), [("datasets", "hf:any", "hf"), ("pyarrow", "{}/data.parquet", "parquet")]
)
def test_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, extra: str
) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{extra}\]'"):
        list(iterate_documents(source.format(tmp_path), max_documents=1))


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r'data.source: .*nowhere.* it must be "stdlib"'):
        check_source(str(tmp_path / "nowhere"), None)
    with pytest.raises(ValueError, match="source: is empty"):
        check_source([], None)
    with pytest.raises(ValueError, match="max_documents: must be set for source 'hf:some/set'"):
        check_source(["stdlib", "hf:some/set"], None)
    with pytest.raises(ValueError, match="names no dataset"):
        check_source("hf:", 3)
    with pytest.raises(ValueError, match="max_documents: must be at least 1"):
        check_source("stdlib", 0)
    with pytest.raises(ValueError, match="holds no text"):
        list(iterate_documents(str(tmp_path)))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text \(byte 3\); convert it"):
        list(iterate_documents(str(tmp_path / "latin.txt")))
