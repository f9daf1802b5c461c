"""Notebook helpers that know the command line: open or train a model, and get a batch of its validation text."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lightning_modules.checkpoint.find import CONFIG, run_of
from lightning_modules.cli import DeepseekV41CLI


def arguments(config: str, *options: str, checkpoint: str | None = None) -> list[str]:
    """Arguments for ``get_cli(..., run=False)``.

    Args:
        config: File to start from where there is no checkpoint.
        *options: Options of the command line, which override any file.
        checkpoint: Of a run, whose ``config.yaml`` is taken in place of `config`.

    Raises:
        FileNotFoundError: The checkpoint does not exist, or has no ``config.yaml`` of its run beside its folder.
    """
    if checkpoint is None:
        return ["--config", config, *options]
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"checkpoint: {checkpoint} does not exist")
    saved = run_of(Path(checkpoint)) / CONFIG
    if not saved.is_file():
        raise FileNotFoundError(f"checkpoint: {checkpoint} has no configuration of its run at {saved}")
    return ["--config", str(saved), *options]


def train_or_load(cli: DeepseekV41CLI, checkpoint: str | None = None) -> None:
    """Train for ``trainer.max_steps``, or validate `checkpoint`; either leaves its weights in ``cli.model``."""
    if checkpoint is None:
        cli.model.train()  # `build` may have left it evaluating, in which indexers learn nothing
        cli.trainer.fit(cli.model, cli.datamodule)
    else:
        cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=checkpoint)
    cli.model.eval()


def build(cli: DeepseekV41CLI) -> None:
    """Build the model with its initial values, without training."""
    cli.model.configure_model()
    cli.model.eval()


def validation_batch(cli: DeepseekV41CLI, rows: int = 1) -> dict[str, Tensor]:
    """First rows of the validation text, on the model's device.

    Args:
        cli: After `train_or_load` or `build`.
        rows: At most a batch.

    Returns:
        `input_ids`, `attention_mask` and `labels`, int64 [rows, sequence_length].

    Raises:
        ValueError: There is no validation text, or its first batch has fewer than `rows`.
    """
    cli.datamodule.prepare_data()
    cli.datamodule.setup("validate")
    batch = next(iter(cli.datamodule.val_dataloader()))
    if not 1 <= rows <= len(batch["input_ids"]):
        raise ValueError(f"rows: must lie in 1..{len(batch['input_ids'])}, got {rows}")
    device = next(cli.model.parameters()).device
    return {name: batch[name][:rows].to(device) for name in ("input_ids", "attention_mask", "labels")}


def run_directory(cli: DeepseekV41CLI, checkpoint: str | None = None) -> Path:
    """Directory of a run's event files.

    Args:
        cli: After `train_or_load`.
        checkpoint: The run's, if it was not trained by `cli`.

    Raises:
        ValueError: No logger has written any.
    """
    if checkpoint is not None:
        return Path(checkpoint).absolute().parent.parent
    if cli.trainer.logger is None:
        raise ValueError("trainer.logger: must be a TensorBoardLogger, or there is no file to read curves from")
    assert cli.trainer.log_dir is not None
    return Path(cli.trainer.log_dir)
