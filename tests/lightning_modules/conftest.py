"""The command line of the smallest run, and float64 for comparisons beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_modules.cli import DeepseekV41CLI, get_cli


@pytest.fixture
def double() -> Iterator[None]:
    """Everything made in the test is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def nano_cli(nano_args: list[str]) -> Callable[..., DeepseekV41CLI]:
    """Build the objects of a run: ``nano_cli("--trainer.max_steps", "2")``."""

    def make(*extra: str) -> DeepseekV41CLI:
        return get_cli([*nano_args, *extra], run=False)

    return make
