"""On two ranks, a wrong bit is found and a full disk is reported, by all ranks alike."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bare_strategy import bare_strategy
from ranks import run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dsv41 import files
from lightning_modules.checkpoint import sharded as sharded_checkpoint

FILES = {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}


def wrong_bit(path: Path, place: float = 0.5) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size`, as if the disk were full (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def message(action: Callable[[], Any]) -> str:
    """Type and text of the error that `action` ends with."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_and_load(directory: Path, mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Save and load what is damaged, or cannot be written; results and errors of this rank."""
    sharded = bare_strategy()

    def checkpoint_of(step: int) -> dict[str, Any]:
        rows = torch.full((512, 64), float(10 * step + rank))
        table = DTensor.from_local(rows, mesh, [Shard(0)])
        state = {"state": {"table": {"exp_avg": table}}, "param_groups": [{"params": ["table"]}]}
        return {"state_dict": {"table": table}, "optimizer_states": [state], "global_step": step}

    hashed: list[str] = []
    real = files.sha256_of

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    files.sha256_of = sharded_checkpoint.sha256_of = noted  # type: ignore[attr-defined]
    found: dict[str, Any] = {}

    def taken() -> list[str]:
        names = sorted(hashed)
        hashed.clear()
        return names

    def prepared(change: Callable[[], Any]) -> None:
        """Rank 0 changes something on the disk while the other waits."""
        if rank == 0:
            change()
        dist.barrier()

    path = directory / "sharded" / "step-00000001.ckpt"
    sharded.save_checkpoint(checkpoint_of(1), path)
    found["hashed on saving"] = taken()
    sharded.load_checkpoint(path)
    found["hashed on loading"] = taken()

    damaged = {}
    for name in sorted(file.name for file in path.iterdir()):
        prepared(lambda name=name: wrong_bit(path / name))  # type: ignore[misc]
        if name != files.MARKER:
            damaged[name] = message(lambda: sharded.load_checkpoint(path))
        dist.barrier()
        prepared(lambda name=name: wrong_bit(path / name))  # type: ignore[misc]
    found["damaged"] = damaged
    found["intact again"] = message(lambda: sharded.load_checkpoint(path))

    # Only rank 1 has no room: for nothing at all, and for half of its file.
    next_path = path.with_name("step-00000002.ckpt")
    found["full"] = []
    for size in (0, 100_000):
        with largest_file(size) if rank == 1 else nullcontext():
            found["full"].append(message(lambda: sharded.save_checkpoint(checkpoint_of(2), next_path)))
        dist.barrier()
        found["beside the full"] = sorted(file.name for file in path.parent.iterdir())
        dist.barrier()
    found["older"] = sharded.load_checkpoint(path)["global_step"]

    whole = bare_strategy(sharded=False)
    file = directory / "file" / "step-00000001.ckpt"
    plain = {"state_dict": {"table": torch.ones(1000)}, "global_step": 1} if rank == 0 else {}
    whole.save_checkpoint(plain, file)
    with largest_file(1000) if rank == 0 else nullcontext():
        found["full file"] = message(lambda: whole.save_checkpoint(plain, file.with_name("step-00000002.ckpt")))
    dist.barrier()
    found["beside the full file"] = sorted(left.name for left in file.parent.iterdir())
    dist.barrier()
    prepared(lambda: shutil.copy(file, file.with_name("best.ckpt")))
    prepared(lambda: wrong_bit(file))
    found["damaged file"] = message(lambda: whole.load_checkpoint(file))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results and errors of each rank."""
    return run(save_and_load, 2, directory=tmp_path_factory.mktemp("integrity"))


def test_each_rank_hashes_the_file_that_it_has_written(found: list[dict[str, Any]]) -> None:
    assert found[0]["hashed on saving"] == [".metadata", "__0_0.distcp", "meta.pt"]
    assert found[1]["hashed on saving"] == ["__1_0.distcp"]


def test_the_ranks_share_the_reading(found: list[dict[str, Any]]) -> None:
    """All read the plain values, which are small and which all need."""
    assert found[0]["hashed on loading"] == [".metadata", "__1_0.distcp", "meta.pt"]
    assert found[1]["hashed on loading"] == ["__0_0.distcp", "meta.pt", "meta.pt"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_wrong_bit_in_any_file_stops_all_ranks_and_is_named(found: list[dict[str, Any]], name: str) -> None:
    texts = [rank["damaged"][name] for rank in found]
    assert sorted(text.split(":")[0] for text in texts) == ["DamagedFileError", "OtherRankError"]
    for text in texts:
        assert f"step-00000001.ckpt/{name}: its content is not what was written" in text
        assert "no other checkpoint is beside it" in text


def test_every_file_has_been_damaged_and_mended(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["damaged"].keys() == FILES
        assert rank["intact again"] == ""


def test_a_disk_that_is_full_for_one_rank_stops_all_and_leaves_the_older_checkpoint(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        for text in rank["full"]:
            assert "step-00000002.ckpt could not be written: rank 1: [Errno 27] File too large" in text
            assert "rank 0:" not in text
            assert "about 0.5 MB were needed" in text
            assert "what was complete before is untouched" in text
        assert rank["beside the full"] == ["step-00000001.ckpt"]
        assert rank["older"] == 1


def test_a_disk_that_is_full_for_the_one_file_stops_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank, kind in zip(found, ("OSError", "OtherRankError"), strict=True):
        assert rank["full file"].startswith(kind)
        assert "step-00000002.ckpt could not be written: File too large" in rank["full file"]
        assert rank["beside the full file"] == ["step-00000001.ckpt"]


def test_a_wrong_bit_in_the_one_file_stops_all_ranks_and_the_choice_is_named(found: list[dict[str, Any]]) -> None:
    for rank, kind in zip(found, ("DamagedFileError", "OtherRankError"), strict=True):
        assert rank["damaged file"].startswith(kind)
        assert "file/step-00000001.ckpt: its content is not what was written (the CRC-32" in rank["damaged file"]
        assert "complete beside it: best.ckpt" in rank["damaged file"]
