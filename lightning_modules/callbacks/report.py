"""Report at the end of a training: where everything is, how it went, and the commands that come next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from dsv41.files import written_whole
from lightning_modules.checkpoint.callbacks import BestCheckpoint, LatestCheckpoint
from lightning_modules.insight.drawing import boards
from lightning_modules.text import duration, markdown_table

FILE = "report.md"


@dataclass(frozen=True)
class Report:
    """Report of a run.

    Attributes:
        title: One line.
        facts: Names and values.
        commands: What each is for, and the command.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]

    def text(self) -> str:
        """Lines for a terminal."""
        width = max(len(name) for name, _ in self.facts) + 2
        lines = [self.title, *(f"  {name:<{width}}{value}" for name, value in self.facts)]
        if self.commands:
            lines += ["next:", *(f"  {command}   # {purpose}" for purpose, command in self.commands)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Markdown for a file and for TensorBoard's tab Text."""
        facts = [(name, value.replace("|", "\\|")) for name, value in self.facts]
        text = f"# {self.title}\n\n" + markdown_table(("", ""), facts, align="ll")
        if self.commands:
            lines = [f"# {purpose}\n{command}" for purpose, command in self.commands]
            text += "\n```sh\n" + "\n".join(lines) + "\n```\n"
        return text


def run_folder(trainer: L.Trainer) -> Path | None:
    """Directory of the run, above its checkpoints; None without a logger. All ranks have to ask."""
    if not trainer.loggers:
        return None
    folders = [path for one in trainer.checkpoint_callbacks if (path := getattr(one, "dirpath", None))]
    log_dir = trainer.log_dir
    return Path(folders[0]).parent if folders else None if log_dir is None else Path(log_dir)


def newest(trainer: L.Trainer, kind: type[BestCheckpoint] | type[LatestCheckpoint]) -> Path | None:
    """Path of the checkpoint that a callback of this kind has written last; None if there is none on the disk."""
    paths = [one.best_model_path for one in trainer.checkpoint_callbacks if isinstance(one, kind)]
    return next((Path(path) for path in paths if path and Path(path).exists()), None)


def _is_cut_short(trainer: L.Trainer) -> bool:
    """Whether the run has ended before the steps and epochs that it was given."""
    if trainer.max_steps not in (None, -1):
        return trainer.global_step < trainer.max_steps and not _all_epochs(trainer)
    return not _all_epochs(trainer)


def _all_epochs(trainer: L.Trainer) -> bool:
    return trainer.max_epochs not in (None, -1) and trainer.current_epoch >= (trainer.max_epochs or 0)


def next_commands(trainer: L.Trainer) -> list[tuple[str, str]]:
    """Purposes and commands: validate, resume or extend, export, each with the run's own paths.

    Empty where the checkpoint has no saved configuration beside it, which all of them need.
    """
    last = newest(trainer, LatestCheckpoint)
    use = newest(trainer, BestCheckpoint) or last
    if use is None or last is None:
        return []
    run = use.parent.parent
    config = run / "config.yaml"
    if not config.is_file():
        return []
    resume = ["dsv41", "fit", "--config", str(config), "--ckpt_path", "last"]
    purpose = "resume"
    if not _is_cut_short(trainer):
        purpose = "train longer"
        if trainer.max_steps not in (None, -1):
            resume += ["--trainer.max_steps", str(2 * trainer.max_steps)]
        else:
            resume += ["--trainer.max_epochs", str(2 * (trainer.max_epochs or 0))]
    commands = [
        ("validation loss", ["dsv41", "validate", "--ckpt_path", str(use)]),
        (purpose, resume),
        ("weights for others", ["dsv41", "export", "--ckpt_path", str(use), "--output", str(run / "exported")]),
    ]
    return [(purpose, shlex.join(words)) for purpose, words in commands]


def _losses(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if "val/loss" in metrics:
        text = f"{float(metrics['val/loss']):.4f} nats per token"
        if "val/bits_per_byte" in metrics:
            text += f", {float(metrics['val/bits_per_byte']):.4f} bits per byte"
        if "val/unigram_entropy" in metrics:
            text += f"; unigram entropy {float(metrics['val/unigram_entropy']):.4f}"
        facts.append(("validation loss", text))
    if "train/loss" in metrics:
        facts.append(("training loss", f"{float(metrics['train/loss']):.4f} nats per token at the last step"))
    return facts


class RunReport(Callback):
    """Prints the report of a training at its end, and writes it to ``report.md`` in the run's directory and to
    TensorBoard's tab Text. Rank 0 alone; without a logger there is no file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: float | None = None
        self._tokens = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._began = time.monotonic()
        self._tokens = getattr(pl_module, "tokens_seen", 0)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report, if there was a training."""
        folder = run_folder(trainer)  # asked for by all ranks
        if self._began is None or not trainer.is_global_zero:
            return
        seconds, self._began = time.monotonic() - self._began, None
        report = self._report(trainer, pl_module, folder, seconds)
        rank_zero_info(report.text())
        if folder is None or getattr(trainer, "fast_dev_run", False):
            return
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / FILE) as partial:
            partial.write_text(report.markdown(), encoding="utf-8")
        for board in boards(trainer):
            board.add_text("report", report.markdown(), trainer.global_step)

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, folder: Path | None, seconds: float) -> Report:
        steps = f"{trainer.global_step:,} steps"
        short = _is_cut_short(trainer)
        if short and trainer.max_steps not in (None, -1):
            steps += f" of {trainer.max_steps:,}"
        facts = [] if folder is None else [("directory", str(folder))]
        for name, kind in (("last checkpoint", LatestCheckpoint), ("best checkpoint", BestCheckpoint)):
            if path := newest(trainer, kind):
                facts.append((name, str(path)))
        facts.append(("duration", duration(seconds)))
        seen = getattr(pl_module, "tokens_seen", None)
        if seen is not None:
            rate = (seen - self._tokens) / max(seconds, 1e-9)
            facts.append(("tokens", f"{seen:,} predicted, {rate:,.0f} per second with validation and checkpoints"))
        facts += _losses(dict(trainer.callback_metrics))
        left_out: Any = getattr(getattr(trainer, "datamodule", None), "left_out", None)
        if left_out is not None and (summary := left_out.summary()):
            facts.append(("data", summary))
        return Report(f"{'stopped' if short else 'finished'} after {steps}", facts, next_commands(trainer))
