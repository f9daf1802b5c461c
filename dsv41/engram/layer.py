"""Engram: hashed n-gram memory that writes into every residual stream through a gate (ARCHITECTURE 6).

    rows [B,S,cols,d] = table[hash ids]            flattened, then one projection `wkv`:
    key_c [B,S,C,H], value [B,S,H]                 one key per stream, one value for all
    dot_c  = < norm(h_c) * q_w_c , norm(key_c) * k_w_c > / sqrt(H)
    gate_c = sigmoid(sign(dot_c) * sqrt(max(|dot_c|, 1e-6)))
    h_c   += gate_c * value

V4.1 has no short convolution. The gate core (`ops/engram_gate.py`) is a pure function, eager or compiled.

Shapes: B batch, S sequence, C streams, H hidden, d engram_head_dim, cols = (N - 1) * heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41TextConfig
from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.engram.table import EngramTable
from dsv41.engram.token_map import compressed_token_map
from dsv41.initialization import NamedDraws
from dsv41.ops.engram_gate import IMPLEMENTATIONS, engram_gates
from dsv41.ops.precision import full_precision, widen

__all__ = ["DeepseekV41Engram", "DeepseekV41NgramHash", "compile_engram_gate", "compressed_token_map", "engram_gates"]


# Whether every Engram of this process runs the compiled gate, whatever its backend says.
_ENGRAM_GATE_COMPILED = False


def compile_engram_gate() -> None:
    """Let every Engram of this process run the ``torch.compile(dynamic=False)`` gate; calling again does nothing.

    `BackendConfig.compile_engram` asks for it model by model. See `CompiledCore` for shapes, rounding and the fallback
    without a compiler.
    """
    global _ENGRAM_GATE_COMPILED
    _ENGRAM_GATE_COMPILED = True


class DeepseekV41Engram(nn.Module):
    """Engram layer: table, projection, gate.

    Args:
        config: Text configuration.
        layer_idx: Zero-based layer, one of `engram_layer_ids`.
        backend: Uses `compile_engram`, `strict_validation`, `sparse_table_gradient`.
        process_group: Ranks that share the table's rows; None holds it whole.
    """

    def __init__(
        self,
        config: DeepseekV41TextConfig,
        layer_idx: int,
        backend: BackendConfig,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.compiled = backend.compile_engram
        self.eps = config.rms_norm_eps
        self.layer_hash_index = config.engram_layer_ids.index(layer_idx)
        assert config.engram_num_embeddings is not None  # filled in by the configuration
        rows = config.engram_num_embeddings[self.layer_hash_index]
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = EngramTable(
            rows,
            config.engram_head_dim,
            config.initializer_range,
            backend.strict_validation,
            process_group,
            backend.sparse_table_gradient,
        )
        self._build_gate(config, columns * config.engram_head_dim)

    def _build_gate(self, config: DeepseekV41TextConfig, width: int) -> None:
        """Build the projection and the norm weights of the gate, for `width` channels of rows per position."""
        self.key_width = config.hc_mult * config.hidden_size
        self.wkv = nn.Linear(width, self.key_width + config.hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))

    def init_weights(self, draws: NamedDraws) -> None:
        """Initialise norm weights to one; table and projection draw themselves."""
        nn.init.ones_(self.q_weight)
        nn.init.ones_(self.k_weight)

    def _rows(self, hash_ids: Tensor) -> Tensor:
        """Rows of every position, concatenated [B, S, cols * d], in the dtype of the projection."""
        return self.embed(hash_ids).flatten(-2).to(self.wkv.weight.dtype)

    def forward(self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Add gated memory to the streams.

        Args:
            hidden_states: [B, S, C, H].
            hash_ids: int64 table rows of this layer [B, S, cols].
            token_mask: Bool [B, S]; padding and image tokens (false) keep their streams.

        Returns:
            [B, S, C, H] in the dtype of `hidden_states`.
        """
        key, value = self.wkv(self._rows(hash_ids)).split((self.key_width, hidden_states.shape[-1]), dim=-1)
        with full_precision(hidden_states):
            gate = IMPLEMENTATIONS["compiled" if self.compiled or _ENGRAM_GATE_COMPILED else "eager"]
            return gate(hidden_states, key, value, self.q_weight, self.k_weight, self.eps, token_mask)


class OpenEngram(DeepseekV41Engram):
    """Engram without gate: the memory's value is added to every stream unweighted."""

    def _build_gate(self, config: DeepseekV41TextConfig, width: int) -> None:
        self.wkv = nn.Linear(width, config.hidden_size, bias=False)

    def init_weights(self, draws: NamedDraws) -> None:
        """Initialise no parameter here: table and projection draw themselves."""

    def forward(self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Add memory to the streams; see `DeepseekV41Engram.forward`."""
        value = widen(self.wkv(self._rows(hash_ids)))
        if token_mask is not None:
            value = value * token_mask.unsqueeze(-1)
        return (widen(hidden_states) + value.unsqueeze(-2)).to(hidden_states.dtype)


def build_engram(
    config: DeepseekV41TextConfig,
    layer_idx: int,
    backend: BackendConfig,
    process_group: dist.ProcessGroup | None = None,
) -> DeepseekV41Engram:
    """Engram layer named by ``config.engram_gate``."""
    kinds = {"learned": DeepseekV41Engram, "open": OpenEngram}
    return kinds[config.engram_gate](config, layer_idx, backend, process_group)
