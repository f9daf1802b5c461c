"""Where the time of the training loop goes: shares of forward, backward, optimizer, and of everything around them.

    python benchmarks/loop_profile.py [--steps 60] [--warm-up 10] [--threads N] [--json FILE] [options of dsv41 fit]

Without ``--config`` among the options it is ``--config configs/tiny.yaml``. The run is an ordinary one, with its
callbacks, logger and progress bar; what it writes goes to a temporary folder. The clock is a profiler of Lightning's
interface, with some boundaries that Lightning lacks: the time between two boundaries belongs to the innermost part that
is open, so that the parts add up to the whole. Shares are of the loop from the first batch after the warm-up to the
last; validation and the writing of checkpoints are counted apart.

Two clocks: wall time, which is what a user waits for, and the CPU time of the main thread, which does not grow with
other work on the machine, but does not see waiting either (for a disk, a data worker). Reading them costs some
microseconds a boundary, below a millisecond a batch. On a GPU the clock waits for the device at each boundary.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from measure import write_json

from lightning_modules import task
from lightning_modules.cli import get_cli

# Parts by the end of the name of Lightning's action, or of the ones added below.
PARTS = {
    ".forward": "forward",
    ".backward": "backward",
    ".optimizer_step": "optimizer",
    ".optimizer_zero_grad": "optimizer",
    ".configure_gradient_clipping": "clipping",
    ".training_step": "rest of the task",
    ".train_dataloader_next": "loading",
    ".batch_to_device": "loading",
    ".check": "finite checks",
    ".log": "logging",
    ".validation": "validation",
    "save_checkpoint": "checkpoints",
}
WORK = ("forward", "backward", "optimizer", "clipping")
AROUND = ("loading", "finite checks", "logging", "progress bar", "callbacks", "rest of the task", "Lightning's loops")
APART = ("validation", "checkpoints")


@cache
def part_of(action: str) -> str:
    """The part that an action belongs to."""
    for end, part in PARTS.items():
        if action.endswith(end) and not action.startswith("[Callback]"):
            return part
    if action.startswith("[Callback]"):
        return "progress bar" if "ProgressBar" in action else "callbacks"
    return "Lightning's loops"


class LoopClock(Profiler):
    """Adds up seconds per part, from the first batch after the warm-up to the end of the last one.

    Attributes:
        batches: Batches so far, the warm-up included.
        loop: Wall and CPU seconds of each part, complete when training has ended.
    """

    def __init__(self, warm_up: int) -> None:
        super().__init__()
        self.warm_up = warm_up
        self.batches = 0
        self.loop: dict[str, tuple[float, float]] = {}
        self._spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._open: list[str] = []
        self._last = (0.0, 0.0)
        self._on_gpu = torch.cuda.is_available()

    def start(self, action_name: str) -> None:
        """Enter an action."""
        self._charge()
        if action_name.endswith(".train_dataloader_next"):
            if self.batches == self.warm_up:
                self._spent.clear()
            self.batches += 1
        # What happens inside a validation is validation, whatever it is.
        inside = self._open[-1] if self._open and self._open[-1] in APART else part_of(action_name)
        self._open.append(inside)

    def stop(self, action_name: str) -> None:
        """Leave it."""
        self._charge()
        self._open.pop()
        if action_name == "run_training_epoch":  # what the run does after its last batch does not count
            self.loop = {part: (wall, cpu) for part, (wall, cpu) in self._spent.items()}

    def _charge(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.thread_time()
        if self._open:
            spent = self._spent[self._open[-1]]
            spent[0] += wall - self._last[0]
            spent[1] += cpu - self._last[1]
        self._last = (wall, cpu)


class MoreBoundaries(Callback):
    """Gives the clock boundaries that Lightning has no action for."""

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wrap them."""
        assert isinstance(pl_module, task.DeepseekV41Task)
        pl_module.built.register_forward_pre_hook(lambda *_: self.clock.start("model.forward"))
        pl_module.built.register_forward_hook(lambda *_: self.clock.stop("model.forward"))
        for name in [name for name in vars(task) if name.startswith("require_finite")]:
            self._wrap(task, name, f"{name}.check")
        connector = trainer._logger_connector
        for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"):
            self._wrap(connector, name, f"{name}.log")
        self._wrap(pl_module, "log", "task.log")
        self._wrap(trainer.fit_loop.epoch_loop.val_loop, "run", "val_loop.validation")

    def _wrap(self, owner: Any, name: str, action: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.profile(action):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Milliseconds per batch and shares of the loop."""
    print(f"\n{'per batch':<20}{'wall':>12}{'share':>9}{'CPU':>12}{'share':>9}")
    for row in rows:
        line = f"{row['part']:<20}"
        for clock in ("wall", "cpu"):
            line += f"{row[f'{clock}_ms']:>9.2f} ms"
            line += f"{row[f'{clock}_share']:>9.2%}" if f"{clock}_share" in row else f"{'apart':>9}"
        print(line)
    for name, parts in (("work", WORK), ("around it", AROUND)):
        shares = [sum(row[key] for row in rows if row["part"] in parts) for key in ("wall_share", "cpu_share")]
        print(f"{name:<20}{'':>12}{shares[0]:>9.2%}{'':>12}{shares[1]:>9.2%}")


def main() -> None:
    """Train for some steps, print the table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps that are measured")
    parser.add_argument("--warm-up", type=int, default=10, help="batches before them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    if not any(word in ("-c", "--config") or word.startswith("--config=") for word in rest):
        rest = ["--config", "configs/tiny.yaml", *rest]
    clock = LoopClock(options.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        limits = ["--trainer.max_steps", str(options.warm_up + options.steps)]
        try:
            cli = get_cli([*rest, *limits, "--trainer.logger.init_args.save_dir", folder], run=False)
        except ValueError as error:
            parser.error(str(error))
        cli.trainer.profiler = clock
        cli.trainer.callbacks.append(MoreBoundaries(clock))
        cli.trainer.fit(cli.model, cli.datamodule)
    if not cli.trainer.is_global_zero:
        return
    batches = clock.batches - options.warm_up
    rows: list[dict[str, Any]] = []
    total = [sum(spent[kind] for part, spent in clock.loop.items() if part not in APART) for kind in (0, 1)]
    for part in (*WORK, *AROUND, *APART):
        wall, cpu = clock.loop.get(part, (0.0, 0.0))
        row = {"part": part, "wall_ms": wall / batches * 1e3, "cpu_ms": cpu / batches * 1e3}
        if part not in APART:
            row |= {"wall_share": wall / total[0], "cpu_share": cpu / total[1]}
        rows.append(row)
    print_table(rows)
    write_json(options.json, vars(options) | {"fit": rest, "batches": batches}, rows)


if __name__ == "__main__":
    main()
