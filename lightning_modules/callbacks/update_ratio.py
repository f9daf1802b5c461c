"""Update ratio: the size of a step's change of the weights relative to theirs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from dsv41.cost import watched_part
from dsv41.ranks import local_rows
from lightning_modules.insight.hooks import log_details
from lightning_modules.optim.row_adam import rows_hit
from lightning_modules.training.gradients import PARTS
from lightning_modules.training.lightning_private import logs_this_step


class _Before(NamedTuple):
    """Values of one parameter before a step.

    Attributes:
        part: Name of the ratio that it counts in.
        parameter: The parameter.
        rows: This rank's rows that the values are of, int64 [R]; None is all of them.
        values: Their copy.
    """

    part: str
    parameter: nn.Parameter
    rows: Tensor | None
    values: Tensor

    def squares(self) -> Tensor:
        """Squared norms of the change since then and of the values, float64 [2]. Overwrites the copy."""
        size = _square(self.values)
        local = local_rows(self.parameter.detach())[0]
        self.values.sub_(local if self.rows is None else local.index_select(0, self.rows))
        return torch.stack((_square(self.values), size))


def _square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def _copy(name: str, parameter: nn.Parameter) -> _Before:
    local, first = local_rows(parameter.detach())
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return _Before(watched_part(name), parameter, None, local.clone())
    rows = rows_hit(gradient)[0] - first
    return _Before(watched_part(name), parameter, rows, local.index_select(0, rows))


class UpdateRatio(Callback):
    """Logs ``|w_after - w_before| / |w_before|`` of optimizer steps as ``within/update_ratio/total`` and, for the parts
    that `dsv41.cost.watched_part` knows, as ``within/update_ratio/engram_tables`` and so on.

    Norms are over all ranks, in float64, so the numbers do not depend on how many there are. Parameters that have no
    gradient take no part (frozen ones, and a frozen indexer's). Of an Engram table with a row-sparse gradient, only the
    rows with a gradient that is not zero count, above and below the bar, since the others stay where they are; of one
    with a dense gradient, all rows. A part whose weights are all zero is left out.

    On a logged step this costs a copy of what this rank holds of the weights (of tables, of the rows hit), from before
    the update until just after it; two passes over them; and one sum of a dozen numbers over ranks. On other steps
    nothing.

    Args:
        every_n_steps: Look at logged steps (``trainer.log_every_n_steps``) whose number is a multiple of this; 1 is all
            of them, 0 none.

    Raises:
        ValueError: `every_n_steps` is negative.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__()
        if every_n_steps < 0:
            raise ValueError(f"every_n_steps: must be at least 0 (0 switches it off), got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._before: list[_Before] | None = None  # None between steps that are looked at

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the copies of a run that failed inside a step."""
        self._before = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Copy the values that the step is about to change: gradients are there, and nothing has been updated yet."""
        if self.every_n_steps == 0 or (trainer.global_step + 1) % self.every_n_steps:
            return
        if logs_this_step(trainer):
            self._before = [
                _copy(name, parameter)
                for name, parameter in pl_module.named_parameters()
                if parameter.requires_grad and parameter.grad is not None
            ]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Compare, free the copies and log. Inside an accumulation there are none."""
        if self._before is None:
            return
        before, self._before = self._before, None
        device = trainer.strategy.root_device
        sums = torch.zeros(len(PARTS), 2, dtype=torch.float64, device=device)
        while before:
            one = before.pop()
            sums[PARTS.index(one.part)] += one.squares().to(device)
        total = trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        named = dict(zip(PARTS, total.tolist(), strict=True)) | {"total": total.sum(0).tolist()}
        ratios = {name: math.sqrt(change / size) for name, (change, size) in named.items() if size > 0}
        # Not `pl_module.log`, which repeats its last value at each logged step.
        log_details(
            trainer,
            {f"update_ratio/{name}": torch.tensor(ratio, dtype=torch.float64) for name, ratio in ratios.items()},
        )
