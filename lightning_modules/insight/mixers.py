"""Mixing matrices of the residual streams: their gain over depth, and how doubly stochastic they are (mHC,
arXiv:2512.24880)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from dsv41.hyper_connections import HyperConnection
from dsv41.model import DeepseekV41Block, DeepseekV41ForCausalLM
from dsv41.ops.mixing import sinkhorn
from lightning_modules.insight.drawing import Array, boards, colour_bar, heat_map, new_axes, show
from lightning_modules.insight.hooks import Taps, ValidationObserver, log, log_details, over_ranks, watch
from lightning_modules.text import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORWARD, _BACKWARD = range(2)


def mixing_sites(model: nn.Module) -> list[tuple[str, HyperConnection]]:
    """Sites of a model that mix streams, in their order: ``layer_N_attention``, ``layer_N_experts``."""
    return [
        (f"layer_{block.attn.layer_idx}_{kind}", site)
        for block in model.modules()
        if isinstance(block, DeepseekV41Block)
        for kind, site in (("attention", block.attn_hc), ("experts", block.ffn_hc))
        if isinstance(site, HyperConnection)
    ]


def composite_gains(product: Tensor) -> Tensor:
    """Worst-case amplification by a product of mixers ``comb_1 @ comb_2 @ ...``, [T, C_in, C_out].

    Streams are multiplied by its transpose, gradients by itself. The gain of either is the maximum absolute row sum of
    what it is multiplied by: no signal whose largest stream is 1 leaves with a larger one, and one does reach it.

    Returns:
        [T, 2]: forward (a maximum over C_out of sums over C_in), backward (over C_in, of sums over C_out).
    """
    size = product.abs()
    return torch.stack((size.sum(-2).amax(-1), size.sum(-1).amax(-1)), dim=-1)


def sinkhorn_residual(comb: Tensor) -> Tensor:
    """Largest deviation from 1 of a row's or column's sum in matrices [..., C_in, C_out]: 0 is doubly stochastic."""
    return torch.maximum((comb.sum(-1) - 1).abs().amax(), (comb.sum(-2) - 1).abs().amax())


class Mixers(NamedTuple):
    """The mixing matrices of a batch.

    Attributes:
        sites: ``layer_N_attention``, ``layer_N_experts``, in the order of the model.
        combs: Of the live tokens, float64 [sites, T, C_in, C_out].
    """

    sites: list[str]
    combs: Tensor


def mixers_of(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor]) -> Mixers:
    """Mixing matrices of all sites for the tokens of a batch.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, int64 [B, S].

    Raises:
        ValueError: The model has one ordinary stream, and nothing to mix.
    """
    sites = mixing_sites(model)
    if not sites:
        raise ValueError("model.config.residual: must be 'mhc' or 'hyper_connections' for streams to mix, got 'plain'")
    combs: list[Tensor] = []

    def listen(taps: Taps) -> None:
        for _, site in sites:
            taps.after(site, lambda _, made: combs.append(made[3]))

    watch(model, batch, listen)
    live = batch["attention_mask"].bool()
    return Mixers([name for name, _ in sites], torch.stack([comb[live].double().cpu() for comb in combs]))


def matrix_table(comb: Tensor) -> str:
    """Markdown: a mixing matrix [C_in, C_out] in numbers, with the sums of its rows and columns."""
    streams = range(comb.shape[1])
    rows = [
        (f"stream {stream}", *(f"{value:.5f}" for value in row), f"**{sum(row):.5f}**")
        for stream, row in enumerate(comb.tolist())
    ]
    sums = ("sum", *(f"**{value:.5f}**" for value in comb.sum(0).tolist()), "")
    return markdown_table(("from, to", *(f"stream {stream}" for stream in streams), "sum"), [*rows, sums])


def sinkhorn_residuals(
    iterations: Sequence[int],
    spreads: Sequence[float],
    streams: int = 4,
    matrices: int = 1000,
    eps: float = 1e-6,
    seed: int = 0,
) -> Tensor:
    """`sinkhorn_residual` of Sinkhorn's result for random logits.

    Args:
        iterations: Numbers of rounds to try.
        spreads: Standard deviations of the logits to try.
        streams: Rows and columns of a matrix.
        matrices: That are drawn for each spread.
        eps: See `sinkhorn`.
        seed: Of the draws.

    Returns:
        float64 [spreads, iterations], the largest over the matrices.

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


def gains_over_depth(combs: Tensor) -> Tensor:
    """`composite_gains` of the product of all mixers up to each site.

    Args:
        combs: As `Mixers.combs`, [sites, T, C_in, C_out].

    Returns:
        [sites, T, 2]: forward, backward.
    """
    return torch.stack([composite_gains(product) for product in accumulate(combs, torch.matmul)])


def stream_norms(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor]) -> Tensor:
    """Root mean square of each stream before the first block and after each block, means over live tokens.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, int64 [B, S].

    Returns:
        float64 [layers + 1, C].
    """
    with torch.no_grad():
        out = model(
            batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=1, output_hidden_states=True
        )
    live = batch["attention_mask"].bool()
    return torch.stack([streams[live].double().square().mean(-1).sqrt().mean(0).cpu() for streams in out.hidden_states])


def comb_picture(combs: Array, title: str = "mixing of streams, mean over tokens") -> Figure:
    """Mean mixing matrices [2 * layers, C_in, C_out]: above those of attention, below those of experts."""
    layers, streams = len(combs) // 2, combs.shape[-1]
    # One image: a panel for each would take four times as long to draw.
    tiled = np.full((2, streams + 1, layers, streams + 1), np.nan)
    tiled[:, :streams, :, :streams] = combs.reshape(layers, 2, streams, streams).transpose(1, 2, 0, 3)
    tiled = tiled.reshape(2 * (streams + 1), layers * (streams + 1))[:-1, :-1]
    width = min(15.0, 1.2 + 0.14 * tiled.shape[1])
    figure, axes = new_axes(width, 0.14 * tiled.shape[0], title, left=0.9, bottom=0.6)
    # Doubly stochastic matrices lie in 0 to 1; others show how far they leave that.
    image = heat_map(axes, tiled, [], [], min(0.0, float(combs.min())), max(1.0, float(combs.max())))
    middle = (streams - 1) / 2
    axes.set_yticks([middle, middle + streams + 1], ["attention", "experts"], fontsize=8)
    names = [str(layer) for layer in range(layers)]
    axes.set_xticks([middle + layer * (streams + 1) for layer in range(layers)], names, fontsize=8)
    axes.set_xlabel("layer; inside a block, from stream (down) to stream (across)", fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    colour_bar(figure, axes, image, "weight")
    return figure


def gain_picture(means: Array, worst: Array, sites: list[str]) -> Figure:
    """Composite gains over depth, both [sites, 2]: mean and maximum over tokens."""
    size = min(15.0, 2 + 0.3 * len(sites)), 3.0
    figure, axes = new_axes(*size, "composite gain of the mixers up to each site", bottom=1.3)
    for way, name, colour in ((_FORWARD, "forward", "tab:blue"), (_BACKWARD, "backward", "tab:orange")):
        axes.plot(means[:, way], color=colour, marker="o", markersize=3, label=f"{name}, mean over tokens")
        axes.plot(worst[:, way], color=colour, linestyle="--", label=f"{name}, largest")
    if worst.max() > 10:
        axes.set_yscale("log")
    axes.set_xticks(range(len(sites)), [site.replace("_", " ") for site in sites], rotation=90, fontsize=7)
    axes.set_ylabel("maximum absolute row sum")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return figure


class StreamMixers(ValidationObserver):
    """Logs how stable the mixing of residual streams is, over the tokens of the first validation batches.

    The mixers of all sites multiplied, token by token, give `composite_gains`: ``within/forward_gain`` and
    ``within/backward_gain`` are means over tokens, ``..._worst`` the largest of a token. 1 is neither growth nor decay,
    and what doubly stochastic mixers have. ``within/sinkhorn_residual`` is `sinkhorn_residual` over all sites and
    tokens, and ``within/sinkhorn_residual/layer_N_attention`` (or ``_experts``) that of a site. The pictures are
    ``within/mixers/comb``, the mean matrices, and ``within/mixers/gain``, the gains up to each site. A plain residual
    has no mixers, and nothing is logged.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Each costs a product of C x C matrices per
            site and token, in float64.
        pictures: Draw.
    """

    def __init__(self, batches: int = 2, pictures: bool = True) -> None:
        super().__init__(batches)
        self.pictures = pictures
        self._sites: list[str] = []

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the matrices of every site."""
        sites = mixing_sites(pl_module)
        self._sites = [name for name, _ in sites]
        for index, (_, site) in enumerate(sites):
            self.after(site, partial(self._add, index))
        streams = sites[0][1].streams if sites else 0
        shape: dict[str, Any] = {"dtype": torch.float64, "device": pl_module.device}
        self._product = torch.empty(0)
        self._tokens = torch.zeros((), **shape)
        self._combs = torch.zeros(len(self._sites), streams, streams, **shape)
        self._gains = torch.zeros(len(self._sites), 2, **shape)
        self._worst = torch.zeros(len(self._sites), 2, **shape)
        self._residual = torch.zeros(len(self._sites), **shape)

    def _add(self, index: int, _: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        comb = result[3][self.batch["attention_mask"].bool()].double()
        self._product = comb if index == 0 else self._product @ comb
        if len(comb) == 0:  # a rank that has padding alone
            return
        gains = composite_gains(self._product)
        self._combs[index] += comb.sum(0)
        self._gains[index] += gains.sum(0)
        self._worst[index] = torch.maximum(self._worst[index], gains.amax(0))
        self._residual[index] = torch.maximum(self._residual[index], sinkhorn_residual(comb))
        if index == 0:
            self._tokens += len(comb)

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks."""
        if not self._sites:
            return
        tokens = over_ranks(trainer, self._tokens)
        if tokens == 0:
            return
        means = over_ranks(trainer, self._gains) / tokens
        combs = over_ranks(trainer, self._combs) / tokens
        worst = over_ranks(trainer, self._worst, "max")
        residual = over_ranks(trainer, self._residual, "max")
        for way, name in ((_FORWARD, "forward"), (_BACKWARD, "backward")):
            log(pl_module, f"{name}_gain", means[-1, way])
            log(pl_module, f"{name}_gain_worst", worst[-1, way])
        log(pl_module, "sinkhorn_residual", residual.max())
        log_details(
            trainer, {f"sinkhorn_residual/{site}": value for site, value in zip(self._sites, residual, strict=True)}
        )
        if self.pictures and boards(trainer):
            show(trainer, "mixers/comb", comb_picture(combs.cpu().numpy()))
            show(trainer, "mixers/gain", gain_picture(means.cpu().numpy(), worst.cpu().numpy(), self._sites))
