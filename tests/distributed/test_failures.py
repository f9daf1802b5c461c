"""When a rank dies, the others end soon and say why, and there is a checkpoint to go on from (`failure_checks.py`)."""

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

from lightning_modules.checkpoint.find import find_checkpoint
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("failure_checks.py")
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


@pytest.fixture(scope="module")
def unbroken(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same training on one device, all kept. In a process of its own, as the ranks are: what earlier
    tests have compiled in this one rounds otherwise, and training amplifies that."""
    folder = tmp_path_factory.mktemp("unbroken")
    status, output, _ = launch(
        "-m", "lightning_modules", "fit", *make_nano_args(folder), *STEPS, "--checkpoint.keep", "-1"
    )
    assert status == 0, output[-4000:]
    return folder / "runs" / "nano" / "version_0" / "checkpoints"


def require_step(folder: Path, step: int, unbroken: Path) -> None:
    """The checkpoint that "last" means is whole and that of `step`, in every part."""
    path = find_checkpoint(folder / "runs" / "nano", "last")
    assert path is not None
    ours = AtomicCheckpointIO().load_checkpoint(path)
    expected: dict[str, Any] = torch.load(unbroken / f"step-{step:08d}.ckpt", weights_only=True)
    assert ours["global_step"] == expected["global_step"] == step
    assert ours["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        assert torch.allclose(ours["state_dict"][name], value, rtol=1e-9, atol=1e-12), name
    (optimizer,), (theirs,) = ours["optimizer_states"], expected["optimizer_states"]
    assert optimizer["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.allclose(optimizer["state"][number][key], value, rtol=1e-9, atol=1e-15), (number, key)


@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("1:step", 2),
        ("1:error", 2),
        ("1:data", 2),
        ("0:metadata", 2),
        ("0:meta", 2),
        ("0:naming", 4),
        ("0:deletion", 4),
    ],
)
def test_the_others_end_and_the_newest_whole_checkpoint_is_found(
    what: str, step: int, unbroken: Path, make_nano_args: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    options = [*make_nano_args(tmp_path), *STEPS, *TWO_RANKS]
    status, output, seconds = launch(str(SCRIPT), what, *options)
    assert status != 0
    assert seconds < A_MINUTE + 60, "start-up, four steps, and a minute"
    survivor = "0" if what.startswith("1") else "1"
    assert f"rank {survivor}: lost the connection to another rank" in output, output[-4000:]
    if what == "1:error":
        assert "this rank fails on purpose" in output
    require_step(tmp_path, step, unbroken)
    if what in ("0:naming", "1:step"):
        # What the kill has left does not stand in the way, and the end is that of the unbroken run.
        status, output, _ = launch("-m", "lightning_modules", "fit", *options, "--ckpt_path", "last")
        assert status == 0, output[-4000:]
        require_step(tmp_path, 6, unbroken)
        left = {path.name for path in (tmp_path / "runs" / "nano" / "version_0" / "checkpoints").iterdir()}
        assert left == {"best.ckpt", "step-00000006.ckpt"}
