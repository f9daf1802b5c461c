"""Looking at a model from outside while it is validated.

Nothing in the model knows of it: what is to be seen passes through the borders of its modules, as arguments and
results, and PyTorch's hooks are the taps there. They exist during a validation that somebody looks at, and at no other
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_modules.training.lightning_private import log_to_loggers


class ValidationObserver(Callback):
    """Looks at the first batches of every validation and logs when they are over.

    Subclasses begin anew in `listen`, where they place their taps with `before` and `after`, and log in `report`, which
    all ranks call. The sanity check before training is not looked at.

    Args:
        batches: Validation batches that are looked at; 0 switches it off.

    Raises:
        ValueError: `batches` is negative.
    """

    def __init__(self, batches: int) -> None:
        super().__init__()
        if batches < 0:
            raise ValueError(f"batches: must be at least 0, got {batches}")
        self.batches = batches
        self.batch: Any = None  # the one that is looked at
        self._active = False
        self._hooks: list[RemovableHandle] = []

    def listen(self, pl_module: L.LightningModule) -> None:
        """Forget what the validation before has shown, and place the taps."""
        raise NotImplementedError

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what has been seen."""
        raise NotImplementedError

    def before(self, module: nn.Module, see: Callable[[tuple[Any, ...]], None]) -> None:
        """Call `see` with the arguments of each forward of `module` in a batch that is looked at."""

        @torch.no_grad()
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if self.batch is not None:
                see(arguments)

        self._hooks.append(module.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        """Likewise with the result."""

        @torch.no_grad()
        def hook(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            if self.batch is not None:
                see(result)

        self._hooks.append(module.register_forward_hook(hook))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen, if anything is to be looked at."""
        self._stop()
        if self.batches > 0 and not trainer.sanity_checking:
            self._active = True
            self.listen(pl_module)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Look at the first batches."""
        self.batch = batch if self._active and batch_idx < self.batches else None

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Look away."""
        self.batch = None

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log."""
        if self._active:
            self.report(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen no more."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._stop()

    def _stop(self) -> None:
        self._active, self.batch = False, None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def over_ranks(trainer: L.Trainer, values: Tensor, operation: str = "sum") -> Tensor:
    """`values` of all ranks, added up ("sum") or the largest ("max"); may overwrite them."""
    total = trainer.strategy.reduce(values, reduce_op=operation)
    assert isinstance(total, Tensor)
    return total


def log_details(trainer: L.Trainer, values: dict[str, Any]) -> None:
    """Give numbers of all ranks to the loggers, at the step that everything else in this validation has.

    Not `pl_module.log`: there would be a hundred more lines under ``dsv41 validate``, and an exchange of the ranks for
    each.
    """
    log_to_loggers(trainer, {name: torch.as_tensor(value) for name, value in values.items()})


def log(pl_module: L.LightningModule, name: str, value: Tensor | float) -> None:
    """Log a number of all ranks in brief, as ``val/NAME``. Each of them has it; the maximum keeps it as it is."""
    pl_module.log(name, float(value), sync_dist=True, reduce_fx="max")
