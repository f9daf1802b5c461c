"""Seeing what passes the borders of modules in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsv41.model import DeepseekV41ForCausalLM

# What is called with the arguments and the result of a module's forward.
See = Callable[[tuple[Any, ...], Any], None]


@torch.no_grad()
def watch(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor], taps: Iterable[tuple[nn.Module, See]]) -> None:
    """Run one forward; hooks exist for that long.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, [B, S].
        taps: Modules, each with who sees what it is given and what it makes of it.
    """

    def tap(see: See) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            see(given, made)

        return hook

    handles = [module.register_forward_hook(tap(see)) for module, see in taps]
    try:
        model(batch["input_ids"], attention_mask=batch["attention_mask"])
    finally:
        for handle in handles:
            handle.remove()
