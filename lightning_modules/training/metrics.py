"""Loss of a language model over a whole data set, every token with the same weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class LanguageModelMetric(Metric):
    """Mean loss, perplexity and bits per byte.

    Sums are kept in float64 and added up over ranks, so that the result does not depend on how the data was batched.
    """

    higher_is_better = False
    full_state_update = False
    nats: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "tokens", "bytes"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats: Tensor, tokens: Tensor, byte_count: Tensor) -> None:
        """Add the sums of a batch.

        Args:
            nats: Summed cross-entropy, scalar.
            tokens: Number of predicted tokens, scalar.
            byte_count: UTF-8 bytes that they stand for, scalar.
        """
        # Not in place: a state that was reset in inference mode cannot be written to outside of it.
        self.nats = self.nats + nats.detach().double()
        self.tokens = self.tokens + tokens
        self.bytes = self.bytes + byte_count

    def compute(self) -> dict[str, Tensor]:
        """`loss` in nats per token, `perplexity`, `bits_per_byte`; NaN where nothing was predicted."""
        loss = self.nats / self.tokens
        return {
            "loss": loss.float(),
            "perplexity": loss.exp().float(),
            "bits_per_byte": (self.nats / math.log(2) / self.bytes).float(),
        }
