"""Muon for matrices that are cut by rows over ranks.

Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) replaces the averaged gradient of a matrix by the
nearest orthogonal one, about, which needs the whole matrix. ``torch.optim.Muon`` given DTensors exchanges them in every
product of its iteration, rounds otherwise than on one process, and fails where a rank has no rows. Here the average
stays sharded, and the matrix that the iteration starts from is gathered once. Every rank then computes the same numbers
as one process alone and takes its rows of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsv41.sharding import local_rows
from lightning_modules.optimizer_state import sharded_rows


def iteration_dtype(matrix: Tensor) -> torch.dtype:
    """bf16 as in ``torch.optim.Muon``, but on a CPU that of the matrix: most multiply bf16 slower, some 50 times."""
    return matrix.dtype if matrix.device.type == "cpu" else torch.bfloat16


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Replace the singular values of a matrix by numbers near 1, by the quintic Newton-Schulz iteration.

    Args:
        matrix: [A, B], overwritten.
        coefficients: a, b, c of X <- a X + (b G + c G^2) X with G = X X^T.
        steps: Iterations.
        eps: Smallest norm to divide by.

    Returns:
        [A, B], in the dtype of `matrix`.
    """
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class ShardedMuon(torch.optim.Muon):
    """``torch.optim.Muon``, to the bit where it iterates in bf16, for matrices that may be sharded by rows.

    Its arguments and state are torch's; `adjust_lr_fn` has to be "match_rms_adamw", with which updates are as large as
    those of AdamW, so that learning rate and decay can be shared. A parameter needs a gradient on all ranks or on none.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have gradients. Called by all ranks."""
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
        assert parameter.grad is not None
        assert group["adjust_lr_fn"] == "match_rms_adamw"
        local, first = local_rows(parameter.detach())
        gradient, _ = local_rows(parameter.grad)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        average, _ = local_rows(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        start = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average.clone()
        whole = sharded_rows(start.to(iteration_dtype(start)), parameter)
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        update = orthogonalised(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        local.mul_(1 - group["lr"] * group["weight_decay"])
        size = group["lr"] * (0.2 * math.sqrt(max(parameter.shape)))
        local.add_(update[first : first + len(local)], alpha=-size)
