"""Results of a study as a table: JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsv41.files import written_whole
from lightning_modules.ablation.cost import Cost
from lightning_modules.ablation.curves import Record
from lightning_modules.ablation.intervals import Interval, interval, paired
from lightning_modules.text import readable_count

WIDTH = 100  # columns of a terminal
NAME_WIDTH = 28


@dataclass(frozen=True)
class Row:
    """Result of a variant over its seeds.

    Attributes:
        variant: Name.
        seeds: Of its runs; those that do not say are left out.
        steps: Steps after which the loss was measured, of each run.
        loss: Validation loss in nats per token.
        difference: To the base, paired by seed; None for the base itself and without a common seed.
        rate: Median tokens per second, the median over runs.
        memory: Peak in MB, the largest over runs.
        cost: Parameters and operations.
    """

    variant: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    loss: Interval
    difference: Interval | None
    rate: float | None
    memory: float | None
    cost: Cost | None


def group(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by variant, in the order in which variants appear first.

    Raises:
        ValueError: Two runs of a variant have the same seed.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        others = groups.setdefault(record.variant, [])
        twin = next((other for other in others if other.seed == record.seed), None)
        if twin is not None:
            what = "no known seed" if record.seed is None else f"seed {record.seed}"
            raise ValueError(
                f"two runs of {record.variant} have {what}: {twin.directory} and {record.directory}; leave one out, or "
                f"give it a name of its own: NAME={record.directory}"
            )
        others.append(record)
    return groups


def summarise(records: Sequence[Record], base: str) -> list[Row]:
    """One row per variant.

    Args:
        records: At least one run of each variant.
        base: Name of the variant that differences are to; without runs of it there are none.

    Raises:
        ValueError: As `group`.
    """
    groups = group(records)
    by_seed = {
        name: {record.seed: record.loss for record in runs if record.seed is not None} for name, runs in groups.items()
    }
    rows = []
    for name, runs in groups.items():
        rates = [record.rate for record in runs if record.rate is not None]
        peaks = [record.memory for record in runs if record.memory is not None]
        rows.append(
            Row(
                variant=name,
                seeds=tuple(by_seed[name]),
                steps=tuple(record.steps for record in runs),
                loss=interval([record.loss for record in runs]),
                difference=None if name == base else paired(by_seed[name], by_seed.get(base, {})),
                rate=median(rates) if rates else None,
                memory=max(peaks) if peaks else None,
                cost=runs[0].cost,
            )
        )
    return rows


def _shown(difference: Interval | None) -> str:
    if difference is None:
        return ""
    mean = f"{difference.mean:+.4f}"
    if difference.half is None:
        return f"{mean} (one seed: no interval)"
    return f"{mean} [{difference.mean - difference.half:+.4f}, {difference.mean + difference.half:+.4f}]"


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of equal width also in its source, for terminals.

    Names in the first column are wrapped: what is left of one follows in a row without other cells.
    """
    lines = [list(titles)]
    for name, *cells in rows:
        first, *rest = [name[begin : begin + NAME_WIDTH] for begin in range(0, len(name), NAME_WIDTH)]
        lines += [[first, *cells], *([part, *([""] * len(cells))] for part in rest)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [" | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {line} |" for line in shown[1:])]) + "\n"


def _count(count: int) -> str:
    """All digits of what fits; a prefix for more."""
    return f"{count:,}" if count < 100_000_000 else readable_count(count)


def markdown(rows: Sequence[Row], base: str, notes: Sequence[str] = ()) -> str:
    """Two tables, of losses and of costs, and notes: Markdown that a terminal of 100 columns shows as it is.

    Args:
        rows: Of `summarise`.
        base: Variant that differences are to.
        notes: Sentences.
    """
    losses = [(row.variant, str(row.loss.count), f"{row.loss.mean:.4f}", _shown(row.difference)) for row in rows]
    costs = [
        (
            row.variant,
            "" if row.rate is None else f"{row.rate:,.0f}",
            "" if row.memory is None else f"{row.memory:,.0f} MB",
            "" if row.cost is None else _count(row.cost.parameters),
            "" if row.cost is None else _count(row.cost.active),
            "" if row.cost is None else readable_count(row.cost.flops),
        )
        for row in rows
    ]
    titles = ("variant", "seeds", "val loss", "difference [95% interval]")
    text = _aligned(titles, losses) + "\n"
    text += _aligned(("variant", "tokens/s", "memory", "parameters", "per token", "FLOPs/token"), costs)
    written = [f"Differences are to {base}.", *notes] if any(row.difference for row in rows) else list(notes)
    if written:
        text += "\n" + "".join(
            textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"
            for note in written
        )
    return text


def notes_on(rows: Sequence[Row], base: str) -> list[str]:
    """Notes below the table: definition of the interval, and limits of the comparison."""
    notes = [
        "Validation loss: nats per token after the last step, mean over seeds. Difference: paired by seed; interval: "
        "Student's t. Parameters per token: read in a forward pass. FLOPs: of training."
    ]
    lonely = [row.variant for row in rows if row.loss.count == 1]
    if lonely:
        notes.append(f"One seed says nothing about how far a result may be off: {', '.join(lonely)}.")
    missing = [row.variant for row in rows if row.variant != base and row.difference is None]
    if missing:
        notes.append(f"No seed in common with {base}, so no difference: {', '.join(missing)}.")
    if len({step for row in rows for step in row.steps}) > 1:
        found = ", ".join(f"{row.variant} {'/'.join(str(step) for step in sorted(set(row.steps)))}" for row in rows)
        notes.append(f"WARNING: the runs have not taken the same number of steps: {found}.")
    return notes


def _plain(row: Row) -> dict[str, Any]:
    """Row as plain values for files."""
    return {
        "variant": row.variant,
        "seeds": list(row.seeds),
        "runs": row.loss.count,
        "steps": max(row.steps),
        "val_loss": row.loss.mean,
        "val_loss_half_interval": row.loss.half,
        "difference": None if row.difference is None else row.difference.mean,
        "difference_half_interval": None if row.difference is None else row.difference.half,
        "difference_pairs": 0 if row.difference is None else row.difference.count,
        "tokens_per_second": row.rate,
        "peak_memory_mb": row.memory,
        "parameters": None if row.cost is None else row.cost.parameters,
        "active_parameters": None if row.cost is None else row.cost.active,
        "training_flops_per_token": None if row.cost is None else row.cost.flops,
    }


def _run(record: Record) -> dict[str, Any]:
    return {
        "variant": record.variant,
        "seed": record.seed,
        "directory": str(record.directory),
        "val_loss": record.loss,
        "tokens_per_second": record.rate,
        "peak_memory_mb": record.memory,
        "cost": None if record.cost is None else asdict(record.cost),
        "curve": {str(step): loss for step, loss in record.curve.items()},
    }


def write_results(
    output: Path, rows: Sequence[Row], records: Sequence[Record], table: str, about: dict[str, Any]
) -> list[Path]:
    """Write results.json, results.csv and results.md, each whole.

    Args:
        output: Folder.
        rows: Of `summarise`.
        records: Behind them.
        table: Of `markdown`.
        about: More plain values for the JSON.

    Returns:
        The files.
    """
    plain = [_plain(row) for row in rows]
    files = [output / f"results.{kind}" for kind in ("json", "csv", "md")]
    with written_whole(files[0]) as partial:
        partial.write_text(json.dumps(about | {"variants": plain, "runs": [_run(r) for r in records]}, indent=1))
    with written_whole(files[1]) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(plain[0]))
        writer.writeheader()
        writer.writerows(row | {"seeds": " ".join(map(str, row["seeds"]))} for row in plain)
    with written_whole(files[2]) as partial:
        partial.write_text(table)
    return files
