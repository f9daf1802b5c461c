"""Checks of a training step: finite loss and gradients, and fp32 storage of the parameters that need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dsv41.model import DeepseekV41ForCausalLM
from dsv41.moe import Router
from dsv41.ranks import local_rows
from lightning_modules.text import first_few


class NonFiniteError(RuntimeError):
    """Infinite or NaN loss or gradient."""


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


def require_whole_accumulation(asked: int, batches: float) -> None:
    """Raise unless an epoch has the micro-batches of an optimizer step: Lightning steps at the end of each epoch.

    Args:
        asked: ``trainer.accumulate_grad_batches``.
        batches: Training batches of an epoch on each rank.

    Raises:
        ValueError: The epoch is shorter.
    """
    if asked > batches:
        raise ValueError(
            f"trainer.accumulate_grad_batches: must be at most {int(batches)}, the batches of an epoch, got {asked}: "
            "an optimizer step ends with its epoch; give more text or a smaller data.batch_size"
        )


def _wide(model: DeepseekV41ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter) for name, parameter in model.named_parameters() if model.stays_fp32(name))
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield from ((f"{name}.{leaf}", getattr(module, leaf)) for leaf in ("bias", "bias_vl"))


def require_wide_parameters(model: DeepseekV41ForCausalLM) -> None:
    """Raise unless what has to stay fp32 (ARCHITECTURE 9) is stored in fp32, or in float64.

    These are mixing coefficients, sinks, pooling weights, the head, and the routers' biases. A cast of the whole model
    (``model.bfloat16()``) narrows them silently; training would continue with coefficients of three digits.

    Args:
        model: Whole or sharded; nothing is communicated, and every rank finds the same.

    Raises:
        ValueError: Names the first few that are narrower, with their dtype.
    """
    narrow = [f"{n} ({t.dtype})" for n, t in _wide(model) if t.dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise ValueError(
            f"parameters and buffers that have to stay fp32: {first_few(narrow)}; cast with "
            "model.cast_parameters(dtype), which leaves them out, or train with trainer.precision bf16-mixed"
        )
