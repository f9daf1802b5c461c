"""When a rank dies, the others end soon and say why, and there is a checkpoint to resume from (`failing_run.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_run import train
from ranks import fork, run

from lightning_modules import cli
from lightning_modules.checkpoint.find import find_checkpoint
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO

SCRIPT = Path(__file__).with_name("failing_run.py")
STEPS = (
    *("--trainer.max_steps", "6", "--checkpoint.every_n_steps", "2", "--checkpoint.keep", "1"),
    *("--trainer.val_check_interval", "6", "--trainer.limit_val_batches", "1", "--trainer.precision", "64-true"),
)
TWO_RANKS = ("--trainer.strategy", "engram_fsdp", "--trainer.devices", "2")
A_MINUTE = 60


def launch(*command: str) -> tuple[int, str, float]:
    """Exit status, output, and seconds that it took; the ranks are a process group of their own."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env={name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # Ends when the last rank has closed its output, not when the first process is gone.
        output, _ = process.communicate(timeout=250)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after 250 s\n{output[-4000:]}")
    assert not running(process.pid), "a rank is left"
    return process.returncode, output, time.monotonic() - begin


def running(group: int) -> list[str]:
    """Processes of a group that are not just waiting to be collected by their parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:
            continue  # it has just ended
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state not in "ZX":
            found.append(name)
    return found


def fit(options: list[str]) -> None:
    """``dsv41 fit`` in this process."""
    cli.main(["fit", *options])


@pytest.fixture(scope="module")
def unbroken(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same training on one device, all kept. In a process of its own, as the ranks are: what earlier
    tests have compiled in this one rounds otherwise, and training amplifies that."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(fit, None, options=[*make_nano_args(folder), *STEPS, "--checkpoint.keep", "-1"])
    return folder / "runs" / "nano" / "version_0" / "checkpoints"


def tensors_of(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of the model and its one optimizer, in float64."""
    (optimizer,) = checkpoint["optimizer_states"]
    states = {f"{n}/{key}": value for n, state in optimizer["state"].items() for key, value in state.items()}
    return {name: value.double() for name, value in (checkpoint["state_dict"] | states).items()}


def require_step(folder: Path, step: int, unbroken: Path) -> None:
    """The checkpoint that "last" means is whole and that of `step`, in every part."""
    path = find_checkpoint(folder / "runs" / "nano", "last")
    assert path is not None
    ours = AtomicCheckpointIO().load_checkpoint(path)
    expected: dict[str, Any] = torch.load(unbroken / f"step-{step:08d}.ckpt", weights_only=True)
    assert ours["global_step"] == expected["global_step"] == step
    assert tensors_of(ours).keys() == tensors_of(expected).keys()
    for name, value in tensors_of(expected).items():
        # In norm: single entries may be what is left of a cancellation, which depends on the CPU, and moments are tiny.
        difference = float((tensors_of(ours)[name] - value).norm())
        atol = 1e-15 if name[0].isdigit() else 1e-12
        assert difference <= 1e-9 * float(value.norm()) + atol * value.numel() ** 0.5, name


def require_lost_connection(what: str, output: str) -> None:
    survivor = "0" if what.startswith("1") else "1"
    assert f"rank {survivor}: lost the connection to another rank" in output, output[-4000:]
    if what == "1:error":
        assert "this rank fails on purpose" in output


@pytest.mark.parametrize(
    ("what", "step"), [("1:error", 2), ("1:data", 2), ("0:metadata", 2), ("0:meta", 2), ("0:deletion", 4)]
)
def test_the_other_ends_and_the_newest_whole_checkpoint_is_found(
    what: str, step: int, unbroken: Path, make_nano_args: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    options = [*make_nano_args(tmp_path), *STEPS, *TWO_RANKS]
    begin = time.monotonic()
    ends = fork(train, 2, what=what, options=options)
    assert time.monotonic() - begin < A_MINUTE
    assert all(end.exit_code != 0 for end in ends)
    assert ends[int(what[0])].exit_code == (1 if what == "1:error" else -signal.SIGKILL)
    require_lost_connection(what, "".join(end.output + end.error for end in ends))
    require_step(tmp_path, step, unbroken)


@pytest.mark.parametrize(("what", "step"), [("1:step", 2), ("0:naming", 4)])
def test_a_run_that_lightning_has_launched_ends_and_can_be_resumed(
    what: str, step: int, unbroken: Path, make_nano_args: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """The rank that dies is the launched one, and the one that launches."""
    options = [*make_nano_args(tmp_path), *STEPS, *TWO_RANKS]
    status, output, seconds = launch(str(SCRIPT), what, *options)
    assert status != 0
    assert seconds < A_MINUTE + 60, "start-up, four steps, and a minute"
    require_lost_connection(what, output)
    require_step(tmp_path, step, unbroken)
    # What the kill has left does not stand in the way, and the end is that of the unbroken run.
    run(fit, 2, options=[*options, "--ckpt_path", "last"])
    require_step(tmp_path, 6, unbroken)
    left = {path.name for path in (tmp_path / "runs" / "nano" / "version_0" / "checkpoints").iterdir()}
    assert left == {"best.ckpt", "step-00000006.ckpt"}
