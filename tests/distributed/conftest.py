"""Launches of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], dict[str, list[float]]]:
    """Run a script of checks by torchrun: ``run_checks(script, ranks)`` returns deviations per check and rank."""

    def run(script: Path, ranks: int) -> dict[str, list[float]]:
        out = tmp_path_factory.mktemp(script.stem) / "results.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [*command, str(script), str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, list[float]] = json.loads(out.read_text())
        assert all(len(values) == ranks for values in found.values())
        return found

    return run
