"""Gates of the Engram layers: how far each stream opens for what the memory gives a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from dsv41.engram import DeepseekV41Engram, OpenEngram, engram_gates
from dsv41.engram.token_map import fast_backend
from dsv41.model import DeepseekV41Block, DeepseekV41ForCausalLM
from dsv41.ops.precision import full_precision, widen
from lightning_modules.insight.drawing import (
    Array,
    boards,
    colour_bar,
    heat_map,
    new_axes,
    show,
)
from lightning_modules.insight.hooks import WITHIN, Taps, ValidationObserver, log, log_details, over_ranks, watch
from lightning_modules.text import readable, token_texts
from lightning_modules.training.lightning_private import logged_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40
OPEN = 0.5  # a gate's value where stream and memory have nothing to do with each other
_SUM, _SQUARES, _OPEN, _TOKENS, _FIRST_BIN = range(5)


def gated_layers(model: nn.Module) -> dict[int, DeepseekV41Engram]:
    """Engrams with a gate, by layer."""
    return {
        block.attn.layer_idx: block.engram
        for block in model.modules()
        if isinstance(block, DeepseekV41Block) and block.engram is not None and not isinstance(block.engram, OpenEngram)
    }


def listen_to_gates(
    taps: Taps | ValidationObserver, model: nn.Module, see: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Place hooks that recompute the gates of every forward from what a layer is given (`engram_gates`).

    Args:
        taps: Where to place them.
        model: With or without gates.
        see: Called with a layer, its gates [B, S, C] and which tokens are live, bool [B, S].
    """
    given: dict[int, tuple[Tensor, Tensor | None]] = {}

    def keep(layer: int, arguments: tuple[Any, ...]) -> None:
        hidden_states, _, token_mask = arguments
        given[layer] = hidden_states, token_mask

    def gates(layer: int, engram: DeepseekV41Engram, _: tuple[Any, ...], projected: Tensor) -> None:
        hidden_states, token_mask = given.pop(layer)
        with full_precision(hidden_states):
            key = projected[..., : engram.key_width]
            found = engram_gates(widen(hidden_states), key, engram.q_weight, engram.k_weight, engram.eps)
        live = torch.ones_like(found[..., 0], dtype=torch.bool) if token_mask is None else token_mask
        see(layer, found, live)

    for layer, engram in gated_layers(model).items():
        taps.before(engram, partial(keep, layer))
        taps.after(engram.wkv, partial(gates, layer, engram))


def gate_sums(gates: Tensor) -> Tensor:
    """Sums over tokens of `gates` [T, C], float64 [C, 4 + BINS]: gates, their squares, those above `OPEN`, tokens; and
    tokens in each of the equal parts of 0 to 1.
    """
    wide = gates.double().t()
    bins = wide.new_zeros(len(wide), BINS)
    bins.scatter_add_(1, (wide * BINS).long().clamp_(0, BINS - 1), torch.ones_like(wide))
    sums = torch.stack((wide.sum(1), wide.square().sum(1), (wide > OPEN).sum(1).double(), bins.sum(1)), dim=1)
    return torch.cat((sums, bins), dim=1)


def gates_of(
    model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor], tokens: int = 48
) -> tuple[dict[int, Tensor], Tensor]:
    """Gates over the first live tokens of the first row of a batch.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, int64 [B, S].
        tokens: At most.

    Returns:
        By layer, gates [C, T]; and the ids of the T tokens, int64.

    Raises:
        ValueError: No layer of the model has a gate, or `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"tokens: must be at least 1, got {tokens}")
    found: dict[int, Tensor] = {}

    def see(layer: int, gates: Tensor, live: Tensor) -> None:
        found[layer] = gates[0][live[0]][:tokens].t().clone()

    watch(model, batch, lambda taps: listen_to_gates(taps, model, see))
    if not found:
        raise ValueError("model.config: no layer has a gate; it takes engram_layer_ids and engram_gate 'learned'")
    return found, batch["input_ids"][0][batch["attention_mask"][0].bool()][:tokens]


def gate_picture(gates: Array, texts: list[str], layer: int) -> Figure:
    """Picture of a layer's gates [C, T] over the texts of T tokens."""
    streams, tokens = gates.shape
    figure, axes = new_axes(1.5 + 0.2 * tokens, 0.4 + 0.3 * streams, f"Engram gates of layer {layer}")
    rows = [f"stream {stream}" for stream in range(streams)]
    image = heat_map(axes, gates, rows, [readable(text) for text in texts], 0.0, 1.0)
    colour_bar(figure, axes, image, "gate")
    return figure


class EngramGates(ValidationObserver):
    """Logs the gates of Engram layers over the tokens of the first validation batches.

    For each layer and stream: the mean, ``within/engram_gate_mean/layer_N_stream_C``; the share above a half, where the
    memory agrees with the stream, ``within/engram_gate_open/layer_N_stream_C``; and the histogram
    ``within/engram_gate/layer_N_stream_C``. ``within/engram_gate`` and ``within/engram_gate_open`` are means over all.
    The picture ``within/engram_gate/layer_N`` has the gates over the first tokens of the validation text. Gates are
    those that the model applies, recomputed from what the layer is given (`engram_gates`). A layer without a gate is
    left out.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Each costs the gates of its Engram layers a
            second time, without the lookup.
        pictures: Draw.
        tokens: In the picture.

    Raises:
        ValueError: `batches` is negative or `tokens` not positive.
    """

    def __init__(self, batches: int = 2, pictures: bool = True, tokens: int = 48) -> None:
        super().__init__(batches)
        if tokens < 1:
            raise ValueError(f"tokens: must be at least 1, got {tokens}")
        self.pictures = pictures
        self.tokens = tokens
        self._sums: dict[int, Tensor] = {}
        self._piece: dict[int, Tensor] = {}  # by layer, the gates [C, T] of the first live tokens that were seen
        self._piece_ids = torch.empty(0, dtype=torch.int64)

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the gates of every layer."""
        self._piece = {}
        self._sums = {
            layer: torch.zeros(len(engram.q_weight), _FIRST_BIN + BINS, dtype=torch.float64, device=pl_module.device)
            for layer, engram in gated_layers(pl_module).items()
        }
        listen_to_gates(self, pl_module, self._add)

    def _add(self, layer: int, gates: Tensor, live: Tensor) -> None:
        self._sums[layer] += gate_sums(gates[live])
        if layer not in self._piece:
            # Of the first row, which on rank 0 is the first of the text. A copy, not a view that keeps all of them.
            self._piece[layer] = gates[0][live[0]][: self.tokens].t().clone()
            self._piece_ids = self.batch["input_ids"][0][live[0]][: self.tokens]

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks; draw those that rank 0 has seen."""
        if not self._sums:
            return
        layers = sorted(self._sums)
        sums = over_ranks(trainer, torch.stack([self._sums[layer] for layer in layers]))
        if not sums[..., _TOKENS].all():
            return
        means = sums[..., _SUM] / sums[..., _TOKENS]
        shares = sums[..., _OPEN] / sums[..., _TOKENS]
        details = {}
        for row, layer in enumerate(layers):
            for stream in range(sums.shape[1]):
                name = f"layer_{layer}_stream_{stream}"
                details[f"engram_gate_mean/{name}"] = means[row, stream]
                details[f"engram_gate_open/{name}"] = shares[row, stream]
                _add_histogram(trainer, f"{WITHIN}/engram_gate/{name}", sums[row, stream])
        log_details(trainer, details)
        log(pl_module, "engram_gate", means.mean())
        log(pl_module, "engram_gate_open", shares.mean())
        if self.pictures and boards(trainer):
            texts = token_texts(fast_backend(pl_module.tokenizer), self._piece_ids)  # type: ignore[arg-type]
            for layer in layers:
                picture = gate_picture(self._piece[layer].float().cpu().numpy(), texts, layer)
                show(trainer, f"engram_gate/layer_{layer}", picture)


def _add_histogram(trainer: L.Trainer, tag: str, sums: Tensor) -> None:
    counts = sums[_FIRST_BIN:].tolist()
    limits = [(edge + 1) / BINS for edge in range(BINS)]
    for board in boards(trainer):
        board.add_histogram_raw(
            tag,
            min=0.0,
            max=1.0,
            num=int(sums[_TOKENS]),
            sum=float(sums[_SUM]),
            sum_squares=float(sums[_SQUARES]),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=logged_step(trainer),
        )
