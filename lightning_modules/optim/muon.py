"""Muon for matrices that may be cut by rows over ranks: ``torch.optim.Muon`` on whole matrices.

Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) replaces the averaged gradient of a matrix by the
nearest orthogonal one, about, which needs the whole matrix. Given DTensors, torch's class exchanges them in every
product of its iteration, rounds otherwise than on one process (by 0.5 to 3%), and fails where a rank has no rows. Here
the average stays sharded, and the start of the iteration is gathered once: every rank lets torch compute the same
update as one process alone, and takes its rows of it.

torch iterates in bf16, which CPUs without bf16 instructions multiply about 20 times slower than fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsv41.ranks import local_rows
from lightning_modules.optim.state import sharded_rows


class ShardedMuon(torch.optim.Muon):
    """``torch.optim.Muon``, also of matrices that are sharded by rows.

    Arguments and state are torch's. A sharded parameter needs a gradient on all ranks or on none.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have gradients. Called by all ranks."""
        sharded = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and parameter.grad is not None
        ]
        if not sharded:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, group in sharded:
            self._update(parameter, group)
        return loss

    def _update(self, parameter: DTensor, group: dict[str, Any]) -> None:
        local, first = local_rows(parameter.detach())
        gradient, _ = local_rows(parameter.grad)  # type: ignore[arg-type]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        average, _ = local_rows(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        start = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average.clone()
        whole = sharded_rows(start, parameter)
        assert isinstance(whole, DTensor)
        update = step_from_zero(whole.full_tensor(), group)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(update[first : first + len(local)])


def step_from_zero(averaged: Tensor, group: dict[str, Any]) -> Tensor:
    """Update that ``torch.optim.Muon`` with the settings of `group` makes from an averaged gradient [A, B]."""
    blank = nn.Parameter(torch.zeros_like(averaged))
    blank.grad = averaged
    constants = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([blank], weight_decay=0.0, momentum=0.0, nesterov=False, **constants).step()
    return blank.detach()
