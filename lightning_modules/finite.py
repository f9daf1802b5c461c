"""Stop at the first number that is not finite, and say where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dsv41.sharding import local_rows
from lightning_modules.listing import first_few


class NonFiniteError(RuntimeError):
    """A loss or a gradient became infinite or NaN."""


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    # Of this rank's rows alone: the others may have nothing to complain about, and would not take part in a collective.
    return [name for name, tensor in tensors if not bool(torch.isfinite(local_rows(tensor.detach())[0]).all())]


def require_finite_loss(loss: Tensor, module: nn.Module, step: int) -> None:
    """Raise `NonFiniteError` if the scalar `loss` is not finite, naming the parameters that are not.

    This reads one number from the device per call.
    """
    if bool(torch.isfinite(loss)):
        return
    names = _not_finite(module.named_parameters())
    cause = f"parameters that are not finite: {first_few(names)}" if names else "all parameters are finite"
    raise NonFiniteError(f"loss is {float(loss.detach())} in optimizer step {step}; {cause}")


def require_finite_gradients(norm: Tensor, gradients: Mapping[str, Tensor], step: int) -> None:
    """Raise `NonFiniteError` if the gradient `norm` is not finite, naming the parameters whose gradients are not.

    This reads one number from the device per call.

    Args:
        norm: Of all ranks.
        gradients: What this rank holds, by name, as plain tensors (see `local_gradients`).
        step: Number of the optimizer step.
    """
    if bool(torch.isfinite(norm)):
        return
    names = _not_finite(gradients.items())
    cause = (
        f"gradients that are not finite: {first_few(names)}" if names else "each gradient is finite, their norm is not"
    )
    raise NonFiniteError(f"gradient norm is {float(norm)} in optimizer step {step}; {cause}")
