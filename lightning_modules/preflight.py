"""Checks of a run that need no data, before the tokenizer is trained and anything is tokenised."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41TextConfig
from lightning_modules.budget import FP32, bytes_per_rank, named_parameters
from lightning_modules.optim.groups import OptimizerConfig
from lightning_modules.optim.schedule import ScheduleConfig
from lightning_modules.options.messages import nearest
from lightning_modules.strategy import EngramFSDPStrategy

PRECISIONS = ("32-true", "64-true", "bf16-mixed")


def require_trainer(trainer: L.Trainer) -> None:
    """Refuse a precision, a strategy or a device that the model cannot be trained with.

    Raises:
        ValueError: Begins with the option.
    """
    if trainer.precision not in PRECISIONS:
        raise ValueError(
            f"trainer.precision: must be one of {PRECISIONS}, got {trainer.precision!r}; the others would "
            "also cast what has to stay fp32 (mixing coefficients, router biases), or need a loss scaler"
        )
    strategy = trainer.strategy
    if trainer.world_size > 1 and not isinstance(strategy, EngramFSDPStrategy):
        raise ValueError(
            f"trainer.strategy: {trainer.world_size} devices need engram_fsdp (see configs/strategy), got "
            f"{type(strategy).__name__}"
        )
    if isinstance(strategy, EngramFSDPStrategy):
        strategy.require_precision(trainer.precision)
    if strategy.root_device.type == "mps":
        raise ValueError("trainer.accelerator: mps has neither float8 nor float64; use cpu")


def require_table_rule(backend: BackendConfig, optimizer: OptimizerConfig) -> None:
    """Refuse row-sparse gradients for an optimizer that takes dense ones only; ValueError begins with the option."""
    if backend.sparse_table_gradient and optimizer.tables == "dense":
        raise ValueError(
            "model.backend.sparse_table_gradient: must be false with model.optimizer.tables 'dense', which takes "
            "dense gradients only; with 'rows' gradients are row-sparse either way"
        )


def require_rows_fit(length: int | None, config: DeepseekV41TextConfig) -> None:
    """Refuse rows that are longer than the model takes.

    Args:
        length: Tokens in a row, or None where the data module does not say.
        config: Of the model.

    Raises:
        ValueError: Begins with the option.
    """
    if length is not None and length > config.max_position_embeddings:
        raise ValueError(
            f"data.sequence_length: {length} exceeds model.config.max_position_embeddings="
            f"{config.max_position_embeddings}"
        )


def require_batch_divides(batch_size: int | None, trainer: L.Trainer) -> None:
    """Refuse batches of fewer rows than there are processes; ValueError begins with the option."""
    if batch_size is not None and batch_size < trainer.world_size:
        raise ValueError(
            f"data.batch_size: must be at least the number of processes, {trainer.world_size}, since a batch is "
            f"divided among them, got {batch_size}"
        )


def require_schedule_length(schedule: ScheduleConfig, trainer: L.Trainer) -> None:
    """Refuse a schedule that needs a length in a run that has none; ValueError begins with the option."""
    endless = trainer.max_steps == -1 and trainer.max_epochs == -1
    if schedule.name != "constant" and schedule.total_steps is None and endless:
        raise ValueError(
            f"model.schedule.total_steps: {schedule.name!r} needs the number of steps; set it, trainer.max_steps or "
            "trainer.max_epochs"
        )


def require_buildable(
    config: DeepseekV41TextConfig, trainer: L.Trainer, vocab_size: int | None, optimizer: OptimizerConfig | None
) -> None:
    """Build the model's modules without memory, and refuse a model that no memory here can hold.

    Args:
        config: Of the model.
        trainer: Its devices.
        vocab_size: In place of one that the tokenizer will say; None is the smallest possible.
        optimizer: Of a run that trains; None counts weights alone.

    Raises:
        ValueError: A size cannot be built, or the model is too large; begins with the option.
    """
    known = config
    if config.vocab_size is None:
        known = DeepseekV41TextConfig(
            **(config.fields() | {"vocab_size": max(vocab_size or 0, config.engram_pad_token_id + 1)})
        )
    with torch.random.fork_rng(devices=[]):
        parameters = named_parameters(known)
    DeepseekV41Config(text_config=known)
    count = sum(parameter.numel() for parameter in parameters.values())
    needed = count * FP32 if optimizer is None else bytes_per_rank(parameters, optimizer, 1).total
    memory = _memory(trainer)
    if memory is not None and needed > memory:
        held = "weights" if optimizer is None else "weights, gradients and optimizer state"
        raise ValueError(
            f"model.config: {count:,} parameters take {needed / 1e9:,.1f} GB in fp32 ({held}), and all of this run's "
            f"memory is {memory / 1e9:,.1f} GB; `dsv41 inspect` shows what a configuration takes"
        )


def _memory(trainer: L.Trainer) -> int | None:
    """Bytes that all devices of a run have together, as far as this process can see; None if unknown."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory * trainer.world_size
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * trainer.num_nodes
    except (ValueError, OSError, AttributeError):  # not every system says
        return None


def require_writable(trainer: L.Trainer) -> None:
    """Refuse folders for curves and checkpoints that cannot be made or written.

    Raises:
        NotADirectoryError: A file is in the way; begins with the option.
        PermissionError: Likewise.
    """
    folders: dict[str, list[str | None]] = {
        "trainer.logger.init_args.save_dir": [logger.save_dir for logger in trainer.loggers],
        "trainer.default_root_dir": [] if trainer.loggers else [trainer.default_root_dir],
    }
    for option, found in folders.items():
        for folder in found:
            if folder is None or "://" in str(folder):
                continue
            path = Path(folder).expanduser().absolute()
            there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
            if not there.is_dir():
                raise NotADirectoryError(f"{option}: {there} is a file, and a folder is to be made at {path}")
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(f"{option}: {there} cannot be written by this user")


def require_monitors(trainer: L.Trainer, known: Iterable[str]) -> None:
    """Refuse callbacks that watch a number that this project does not log; others' callbacks may log more.

    Args:
        trainer: Its callbacks.
        known: Names of all numbers; a name that ends with a slash stands for all that begin with it.

    Raises:
        ValueError: Names the callback and the nearest number.
    """
    names = list(known)
    ours = ("lightning.pytorch.", "lightning_modules.")
    if not all(type(callback).__module__.startswith(ours) for callback in _callbacks(trainer)):
        return
    for callback in _callbacks(trainer):
        if not isinstance(callback, EarlyStopping | ModelCheckpoint) or callback.monitor is None:
            continue
        monitor = callback.monitor
        groups = [name for name in names if name.endswith("/")]
        if monitor in names or monitor.startswith(tuple(groups)):
            continue
        single = ", ".join(name for name in names if name.startswith("val/"))
        raise ValueError(
            f"trainer.callbacks: {type(callback).__name__}.init_args.monitor: there is no number {monitor!r}"
            f"{nearest(monitor, names) or f'; such as {single}'}"
        )


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def require_options_of_trainer(options: dict[str, Any]) -> None:
    """Refuse, in this project's words, what Lightning refuses in the middle of building a trainer.

    Args:
        options: Of the trainer, with callbacks built.

    Raises:
        ValueError: Begins with the option.
    """
    shares = options.get("val_check_interval")
    if options.get("check_val_every_n_epoch", 1) is None and isinstance(shares, float) and math.isfinite(shares):
        raise ValueError(
            f"trainer.val_check_interval: must be a number of batches with check_val_every_n_epoch null, got {shares}: "
            "there is no epoch that it is a share of"
        )
