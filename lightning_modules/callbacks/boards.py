"""Pages of TensorBoard beside the curves: a page of main charts, the table HParams, and the configuration as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lightning_modules.callbacks.report import run_folder
from lightning_modules.insight.drawing import boards
from lightning_modules.transfer.run_record import saved_configuration

SUFFIX = ".page"  # of event files that are written again
PAGE = "main"
MAIN_CHARTS = {
    "loss": ["^train/loss$", "^val/loss$"],
    "learning rate": ["^train/lr/.*"],
    "tokens per second": ["^train/tokens_per_sec$"],
    "gradient norm": ["^train/grad_norm$"],
}
# Columns of the table HParams by name; TensorBoard orders them by name, and shows the first five until more are chosen.
# Its metrics are tags of the run's curves, so that the table follows a run while it trains.
OPTIONS = {
    "batch_size": "data.batch_size",
    "engram_layer_ids": "model.config.engram_layer_ids",
    "hidden_size": "model.config.hidden_size",
    "indexer": "model.config.indexer",
    "lr": "model.optimizer.lr",
    "matrices": "model.optimizer.matrices",
    "max_steps": "trainer.max_steps",
    "n_routed_experts": "model.config.n_routed_experts",
    "num_experts_per_tok": "model.config.num_experts_per_tok",
    "num_hidden_layers": "model.config.num_hidden_layers",
    "precision": "trainer.precision",
    "schedule": "model.schedule.name",
    "seed": "seed_everything",
    "sequence_length": "data.sequence_length",
    "source": "data.source",
    "tables": "model.optimizer.tables",
    "warmup_steps": "model.schedule.warmup_steps",
    "weight_decay": "model.optimizer.weight_decay",
}
METRICS = ("val/loss", "val/bits_per_byte", "train/loss", "train/tokens_per_sec", "train/peak_memory_mb")


def page_writer(directory: Path) -> SummaryWriter:
    """A writer whose file takes the place of the one of an earlier time."""
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    return SummaryWriter(str(directory), filename_suffix=SUFFIX)


def _plain(value: Any) -> bool | str | float | int:
    return value if isinstance(value, bool | str | float | int) else json.dumps(value)


def add_charts(writer: SummaryWriter, page: str, charts: Mapping[str, Sequence[str]]) -> None:
    """Write a page of the tab Custom Scalars.

    Args:
        writer: Of any directory; TensorBoard merges the pages of all runs, and shows equal charts once.
        page: Title.
        charts: Regular expressions of tags by title of the chart.
    """
    writer.add_custom_scalars({page: {title: ["Multiline", list(tags)] for title, tags in charts.items()}})


def add_hparams(writer: SummaryWriter, shown: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Write a run's line of the tab HParams: ``writer.add_hparams`` would make a directory for it.

    Args:
        writer: Of the run's directory.
        shown: Values by name; what is no number, truth value or text is shown as JSON.
        metrics: Tags of the run's curves, whose last values are shown.
    """
    plain = {
        name: value if isinstance(value, bool | str | float | int) else json.dumps(value)
        for name, value in shown.items()
    }
    for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
        writer._get_file_writer().add_summary(summary)


def chosen_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `OPTIONS` in a run's configuration, by name; those it lacks are left out."""
    found: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value: Any = config
        for part in option.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found


class RunPages(Callback):
    """Writes the page of main charts, the run's line of HParams and its configuration when a training begins.

    Rank 0 alone, for TensorBoard loggers. HParams and configuration are of the ``config.yaml`` in the run's directory;
    a run without one has the charts only.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write."""
        folder = run_folder(trainer)  # asked for by all ranks
        for board in boards(trainer):
            add_charts(board, PAGE, MAIN_CHARTS)
            config = {} if folder is None else saved_configuration(folder)
            if not config:
                continue
            assert folder is not None
            text = (folder / "config.yaml").read_text(encoding="utf-8")
            board.add_text("configuration", f"```yaml\n{text}\n```", trainer.global_step)
            writer = page_writer(Path(board.log_dir))
            add_hparams(writer, chosen_options(config), METRICS)
            writer.close()
