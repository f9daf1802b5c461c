"""Files and folders are whole under their name, whenever the process that writes or deletes them is killed.

Run as a script, this file does each piece of work again and again, each time in a folder of its own and in a process of
its own, which is killed before its first file operation, before its second, and so on.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsv41.files import (
    MARKER,
    DamagedFileError,
    begin_folder,
    checksums_of,
    complete_beside,
    discard,
    files_in,
    is_complete,
    leftovers,
    publish_folder,
    remove_whole,
    require_intact,
    settle,
    whole_names,
    write_failures_explained,
    written_whole,
)

NAME = "step-00000100.ckpt"
HEX = "0123456789abcdef" * 2
# Some files have the same name and size in both, as those of two saves do: a mixture would not show in sizes.
OLD = {"__0_0.distcp": b"old 0", "__1_0.distcp": b"old 1", "meta.pt": b"old meta"}
NEW = {"__0_0.distcp": b"new 0", "meta.pt": b"new meta and more"}
HALF = {"__0_0.distcp": b"ol"}
Content = dict[str, bytes] | bytes | None


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def publish(path: Path, files: dict[str, bytes]) -> None:
    partial = begin_folder(path)
    write_files(partial, files)
    publish_folder(partial, path, {"global_step": 100})


def complete_folder(path: Path, files: dict[str, bytes]) -> Path:
    """What `publish` leaves, made without it."""
    path.mkdir(parents=True)
    write_files(path, files)
    (path / MARKER).write_text(json.dumps({"files": {name: len(content) for name, content in files.items()}}))
    return path


def content_of(path: Path) -> Content:
    """All there is, without judging it: files of a folder but its marker, or of a file its bytes, or None."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name != MARKER}
    return path.read_bytes() if path.exists() else None


def seen_at(path: Path) -> Content:
    """What a reader takes for the content of `path`, which may not have its name yet."""
    found = whole_names(path.parent).get(path.name)
    return None if found is None else content_of(found)


def write_file(path: Path) -> None:
    with written_whole(path) as partial:
        partial.write_bytes(b"new file")


def half_replaced(path: Path) -> None:
    """A replacement killed between its two renames, beside what other kills have left."""
    complete_folder(path.with_name(f"{path.name}.{HEX}.replaced"), OLD)
    complete_folder(path.with_name(f"{path.name}.{HEX}.partial"), NEW)
    half = path.with_name(f"{path.name}.{HEX[::-1]}.partial")
    half.mkdir()
    write_files(half, {"__0_0.distcp": b"ne"})
    complete_folder(path.with_name(f"{path.name}.{HEX}.replaced.{HEX}.deleted"), OLD)


def half_folder(path: Path) -> None:
    """What a copy that was broken off leaves."""
    path.mkdir()
    write_files(path, HALF)


@dataclass
class Work:
    """Something a process does with the name `path`, and what a reader sees there before and after."""

    before: Callable[[Path], Any]
    act: Callable[[Path], Any]
    old: Content
    new: Content


WORK = {
    "first folder": Work(lambda path: None, lambda path: publish(path, NEW), None, NEW),
    "folder over folder": Work(lambda path: complete_folder(path, OLD), lambda path: publish(path, NEW), OLD, NEW),
    "folder over half a folder": Work(half_folder, lambda path: publish(path, NEW), None, NEW),
    "folder over file": Work(lambda path: path.write_bytes(b"old"), lambda path: publish(path, NEW), b"old", NEW),
    "first file": Work(lambda path: None, write_file, None, b"new file"),
    "file over file": Work(lambda path: path.write_bytes(b"old"), write_file, b"old", b"new file"),
    "file over folder": Work(lambda path: complete_folder(path, OLD), write_file, OLD, b"new file"),
    "folder removed": Work(lambda path: complete_folder(path, OLD), remove_whole, OLD, None),
    "file removed": Work(lambda path: path.write_bytes(b"old"), remove_whole, b"old", None),
    "directory settled": Work(half_replaced, lambda path: settle(path.parent), NEW, NEW),
}


def kill_before_operation(number: int) -> None:
    """Kill this process before its `number`-th file operation from here on; a write counts twice, and can be cut."""
    seen = 0

    def operation() -> None:
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}:
            operation()

    real_open, real_fsync = io.open, os.fsync

    def open_in_halves(*arguments: Any, **keywords: Any) -> Any:
        file: Any = real_open(*arguments, **keywords)
        real_write = file.write

        def write(content: Any) -> int:
            written = 0
            for half in (content[: len(content) // 2], content[len(content) // 2 :]):
                operation()
                written += real_write(half)
                file.flush()
            return written

        file.write = write
        return file

    def fsync(descriptor: int) -> None:
        operation()
        real_fsync(descriptor)

    sys.addaudithook(hook)
    io.open = open_in_halves  # type: ignore[assignment]
    os.fsync = fsync


def kill_everywhere(work: Work, root: Path) -> list[str]:
    """Do the work in ``root/0``, ``root/1``, ... until there is no operation left to be killed at; return the fates."""
    fates: list[str] = []
    while not fates or fates[-1] == "killed":
        path = root / str(len(fates)) / NAME
        path.parent.mkdir(parents=True)
        work.before(path)
        child = os.fork()
        if child == 0:
            try:
                kill_before_operation(len(fates))
                work.act(path)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        fates.append({0: "undisturbed", 1: "failed", -signal.SIGKILL: "killed"}[code])
    return fates


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each work, with a directory for each operation before which it was killed, and one without a kill.

    One process does them all: its imports take longer than the rest.
    """
    root = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, __file__, str(root)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, fates in json.loads(done.stdout).items():
        assert fates == ["killed"] * (len(fates) - 1) + ["undisturbed"], f"{name}: {done.stderr}"
    return root


def killed_in(killed: Path, work: str, root: Path) -> list[Path]:
    """NAME in a copy of each directory of a work, in the order of the operations."""
    shutil.copytree(killed / work, root / work)
    return [root / work / str(number) / NAME for number in range(len(list((root / work).iterdir())))]


@pytest.mark.parametrize(
    ("name", "fewest"),
    [
        ("first folder", 15),
        ("folder over folder", 20),
        ("folder over half a folder", 20),
        ("folder over file", 15),
        ("first file", 6),
        ("file over file", 6),
        ("file over folder", 10),
        ("folder removed", 6),
        ("file removed", 1),
        ("directory settled", 10),
    ],
)
def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new(
    killed: Path, tmp_path: Path, name: str, fewest: int
) -> None:
    work = WORK[name]
    paths = killed_in(killed, name, tmp_path)
    assert len(paths) > fewest

    renewed = False
    for number, path in enumerate(paths):
        before = sorted(path.parent.rglob("*"))
        seen = seen_at(path)
        assert seen in (work.old, work.new), f"operation {number}"
        assert not renewed or seen == work.new, f"operation {number}: the old content has come back"
        renewed = seen == work.new
        if name != "folder over half a folder":
            assert is_complete(path) or not path.exists(), f"operation {number}: half of it under its name"
        assert sorted(path.parent.rglob("*")) == before, "a reader has changed something"

        settle(path.parent)
        assert seen_at(path) == seen, f"operation {number}"
        assert content_of(path) in (seen, HALF), f"operation {number}"
        assert [entry.name for entry in path.parent.iterdir()] == [NAME] * path.exists(), f"operation {number}"
    assert renewed


def test_kills_reach_the_moment_without_a_name_and_the_half_written_marker(killed: Path, tmp_path: Path) -> None:
    """The worst moments are among those of the test above: otherwise it would show little."""
    nameless = [path.parent for path in killed_in(killed, "folder over folder", tmp_path) if not path.exists()]
    assert nameless
    for directory in nameless:
        assert sorted(path.suffix for path in directory.iterdir()) == [".partial", ".replaced"]
        assert all(is_complete(path) for path in directory.iterdir())
    markers = [marker.read_text() for marker in tmp_path.glob(f"*/*/*.partial/{MARKER}")]
    assert "" in markers
    assert any(text and not text.endswith("}") for text in markers)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Suffixes of what is flushed to the disk or renamed in `tmp_path` from here on."""
    done: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        known = {path.stat().st_ino: path.suffix for path in tmp_path.rglob("*")} | {
            tmp_path.stat().st_ino: "directory"
        }
        done.append(f"fsync {known[os.fstat(descriptor).st_ino]}")
        real["fsync"](descriptor)

    def rename(source: Path, target: Path, name: str = "rename") -> None:
        done.append(f"{Path(source).suffix} becomes {Path(target).suffix}")
        real[name](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", functools.partial(rename, name="replace"))
    return done


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[str]) -> None:
    """Otherwise a power cut could leave a name with nothing behind it."""
    publish(tmp_path / NAME, NEW)
    assert order == ["fsync .json", "fsync .partial", ".partial becomes .ckpt", "fsync directory"]


def test_a_new_folder_is_on_the_disk_before_the_old_one_goes(tmp_path: Path, order: list[str]) -> None:
    complete_folder(tmp_path / NAME, OLD)
    publish(tmp_path / NAME, NEW)
    assert order == [
        "fsync .json",
        "fsync .partial",
        ".ckpt becomes .replaced",
        ".partial becomes .ckpt",
        "fsync directory",
        ".replaced becomes .deleted",
    ]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[str]) -> None:
    write_file(tmp_path / NAME)
    assert order == ["fsync .partial", ".partial becomes .ckpt", "fsync directory"]


@pytest.mark.parametrize("write", [write_file, lambda path: publish(path, NEW)], ids=["file", "folder"])
def test_a_name_that_cannot_be_taken_stays_with_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    path = complete_folder(tmp_path / NAME, OLD)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).suffix == ".partial":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        write(path)
    assert content_of(path) == OLD
    assert is_complete(path)


def test_an_old_folder_that_cannot_be_deleted_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rmtree(path: Path) -> None:
        raise OSError(13, "Permission denied", str(path))

    path = complete_folder(tmp_path / NAME, OLD)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        publish(path, NEW)
        discard(complete_folder(tmp_path / "other", OLD))
        with pytest.raises(OSError, match="Permission denied"):
            remove_whole(complete_folder(tmp_path / "third", OLD))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "Permission denied" in caplog.text
    assert whole_names(tmp_path) == {NAME: path}
    assert content_of(path) == NEW


def test_publication_marks_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / NAME
    partial = begin_folder(path)
    write_files(partial, NEW)
    assert not is_complete(partial)
    publish_folder(partial, path, {"global_step": 7})
    assert is_complete(path)
    assert content_of(path) == NEW
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]
    marker = json.loads((path / MARKER).read_text())
    assert marker == {
        "global_step": 7,
        "files": {name: len(content) for name, content in NEW.items()},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in NEW.items()},
    }


def test_a_folder_takes_the_place_of_a_file_and_goes_for_the_next(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"a file")
    publish(path, OLD)
    assert content_of(path) == OLD
    publish(path, NEW)
    assert content_of(path) == NEW
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_a_file_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    path = complete_folder(tmp_path / NAME, OLD)
    write_file(path)
    assert content_of(path) == b"new file"
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_a_block_that_raises_leaves_the_older_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with written_whole(path) as partial:
            partial.write_bytes(b"half")
            raise RuntimeError("in the middle")

    (tmp_path / "a").write_bytes(b"old")
    for name in ("a", "b"):
        with pytest.raises(RuntimeError, match="in the middle"):
            fail(tmp_path / name)
    assert content_of(tmp_path) == {"a": b"old"}


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    remove_whole(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A complete folder."""
    path = complete_folder(tmp_path / NAME, OLD)
    assert is_complete(path)
    yield path
    assert not is_complete(path), "the test has changed nothing"


def test_a_truncated_file_makes_a_folder_incomplete(folder: Path) -> None:
    os.truncate(folder / "meta.pt", 3)


def test_a_longer_file_makes_a_folder_incomplete(folder: Path) -> None:
    (folder / "meta.pt").write_bytes(OLD["meta.pt"] + b"!")


def test_a_missing_file_makes_a_folder_incomplete(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def test_a_missing_marker_makes_a_folder_incomplete(folder: Path) -> None:
    (folder / MARKER).unlink()


# Indexing these with "files" is a TypeError, which nobody catches.
@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"files": {"meta.pt": 8',
        "no json at all",
        "{}",
        '{"files": null}',
        '{"files": ["meta.pt"]}',
        '{"files": 3}',
        '{"files": {"meta.pt": "8"}}',
        '{"files": {"meta.pt": null}}',
        '{"files": {"a\\u0000b": 8}}',
        "null",
        "3",
        '"files"',
        '["files"]',
    ],
)
def test_a_marker_of_another_shape_makes_a_folder_incomplete(tmp_path: Path, text: str) -> None:
    path = complete_folder(tmp_path / NAME, OLD)
    (path / MARKER).write_text(text)
    assert not is_complete(path)


def test_a_marker_that_is_no_text_makes_a_folder_incomplete(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"\xff\xfe\x00")


def test_a_file_is_complete_and_nothing_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert is_complete(tmp_path / "a")
    assert not is_complete(tmp_path / "b")


def leave(directory: Path) -> list[str]:
    """One leftover of every kind, none of which may get the name; returns their names, sorted."""
    names = [f"{NAME}.{HEX}.partial", f"{NAME}.{HEX}.deleted", f"{NAME}.{HEX}.replaced", f"best.ckpt.{HEX}.partial"]
    half, deleted, replaced, file = (directory / name for name in names)
    half.mkdir()
    write_files(half, {"__0_0.distcp": b"ne"})
    complete_folder(deleted, OLD)
    (complete_folder(replaced, OLD) / "meta.pt").unlink()
    file.write_bytes(b"a file cannot say that it is whole")
    return sorted(names)


def test_settling_deletes_leftovers_and_tells_their_names(tmp_path: Path) -> None:
    names = leave(tmp_path)
    assert whole_names(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(settle(tmp_path)) == names
    assert list(tmp_path.iterdir()) == []
    assert settle(tmp_path) == []


def test_settling_leaves_all_other_names_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.partial").write_bytes(b"mine")
    (tmp_path / "best.ckpt").write_bytes(b"best")
    (tmp_path / f"{HEX}.partial").write_bytes(b"no name before the digits")
    (tmp_path / f"{NAME}.{HEX[1:]}.deleted").write_bytes(b"a digit too few")
    (tmp_path / f"{NAME}.{HEX}.backup").mkdir()
    complete_folder(tmp_path / NAME, OLD)
    complete_folder(tmp_path / "archive.replaced", OLD)
    before = {path.name: content_of(path) for path in tmp_path.iterdir()}
    assert whole_names(tmp_path) == {name: tmp_path / name for name in before if not name.endswith("backup")}
    leave(tmp_path)
    assert len(settle(tmp_path)) == 4
    assert {path.name: content_of(path) for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_a_complete_folder_that_waits_for_its_name_gets_it(tmp_path: Path, kind: str) -> None:
    waiting = complete_folder(tmp_path / f"{NAME}.{HEX}.{kind}", NEW)
    assert whole_names(tmp_path) == {NAME: waiting}
    assert settle(tmp_path) == []
    assert whole_names(tmp_path) == {NAME: tmp_path / NAME}
    assert content_of(tmp_path / NAME) == NEW


def test_a_replaced_file_gets_its_name_back(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.{HEX}.replaced").write_bytes(b"old")
    assert settle(tmp_path) == []
    assert content_of(tmp_path) == {NAME: b"old"}


@pytest.mark.parametrize("kind", ["partial", "replaced", "deleted"])
def test_a_name_that_is_taken_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    complete_folder(tmp_path / NAME, OLD)
    waiting = complete_folder(tmp_path / f"{NAME}.{HEX}.{kind}", NEW).name
    assert whole_names(tmp_path) == {NAME: tmp_path / NAME}
    assert settle(tmp_path) == [waiting]
    assert content_of(tmp_path / NAME) == OLD
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_newer_of_two_folders_gets_the_name(tmp_path: Path) -> None:
    half_replaced(tmp_path / NAME)
    assert seen_at(tmp_path / NAME) == NEW
    assert len(settle(tmp_path)) == 3
    assert content_of(tmp_path / NAME) == NEW


def test_what_was_being_deleted_never_comes_back(tmp_path: Path) -> None:
    name = complete_folder(tmp_path / f"{NAME}.{HEX}.deleted", OLD).name
    assert whole_names(tmp_path) == {}
    assert settle(tmp_path) == [name]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert whole_names(tmp_path / "nothing") == {}
    assert settle(tmp_path / "nothing") == []


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "below/file", "..", ".", "", "below"])
def test_a_marker_that_names_anything_but_files_of_its_folder_makes_it_incomplete(tmp_path: Path, name: str) -> None:
    path = complete_folder(tmp_path / NAME, OLD)
    (path / "below").mkdir()
    for file in (tmp_path / "secret", path / "below" / "file"):
        file.write_bytes(b"12345")
    size = (path / name).stat().st_size
    (path / MARKER).write_text(json.dumps({"files": {name: size}}))
    assert not is_complete(path)


def test_a_wrong_bit_is_found_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / NAME
    publish(path, OLD)
    assert files_in(path) == sorted(OLD)
    require_intact(path, files_in(path))
    (path / "__1_0.distcp").write_bytes(b"olD 1")
    assert is_complete(path), "sizes do not tell"
    require_intact(path, ["__0_0.distcp", "meta.pt"])
    with pytest.raises(DamagedFileError, match=rf"{NAME}/__1_0\.distcp: its content is not what was written"):
        require_intact(path, files_in(path))


def test_checksums_that_the_writer_knows_are_not_computed_again(tmp_path: Path) -> None:
    partial = begin_folder(tmp_path / NAME)
    write_files(partial, OLD)
    publish_folder(partial, tmp_path / NAME, {}, {"meta.pt": "known"})
    found = checksums_of(tmp_path / NAME)
    assert found.keys() == OLD.keys()
    assert [name for name, value in found.items() if value == "known"] == ["meta.pt"]


def test_a_folder_without_checksums_is_taken_as_it_is(tmp_path: Path) -> None:
    path = complete_folder(tmp_path / NAME, OLD)
    assert checksums_of(path) == {}
    require_intact(path, files_in(path))


def test_leftovers_are_told_and_left_where_they_are(tmp_path: Path) -> None:
    names = leave(tmp_path)
    half_folder(tmp_path / "step-00000300.ckpt")
    complete_folder(tmp_path / "best.ckpt", OLD)
    complete_folder(tmp_path / f"step-00000200.ckpt.{HEX}.partial", NEW)  # waits for its name
    before = sorted(tmp_path.rglob("*"))
    assert [path.name for path in leftovers(tmp_path)] == sorted([*names, "step-00000300.ckpt"])
    assert sorted(tmp_path.rglob("*")) == before
    assert leftovers(tmp_path / "nothing") == []


def test_what_is_complete_beside_comes_with_the_last_before_it_first(tmp_path: Path) -> None:
    steps = [complete_folder(tmp_path / f"step-{step:08d}.ckpt", OLD) for step in (100, 200, 300)]
    assert complete_beside(steps[0]) == ["step-00000300.ckpt", "step-00000200.ckpt"]
    half_folder(tmp_path / "step-00000150.ckpt")
    (tmp_path / "best.ckpt").write_bytes(b"best")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    assert complete_beside(steps[2]) == ["step-00000200.ckpt", "step-00000100.ckpt", "best.ckpt"]
    assert complete_beside(steps[1]) == ["step-00000100.ckpt", "best.ckpt"]
    assert complete_beside(tmp_path / "best.ckpt") == [step.name for step in reversed(steps)]


def test_a_full_disk_is_told_with_the_room_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 3 * 10**6))  # type: ignore[attr-defined]
    message = (
        rf"{NAME} could not be written: No space left on device \(about 5\.0 MB were needed, 3\.0 MB are free there\); "
        "what was complete before is untouched$"
    )
    with pytest.raises(OSError, match=message) as error, write_failures_explained(tmp_path / "new" / NAME, 5 * 10**6):
        raise OSError(28, "No space left on device")
    assert error.value.errno == 28


def test_what_is_no_matter_of_room_says_nothing_of_it(tmp_path: Path) -> None:
    with (
        pytest.raises(PermissionError, match=rf"{NAME} could not be written: Permission denied; what"),
        write_failures_explained(tmp_path / NAME, 5),
    ):
        raise PermissionError(13, "Permission denied")


def test_the_disk_is_found_behind_another_error_and_nothing_else_is_taken_for_it(tmp_path: Path) -> None:
    hidden = RuntimeError("unexpected pos 704 vs 598")
    hidden.__context__ = OSError(28, "No space left on device")
    with (
        pytest.raises(OSError, match="could not be written: No space left on device"),
        write_failures_explained(tmp_path / NAME),
    ):
        raise hidden
    with pytest.raises(RuntimeError, match=r"^lost$"), write_failures_explained(tmp_path / NAME):
        raise RuntimeError("lost")


if __name__ == "__main__":
    print(json.dumps({name: kill_everywhere(work, Path(sys.argv[1]) / name) for name, work in WORK.items()}))
