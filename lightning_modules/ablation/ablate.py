"""``dsv41 ablate``: from a study's file to its table."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from lightning_modules.ablation.boards import write_hparams, write_layout
from lightning_modules.ablation.curves import Record, read_run
from lightning_modules.ablation.matching import ratio, warning
from lightning_modules.ablation.plan import Plan, make_plan
from lightning_modules.ablation.plots import draw
from lightning_modules.ablation.progress import Progress
from lightning_modules.ablation.results import Row, markdown, notes_on, summarise, write_results
from lightning_modules.ablation.running import (
    alone,
    finished,
    require_same,
    run_all,
    steps_done,
    threads_per_job,
)
from lightning_modules.ablation.study import BASE, Study, read_study
from lightning_modules.text import plain_table, readable_count


def dry_run(plan: Plan) -> str:
    """Plan as text: variants with their budget, runs with their state."""
    base = plan.variants[0].cost
    cells: list[tuple[str, ...]] = [("variant", "parameters", "read by a token", "FLOPs per token", "matched")]
    warnings = []
    for planned in plan.variants:
        match, cost, note = planned.variant.match, planned.cost, ""
        if planned.matched is not None:
            achieved = ratio(match, cost, base)
            note = f"{match} {achieved:.4f} of the base's ({planned.matched})"
            warnings += [text for text in [warning(planned.variant.name, match, achieved)] if text]
        counts = f"{cost.parameters:,}", f"{cost.active:,}", readable_count(cost.flops)
        cells.append((planned.variant.name, *counts, note))
    lines = [f"study {plan.study.name}, written to {plan.study.output}", "", *plain_table(cells), *warnings, ""]
    lines += ["what changes: " + (", ".join(plan.switches()) or "nothing"), ""]
    width = max(len(run.name) for run in plan.runs)
    for run in plan.runs:
        done = steps_done(run)
        state = "finished" if finished(run) else f"step {done} of {run.steps}" if done else f"new, {run.steps} steps"
        lines.append(f"{run.name.ljust(width)}  {state}")
    return "\n".join(lines)


def _match_notes(plan: Plan, rows: list[Row]) -> list[str]:
    """Notes on the match of variants, with the vocabulary that the runs have found."""
    costs = {row.variant: row.cost for row in rows}
    notes = []
    for planned in plan.variants:
        name, match = planned.variant.name, planned.variant.match
        if planned.matched is None or name not in costs:
            continue
        cost, base = costs[name] or planned.cost, costs.get(BASE) or plan.variants[0].cost
        achieved = ratio(match, cost, base)
        notes.append(f"{name}: {planned.matched}, which gives {achieved:.4f} of the base's {match}.")
        notes += [text for text in [warning(name, match, achieved)] if text]
    return notes


def collect(plan: Plan) -> list[Record]:
    """Finished runs of a plan, the base first; their last loss is that of the marker."""
    records = []
    order = [planned.variant.name for planned in plan.variants]
    for run in sorted(plan.runs, key=lambda run: order.index(run.variant)):
        marker = finished(run)
        if marker is not None:
            record = read_run(run.directory, run.variant)
            records.append(replace(record, curve=record.curve | {marker["steps"]: marker["metrics"]["val/loss"]}))
    return records


def write_all(plan: Plan, jobs: int) -> str:
    """Write tables, pictures and boards of the finished runs, and return what to print."""
    records, output = collect(plan), plan.study.output
    if not records:
        return "no run is finished, so there is no table"
    rows = summarise(records, BASE)
    notes = notes_on(rows, BASE) + _match_notes(plan, rows)
    left = [run.name for run in plan.runs if finished(run) is None]
    if left:
        notes.append(f"WARNING: not finished, and not counted: {', '.join(left)}.")
    text = markdown(rows, BASE, notes)
    about = {
        "study": plan.study.name,
        "base": BASE,
        "seeds": list(plan.study.seeds),
        "notes": notes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        "jobs": jobs,
        "threads_per_job": threads_per_job(jobs),
    }
    files = write_results(output, rows, records, text, about)
    for record in records:
        write_hparams(record, plan.switches())
    write_layout(output, plan.study.name)
    draw(records, BASE, output / "curves.png")
    files.append(output / "curves.png")
    return "\n".join([text, *(str(file) for file in files), f"curves: tensorboard --logdir {output}"])


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Treat a scheduler's SIGTERM like Ctrl-C, and restore the handler for processes that outlive the call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ablate(path: Path, output: Path | None, jobs: int, only_plan: bool, stream: TextIO | None = None) -> int:
    """Run ``dsv41 ablate``.

    Args:
        path: The study's file.
        output: In place of the file's.
        jobs: Runs at a time, at least 1.
        only_plan: Print the plan, and run nothing.
        stream: Where to print; None is stdout.

    Returns:
        Exit status: 0, 1 if a run has failed, 130 after Ctrl-C.

    Raises:
        FileNotFoundError: As `read_study`.
        ValueError: As `read_study` and `make_plan`; or `jobs` is below 1, the folder holds runs of another
            configuration, or another process is working there.
    """
    if jobs < 1:
        raise ValueError(f"--jobs: must be at least 1, got {jobs}")
    study: Study = read_study(path)
    plan = make_plan(study if output is None else replace(study, output=output))
    return run_plan(plan, jobs, only_plan, stream or sys.stdout)


def run_plan(plan: Plan, jobs: int, only_plan: bool, stream: TextIO) -> int:
    """Run a finished plan; see `ablate`."""
    for run in plan.runs:
        require_same(run)
    print(dry_run(plan), file=stream, flush=True)
    if only_plan:
        return 0
    with alone(plan.study.output), _stopped_by_sigterm():
        try:
            print(file=stream)
            with Progress(plan, jobs, stream) as progress:
                failed = run_all(plan.runs, jobs, progress)
        except KeyboardInterrupt:
            print("stopped; the same command resumes from here", file=stream)
            return 130
        print(f"\n{write_all(plan, jobs)}", file=stream)
    if failed:
        print(f"FAILED: {', '.join(failed)}; the same command tries again", file=stream)
    return 1 if failed else 0
