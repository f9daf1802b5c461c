"""Gradient of a step as plain tensors: this process's part, whether dense, sharded or row-sparse.

One process holds every gradient whole. On several ranks all trainable parameters are cut by rows, and each row has one
owner (see `dsv41/ranks.py`), so a sum over ranks counts every element once: norms need one such sum and do not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv41.cost import WATCHED_PARTS, watched_part
from dsv41.ranks import local_rows

Gradients = dict[str, Tensor]

PARTS = (*WATCHED_PARTS.values(), "rest")
# Learns from a separate loss, so that its gradient and the language model's must not scale each other.
OWN_LOSS = ("indexer",)


def local_gradients(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Local part of each gradient, as plain tensors that share its memory.

    Entries of a row-sparse gradient that belong to the same row are added up here, once, and the parameter keeps the
    result, so that an optimizer need not do it again.

    Args:
        parameters: By name; those without a gradient are left out.

    Returns:
        By name: the gradient, its rows held here, or the [R, D] values of the R rows that a row-sparse one has here.
    """
    found = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                gradient = gradient.coalesce()
                parameter.grad = gradient
            found[name] = gradient.values()
        else:
            found[name] = local_rows(gradient)[0]
    return found


@dataclass(frozen=True)
class GradientNorms:
    """Norms of the gradient over all ranks.

    Attributes:
        squares: Squared norm of each of `PARTS` that has gradients: float64 scalars on one device.
    """

    squares: dict[str, Tensor]

    def norm(self, parts: Iterable[str] = PARTS) -> Tensor:
        """Norm of the gradients of some parts together; of all by default. A float64 scalar, 0 if there are none."""
        found = [self.squares[part] for part in parts if part in self.squares]
        return torch.stack(found).sum().sqrt() if found else torch.zeros((), dtype=torch.float64)


def gradient_norms(gradients: Gradients, device: torch.device, reduce: Callable[[Tensor], Tensor]) -> GradientNorms:
    """Norms of `local_gradients`, with one sum over ranks. Called by all ranks, which have the same names.

    Args:
        gradients: By name; they may be on several devices, when some are offloaded.
        device: Where the sum over ranks is made.
        reduce: Gives the sum over ranks of a tensor that it may overwrite; on one device what it is given.
    """
    squares = torch.zeros(len(PARTS), dtype=torch.float64, device=device)
    for names in _by_device(gradients).values():
        for index, part in enumerate(PARTS):
            rows = [_row_norms(gradients[name]) for name in names if watched_part(name) == part]
            if rows:
                squares[index] += torch.cat(rows).to(torch.float64).square_().sum().to(device)
    squares = reduce(squares)
    present = {watched_part(name) for name in gradients}
    return GradientNorms({part: square for part, square in zip(PARTS, squares, strict=True) if part in present})


def _row_norms(gradient: Tensor) -> Tensor:
    # One sum of squares over a whole tensor of fp32 is wrong in the third digit at 50 M elements on a CPU, and depends
    # on how the rows are spread over ranks; rows are short, and are added up in float64.
    return gradient.abs() if gradient.dim() < 2 else torch.linalg.vector_norm(gradient, dim=-1).flatten()


def scale_(gradients: Gradients, factor: Tensor) -> None:
    """Multiply all gradients by a scalar."""
    for device, names in _by_device(gradients).items():
        members = [gradients[name] for name in names]
        torch._foreach_mul_(members, factor.to(device, members[0].dtype))


def clip_by_norm_(gradients: Gradients, norms: GradientNorms, limit: float) -> None:
    """Scale gradients down to a norm of at most `limit`: those of `OWN_LOSS` by their norm, all others by theirs.

    The factor is that of ``torch.nn.utils.clip_grads_with_norm_``: limit / (norm + 1e-6), at most 1.

    Args:
        gradients: `local_gradients`.
        norms: Their `gradient_norms`.
        limit: Above 0.
    """
    own = {name: gradient for name, gradient in gradients.items() if watched_part(name) in OWN_LOSS}
    others = {name: gradient for name, gradient in gradients.items() if name not in own}
    for members, norm in (
        (own, norms.norm(OWN_LOSS)),
        (others, norms.norm(part for part in PARTS if part not in OWN_LOSS)),
    ):
        scale_(members, (limit / (norm + 1e-6)).clamp(max=1.0))


def clip_values_(gradients: Gradients, limit: float) -> None:
    """Clip every element to [-limit, limit]; of a row-sparse gradient, after entries of a row have been added up."""
    for gradient in gradients.values():
        gradient.clamp_(-limit, limit)


def _by_device(gradients: Gradients) -> dict[torch.device, list[str]]:
    devices: dict[torch.device, list[str]] = {}
    for name, gradient in gradients.items():
        devices.setdefault(gradient.device, []).append(name)
    return devices
