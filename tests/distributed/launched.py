"""How the scripts of checks in this folder run under torchrun: beside them on the path, and imported by them alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run(checks: Iterable[Callable[[], float]]) -> None:
    """Run each check on all ranks; rank 0 writes what they return, by check and rank, to the file that was named."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, list[float]] = {}
    for check in checks:
        values: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(values, check())
        results[check.__name__] = [value for value in values if value is not None]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
