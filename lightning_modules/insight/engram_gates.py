"""How far do the streams open for what the Engram remembers?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from torch import Tensor

from dsv41.engram import DeepseekV41Engram, OpenEngram, engram_gates
from dsv41.engram.token_map import fast_backend
from dsv41.model import DeepseekV41Block
from dsv41.ops.precision import full_precision, widen
from lightning_modules.insight.drawing import (
    Array,
    boards,
    colour_bar,
    drawing_boards,
    heat_map,
    new_axes,
    show,
)
from lightning_modules.insight.hooks import ValidationObserver, log, log_details, over_ranks
from lightning_modules.training.lightning_private import logged_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40
OPEN = 0.5  # what a gate is when stream and memory have nothing to do with each other
_SUM, _SQUARES, _OPEN, _TOKENS, _FIRST_BIN = range(5)
_LONGEST = 12  # characters of a token on an axis


def gate_sums(gates: Tensor) -> Tensor:
    """Sums over tokens of `gates` [T, C], float64 [C, 4 + BINS]: gates, their squares, those above `OPEN`, how many;
    and how many lie in each of the equal parts of 0 to 1.
    """
    wide = gates.double().t()
    bins = wide.new_zeros(len(wide), BINS)
    bins.scatter_add_(1, (wide * BINS).long().clamp_(0, BINS - 1), torch.ones_like(wide))
    sums = torch.stack((wide.sum(1), wide.square().sum(1), (wide > OPEN).sum(1).double(), bins.sum(1)), dim=1)
    return torch.cat((sums, bins), dim=1)


def readable(text: str, longest: int | None = _LONGEST) -> str:
    """A token's text for an axis: white space made visible, cut to `longest` characters; None shows all of it."""
    # The bar in the special tokens of DeepSeek is a full-width one, which fonts lack.
    shown = repr(text)[1:-1].replace(" ", "·").replace("｜", "|")
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 1]}…"


def gate_picture(gates: Array, texts: list[str], layer: int) -> Figure:
    """Gates [C, T] of a layer over the texts of T tokens."""
    streams, tokens = gates.shape
    figure, axes = new_axes(1.5 + 0.2 * tokens, 0.4 + 0.3 * streams, f"Engram gates of layer {layer}")
    rows = [f"stream {stream}" for stream in range(streams)]
    image = heat_map(axes, gates, rows, [readable(text) for text in texts], 0.0, 1.0)
    colour_bar(figure, axes, image, "gate")
    return figure


class EngramGates(ValidationObserver):
    """Logs the gates of Engram layers over the tokens of the first validation batches.

    For each layer and stream: the mean, ``engram_gate_mean/layer_N_stream_C``; the share above a half, where the memory
    agrees with the stream, ``engram_gate_open/layer_N_stream_C``; and the histogram ``engram_gate/layer_N_stream_C``.
    ``val/engram_gate`` and ``val/engram_gate_open`` are means over all. The picture ``engram_gate/layer_N`` has the
    gates over the first tokens of the validation text. Gates are those that the model applies, recomputed from what
    the layer is given (`engram_gates`). A layer without a gate is left out.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Each costs the gates of its Engram layers a
            second time, without the lookup.
        pictures: Draw, where matplotlib is installed.
        tokens: In the picture.

    Raises:
        ValueError: `batches` is negative or `tokens` not positive.

    Attributes:
        piece: By layer, the gates [C, T] of the first live tokens that were seen.
        piece_ids: Their token ids int64 [T].
    """

    def __init__(self, batches: int = 2, pictures: bool = True, tokens: int = 48) -> None:
        super().__init__(batches)
        if tokens < 1:
            raise ValueError(f"tokens: must be at least 1, got {tokens}")
        self.pictures = pictures
        self.tokens = tokens
        self._sums: dict[int, Tensor] = {}
        self._given: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.piece: dict[int, Tensor] = {}
        self.piece_ids = torch.empty(0, dtype=torch.int64)

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the streams that reach a layer, and the keys that it makes of its rows."""
        self._sums, self._given, self.piece = {}, {}, {}
        for block in pl_module.modules():
            if isinstance(block, DeepseekV41Block) and block.engram is not None:
                layer, engram = block.attn.layer_idx, block.engram
                if not isinstance(engram, OpenEngram):
                    self._sums[layer] = torch.zeros(
                        len(engram.q_weight), _FIRST_BIN + BINS, dtype=torch.float64, device=pl_module.device
                    )
                    self.before(engram, partial(self._keep, layer))
                    self.after(engram.wkv, partial(self._add, layer, engram))

    def _keep(self, layer: int, arguments: tuple[Any, ...]) -> None:
        hidden_states, _, token_mask = arguments
        self._given[layer] = hidden_states, token_mask

    def _add(self, layer: int, engram: DeepseekV41Engram, projected: Tensor) -> None:
        hidden_states, token_mask = self._given.pop(layer)
        with full_precision(hidden_states):
            key = projected[..., : engram.key_width]
            gates = engram_gates(widen(hidden_states), key, engram.q_weight, engram.k_weight, engram.eps)
        live = torch.ones_like(gates[..., 0], dtype=torch.bool) if token_mask is None else token_mask
        self._sums[layer] += gate_sums(gates[live])
        if layer not in self.piece:
            # Of the first row, which on rank 0 is the first of the text. A copy, not a view that keeps all of them.
            self.piece[layer] = gates[0][live[0]][: self.tokens].t().clone()
            self.piece_ids = self.batch["input_ids"][0][live[0]][: self.tokens]

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks; draw what rank 0 has seen."""
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
                _add_histogram(trainer, f"engram_gate/{name}", sums[row, stream])
        log_details(trainer, details)
        log(pl_module, "val/engram_gate", means.mean())
        log(pl_module, "val/engram_gate_open", shares.mean())
        if self.pictures and drawing_boards(trainer):
            tokenizer = fast_backend(pl_module.tokenizer)  # type: ignore[arg-type]  # an Engram has one
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in self.piece_ids.tolist()]
            for layer in layers:
                picture = gate_picture(self.piece[layer].float().cpu().numpy(), texts, layer)
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
