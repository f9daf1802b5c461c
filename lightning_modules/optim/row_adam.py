"""Adam for tables, applied to the rows that a step has read.

    hits_r  = number of steps so far that row r was in
    m_r     = beta1 m_r + (1 - beta1) g_r               v_r = beta2 v_r + (1 - beta2) g_r^2
    w_r    -= lr (m_r / (1 - beta1^hits_r)) / (sqrt(v_r / (1 - beta2^hits_r)) + eps)

A row does what Adam (arXiv:1412.6980) would do if the steps without the row had not happened. In those the row changes
nothing: not its value, and not its averages, which an optimizer of dense gradients would shrink and keep applying.
Hence no weight decay either. A row whose gradient is exactly zero was not in the step: positions without a token and
rows of padding look rows up too, and how many there are depends on the number of ranks.

Time and memory of a step grow with the rows that are hit, not with the table; the state is twice the table, and a
number per row, from the first step on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dsv41.ranks import local_rows
from lightning_modules.optim.state import sharded_rows


def rows_hit(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a row-sparse gradient [N, D] that are not zero: their numbers int64 [R], gradients [R, D]."""
    gradient = gradient.coalesce()  # free where `local_gradients` has done so
    values = gradient.values()
    hit = values.any(1)
    return gradient.indices()[0, hit], values[hit]


class RowAdam(Optimizer):
    """Adam over the rows of row-sparse gradients.

    Args:
        params: Tables [N, D], fp32 or fp64, plain or sharded by rows, whose gradients are plain sparse COO tensors
            [N, D] with one sparse dimension. Those of a sharded table hold this rank's rows under their numbers in the
            whole table (see `EngramTable.sparse_gradient`).
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the root of the squared average.

    State of a table, in its dtype, sharded like it: `exp_avg` and `exp_avg_sq` [N, D], `hits` [N, 1]. fp32 counts hits
    up to 2^24 exactly and then stops, where both corrections have long been 1.

    Raises:
        TypeError: A parameter is neither fp32 nor fp64, in which hits could not be counted.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise TypeError(f"RowAdam takes float32 and float64 tables, got {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the rows that have gradients.

        Raises:
            TypeError: A gradient is not row-sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            raise TypeError("RowAdam takes row-sparse gradients only; see EngramTable.sparse_gradient")
        local, first = local_rows(parameter.detach())
        state = self.state[parameter]
        if not state:
            for key, width in (("exp_avg", local.shape[1]), ("exp_avg_sq", local.shape[1]), ("hits", 1)):
                state[key] = sharded_rows(local.new_zeros(len(local), width), parameter)
        exp_avg, exp_avg_sq, hits = (local_rows(state[key])[0] for key in ("exp_avg", "exp_avg_sq", "hits"))
        rows, values = rows_hit(gradient)
        rows = rows - first
        beta1, beta2 = group["betas"]

        count = hits.index_select(0, rows).add_(1)
        hits.index_copy_(0, rows, count)
        mean = exp_avg.index_select(0, rows).lerp_(values, 1 - beta1)
        exp_avg.index_copy_(0, rows, mean)
        square = exp_avg_sq.index_select(0, rows).mul_(beta2).addcmul_(values, values, value=1 - beta2)
        exp_avg_sq.index_copy_(0, rows, square)
        # In fp32, 1 - 0.999^1 would keep four digits.
        count = count.double()
        size = (group["lr"] / (1 - beta1**count)).to(values.dtype)
        root = (1 - beta2**count).sqrt_().to(values.dtype)
        step = mean.mul_(size).div_(square.sqrt_().div_(root).add_(group["eps"]))
        local.index_copy_(0, rows, local.index_select(0, rows).sub_(step))
