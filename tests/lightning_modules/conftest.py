"""The command line of the smallest run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_modules.cli import DeepseekV41CLI, get_cli


@pytest.fixture
def nano_cli(nano_args: list[str]) -> Callable[..., DeepseekV41CLI]:
    """Build the objects of a run: ``nano_cli("--trainer.max_steps", "2")``."""

    def make(*extra: str) -> DeepseekV41CLI:
        return get_cli([*nano_args, *extra], run=False)

    return make
