"""How the benchmarks here measure: in turn, by CPU time, and memory by what the allocator was asked for.

Other work on a machine makes wall time on several threads useless for comparing two implementations. So each run uses
one thread and the process's CPU time, the implementations take turns for several rounds, and medians are compared.
Peak memory is a running sum of the allocator's events, which does not depend on load: what exists before the run
(inputs, parameters) is left out, what the run makes (activations, gradients, scratch) is in.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Key = TypeVar("Key")


def median_seconds(runs: Mapping[Key, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[Key, float]:
    """CPU seconds of each run, medians over `rounds` in which every run has its turn; `warm_up` rounds go before."""
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for index in range(warm_up + rounds):
        for key, run in runs.items():
            begin = time.process_time()
            run()
            if index >= warm_up:
                times[key].append(time.process_time() - begin)
    return {key: statistics.median(taken) for key, taken in times.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest running sum of what the allocator gave and took back during `run`.

    Freeing what is older than `run` counts for nothing: the profiler knows the sizes of some such blocks (those made in
    an earlier profile, gradients say), and subtracting them would make the sum start below zero.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    events = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            events.append(event)
    live: set[int] = set()
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            live.add(address)
        elif address not in live:
            continue
        else:
            live.remove(address)
        held += size
        peak = max(peak, held)
    return peak


def machine() -> dict[str, Any]:
    """What a reader of the numbers has to know about where they come from."""
    cpu = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_json(path: Path | None, options: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the rows with the machine and the options that they belong to, if there is a path."""
    if path is not None:
        settings = {name: value for name, value in options.items() if not isinstance(value, Path)}
        path.write_text(json.dumps({"machine": machine(), "options": settings, "rows": rows}, indent=1) + "\n")
