"""Pooling of r consecutive tokens into one compressed key/value (ARCHITECTURE 4, KV source layers).

Ratio 1 is a plain projection. Above that, every channel pools its group with a softmax over its learned gate logits,
in fp32; groups do not overlap and an incomplete last group yields nothing.

Shapes: B batch, S sequence, T = floor(S / r), H hidden, D head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.ops.norm import RMSNorm
from dsv41.ops.precision import full_precision, widen


class Compressor(nn.Module):
    """Compressor of tokens into the latent behind shared compressed KV and index keys.

    Args:
        config: Uses hidden_size, head_dim, rms_norm_eps.
        ratio: Tokens per compressed position, at least 1.
    """

    def __init__(self, config: DeepseekV41TextConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False) if ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Pool `x` [B, S, H] to the latent [B, T, D], before rotation and quantisation, in the dtype of `x`."""
        if self.wgate is None:
            return self.norm(self.wkv(x))
        groups = x.shape[1] // self.ratio
        with full_precision(x):
            wide = widen(x[:, : groups * self.ratio])
            values = F.linear(wide, self.wkv.weight.to(wide.dtype)).unflatten(1, (groups, self.ratio))
            gates = F.linear(wide, self.wgate.weight.to(wide.dtype)).unflatten(1, (groups, self.ratio))
            pooled = (values * gates.softmax(dim=2)).sum(dim=2)
        return self.norm(pooled.to(x.dtype))

    def group_mask(self, token_mask: Tensor) -> Tensor:
        """Mask of valid compressed positions: bool [B, T], true where all r tokens of `token_mask` [B, S] are."""
        groups = token_mask.shape[1] // self.ratio
        return token_mask[:, : groups * self.ratio].unflatten(1, (groups, self.ratio)).all(dim=2)
