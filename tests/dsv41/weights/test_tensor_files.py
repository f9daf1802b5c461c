"""Safetensors folders: what is written is read by the library itself, and no header or index leads anywhere else."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv41.weights import tensor_files
from dsv41.weights.tensor_files import (
    INDEX_NAME,
    Planned,
    TensorReader,
    TensorWriter,
    find_tensors,
    read_header,
    shard_names,
)

# One of every dtype that is written, with sizes that are no multiples of anything.
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int8,
]


def of_every_dtype() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(256, (size,), generator=generator).to(torch.uint8).view(dtype).view(shape)

    tensors = {f"{str(dtype)[6:]}.{len(shape)}": random_bits(dtype, *shape) for dtype in DTYPES for shape in SHAPES}
    # By name, a few bytes come first, which would put all others out of step.
    return {"a": random_bits(torch.int8, 3)} | tensors | {"empty": torch.zeros(0, 4), "no columns": torch.zeros(3, 0)}


SHAPES = [(7,), (5, 3), (3, 2, 5)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    writer = TensorWriter(path, {name: Planned(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        for first in reversed(range(0, len(tensor), 2)):
            writer.write(name, first, tensor[first : first + 2])
    writer.close()


# ---------------------------------------------------------------- what is sound


def test_the_library_reads_what_the_writer_writes(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    write(tmp_path / "a.safetensors", tensors)
    theirs = load_file(tmp_path / "a.safetensors")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(theirs[name], tensor), name
    header = read_header(tmp_path / "a.safetensors")
    assert all(stored.start % tensors[name].element_size() == 0 for name, stored in header.items())


def test_rows_of_the_librarys_files_are_read(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    save_file(tensors, tmp_path / "a.safetensors")
    found = find_tensors(tmp_path)
    assert found.keys() == tensors.keys()
    with TensorReader() as reader:
        for name, tensor in tensors.items():
            for first in range(len(tensor)):
                for last in range(first, len(tensor) + 1):
                    assert same_bits(reader.rows(found[name], first, last), tensor[first:last]), name
            whole = torch.empty_like(tensor)
            reader.read_into(whole, found[name], 0)
            assert same_bits(whole, tensor), name
        assert reader.scratch_bytes == sum(
            max(t.nbytes for t in tensors.values() if t.dtype == dtype) for dtype in DTYPES
        )


def test_reading_counts_bytes(tmp_path: Path) -> None:
    save_file({"x": torch.arange(20.0).view(5, 4)}, tmp_path / "a.safetensors")
    stored = find_tensors(tmp_path)["x"]
    with TensorReader() as reader:
        reader.rows(stored, 1, 3)
        reader.read_into(torch.empty(1, 4), stored, 4)
        assert (reader.bytes_read, reader.scratch_bytes) == (48, 32)


@pytest.mark.parametrize(("name", "largest"), [("preadv", 5), ("pwrite", 5), ("pwrite", 1)])
def test_a_system_that_moves_a_few_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, largest: int
) -> None:
    """As it does with 2 GiB, and on a disk that is nearly full."""
    real: Callable[..., int] = getattr(os, name)

    def few(descriptor: int, data: Any, position: int) -> int:
        return real(descriptor, [data[0][:largest]] if name == "preadv" else data[:largest], position)

    monkeypatch.setattr(tensor_files.os, name, few)
    tensors = of_every_dtype()
    write(tmp_path / "a.safetensors", tensors)
    found = find_tensors(tmp_path)
    with TensorReader() as reader:
        for key, tensor in tensors.items():
            assert same_bits(reader.rows(found[key], 0, len(tensor)), tensor), key


def test_a_writer_takes_no_place_and_passes_errors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        TensorWriter(path, {})
    assert path.read_text() == "mine"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TensorWriter(tmp_path / "b.safetensors", {"x": Planned(torch.float32, (2,))})
    monkeypatch.setattr(tensor_files.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        writer.write("x", 0, torch.zeros(2))
    writer.abandon()
    with pytest.raises(OSError, match="No space left"):
        TensorWriter(tmp_path / "c.safetensors", {"x": Planned(torch.float32, (2,))})


def test_shards_are_named_as_transformers_does() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


# ---------------------------------------------------------------- headers


def broken(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, bytes]] = {
    "no json": (b"{not json", b""),
    "no object": (b"[1, 2]", b""),
    "not utf-8": (b'{"\xff": 1}', b""),
    "deeply nested": (b"[" * 100_000, b""),
    "negative offset": ({"x": entry(0, 4) | {"data_offsets": [-4, 4]}}, bytes(4)),
    "offsets backwards": ({"x": entry(0, 4) | {"data_offsets": [4, 0]}}, bytes(4)),
    "overlap": ({"x": entry(0, 4), "y": entry(2, 6)}, bytes(6)),
    "hole": ({"x": entry(0, 4), "y": entry(6, 8)}, bytes(8)),
    "beyond the end": ({"x": entry(0, 4), "y": entry(4, 2**40)}, bytes(8)),
    "more data than it says": ({"x": entry(0, 4)}, bytes(9)),
    "shape of another size": ({"x": entry(0, 4, shape=[5])}, bytes(4)),
    "overflowing shape": ({"x": entry(0, 4, shape=[2**33, 2**33])}, bytes(4)),
    "negative shape": ({"x": entry(0, 4, shape=[-2, -2])}, bytes(4)),
    "unknown dtype": ({"x": entry(0, 4, dtype="F5")}, bytes(4)),
    "no offsets": ({"x": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "offsets that are no numbers": ({"x": entry(0, 4) | {"data_offsets": ["0", "4"]}}, bytes(4)),
    "a name twice": (b'{"x":' + json.dumps(entry(0, 4)).encode() + b',"x":' + json.dumps(entry(0, 4)).encode() + b"}",
                     bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_not_sound_is_refused(tmp_path: Path, case: str) -> None:
    broken(tmp_path / "bad.safetensors", *HEADERS[case])
    with pytest.raises(ValueError, match=r"^bad\.safetensors: not a whole safetensors file \("):
        find_tensors(tmp_path)


@pytest.mark.parametrize("length", [100, 10**6, 2**40, 2**63, 2**64 - 1])
def test_a_header_that_is_longer_than_its_file_is_not_asked_for(tmp_path: Path, length: int) -> None:
    broken(tmp_path / "bad.safetensors", {"x": entry(0, 4)}, bytes(4), length)
    with pytest.raises(ValueError, match=r"^bad\.safetensors: not a whole safetensors file \("):
        find_tensors(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x08", bytes(8), bytes(100)])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"^bad\.safetensors: not a whole safetensors file \("):
        find_tensors(tmp_path)


def test_a_name_that_is_there_twice_is_named(tmp_path: Path) -> None:
    broken(tmp_path / "bad.safetensors", *HEADERS["a name twice"])
    with pytest.raises(ValueError, match="x is there twice"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("kept", [0.999, 0.6, 0.3])
def test_a_truncated_file_names_what_it_lacks(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({f"t{index}": torch.zeros(1000) for index in range(10)}, path)
    os.truncate(path, int(path.stat().st_size * kept))
    cut = [name for name in sorted(load_starts(path)) if load_starts(path)[name] > path.stat().st_size]
    with pytest.raises(
        ValueError, match=rf"^cut\.safetensors: .*ends before {len(cut)} of its tensors do, the first being {cut[0]}$"
    ):
        find_tensors(tmp_path)


def load_starts(path: Path) -> dict[str, int]:
    """Where each tensor of a file ends, by the definition of the format."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return {name: 8 + size + header[name]["data_offsets"][1] for name in header if name != "__metadata__"}


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1000)}, path)
    stored = find_tensors(tmp_path)["x"]
    os.truncate(path, path.stat().st_size - 4)
    with TensorReader() as reader, pytest.raises(OSError, match=r"a\.safetensors: ends early"):
        reader.rows(stored, 0, 1000)


# ---------------------------------------------------------------- indexes


def folder_with(tmp_path: Path, index: Any) -> Path:
    """Two files, x and y in one and z in the other, with any index; a third tensor lies outside the folder."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    save_file({"x": torch.zeros(1), "y": torch.zeros(2)}, folder / "a.safetensors")
    save_file({"z": torch.zeros(3)}, folder / "b.safetensors")
    for outside in (tmp_path / "out.safetensors", folder / "sub" / "in.safetensors"):
        save_file({"z": torch.ones(3)}, outside)
    (folder / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))
    return folder


GOOD = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}


def test_a_sound_index_is_followed(tmp_path: Path) -> None:
    found = find_tensors(folder_with(tmp_path, {"weight_map": GOOD}))
    assert {name: stored.file.name for name, stored in found.items()} == GOOD


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", '{"weight_map": null}', '{"weight_map": [1]}', "[" * 100_000, "\x00", "NaN",
     '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: no index of safetensors files"):
        find_tensors(folder_with(tmp_path, index))


@pytest.mark.parametrize(
    "where",
    ["../out.safetensors", "sub/in.safetensors", "./b.safetensors", "..", ".", "", "sub", "nowhere.safetensors", "\0",
     "x" * 5000, "b.safetensors/", None, 3, ["b.safetensors"], {"b.safetensors": 1}, "ABSOLUTE"],
)  # fmt: skip
def test_an_index_that_leads_anywhere_else_is_refused(tmp_path: Path, where: Any) -> None:
    if where == "ABSOLUTE":
        where = str(tmp_path / "out.safetensors")
    folder = folder_with(tmp_path, {"weight_map": GOOD | {"z": where}})
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: z is said to be in .*, which is no file of .*folder$"):
        find_tensors(folder)


def test_an_index_and_its_files_have_to_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: z should be in a\.safetensors, which does not hold it"):
        find_tensors(folder_with(tmp_path / "1", {"weight_map": GOOD | {"z": "a.safetensors"}}))
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: w should be in b\.safetensors, which does not hold it"):
        find_tensors(folder_with(tmp_path / "2", {"weight_map": GOOD | {"w": "b.safetensors"}}))
    unlisted = {name: file for name, file in GOOD.items() if name != "y"}
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: does not list y, which is in a\.safetensors"):
        find_tensors(folder_with(tmp_path / "3", {"weight_map": unlisted}))
    folder = folder_with(tmp_path / "4", {"weight_map": GOOD})
    save_file({"z": torch.zeros(3), "x": torch.ones(1)}, folder / "b.safetensors")
    with pytest.raises(ValueError, match=r"^x: stored twice, in a\.safetensors and in b\.safetensors"):
        find_tensors(folder)


def test_a_file_that_an_index_names_has_to_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{INDEX_NAME}: not a whole safetensors file"):
        find_tensors(folder_with(tmp_path, {"weight_map": GOOD | {"z": INDEX_NAME}}))
