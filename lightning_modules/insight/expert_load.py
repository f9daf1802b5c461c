"""Load of the experts in validation: how evenly tokens go to them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from torch import Tensor

from dsv41.model import DeepseekV41Block
from dsv41.moe import imbalance
from lightning_modules.insight.drawing import boards, colour_bar, heat_map, new_axes, show
from lightning_modules.insight.hooks import ValidationObserver, log, log_details, over_ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load_entropy(load: Tensor) -> Tensor:
    """Entropy of the experts' shares of `load` [..., E] over ln(E), float64: 1 is even, 0 one expert for all."""
    shares = load.double() / load.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1) / math.log(load.shape[-1])


def load_picture(load: Tensor) -> Figure:
    """Picture of the load of experts [layers, E] as a multiple of its layer's mean; above 3 it looks like 3."""
    relative = (load.double() / load.double().mean(-1, keepdim=True)).cpu().numpy()
    layers, experts = relative.shape
    size = min(15.0, 1.5 + 0.3 * experts), min(15.0, 0.5 + 0.25 * layers)
    figure, axes = new_axes(*size, "load of experts in validation", bottom=0.6)
    names = [str(expert) for expert in range(experts)] if experts <= 64 else []
    image = heat_map(axes, relative, [str(layer) for layer in range(layers)], names, 0.0, 3.0)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    colour_bar(figure, axes, image, "load / mean of the layer", extend="max")
    return figure


class ExpertLoad(ValidationObserver):
    """Logs how evenly the tokens of the first validation batches go to the experts.

    ``within/expert_imbalance/layer_N`` is the busiest expert's load over the mean (1 is even),
    ``within/expert_idlest/layer_N`` the idlest one's, ``within/expert_entropy/layer_N`` is `load_entropy`;
    ``within/expert_imbalance`` and ``within/expert_entropy`` are the means over layers. Text and image tokens count
    together, padding does not. The picture ``within/expert_load`` has the load of every expert.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Loads are results of the model, so looking
            costs an addition.
        pictures: Draw.
    """

    def __init__(self, batches: int = 4, pictures: bool = True) -> None:
        super().__init__(batches)
        self.pictures = pictures
        self._loads: list[Tensor] = []

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the routing report of each layer."""
        self._loads = []
        blocks = [module for module in pl_module.modules() if isinstance(module, DeepseekV41Block)]
        for layer, block in enumerate(blocks):
            count = block.ffn.count
            self._loads.append(torch.zeros(count, dtype=torch.int64, device=pl_module.device))
            self.after(block.ffn, partial(self._add, layer))

    def _add(self, layer: int, _: tuple[Any, ...], result: tuple[Tensor, Any]) -> None:
        self._loads[layer] += result[1].load.sum(0)

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks."""
        if not self._loads:
            return
        load = over_ranks(trainer, torch.stack(self._loads))
        if not load.any():
            return
        worst, entropy = imbalance(load), load_entropy(load)
        idlest = load.amin(-1).double() / load.double().mean(-1)
        kinds = {"imbalance": worst, "idlest": idlest, "entropy": entropy}
        log_details(
            trainer,
            {f"expert_{kind}/layer_{i}": value for kind, values in kinds.items() for i, value in enumerate(values)},
        )
        log(pl_module, "expert_imbalance", worst.mean())
        log(pl_module, "expert_entropy", entropy.mean())
        if self.pictures and boards(trainer):
            show(trainer, "expert_load", load_picture(load))
