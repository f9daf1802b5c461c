"""TensorBoard pages of a study beside the curves of its runs: the HParams tab, and charts that overlay variants.

Both are separate event files, distinguished by their suffix, so that writing them again replaces them; a run's line of
HParams takes the place of the one that the run itself has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_modules.ablation.curves import LOSS, MEMORY, RATE, TRAIN_LOSS, Record
from lightning_modules.callbacks.boards import add_charts, add_hparams, page_writer


def write_hparams(record: Record, switches: Sequence[str]) -> None:
    """Write a run's line of the HParams tab into its directory.

    Args:
        record: The run.
        switches: Dotted names of the options to show.
    """
    shown = {"variant": record.variant} | {name: record.settings.get(name) for name in switches}
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
    writer = page_writer(record.directory)
    add_hparams(writer, shown, list(known))
    for name, value in known.items():
        writer.add_scalar(name, value, record.steps - 1)
    writer.close()


def write_layout(output: Path, study: str) -> None:
    """Write charts that show a tag of all chosen runs at once (the tab Custom Scalars) into ``output/layout``."""
    charts = {
        "validation loss": [f"^{LOSS}$"],
        "training loss": [f"^{TRAIN_LOSS}$"],
        "tokens per second": [f"^{RATE}$"],
        "peak memory, MB": [f"^{MEMORY}$"],
    }
    folder = output / "layout"
    folder.mkdir(parents=True, exist_ok=True)
    writer = page_writer(folder)
    add_charts(writer, study, charts)
    writer.close()
