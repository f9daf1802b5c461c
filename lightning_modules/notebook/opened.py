"""A trained model and a batch of text to look at, from objects of the command line."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_modules.checkpoint.find import CONFIG, run_of
from lightning_modules.cli import DeepseekV41CLI


def arguments(config: str, *options: str, checkpoint: str | None = None) -> list[str]:
    """Arguments for ``get_cli(..., run=False)``.

    Args:
        config: File to start from where there is no checkpoint.
        *options: Options of the command line, which count more than any file.
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
    """Build the model with its initial values, where nothing is to be trained."""
    cli.model.configure_model()
    cli.model.eval()


def validation_batch(cli: DeepseekV41CLI, rows: int = 1) -> dict[str, Tensor]:
    """The first rows of the validation text, on the model's device.

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


def texts_of(cli: DeepseekV41CLI, ids: Tensor) -> list[str]:
    """The text of each token of a row [S]."""
    decode = cli.datamodule.fast_tokenizer.decode
    return [decode([int(token)]) for token in torch.as_tensor(ids)]
