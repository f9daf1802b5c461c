"""Whenever a run is killed, there is a checkpoint to load that is not older than one interval (`kill_checks.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("kill_checks.py")
KILLS, SEED = 24, 7


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What was found after each kill, for checkpoints that are files and that are folders."""
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("killed")), str(KILLS), str(SEED)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_kill_at_any_time_leaves_the_last_checkpoint_or_the_one_before(
    killed: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    records = killed[kind]
    assert len(records) >= KILLS
    for record in records:
        # Complete and not yet reported is as good as reported.
        assert record["found"] in (record["saved"], record["saved"] + 1), record
        assert record["named"].startswith(f"step-{record['found']:08d}.ckpt"), record
    last = [record["found"] for record in records]
    assert last == sorted(set(last)), "every run has gone on from what the one before had left"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_kills_have_met_different_stages_of_a_save(killed: dict[str, list[dict[str, Any]]], kind: str) -> None:
    stages = Counter(", ".join(record["left"]) for record in killed[kind])
    assert len(stages) > 1, stages
    assert ".partial" in stages, stages
