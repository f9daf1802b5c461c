"""The command line of the smallest run, studies of it, and float64 for comparisons beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

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


@pytest.fixture(scope="session")
def make_study_file(make_nano_args: Callable[[Path], list[str]], corpus: Path, cache: Path) -> Callable[..., Path]:
    """Write a study of the smallest run into a folder, and its output there: ``make_study_file(folder, seeds=[0])``."""

    def write(folder: Path, **changes: Any) -> Path:
        make_nano_args(folder)
        options = {
            "data": {"source": str(corpus), "cache_dir": str(cache)},
            "trainer": {"logger": {"init_args": {"save_dir": str(folder / "runs")}}},
        }
        content = {
            "base": {"config": ["nano.yaml"], "options": options},
            "variants": {"no_engram": {"options": {"model": {"config": {"engram_layer_ids": []}}}}},
            "seeds": [0, 1],
            "output": str(folder / "out"),
        }
        path = folder / "some.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return write


@pytest.fixture
def study_file(make_study_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`make_study_file` into ``tmp_path``."""
    return lambda **changes: make_study_file(tmp_path, **changes)
