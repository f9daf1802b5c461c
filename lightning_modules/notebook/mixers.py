"""How residual streams are mixed, what that does to them over depth, and how runs with and without it train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv41.ops.mixing import sinkhorn
from lightning_modules.ablation.curves import Record, read_run
from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight.drawing import new_axes
from lightning_modules.insight.mixers import composite_gains, mixing_sites, sinkhorn_residual
from lightning_modules.notebook.taps import watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("forward", "backward")  # as `composite_gains` has them
MARKERS = "os^Dv"  # hollow, so that points of several runs can be told apart where they lie on each other


class Mixers(NamedTuple):
    """The mixing matrices of a batch.

    Attributes:
        sites: ``layer_N_attention``, ``layer_N_experts``, in the order of the model.
        combs: Of the live tokens, float64 [sites, T, C_in, C_out].
    """

    sites: list[str]
    combs: Tensor


def mixers_of(cli: DeepseekV41CLI, batch: Mapping[str, Tensor]) -> Mixers:
    """The matrices that the sites of a model mix the streams of a batch with.

    Args:
        cli: With a model.
        batch: As of `validation_batch`.

    Raises:
        ValueError: The model has one ordinary stream, and nothing to mix.
    """
    sites = mixing_sites(cli.model)
    if not sites:
        raise ValueError("model.config.residual: must be 'mhc' or 'hyper_connections' for streams to mix, got 'plain'")
    combs: list[Tensor] = []
    watch(cli.model.built, batch, [(site, lambda _, made: combs.append(made[3])) for _, site in sites])
    live = batch["attention_mask"].bool()
    return Mixers([name for name, _ in sites], torch.stack([comb[live].double().cpu() for comb in combs]))


def matrix_table(comb: Tensor) -> str:
    """Markdown: a mixing matrix [C_in, C_out] in numbers, with the sums of its rows and columns."""
    streams = range(comb.shape[1])
    lines = [
        f"| from, to | {' | '.join(f'stream {stream}' for stream in streams)} | sum |",
        "|---|" + "---:|" * (len(streams) + 1),
    ]
    for stream, row in enumerate(comb.tolist()):
        lines.append(f"| stream {stream} | {' | '.join(f'{value:.5f}' for value in row)} | **{sum(row):.5f}** |")
    lines.append(f"| sum | {' | '.join(f'**{value:.5f}**' for value in comb.sum(0).tolist())} | |")
    return "\n".join(lines) + "\n"


def sinkhorn_residuals(
    iterations: Sequence[int],
    spreads: Sequence[float],
    streams: int = 4,
    matrices: int = 1000,
    eps: float = 1e-6,
    seed: int = 0,
) -> Tensor:
    """How far Sinkhorn's result is from doubly stochastic, for random logits.

    Args:
        iterations: Numbers of rounds to try.
        spreads: Standard deviations of the logits to try.
        streams: Rows and columns of a matrix.
        matrices: That are drawn for each spread.
        eps: See `sinkhorn`.
        seed: Of the draws.

    Returns:
        float64 [spreads, iterations]: the largest deviation of a sum of a row or column from 1, of all matrices.

    Raises:
        ValueError: A number of iterations is not positive.
    """
    if min(iterations) < 1:
        raise ValueError(f"iterations: must be at least 1, got {min(iterations)}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(matrices, streams, streams, generator=generator, dtype=torch.float64)
    return torch.stack(
        [
            torch.stack([sinkhorn_residual(sinkhorn(spread * drawn, rounds, eps)) for rounds in iterations])
            for spread in spreads
        ]
    )


def residual_picture(residuals: Tensor, iterations: Sequence[int], spreads: Sequence[float]) -> Figure:
    """`sinkhorn_residuals` over iterations, a line per spread of the logits."""
    figure, axes = new_axes(5.0, 3.0, "Sinkhorn: how far from doubly stochastic", bottom=0.6)
    for line, spread in zip(residuals.tolist(), spreads, strict=True):
        axes.plot(iterations, line, marker="o", markersize=4, label=f"logits N(0, {spread:g}²)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(iterations, [str(rounds) for rounds in iterations])
    axes.minorticks_off()
    axes.set_xlabel("iterations")
    axes.set_ylabel("largest |sum - 1|")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def gains_over_depth(mixers: Mixers) -> Tensor:
    """`composite_gains` of the product of all mixers up to each site, float64 [sites, T, 2]."""
    return torch.stack([composite_gains(product) for product in accumulate(mixers.combs, torch.matmul)])


def gains_picture(models: Mapping[str, Mixers]) -> Figure:
    """`gains_over_depth` of models by name: forward left, backward right, on the same scale.

    Raises:
        ValueError: The models do not have the same sites.
    """
    from matplotlib.figure import Figure

    sites, *others = (mixers.sites for mixers in models.values())
    if any(other != sites for other in others):
        raise ValueError(f"models: must have the same sites, got {[mixers.sites for mixers in models.values()]}")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle("composite gain of the mixers up to each site", fontsize=10)
    panels = figure.subplots(1, 2, sharey=True)
    for number, (name, mixers) in enumerate(models.items()):
        gains = gains_over_depth(mixers)
        for axes, mean, worst in zip(panels, gains.mean(1).t().tolist(), gains.amax(1).t().tolist(), strict=True):
            axes.plot(mean, color=f"C{number}", marker="o", markersize=3, label=f"{name}, mean over tokens")
            axes.plot(worst, color=f"C{number}", linestyle="--", label=f"{name}, largest")
    for axes, way in zip(panels, WAYS, strict=True):
        axes.set_title(way, fontsize=10)
        axes.set_xticks(range(len(sites)), [site.replace("_", " ") for site in sites], rotation=90, fontsize=7)
        axes.grid(alpha=0.3)
    if max(panels[0].get_ylim()) > 10:
        panels[0].set_yscale("log")
    panels[0].set_ylabel("maximum absolute row sum")
    panels[0].legend(fontsize=8)
    return figure


def stream_norms(cli: DeepseekV41CLI, batch: Mapping[str, Tensor]) -> Tensor:
    """Root mean square of each stream before the first block and after each, means over live tokens.

    Args:
        cli: With a model.
        batch: As of `validation_batch`.

    Returns:
        float64 [layers + 1, C].
    """
    with torch.no_grad():
        out = cli.model.built(
            batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=1, output_hidden_states=True
        )
    live = batch["attention_mask"].bool()
    return torch.stack([streams[live].double().square().mean(-1).sqrt().mean(0).cpu() for streams in out.hidden_states])


def norm_picture(models: Mapping[str, Tensor]) -> Figure:
    """`stream_norms` of models by name, a colour for each model and a line for each of its streams."""
    figure, axes = new_axes(6.0, 3.0, "size of the streams, mean over tokens", bottom=0.6)
    for number, (name, norms) in enumerate(models.items()):
        for stream, norm in enumerate(norms.t().tolist()):
            label = f"{name}, {norms.shape[1]} stream{'s' if norms.shape[1] > 1 else ''}" if stream == 0 else None
            axes.plot(norm, color=f"C{number}", marker="o", markersize=3, alpha=0.7, label=label)
    axes.set_xlabel("blocks passed")
    axes.set_ylabel("root mean square")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def run_of(cli: DeepseekV41CLI, name: str, checkpoint: str | None = None) -> Record:
    """The curves of a run, from its event files.

    Args:
        cli: After `train_or_load`.
        name: To call it.
        checkpoint: The run's, if it was not trained by `cli`.

    Raises:
        ValueError: It has no validation loss, or no logger has written any.
    """
    if checkpoint is not None:
        return read_run(Path(checkpoint).absolute().parent.parent, name)
    if cli.trainer.logger is None:
        raise ValueError("trainer.logger: must be a TensorBoardLogger, or there is no file to read curves from")
    assert cli.trainer.log_dir is not None
    return read_run(Path(cli.trainer.log_dir), name)


def curve_picture(runs: Sequence[Record]) -> Figure:
    """Training loss of runs as lines, validation loss as points."""
    figure, axes = new_axes(6.0, 3.4, "loss", bottom=0.6)
    for number, run in enumerate(runs):
        axes.plot(list(run.train_curve), list(run.train_curve.values()), color=f"C{number}", linewidth=1, alpha=0.7)
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(
            list(run.curve),
            list(run.curve.values()),
            color=f"C{number}",
            linestyle="none",
            marker=marker,
            markersize=8,
            fillstyle="none",
            label=run.variant,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token: training (line), validation (point)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
