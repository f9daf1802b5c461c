"""Forward hooks: looking at a model from outside, in one forward (`watch`) or in validation (`ValidationObserver`).

The model is not changed. What is shown are arguments and results of its modules, and hooks exist only while something
is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsv41.model import DeepseekV41ForCausalLM
from lightning_modules.training.lightning_private import log_to_loggers

# First part of the tags of everything diagnostic. TensorBoard sorts by tag, and this is behind train/ and val/.
WITHIN = "within"


class Taps:
    """Forward hooks of modules that are removed together; a context manager that does it at its end."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, see: Callable[[tuple[Any, ...]], None]) -> None:
        """Call `see` with the arguments of each forward of `module`, without gradients."""

        @torch.no_grad()
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            see(arguments)

        self._handles.append(module.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, see: Callable[[tuple[Any, ...], Any], None]) -> None:
        """Call `see` with the arguments and the result of each forward of `module`, without gradients."""

        @torch.no_grad()
        def hook(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            see(arguments, result)

        self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Taps:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@torch.no_grad()
def watch(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor], listen: Callable[[Taps], None]) -> None:
    """Run one forward with hooks.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, int64 [B, S].
        listen: Places the hooks.
    """
    with Taps() as taps:
        listen(taps)
        model(batch["input_ids"], attention_mask=batch["attention_mask"])


class ValidationObserver(Callback):
    """Looks at the first batches of every validation and logs when they are over.

    Subclasses start anew in `listen`, where they place their hooks, and log in `report`, which all ranks call. The
    sanity check before training is not looked at.

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
        self._taps = Taps()

    def listen(self, pl_module: L.LightningModule) -> None:
        """Forget the validation before, and place the hooks."""
        raise NotImplementedError

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what was seen."""
        raise NotImplementedError

    def before(self, module: nn.Module, see: Callable[[tuple[Any, ...]], None]) -> None:
        """`Taps.before` in the batches that are looked at."""
        self._taps.before(module, lambda arguments: None if self.batch is None else see(arguments))

    def after(self, module: nn.Module, see: Callable[[tuple[Any, ...], Any], None]) -> None:
        """`Taps.after` in the batches that are looked at."""
        self._taps.after(module, lambda arguments, result: None if self.batch is None else see(arguments, result))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Place the hooks, if anything is to be looked at."""
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
        """Remove the hooks."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the hooks."""
        self._stop()

    def _stop(self) -> None:
        self._active, self.batch = False, None
        self._taps.remove()


def over_ranks(trainer: L.Trainer, values: Tensor, operation: str = "sum") -> Tensor:
    """`values` of all ranks, added up ("sum") or the largest ("max"); may overwrite them."""
    total = trainer.strategy.reduce(values, reduce_op=operation)
    assert isinstance(total, Tensor)
    return total


def log_details(trainer: L.Trainer, values: Mapping[str, Any]) -> None:
    """Log numbers of all ranks as ``within/NAME``, at the step of everything else that is logged now.

    Not `pl_module.log`: there would be a hundred more lines under ``dsv41 validate``, and an exchange of the ranks for
    each.
    """
    log_to_loggers(trainer, {f"{WITHIN}/{name}": torch.as_tensor(value) for name, value in values.items()})


def log(pl_module: L.LightningModule, name: str, value: Tensor | float, constant: bool = False) -> None:
    """Log a number of all ranks as ``within/NAME``, and show it under ``dsv41 validate``.

    Args:
        pl_module: Logs.
        name: Of the number.
        value: Equal on all ranks.
        constant: It stays the same in a run, so it is no curve of fit.
    """
    logger = False if constant and pl_module.trainer.state.fn == TrainerFn.FITTING else None
    # The maximum over equal numbers keeps them as they are.
    pl_module.log(f"{WITHIN}/{name}", float(value), sync_dist=True, reduce_fx="max", logger=logger)
