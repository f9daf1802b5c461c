"""Run by `test_kills.py`: processes that save step after step are killed at random times, one after the other.

    python kill_checks.py DIRECTORY KILLS SEED

Each goes on from what it finds, as a resumed run does, with the callback that decides what is deleted and with the
checkpoint plugin ("file") or the strategy ("folder") that writes. Prints, as JSON, a record per kill for both: the last
step that was reported as saved, the step that can be loaded, and what lay beside it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bare_strategy import bare_strategy

from dsv41.files import leftovers
from lightning_modules.callbacks import LatestCheckpoint
from lightning_modules.checkpoint.find import steps_in
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO

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
    return bare_strategy(store, 0, 1).save_checkpoint


def run(kind: str, directory: Path, store: Path, report: int) -> None:
    """Go on from the newest checkpoint and save every step, until killed; `report` is told when one is complete."""
    save = saver(kind, store)
    callback = LatestCheckpoint(every_n_steps=1, keep=1)
    callback.dirpath = str(directory)
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], global_step=0)
    trainer.save_checkpoint = lambda path, _weights_only: save(checkpoint_of(trainer.global_step), path)
    module: Any = None
    callback.on_fit_start(trainer, module)
    found = steps_in(directory)
    trainer.global_step = int(found[-1].stem.removeprefix("step-")) if found else 0
    while True:
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
            run(kind, directory, store, write)
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


def kill_often(kind: str, directory: Path, kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """At least `kills` kills, and as many as it takes to meet a half-written checkpoint and something else."""
    directory.mkdir()
    records: list[dict[str, Any]] = []
    begin = time.monotonic()
    # Seconds that a save takes, adapted to the disk; kills are spread over two saves.
    length = 0.01
    while len(records) < kills or not (".partial" in stages(records) and len(stages(records)) > 1):
        assert time.monotonic() - begin < 100, f"{kind}: all kills have met {stages(records)}"
        before = time.monotonic()
        steps = kill_once(kind, directory, directory.with_name(f"{kind}-{len(records)}"), chance.random() * 2 * length)
        length = (length + min(0.5, (time.monotonic() - before) / (len(steps) + 1))) / 2
        complete = steps_in(directory)
        found = require_step(AtomicCheckpointIO().load_checkpoint(complete[-1]))
        left = sorted({path.suffix for path in leftovers(directory)} | ({"older"} if len(complete) > 1 else set()))
        records.append({"saved": steps[-1], "found": found, "named": complete[-1].name, "left": left})
    return records


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()
    directory, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    print(json.dumps({kind: kill_often(kind, directory / kind, kills, chance) for kind in ("file", "folder")}))


if __name__ == "__main__":
    main()
