"""A wrong bit is found and named, and what a stranger has written runs nothing and reaches no other file."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dsv41.files import MARKER, DamagedFileError, begin_folder, publish_folder, sha256_of
from lightning_modules.checkpoint.safe_load import METADATA, read_plain, require_sound
from lightning_modules.checkpoint.sharded import META, model_shapes, read_meta, read_model, write_meta, write_tensors
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*assuming the intent is to (save|load) in a single process:UserWarning"
)
SHARD = "__0_0.distcp"


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.fixture
def harmful(tmp_path: Path) -> Harmful:
    """It does work where nothing stops it."""
    value = Harmful(tmp_path / "harm")
    pickle.loads(pickle.dumps(value)).close()
    value.path.unlink()
    return value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    path = tmp_path / "file.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"x": torch.arange(300.0)}, "step": 7}, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of many ranks, by one."""
    path = tmp_path / "folder.ckpt"
    partial = begin_folder(path)
    write_tensors(partial, {"state_dict": {"x": torch.arange(300.0)}})
    write_meta(partial, {"global_step": 7})
    publish_folder(partial, path, {})
    return path


def sealed(folder: Path) -> None:
    """Make the marker agree with the files: a stranger can do this too."""
    files = [path for path in folder.iterdir() if path.name != MARKER]
    marker = {
        "files": {path.name: path.stat().st_size for path in files},
        "sha256": {path.name: sha256_of(path) for path in files},
    }
    (folder / MARKER).write_text(json.dumps(marker))


def refused(action: Callable[[], Any], harmful: Harmful | None = None) -> str:
    """The refusal's text, which runs nothing and does not advise to."""
    with pytest.raises(ValueError, match=r"/") as error:  # names a file
        action()
    shown = "".join(traceback.format_exception(error.value))
    for advice in ("weights_only", "safe_globals", "trust"):
        assert advice not in re.sub(r'File ".*|^ .*', "", shown, flags=re.MULTILINE)
        assert advice not in str(error.value)
    assert harmful is None or not harmful.path.exists()
    return str(error.value)


def open_whole(path: Path) -> dict[str, Any]:
    return AtomicCheckpointIO().load_checkpoint(path)


def test_torch_does_not_notice_a_wrong_bit(file: Path) -> None:
    """Why `require_sound` is there: if this fails, it may go."""
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(300.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(content)
    loaded = torch.load(file, weights_only=True)
    assert not torch.equal(loaded["state_dict"]["x"], torch.arange(300.0))


def test_a_wrong_bit_anywhere_is_found_or_changes_nothing(file: Path) -> None:
    original = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    chance = random.Random(3)
    harmless = 0
    for place in chance.sample(range(len(original)), 300):
        content = bytearray(original)
        content[place] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        with suppress(ValueError):
            loaded = open_whole(file)
            harmless += 1
            assert loaded["step"] == 7
            assert torch.equal(loaded["state_dict"]["x"], torch.arange(300.0))
    assert harmless < 300 * (1 - sum(map(len, records.values())) / len(original)), "only between records"


def test_the_damaged_record_is_named_and_so_is_what_could_be_loaded_instead(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(300.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DamagedFileError, match=r"^ckpt_path: .*/file\.ckpt: .* record archive/data/0 .*; no other checkpoint"
    ):
        require_sound(file)
    open_whole_text = refused(lambda: open_whole(file))
    (file.parent / "best.ckpt").write_bytes(b"")
    assert refused(lambda: open_whole(file)) == open_whole_text.replace(
        "no other checkpoint is beside it", "complete beside it: best.ckpt"
    )


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_cut_file_is_named(file: Path, part: float) -> None:
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    assert "file.ckpt: its content is not what was written (damaged, cut or no" in refused(lambda: open_whole(file))


def test_other_files_are_no_checkpoints(file: Path, harmful: Harmful) -> None:
    old = io.BytesIO()
    torch.save({"x": torch.zeros(3)}, old, _use_new_zipfile_serialization=False)
    # torch would take what comes before a zip for a checkpoint of its oldest form.
    for content in (
        b"junk" + file.read_bytes(),
        b"hello",
        b"PK\x03\x04",
        b"PK\x03\x04" + bytes(99),
        pickle.dumps(harmful),
        old.getvalue(),
    ):
        file.write_bytes(content)
        assert "no checkpoint at all" in refused(lambda: open_whole(file), harmful)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "a zip of something else")
    assert f"{file} cannot be read (" in refused(lambda: open_whole(file))
    torch.save(torch.zeros(3), file)
    assert f"{file} holds no dictionary but a Tensor" in refused(lambda: open_whole(file))
    with pytest.raises(FileNotFoundError, match=r"gone\.ckpt"):
        open_whole(file.with_name("gone.ckpt"))


@pytest.mark.parametrize("asked", [None, False, True])
def test_code_in_a_file_is_not_run_whoever_asks_for_it(
    file: Path, harmful: Harmful, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": {"x": harmful}}, file)
    text = refused(lambda: AtomicCheckpointIO().load_checkpoint(file, weights_only=asked), harmful)
    assert f"{file} asks for io.open, which is refused" in text


def test_an_object_in_a_file_is_refused_by_its_class(file: Path) -> None:
    torch.save({"x": Path("a")}, file)
    assert "asks for pathlib." in refused(lambda: open_whole(file))
    torch.save({"x": torch.nn.Linear(1, 1)}, file)
    assert "asks for torch.nn.modules.linear.Linear" in refused(lambda: open_whole(file))


def test_code_in_the_plain_values_of_a_folder_is_not_run(folder: Path, harmful: Harmful) -> None:
    torch.save({"global_step": harmful}, folder / META)
    sealed(folder)
    for read in (open_whole, read_meta):
        assert f"{META} asks for io.open" in refused(lambda read=read: read(folder), harmful)  # type: ignore[misc]


READERS: list[Callable[[Path], Any]] = [
    open_whole,
    model_shapes,
    lambda folder: read_model(folder, {"x": torch.zeros(300)}, no_dist=True),
]


@pytest.mark.parametrize("read", READERS, ids=["whole", "shapes", "model"])
def test_code_in_the_metadata_is_not_run(folder: Path, harmful: Harmful, read: Callable[[Path], Any]) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(harmful))
    sealed(folder)
    text = refused(lambda: read(folder), harmful)
    assert f"{METADATA} is no metadata of tensors: it asks for io.open, which is refused; no code is run" in text


def altered(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change a folder's metadata."""
    metadata: Any = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    sealed(folder)


def test_metadata_is_the_same_as_torch_reads(folder: Path) -> None:
    altered(folder, lambda metadata: None)
    theirs = dcp.FileSystemReader(folder).read_metadata()
    target = torch.zeros(300)
    read_model(folder, {"x": target}, no_dist=True)
    assert torch.equal(target, torch.arange(300.0))
    assert model_shapes(folder) == {"x": (300,)}
    assert theirs.state_dict_metadata.keys() == {"state_dict.x"}


@pytest.mark.parametrize("read", READERS, ids=["whole", "shapes", "model"])
def test_an_entry_that_torch_would_unpickle_without_limits_is_refused(
    folder: Path, harmful: Harmful, read: Callable[[Path], Any]
) -> None:
    """Its reader opens entries of bytes, unlike tensors, with everything allowed."""
    blob = io.BytesIO()
    torch.save(harmful, blob)
    (folder / SHARD).write_bytes(blob.getvalue())

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["state_dict.x"] = BytesStorageMetadata()
        (info,) = metadata.storage_data.values()
        info.offset, info.length = 0, len(blob.getvalue())

    altered(folder, change)
    assert "BytesStorageMetadata, which is refused" in refused(lambda: read(folder), harmful)


def test_code_in_a_tensor_is_not_run(folder: Path, harmful: Harmful) -> None:
    blob = io.BytesIO()
    torch.save(harmful, blob)
    (folder / SHARD).write_bytes(blob.getvalue())

    def change(metadata: Any) -> None:
        (info,) = metadata.storage_data.values()
        info.offset, info.length = 0, len(blob.getvalue())

    altered(folder, change)
    for read in (READERS[0], READERS[2]):
        assert f"{SHARD} asks for io.open, which is refused" in refused(lambda read=read: read(folder), harmful)  # type: ignore[misc]


@pytest.mark.parametrize("place", ["../other.ckpt/__0_0.distcp", "/etc/hostname", "below/__0_0.distcp", "..", ""])
@pytest.mark.parametrize("read", READERS, ids=["whole", "shapes", "model"])
def test_metadata_cannot_reach_another_file(folder: Path, place: str, read: Callable[[Path], Any]) -> None:
    other = folder.with_name("other.ckpt")
    folder.rename(other)
    folder.mkdir()
    for path in other.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "below").mkdir()
    (folder / "below" / SHARD).write_bytes((folder / SHARD).read_bytes())

    metadata: Any = pickle.loads((folder / METADATA).read_bytes())
    (info,) = metadata.storage_data.values()
    info.relative_path = place
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    sizes = {name: (folder / name).stat().st_size for name in (METADATA, SHARD, META)}
    (folder / MARKER).write_text(json.dumps({"files": sizes}))
    assert f"it refers to {place!r}, which is none of the checkpoint's files" in refused(lambda: read(folder))


STRANGE: dict[str, Callable[[Any], Any]] = {
    "another name": lambda metadata: metadata.planner_data.update({"state_dict.x": ("state_dict", "y")}),
    "no path": lambda metadata: metadata.planner_data.clear(),
    "a transformation": lambda metadata: setattr(
        next(iter(metadata.storage_data.values())), "transform_descriptors", ["stream.rot13"]
    ),
    "a size that is none": lambda metadata: setattr(metadata.state_dict_metadata["state_dict.x"], "size", (300,)),
    "a type that is none": lambda metadata: setattr(
        metadata.state_dict_metadata["state_dict.x"].properties, "dtype", "float"
    ),
    "no places": lambda metadata: setattr(metadata, "storage_data", None),
}


@pytest.mark.parametrize("name", STRANGE)
def test_metadata_of_another_form_is_refused(folder: Path, name: str) -> None:
    altered(folder, STRANGE[name])
    assert f"{METADATA} is no metadata of tensors: " in refused(lambda: model_shapes(folder))


def test_metadata_cannot_change_classes(folder: Path) -> None:
    """The pickle's BUILD on a class, which needs no call, would set its attributes."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / METADATA).write_bytes(b"\x80\x02" + name + b"N}X\x07\x00\x00\x00changedK\x01s\x86b.")
    pickle.loads((folder / METADATA).read_bytes())
    assert Metadata.changed == 1  # type: ignore[attr-defined]
    del Metadata.changed  # type: ignore[attr-defined]
    sealed(folder)
    refused(lambda: model_shapes(folder))
    assert not hasattr(Metadata, "changed")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04", b"\x80\x04N.", b"\x80\x04}.", bytes(50)])
def test_metadata_that_is_none_is_named(folder: Path, content: bytes) -> None:
    (folder / METADATA).write_bytes(content)
    sealed(folder)
    assert f"{METADATA} is no metadata of tensors: " in refused(lambda: open_whole(folder))


def test_tensors_may_stay_on_the_disk(file: Path) -> None:
    assert torch.equal(read_plain(file, mmap=True)["state_dict"]["x"], torch.arange(300.0))
