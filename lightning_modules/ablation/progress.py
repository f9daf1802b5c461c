"""Progress of a study: a line per run and one for all, redrawn on a terminal, now and then in a file."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from statistics import fmean
from typing import TextIO

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.ablation.curves import TRAIN_LOSS
from lightning_modules.ablation.plan import Plan, Run
from lightning_modules.ablation.running import Job, finished
from lightning_modules.text import duration

INTERVAL = 2.0  # seconds between looks at event files
PARTS = 10  # lines per run in a file, at most
PAUSE = 10.0  # seconds between two of them, at least


class _Watched:
    """Where a running job stands, by its event files, which are read on from where the last look ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = 0
        self.loss: float | None = None
        self.pace: float | None = None  # seconds per step
        self.said = 0  # parts
        self.spoke = time.monotonic()
        self._reader: EventAccumulator | None = None

    def look(self) -> None:
        """Read what is new."""
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

    def left(self) -> float | None:
        """Seconds to go."""
        return None if self.pace is None else self.pace * max(0, self.job.run.steps - self.step)

    def line(self) -> str:
        """What is known of it."""
        run, left = self.job.run, self.left()
        words = [f"{run.variant:<20} seed {run.seed:<3} step {self.step} of {run.steps}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if left is not None:
            words.append(f"{duration(left)} left")
        if self.job.process is None:
            words.append("(a process that was left behind)")
        return ", ".join(words)


class Progress:
    """Watches a study's runs.

    Args:
        plan: All runs.
        jobs: How many train at once.
        stream: Where to print.
    """

    def __init__(self, plan: Plan, jobs: int, stream: TextIO) -> None:
        self.plan = plan
        self.jobs = jobs
        self.stream = stream
        self.live = stream.isatty()
        self._watched: dict[str, _Watched] = {}
        self._paces: dict[str, list[float]] = {}
        self._drawn = 0
        self._next = 0.0

    def started(self, job: Job) -> None:
        """Say so."""
        self._watched[job.run.name] = _Watched(job)
        self._say(f"{job.run.name}: started, log in {job.run.folder / 'log.txt'}")

    def ended(self, run: Run, failure: str | None) -> None:
        """Say how."""
        watched = self._watched.pop(run.name)
        watched.look()
        if watched.pace is not None:
            self._paces.setdefault(run.variant, []).append(watched.pace)
        marker = finished(run)
        if failure is not None or marker is None:
            self._say(f"FAILED: {failure}")
        else:
            self._say(f"{run.name}: finished, validation loss {marker['metrics']['val/loss']:.4f}")

    def look(self, running: Sequence[Job], waiting: Sequence[Run]) -> None:
        """Show where things stand, if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        for job in list(running):
            self._watched[job.run.name].look()
        watched = [self._watched[job.run.name] for job in running]
        total = self.total(watched, waiting)
        if self.live:
            self._redraw([*(one.line() for one in watched), total])
            return
        for one in watched:
            part = one.step * PARTS // one.job.run.steps
            if part > one.said and time.monotonic() - one.spoke >= PAUSE:
                one.said, one.spoke = part, time.monotonic()
                self._say(f"{one.line()}; {total}")

    def total(self, watched: Sequence[_Watched], waiting: Sequence[Run]) -> str:
        """How much of the study is done, and how long the rest takes if it goes on like this."""
        known = {name: list(paces) for name, paces in self._paces.items()}
        for one in watched:
            if one.pace is not None:
                known.setdefault(one.job.run.variant, []).append(one.pace)
        done = sum(finished(run) is not None for run in self.plan.runs)
        text = f"study {self.plan.study.name}: {done} of {len(self.plan.runs)} runs finished"
        if not known:
            return text
        other = fmean(pace for paces in known.values() for pace in paces)
        seconds = 0.0
        for one in watched:
            left = one.left()
            seconds += (one.job.run.steps - one.step) * other if left is None else left
        for run in waiting:
            seconds += run.steps * fmean(known.get(run.variant, [other]))
        return f"{text}, about {duration(seconds / max(1, min(self.jobs, len(watched) + len(waiting))))} left"

    def _say(self, line: str) -> None:
        self._erase()
        print(line, file=self.stream, flush=True)

    def _erase(self) -> None:
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _redraw(self, lines: list[str]) -> None:
        self._erase()
        columns = shutil.get_terminal_size().columns
        for line in lines:
            print(line[: columns - 1], file=self.stream)  # one that wraps would be two to erase
        self.stream.flush()
        self._drawn = len(lines)
