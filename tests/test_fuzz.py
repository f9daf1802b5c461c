"""A few of the malformed inputs of `fuzz.py`, in a process that forks: this one may have threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz.py"


def test_malformed_inputs_end_with_one_line_or_work() -> None:
    command = [sys.executable, str(FUZZ), "--count", "48", "--seed", "0"]
    done = subprocess.run(command, cwd=FUZZ.parents[1], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "48 inputs, 0 faults" in done.stdout
