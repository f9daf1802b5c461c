"""Run by `test_integrity.py`: two ranks save and load what is damaged, or cannot be written.

    python integrity_checks.py DIRECTORY

Each rank writes what it has met to ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bare_strategy import bare_strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dsv41 import files
from lightning_modules.checkpoint import sharded as sharded_checkpoint

RANKS = 2


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


def check(directory: Path, rank: int) -> dict[str, Any]:
    sharded = bare_strategy(directory / "store", rank, RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

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

    whole = bare_strategy(directory / "store", rank, RANKS, sharded=False)
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


def rank_main(directory: Path, rank: int) -> int:
    torch.set_num_threads(1)
    try:
        found = check(directory, rank)
        (directory / f"{rank}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    directory = Path(sys.argv[1])
    logging.disable()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os._exit(rank_main(directory, rank))
        children.append(child)
    begin = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(f"ranks ended with {codes} after {time.monotonic() - begin:.0f} s" if any(codes) else 0)


if __name__ == "__main__":
    main()
