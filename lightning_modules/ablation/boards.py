"""TensorBoard pages of a study beside the curves of its runs: the HParams tab, and charts that overlay variants.

Both are separate event files, distinguished by their suffix, so that writing them again replaces them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lightning_modules.ablation.curves import LOSS, MEMORY, RATE, TRAIN_LOSS, Record

SUFFIX = ".study"


def _writer(directory: Path) -> SummaryWriter:
    """Writer whose file replaces an earlier one."""
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    return SummaryWriter(str(directory), filename_suffix=SUFFIX)


def _plain(value: Any) -> bool | str | float | int:
    """Value of a type that the HParams tab accepts."""
    return value if isinstance(value, bool | str | float | int) else json.dumps(value)


def write_hparams(record: Record, switches: Sequence[str]) -> None:
    """Write a run's line of the HParams tab into its directory.

    Args:
        record: The run.
        switches: Dotted names of the options to show.
    """
    shown = {"variant": record.variant} | {name: _plain(record.settings.get(name)) for name in switches}
    if record.seed is not None:
        shown["seed"] = record.seed
    metrics = {
        "final/val_loss": record.loss,
        "final/tokens_per_sec": record.rate,
        "final/peak_memory_mb": record.memory,
    }
    if record.cost is not None:
        metrics |= {
            "final/parameters": float(record.cost.parameters),
            "final/active_parameters": float(record.cost.active),
            "final/training_flops_per_token": record.cost.flops,
        }
    known = {name: value for name, value in metrics.items() if value is not None}
    writer = _writer(record.directory)
    events = writer._get_file_writer()  # add_hparams would make a separate directory for them
    for summary in hparams(shown, known):
        events.add_summary(summary)
    for name, value in known.items():
        writer.add_scalar(name, value, record.steps - 1)
    writer.close()


def write_layout(output: Path, study: str) -> None:
    """Write charts that show a tag of all chosen runs at once (the tab Custom Scalars) into ``output/layout``."""
    charts = {
        "validation loss": ["Multiline", [f"^{LOSS}$"]],
        "training loss": ["Multiline", [f"^{TRAIN_LOSS}$"]],
        "tokens per second": ["Multiline", [f"^{RATE}$"]],
        "peak memory, MB": ["Multiline", [f"^{MEMORY}$"]],
    }
    folder = output / "layout"
    folder.mkdir(parents=True, exist_ok=True)
    writer = _writer(folder)
    writer.add_custom_scalars({study: charts})
    writer.close()
