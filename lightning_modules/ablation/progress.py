"""Progress of a study: a line per run and one for all, redrawn on a terminal, now and then in a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.ablation.curves import TRAIN_LOSS
from lightning_modules.ablation.plan import Plan, Run
from lightning_modules.ablation.running import Job, finished, steps_done
from lightning_modules.text import duration

INTERVAL = 2.0  # seconds between looks at event files
PARTS = 10  # lines per run in a file, at most
PAUSE = 10.0  # seconds between two of them, at least


class _Watched:
    """State of a running job by its event files, which are read on from where the last look ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.step = steps_done(job.run)
        self.loss: float | None = None
        self.pace: float | None = None  # seconds per step
        self.start_up = 0.0  # seconds before the first step, as soon as there is a pace
        self.said = 0  # parts
        self.spoke = time.monotonic()
        self._reader: EventAccumulator | None = None

    def look(self) -> None:
        """Read new events."""
        if self._reader is None:
            if not any(self.job.run.directory.glob("events.out.tfevents.*")):
                return
            self._reader = EventAccumulator(str(self.job.run.directory), size_guidance={"scalars": 0})
        self._reader.Reload()
        if TRAIN_LOSS not in self._reader.Tags()["scalars"]:
            return
        events = self._reader.Scalars(TRAIN_LOSS)
        self.step, self.loss = events[-1].step + 1, events[-1].value
        mine = [event for event in events if event.wall_time >= self.job.started]
        if len(mine) > 1 and mine[-1].step > mine[0].step:
            self.pace = (mine[-1].wall_time - mine[0].wall_time) / (mine[-1].step - mine[0].step)
            steps = max(0, mine[0].step + 1 - self.begun)
            self.start_up = max(0.0, mine[0].wall_time - self.job.started - self.pace * steps)

    def beside_steps(self) -> float | None:
        """Seconds since the start that no step has taken, of a run that has ended; None without a pace."""
        if self.pace is None:
            return None
        return max(0.0, time.time() - self.job.started - self.pace * (self.step - self.begun))

    def left(self, pace: float, beside: float) -> float:
        """Seconds left.

        Args:
            pace: Seconds per step where the run has none yet.
            beside: Seconds that runs take beside their steps.
        """
        known = self.start_up if self.pace is not None else time.time() - self.job.started
        return (self.pace or pace) * max(0, self.job.run.steps - self.step) + max(0.0, beside - known)

    def line(self) -> str:
        """One line about the run."""
        run = self.job.run
        words = [f"{run.variant:<20} seed {run.seed:<3} step {self.step} of {run.steps}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if self.pace is not None:
            words.append(f"{duration(self.left(0.0, 0.0))} left")
        if self.job.process is None:
            words.append("(a process that was left behind)")
        return ", ".join(words)


class Progress:
    """Watches a study's runs. As a context it leaves a terminal as it was.

    Args:
        plan: All runs.
        jobs: How many train at once.
        stream: Where to print.
    """

    def __init__(self, plan: Plan, jobs: int, stream: TextIO) -> None:
        self.plan = plan
        self.jobs = jobs
        self._console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
        self._live: Live | None = None
        self._watched: dict[str, _Watched] = {}
        self._paces: dict[str, list[float]] = {}
        self._beside: list[float] = []
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._erase()

    def started(self, job: Job) -> None:
        """Report a start."""
        self._watched[job.run.name] = _Watched(job)
        self._console.print(f"{job.run.name}: started, log in {job.run.folder / 'log.txt'}")

    def ended(self, run: Run, failure: str | None) -> None:
        """Report an end."""
        watched = self._watched.pop(run.name)
        watched.look()
        beside = watched.beside_steps()
        if watched.pace is not None and beside is not None:
            self._paces.setdefault(run.variant, []).append(watched.pace)
            self._beside.append(beside)
        if not self._watched:
            self._erase()
        marker = finished(run)
        if failure is not None or marker is None:
            self._console.print(f"FAILED: {failure}")
        else:
            self._console.print(f"{run.name}: finished, validation loss {marker['metrics']['val/loss']:.4f}")

    def look(self, running: Sequence[Job], waiting: Sequence[Run]) -> None:
        """Show where things stand, if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        watched = [self._watched[job.run.name] for job in running]
        for one in watched:
            one.look()
        total = self.total(watched, waiting)
        if self._console.is_terminal:
            self._redraw([*(one.line() for one in watched), total])
            return
        for one in watched:
            part = one.step * PARTS // one.job.run.steps
            if part > one.said and time.monotonic() - one.spoke >= PAUSE:
                one.said, one.spoke = part, time.monotonic()
                self._console.print(f"{one.line()}; {total}")

    def total(self, watched: Sequence[_Watched], waiting: Sequence[Run]) -> str:
        """Runs that are done, and an estimate of the time left: by the pace of each variant, or of all where it has
        none yet, and the time that runs take beside their steps, to start and to end.
        """
        known = {name: list(paces) for name, paces in self._paces.items()}
        for one in watched:
            if one.pace is not None:
                known.setdefault(one.job.run.variant, []).append(one.pace)
        done = sum(finished(run) is not None for run in self.plan.runs)
        text = f"study {self.plan.study.name}: {done} of {len(self.plan.runs)} runs finished"
        if not known:
            return text
        other = fmean(pace for paces in known.values() for pace in paces)
        beside = fmean(self._beside or [one.start_up for one in watched if one.pace is not None])
        seconds = sum(one.left(fmean(known.get(one.job.run.variant, [other])), beside) for one in watched)
        for run in waiting:
            seconds += (run.steps - steps_done(run)) * fmean(known.get(run.variant, [other])) + beside
        return f"{text}, about {duration(seconds / max(1, min(self.jobs, len(watched) + len(waiting))))} left"

    def _erase(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _redraw(self, lines: Sequence[str]) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)), refresh=True)
