"""Totals of an optimizer step over its micro-batches, and their sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.model import TrainingReport


@dataclass(frozen=True)
class StepTotals:
    """Sums of one rank over the micro-batches so far; scalars unless said otherwise.

    Attributes:
        nats: Cross-entropy.
        tokens: Predicted tokens.
        live: Tokens that are no padding.
        indexer: Loss of learned indexers, over layers and live tokens; 0 if there is none.
        balance: Sequence-wise balance loss, likewise.
        load: Tokens per expert, int64 [layers, 2, experts]: text, image.
        reference: Predicted tokens per rank in the first micro-batch (1 if there are none): what the loss of every
            micro-batch is divided by. The same on all ranks.
    """

    nats: Tensor
    tokens: Tensor
    live: Tensor
    indexer: Tensor
    balance: Tensor
    load: Tensor
    reference: Tensor

    @classmethod
    def of(cls, nats: Tensor, tokens: Tensor, live: Tensor, report: TrainingReport, reference: Tensor) -> StepTotals:
        """Totals of one micro-batch."""
        nothing = torch.zeros_like(nats, requires_grad=False)
        indexer, balance = (
            nothing if loss is None else loss.detach() for loss in (report.indexer_loss, report.balance_loss)
        )
        return cls(nats.detach(), tokens, live, indexer, balance, report.expert_load, reference)

    def __add__(self, other: StepTotals) -> StepTotals:
        """Sum of both totals; the first one's reference stays."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in (*_SUMMED, "load")}
        return replace(self, **sums)

    def over_ranks(self, summed: Callable[[Tensor], Tensor]) -> StepTotals:
        """Totals of all ranks, in float64, with two sums over ranks.

        Args:
            summed: Adds a tensor up over ranks; may overwrite it.
        """
        scalars = summed(torch.stack([getattr(self, name).double() for name in _SUMMED]))
        sums = dict(zip(_SUMMED, scalars, strict=True))
        return replace(self, load=summed(self.load.clone()), **sums)


_SUMMED = ("nats", "tokens", "live", "indexer", "balance")
