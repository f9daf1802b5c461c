"""Whenever a run is killed, there is a checkpoint to load that is not older than one interval.

Processes that save step after step are killed at random times, one after the other. Each resumes from what it finds, as
a run does, with the callback that decides what is deleted and with the checkpoint plugin ("file") or the
strategy ("folder") that writes.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bare_strategy import bare_strategy
from ranks import run

from dsv41.files import leftovers
from lightning_modules.callbacks import LatestCheckpoint
from lightning_modules.checkpoint.callbacks import steps_in
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO

KILLS, SEED = 24, 7

Save = Callable[[dict[str, Any], str], None]


def checkpoint_of(step: int) -> dict[str, Any]:
    """Tensors that all say which step it is."""
    return {
        "state_dict": {f"layer.{index}.weight": torch.full((64, 256), float(step)) for index in range(8)},
        "global_step": step,
        "optimizer_states": [],
    }


def require_step(checkpoint: dict[str, Any]) -> int:
    """The step that every part of a checkpoint is of."""
    step: int = checkpoint["global_step"]
    expected = checkpoint_of(step)["state_dict"]
    assert checkpoint["state_dict"].keys() == expected.keys()
    assert all(torch.equal(checkpoint["state_dict"][name], value) for name, value in expected.items()), step
    return step


def saver(kind: str, store: Path) -> Save:
    if kind == "file":
        return AtomicCheckpointIO().save_checkpoint
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    return bare_strategy().save_checkpoint


def save_until_killed(kind: str, directory: Path, store: Path, report: int) -> None:
    """Resume from the newest checkpoint and save every step, until killed; `report` is told when one is complete."""
    save = saver(kind, store)
    callback = LatestCheckpoint(every_n_steps=1, keep=1)
    callback.dirpath = str(directory)
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], global_step=0)
    trainer.save_checkpoint = lambda path, _weights_only: save(checkpoint_of(trainer.global_step), path)
    module: Any = None
    callback.on_fit_start(trainer, module)
    found = steps_in(directory)
    trainer.global_step = int(found[-1].stem.removeprefix("step-")) if found else 0
    parent = os.getppid()
    while os.getppid() == parent:
        trainer.global_step += 1
        callback._save_checkpoint(trainer, str(directory / f"step-{trainer.global_step:08d}.ckpt"))
        os.write(report, struct.pack("i", trainer.global_step))


def kill_once(kind: str, directory: Path, store: Path, wait: float) -> list[int]:
    """Steps that a child has reported as saved before it was killed, `wait` seconds after the first."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            save_until_killed(kind, directory, store, write)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    first = os.read(read, 4)
    assert len(first) == 4, "the child has saved nothing"
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    rest = first
    while more := os.read(read, 4096):
        rest += more
    os.close(read)
    return [step for (step,) in struct.iter_unpack("i", rest)]


def stages(records: list[dict[str, Any]]) -> set[str]:
    return {", ".join(record["left"]) for record in records}


def kill_often(kind: str, directory: Path) -> list[dict[str, Any]]:
    """At least `KILLS` kills, and as many as it takes to meet a half-written checkpoint and something else.

    Returns:
        For each the last step that was reported as saved, the step that can be loaded, and what lay beside it.
    """
    logging.disable()
    directory.mkdir()
    chance = random.Random(SEED)
    records: list[dict[str, Any]] = []
    begin = time.monotonic()
    # Seconds that a save takes, adapted to the disk; kills are spread over two saves.
    length = 0.01
    while len(records) < KILLS or not (".partial" in stages(records) and len(stages(records)) > 1):
        assert time.monotonic() - begin < 100, f"{kind}: all kills have met {stages(records)}"
        before = time.monotonic()
        steps = kill_once(kind, directory, directory.with_name(f"{kind}-{len(records)}"), chance.random() * 2 * length)
        length = (length + min(0.5, (time.monotonic() - before) / (len(steps) + 1))) / 2
        complete = steps_in(directory)
        found = require_step(AtomicCheckpointIO().load_checkpoint(complete[-1]))
        left = sorted({path.suffix for path in leftovers(directory)} | ({"older"} if len(complete) > 1 else set()))
        records.append({"saved": steps[-1], "found": found, "named": complete[-1].name, "left": left})
    return records


@pytest.fixture(scope="module", params=["file", "folder"])
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A record for each kill, of checkpoints that are files or folders. In a process that can fork."""
    directory = tmp_path_factory.mktemp("killed") / request.param
    (found,) = run(kill_often, None, kind=request.param, directory=directory)
    return found


def test_a_kill_at_any_time_leaves_the_last_checkpoint_or_the_one_before(records: list[dict[str, Any]]) -> None:
    assert len(records) >= KILLS
    for record in records:
        # Complete and not yet reported is as good as reported.
        assert record["found"] in (record["saved"], record["saved"] + 1), record
        assert record["named"].startswith(f"step-{record['found']:08d}.ckpt"), record
    last = [record["found"] for record in records]
    assert last == sorted(set(last)), "every run has resumed from what the one before had left"


def test_the_kills_have_met_different_stages_of_a_save(records: list[dict[str, Any]]) -> None:
    met = Counter(", ".join(record["left"]) for record in records)
    assert len(met) > 1, met
    assert ".partial" in met, met
