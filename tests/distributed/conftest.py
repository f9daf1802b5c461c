"""Trainings that several files compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_runs import Runs

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import save_released
from lightning_modules.cli import get_cli


@pytest.fixture(scope="session")
def runs(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the smallest configuration in float64."""
    options = [*make_nano_args(tmp_path_factory.mktemp("options")), "--trainer.precision", "64-true"]
    base = tmp_path_factory.mktemp("runs")
    task = get_cli(options, run=False).model
    torch.manual_seed(7)
    model = DeepseekV41ForCausalLM(DeepseekV41Config(text_config=task.text_config), tokenizer=task.tokenizer)
    save_released(model, base / "released", quantized=True)
    return Runs(base, options, base / "released")
