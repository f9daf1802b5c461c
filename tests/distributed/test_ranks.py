"""The harness of tests on several ranks: arguments, failures, time limits, warnings."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fork, ranks, run
from torch.distributed.device_mesh import DeviceMesh


@ranks(1, 2, 3)
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_ranks_share_a_mesh_and_arguments(
    mesh: DeviceMesh, rank: int, world_size: int, factor: float, tmp_path: Path
) -> None:
    assert (mesh.size(), mesh.get_local_rank(), dist.get_world_size()) == (world_size, rank, world_size)
    total = torch.tensor(factor * rank)
    dist.all_reduce(total)
    assert total == factor * world_size * (world_size - 1) / 2
    assert torch.get_num_threads() == 1
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


def describe(rank: int) -> tuple[int, int, str]:
    return rank, threading.active_count(), os.environ["RANK"]


def alone() -> bool:
    return dist.is_initialized() or "RANK" in os.environ


def test_values_come_back_by_rank() -> None:
    assert run(describe, 3) == [(0, 1, "0"), (1, 1, "1"), (2, 1, "2")]
    assert run(alone, None) == [False]


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        print("this rank was here")
        assert rank == world_size, "on purpose"
    dist.barrier()


def test_the_first_failure_is_reported_with_values_and_output() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^rank 1 of 2: Traceback") as caught:
        run(fail, 2)
    for part in ("in fail\n", "AssertionError: on purpose\nassert 1 == 2", "this rank was here"):
        assert part in str(caught.value)


def kill_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_the_first() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^rank 1 of 2: ended with exit code -9"):
        run(kill_last, 2)
    survivor, victim = fork(kill_last, 2)
    assert (survivor.exit_code, victim.exit_code) == (1, -9)
    assert survivor.error
    assert not victim.error


def hang(folder: Path, rank: int) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    while rank:
        time.sleep(0.05)
    dist.barrier()


def test_no_rank_is_left_after_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="still running after 2 s: 2 ranks") as caught:
        run(hang, 2, timeout=2, folder=tmp_path)
    assert "in hang\n" in str(caught.value), "the place where it stands"
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def warn() -> None:
    warnings.warn("seen by a rank", UserWarning, stacklevel=1)


def test_warnings_are_errors_as_in_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="UserWarning: seen by a rank"):
        run(warn, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "seen by a rank")
        run(warn, 2)
