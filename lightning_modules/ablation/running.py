"""Runs of a study as child processes: each with its log file, skipped when finished, continued when not.

Files of a run in the study's folder:

    run.yaml        complete configuration
    log.txt         output of its processes
    finished.json   marker, written at last: digest of the configuration, final numbers
    lock            held by the process that trains, and released by the system when it ends
    version_0/      the run as ``dsv41 fit`` leaves it
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from dsv41.files import remove_whole, written_whole
from lightning_modules.ablation.plan import PLACE, Run, flat
from lightning_modules.checkpoint import rule as checkpoint_rule
from lightning_modules.checkpoint.find import find_checkpoint, step_of
from lightning_modules.options.safe_yaml import load_plain
from lightning_modules.transfer.export import open_checkpoint

CONFIG = "run.yaml"
LOG = "log.txt"
FINISHED = "finished.json"
LOCK = "lock"
POLL = 0.2  # poll interval for processes, in seconds


# ------------------------------------------------------------------ what is on the disk


def finished(run: Run) -> dict[str, Any] | None:
    """The marker of a finished run, or None."""
    file = run.folder / FINISHED
    return json.loads(file.read_text()) if file.is_file() else None


def steps_done(run: Run) -> int:
    """Steps of the newest checkpoint; 0 if there is none."""
    path = find_checkpoint(run.folder, "last")
    return 0 if path is None else step_of(path) or 0


def require_same(run: Run) -> None:
    """Refuse a folder in which another configuration has been run.

    Raises:
        ValueError: Names the options that differ, with both values.
    """
    file, marker = run.folder / CONFIG, finished(run)
    stored = load_plain(file.read_text()) if file.is_file() else None
    if stored is None:
        if marker is None and not run.directory.exists():
            return
        raise ValueError(f"{run.folder}: has a run, but no {CONFIG} that says which; move it away")
    there = {name: value for name, value in flat(stored).items() if not name.startswith(PLACE)}
    here = run.settings
    different = [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} in the study"
        for name in sorted(set(there) | set(here))
        if there.get(name) != here.get(name)
    ]
    if different:
        raise ValueError(
            f"{run.folder}: holds a run with another configuration; give another output, or move it away:\n  "
            + "\n  ".join(different)
        )
    if marker is not None and marker.get("digest") != run.digest:
        raise ValueError(f"{run.folder / FINISHED}: is of another configuration than {CONFIG} beside it; move it away")


def finish(run: Run) -> bool:
    """Mark the run as finished if its newest checkpoint is that of its last step, validated there.

    The numbers are the checkpoint's own: a killed process may not have put its last events on the disk.
    """
    path = find_checkpoint(run.folder, "last")
    if path is None or steps_done(run) < run.steps:
        return False
    meta = open_checkpoint(path).meta
    about = meta[checkpoint_rule.KEY]
    if meta["global_step"] < run.steps or about.get("validated_at") != meta["global_step"]:
        return False
    marker = {
        "variant": run.variant,
        "seed": run.seed,
        "digest": run.digest,
        "steps": meta["global_step"],
        "tokens": about["tokens_seen"],
        "metrics": about["metrics"],
    }
    with written_whole(run.folder / FINISHED) as partial:
        partial.write_text(json.dumps(marker, indent=1))
    return True


def log_tail(run: Run, lines: int = 15) -> str:
    """Last lines of the run's log."""
    file = run.folder / LOG
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.is_file() else ""


# ------------------------------------------------------------------ processes


def _take(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Keep a second ``dsv41 ablate`` out of a study's folder.

    Raises:
        ValueError: There is one already.
    """
    descriptor = _take(output / LOCK)
    if descriptor is None:
        raise ValueError(f"output: another dsv41 ablate is working in {output}")
    try:
        yield
    finally:
        os.close(descriptor)


@dataclass
class Job:
    """A run that is being trained.

    Attributes:
        run: The run.
        process: None where a killed ``dsv41 ablate`` has left the process behind.
        started: Time of the start.
    """

    run: Run
    process: subprocess.Popen[bytes] | None
    started: float = field(default_factory=time.time)


class Watcher(Protocol):
    """Receiver of the events of a study."""

    def started(self, job: Job) -> None:
        """A process has begun, or was found."""

    def ended(self, run: Run, failure: str | None) -> None:
        """A run is finished, or has failed and why."""

    def look(self, running: Sequence[Job], waiting: Sequence[Run]) -> None:
        """Called several times per second."""


def threads_per_job(jobs: int) -> int:
    """Threads of each child when `jobs` run at once: an equal share of ``OMP_NUM_THREADS`` or of all cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (int(given) if given.isdecimal() else cores) // jobs)


def fit_command(run: Run) -> list[str]:
    """Command that trains the run, from its newest checkpoint if it has one."""
    command = [sys.executable, "-m", "lightning_modules", "fit", "--config", str(run.folder / CONFIG)]
    return command if find_checkpoint(run.folder, "last") is None else [*command, "--ckpt_path", "last"]


def start(run: Run, jobs: int) -> Job:
    """Start or continue a run; a process that trains it already is watched instead."""
    lock = _take(run.folder / LOCK)
    if lock is None:
        return Job(run, None)
    try:
        command = fit_command(run)
        if find_checkpoint(run.folder, "last") is None and run.directory.exists():
            remove_whole(run.directory)  # begun and killed before its first checkpoint
        with written_whole(run.folder / CONFIG) as partial:
            partial.write_text(yaml.safe_dump(run.config, sort_keys=False))
        environment = dict(os.environ)
        if jobs > 1:
            environment["OMP_NUM_THREADS"] = str(threads_per_job(jobs))
        with (run.folder / LOG).open("ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock,),  # the child holds the lock as long as it lives, also without its parent
                start_new_session=True,  # Ctrl-C is this process's matter
            )
        os.truncate(lock, 0)
        os.write(lock, f"{process.pid}\n".encode())  # for people who want to know who holds it
        return Job(run, process)
    finally:
        os.close(lock)


def ended(job: Job) -> bool:
    """Whether the job's process is gone."""
    if job.process is not None:
        return job.process.poll() is not None
    lock = _take(job.run.folder / LOCK)
    if lock is not None:
        os.close(lock)
    return lock is not None


def _failure(job: Job) -> str | None:
    """Reason why a job that has ended is not finished; None if it is."""
    status = None if job.process is None else job.process.returncode
    if status in (None, 0) and finish(job.run):
        return None
    how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
    return f"{job.run.name} ended with {how} at step {steps_done(job.run)} of {job.run.steps}; {job.run.folder / LOG}:"


def _stop(running: Sequence[Job]) -> None:
    """End children after their current step, with a checkpoint; at once, if Ctrl-C comes again."""
    for job in running:
        if job.process is not None:
            job.process.send_signal(signal.SIGTERM)
    try:
        for job in running:
            if job.process is not None:
                job.process.wait()
    except KeyboardInterrupt:
        for job in running:
            if job.process is not None:
                job.process.kill()
                job.process.wait()


def run_all(runs: Sequence[Run], jobs: int, watcher: Watcher) -> list[str]:
    """Train unfinished runs, `jobs` at a time.

    A run that fails does not end the others. Ctrl-C ends all after their current step, with checkpoints.

    Returns:
        Names of the runs that have failed.
    """
    waiting = deque(run for run in runs if finished(run) is None and not finish(run))
    running: list[Job] = []
    failed: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.popleft(), jobs))
                watcher.started(running[-1])
            time.sleep(POLL)
            for job in [job for job in running if ended(job)]:
                running.remove(job)
                failure = _failure(job)
                if failure is not None and job.process is None:
                    waiting.appendleft(job.run)  # left behind, and killed since
                    continue
                if failure is not None:
                    failed.append(job.run.name)
                watcher.ended(job.run, None if failure is None else f"{failure}\n{log_tail(job.run)}")
            watcher.look(running, waiting)
    except BaseException:
        with suppress(ProcessLookupError):
            _stop(running)
        raise
    return failed
