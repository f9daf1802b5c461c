"""Single-pass manifold-constrained hyper-connections (ARCHITECTURE 3; mHC, arXiv:2512.24880).

A block carries C residual streams. Each site (attention, MoE) predicts coefficients from the streams it sees:

    streams [B,S,C,H] --+--------------------- comb [C,C] (doubly stochastic) ---------------(+)--> streams
                        |                                                                     ^
                        +-- read with the carried pre --> x --> norm --> sublayer --> y -- post [C]
                        |        (pre of the site before)
                        +-- flat, RMS-scaled @ fn --> pre | post | comb
                                                       |
                                                       +--> carried to the next site

    pre  [C]     weights with which the NEXT site reads: x = sum_c pre[c] * stream[c],
    post [C]     weights with which the output y is written into each stream,
    comb [C, C]  mixing of the streams among themselves.

Predicting `pre` one site ahead is what makes it single-pass: streams are read once for both coefficients and mixing.
Numerics are in `ops/mixing.py`.

Shapes: B batch, S sequence, C streams, H hidden, R = C * (2 + C) coefficients. Coefficients are at least fp32
everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41TextConfig
from dsv41.initialization import NamedDraws
from dsv41.ops.mixing import expand, read_streams, sinkhorn
from dsv41.ops.precision import full_precision
from dsv41.ranks import copy_rows_


class Residual(nn.Module):
    """Residual connection of one site (attention, MoE): reads from the streams and writes to them.

    The interface of the ``residual`` switch: ``x, pre, post, comb = site(streams, carried_pre)``, then
    ``streams = site.write(y, streams, post, comb)`` with the sublayer's output y. `post` and `comb` are opaque
    to the caller.
    """

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """Streams [B, S, C, H] after the sublayer's output `y` [B, S, H] is written."""
        raise NotImplementedError


class PlainResidual(Residual):
    """Ordinary residual connection: the single stream is read unchanged, and the output is added."""

    def forward(self, streams: Tensor, carried_pre: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Stream [B, S, H] of `streams` [B, S, 1, H], and `carried_pre` unchanged; no coefficients."""
        return streams.squeeze(2), carried_pre, None, None

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """Streams plus the output; see `Residual.write`."""
        return streams + y.unsqueeze(2)


class HyperConnection(Residual):
    """Manifold-constrained hyper-connection: reads with the previous site's `pre`, predicts its site's coefficients.

    Args:
        config: Uses hidden_size, hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps.
        backend: Uses `compile_hc`.
    """

    # Initial logit of a stream's weight for itself: exp(4) against 1, so streams mostly stay separate, yet every entry
    # has a gradient.
    kept = 4.0

    def __init__(self, config: DeepseekV41TextConfig, backend: BackendConfig) -> None:
        super().__init__()
        self.implementation = "compiled" if backend.compile_hc else "eager"
        self.streams = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.initializer_range = config.initializer_range
        rows = (2 + config.hc_mult) * config.hc_mult
        self.fn = nn.Parameter(torch.empty(rows, config.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(3))
        self.init_weights(NamedDraws())

    def init_weights(self, draws: NamedDraws) -> None:
        """Initialise close to an ordinary residual: read the mean of the streams, write to all, keep them separate."""
        draws.normal_(self.fn, "fn", self.initializer_range)
        nn.init.constant_(self.scale, 0.01)
        streams = self.streams
        base = torch.zeros(self.base.shape, dtype=torch.float64)  # the parameter's dtype rounds it, not the default
        # sigmoid(base) = 1 / C: with equal streams the site reads their common value.
        base[:streams].fill_(-math.log(max(streams - 1, 1)))
        base[2 * streams :].view(streams, streams).fill_diagonal_(self.kept)
        copy_rows_(self.base, base)

    def combined(self, logits: Tensor) -> Tensor:
        """Mixing matrices [..., C_in, C_out] from their predicted logits."""
        return sinkhorn(logits, self.iterations, self.eps)

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """Streams after writing and mixing; see `expand`."""
        assert post is not None
        assert comb is not None
        return expand(y, streams, post, comb, self.implementation)

    def forward(self, streams: Tensor, carried_pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input of the site, and the coefficients predicted from the same streams.

        Args:
            streams: [B, S, C, H].
            carried_pre: `pre` of the site before [B, S, C], fp32; float64 for float64 streams.

        Returns:
            x [B, S, H], `streams` collapsed with `carried_pre`, in their dtype; pre [B, S, C] in (hc_eps, 1 + hc_eps),
            post [B, S, C] in (0, 2) and comb [B, S, C_in, C_out], in the dtype of `carried_pre`.
        """
        with full_precision(streams):
            x, mixes = read_streams(streams, carried_pre, self.fn, self.norm_eps)
            base, scale = self.base.to(mixes.dtype), self.scale.to(mixes.dtype)
            count = self.streams
            parts = (count, count, count * count)
            per_row = torch.cat([one.expand(size) for one, size in zip(scale, parts, strict=True)])
            # One fused multiply-add, as in the release; multiply then add rounds differently.
            logits = torch.addcmul(base, mixes, per_row)
            pre, post, comb = logits.split(parts, dim=-1)
            comb = self.combined(comb.unflatten(-1, (count, count)))
            return x, pre.sigmoid() + self.eps, 2 * post.sigmoid(), comb


class UnconstrainedHyperConnection(HyperConnection):
    """Hyper-connections (arXiv:2409.19606) in the single-pass form: mixing matrices are not projected.

    Everything else is mHC's, so that a comparison isolates the effect of the projection.
    """

    kept = 1.0  # the identity, exactly

    def combined(self, logits: Tensor) -> Tensor:
        """Mixing matrices equal to their predicted logits."""
        return logits


def build_residual(config: DeepseekV41TextConfig, backend: BackendConfig) -> Residual:
    """Residual connection named by ``config.residual``."""
    if config.residual == "plain":
        return PlainResidual()
    return {"mhc": HyperConnection, "hyper_connections": UnconstrainedHyperConnection}[config.residual](config, backend)
