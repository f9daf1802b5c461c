"""Every benchmark runs, at sizes that measure nothing, and writes what it promises; times are never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

COMMANDS = {
    "attention": "--lengths 40 --topk 8 --window 8 --rounds 1",
    "checkpoint_io": "--megabytes 1 --rounds 1",
    "experts": "--tokens 32 --experts 8 --hidden 16 --width 8 --rounds 1",
    "hyper_connections": "--tokens 16 --hidden 16 --rounds 1",
    "engram": "--parts hash table --tokens 16 --rows 500 --hidden 16 --width 8 --ids 64 --rounds 1",
    "indexer_learning": "--lengths 40 --hidden 32 --topk 8 --window 8 --rounds 1",
    "optimizer": "--rows 500 --hidden 16 --width 8 --ids 64 --layers 1 --rounds 1",
    "pointwise": "--only norm --dtypes float32 --rounds 1",
    "train_step": "--lengths 24 --vocabulary 400 --layers 0 1 --engram-layers 1 --experts 4 --experts-per-token 2 "
    "--rounds 1 --allocator default",
    "owner_lookup": "--rows 500 --ids 64 --repeats 1",
    "loop_profile": "",  # tests/lightning_modules/test_cli.py
    "plot_curves": "",  # draws a picture from a run's files
}


def test_every_benchmark_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*COMMANDS, "measure", "step_parts"}


@pytest.mark.parametrize("name", [name for name, options in COMMANDS.items() if options])
def test_a_benchmark_runs_and_says_on_what(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    launch = [sys.executable]
    if name == "owner_lookup":
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(FOLDER / f"{name}.py"), *COMMANDS[name].split(), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "a table is printed"
    written = json.loads(out.read_text())
    assert written["rows"]
    assert {"torch", "load", "threads"} <= written["machine"].keys()


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "train_step.py"), *COMMANDS["train_step"].split(), "--profile"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert {"experts", "attention core", "mHC", "head and loss", "Engram", "optimizer"} <= {row["part"] for row in rows}
