"""CSA2: attention over a sliding window, a selection of shared compressed positions, and a sink (ARCHITECTURE 4).

            x [B,S,H] --wq_a, q_norm--> q_latent --wq_b, rope--> q [B,S,heads,D]
            x --wkv, kv_norm, rope, fp8--> window KV [B,S,D]              (every layer)
  Full      x --compressor--> latent --rope, nvfp4--> compressed KV [B,T,D]  \
            latent --indexer--> index keys [B,T,E] --> selection [B,S,K]      > AttentionState, used by later layers
  Reindex   shared keys --indexer--> a new selection                         /
  Reuse     everything from the state
            softmax over window, selection and sink --> un-rope --> wo_a (per group) --> wo_b --> [B,S,H]

Differs from a textbook block: keys and values are one tensor for all heads; outputs are rotated back; what one layer
computes, later layers read from an immutable `AttentionState` and gradients flow back through it.

Shapes: B batch, S sequence, H hidden, D head_dim, T compressed positions, K selected positions, E index_head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41.backend import BackendConfig
from dsv41.compressor import Compressor
from dsv41.config import DeepseekV41TextConfig
from dsv41.indexer import build_indexer
from dsv41.initialization import NamedDraws
from dsv41.ops.norm import RMSNorm
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import layer_frequencies, rotate, rotation_table
from dsv41.ops.sparse_attention import IMPLEMENTATIONS
from dsv41.schedule import layer_plan


class AttentionState(NamedTuple):
    """State that CSA2 layers hand to later layers. Immutable: a layer returns a new one.

    A tuple, so that hooks on a block's inputs and outputs (FSDP2's, for example) find the tensors in it.

    Attributes:
        compressed_kv: Shared compressed keys/values [B, T, D], rotated and NVFP4-rounded.
        index_keys: Shared index keys [B, T, E].
        group_mask: Valid compressed positions, bool [B, T].
        selection: Selected positions int64 [B, S, K], -1 where absent.
        candidate_blocks: Candidate blocks int64 [B, S, N], -1 where absent; None before a candidate source.
        indexer_loss: Sum of the losses of learned indexers so far, a scalar; None without any.
    """

    compressed_kv: Tensor | None = None
    index_keys: Tensor | None = None
    group_mask: Tensor | None = None
    selection: Tensor | None = None
    candidate_blocks: Tensor | None = None
    indexer_loss: Tensor | None = None


class AttentionCore(nn.Module):
    """Attention over given keys, with its sinks. A separate module, so that sinks can stay fp32.

    Args:
        heads: Query heads.
        window: Raw positions that a query sees; None for all up to the query.
        ratio: Tokens per compressed position; 0 without.
        implementation: A key of `dsv41.ops.sparse_attention.IMPLEMENTATIONS` (`BackendConfig.attn`).
    """

    def __init__(self, heads: int, window: int | None, ratio: int, implementation: str) -> None:
        super().__init__()
        self.window, self.ratio, self.implementation = window, ratio, implementation
        self.attn_sink = nn.Parameter(torch.zeros(heads))

    def init_weights(self, draws: NamedDraws) -> None:
        """Initialise sink logits to zero: one unit of attention mass beside the keys."""
        nn.init.zeros_(self.attn_sink)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        compressed: Tensor | None,
        selection: Tensor | None,
        token_mask: Tensor,
        with_mass: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the window, the selected compressed positions and the sink.

        Args:
            q: Queries [B, S, heads, D].
            kv: Raw keys/values [B, S, D].
            compressed: Compressed keys/values [B, T, D], or None.
            selection: Selected positions int64 [B, S, K], -1 where absent, or None.
            token_mask: Bool [B, S]; padding is false, on the right only.
            with_mass: Also return the attention's mass on the selected positions; needs a selection.

        Returns:
            [B, S, heads, D] in the dtype of `q`, zero at padding. And with `with_mass` the attention's probability of
            each selected position, summed over heads, at least fp32 [B, S, K], zero at padding and where absent,
            without a gradient; else None.
        """
        attend = IMPLEMENTATIONS[self.implementation]
        window = self.window or q.shape[1]
        return attend(q, kv, compressed, self.attn_sink, selection, token_mask, window, self.ratio, with_mass)


class DeepseekV41Attention(nn.Module):
    """CSA2 attention site. The layer schedule decides which parts it owns; see the module docstring.

    Args:
        config: Text configuration.
        layer_idx: Zero-based layer.
        backend: Uses `attn`.

    Attributes:
        ratio: Tokens per compressed position that the site sees; 0 if it sees none.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int, backend: BackendConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.long_rotations = config.compress_ratios[layer_idx] > 0
        plan = layer_plan(config, layer_idx)
        self.ratio = plan.ratio
        self.quantized = config.quantized_caches
        self.heads, self.width = config.num_attention_heads, config.head_dim
        self.groups, self.group_rank = config.o_groups, config.o_lora_rank
        self.core = AttentionCore(self.heads, self._window(config), self.ratio, backend.attn)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.wq_a = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wkv = nn.Linear(hidden, self.width, bias=False)
        self.kv_norm = RMSNorm(self.width, eps)
        # One block per group, stacked along the rows as in the released tensor.
        self.wo_a = nn.Linear(self.heads * self.width // self.groups, self.groups * self.group_rank, bias=False)
        self.wo_b = nn.Linear(self.groups * self.group_rank, hidden, bias=False)
        self.compressor = Compressor(config, self.ratio) if plan.makes_keys else None
        self.indexer = build_indexer(config, layer_idx) if plan.selects else None

    def _window(self, config: DeepseekV41TextConfig) -> int | None:
        """Raw positions that a query sees; None for all up to the query."""
        return config.sliding_window

    def _stored(self, keys: Tensor, name: str) -> Tensor:
        """Keys and values after rounding to the cache format `name`."""
        return fake_quantize(keys, name) if self.quantized else keys

    def _query_rotations(self, positions: Tensor) -> Tensor:
        return rotation_table(layer_frequencies(self.config, self.long_rotations), positions)

    def _compressed_rotations(self, count: int, device: torch.device) -> Tensor:
        starts = torch.arange(count, device=device) * self.ratio
        return rotation_table(layer_frequencies(self.config, True), starts)

    def forward(
        self, x: Tensor, state: AttentionState, position_ids: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, AttentionState]:
        """Attention output of the site, and the state for the next layer.

        Args:
            x: Normed input [B, S, H].
            state: State of earlier layers.
            position_ids: int64 [B, S], 0 to S - 1 in every row.
            token_mask: Bool [B, S]; padding is false, on the right only.

        Returns:
            Output [B, S, H] in the dtype of `x`, exactly zero at padding; and the state for the next layer.
        """
        table = self._query_rotations(position_ids)
        q_latent = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)), table)
        kv = self._stored(rotate(self.kv_norm(self.wkv(x)), table), "fp8")
        compressed, selection = None, None
        if self.ratio > 0:
            state = self._publish(x, q_latent, table, state, token_mask)
            compressed, selection = state.compressed_kv, state.selection
            assert compressed is not None  # the configuration's schedule checks guarantee both
            assert selection is not None
        learns = self.indexer is not None and self.indexer.learns
        attended, mass = self.core(q, kv, compressed, selection, token_mask, with_mass=learns)
        if mass is not None:
            state = self._teach(x, q_latent, table, state, mass)
        return self._project(rotate(attended, table, inverse=True)), state

    def _publish(
        self, x: Tensor, q_latent: Tensor, table: Tensor, state: AttentionState, token_mask: Tensor
    ) -> AttentionState:
        """State with this layer's keys and selection added, where it owns any."""
        if self.compressor is not None:
            latent = self.compressor(x)
            rotations = self._compressed_rotations(latent.shape[1], x.device)
            assert self.indexer is not None  # every KV source is an index source
            keys = self.indexer.keys(latent, rotations)
            state = state._replace(
                compressed_kv=self._stored(rotate(latent, rotations), "nvfp4"),
                index_keys=keys,
                group_mask=self.compressor.group_mask(token_mask),
            )
        if self.indexer is not None:
            assert state.index_keys is not None  # likewise
            assert state.group_mask is not None
            selection, blocks = self.indexer(
                x, q_latent, state.index_keys, table, state.group_mask, state.candidate_blocks
            )
            state = state._replace(selection=selection, candidate_blocks=blocks)
        return state

    def _teach(self, x: Tensor, q_latent: Tensor, table: Tensor, state: AttentionState, mass: Tensor) -> AttentionState:
        """State with this layer's indexer loss added: divergence of its scores from the attention's `mass`."""
        assert self.indexer is not None
        assert state.index_keys is not None
        assert state.selection is not None
        loss = self.indexer.loss(x, q_latent, table, state.index_keys, state.selection, mass)
        return state._replace(indexer_loss=loss if state.indexer_loss is None else state.indexer_loss + loss)

    def _project(self, out: Tensor) -> Tensor:
        """Output projection of [B, S, heads, D]: one block of `wo_a` per group, then `wo_b` over all groups."""
        grouped = out.unflatten(2, (self.groups, -1)).flatten(3)
        blocks = self.wo_a.weight.view(self.groups, self.group_rank, -1)
        latent = torch.einsum("bsgi,gri->bsgr", grouped, blocks.to(grouped.dtype)).flatten(2)
        return self.wo_b(latent)


class WindowAttention(DeepseekV41Attention):
    """Window attention: no compressed positions, hence neither compressor nor indexer."""


class FullAttention(WindowAttention):
    """Dense causal attention over all tokens, with the same projections: the limit that CSA2 approximates."""

    def _window(self, config: DeepseekV41TextConfig) -> int | None:
        return None


def build_attention(config: DeepseekV41TextConfig, layer_idx: int, backend: BackendConfig) -> DeepseekV41Attention:
    """Attention site named by ``config.attention``."""
    kinds = {"csa2": DeepseekV41Attention, "window": WindowAttention, "full": FullAttention}
    return kinds[config.attention](config, layer_idx, backend)
