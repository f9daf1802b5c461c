"""A checkpoint whose checksums are right and whose values are not is refused, with the part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_modules.checkpoint.structure import require_structure


def checkpoint(**changes: Any) -> dict[str, Any]:
    """The parts that a run is resumed from."""
    counts = {"ready": 2, "completed": 2}
    progress = {"total": counts, "current": counts, "is_last_batch": False}
    whole: dict[str, Any] = {
        "epoch": 0,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"weight": torch.zeros(2)},
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
        "optimizer_states": [
            {"param_groups": [{"lr": 0.1, "params": [0]}], "state": {0: {"step": 1.0, "exp_avg": torch.zeros(2)}}}
        ],
        "lr_schedulers": [{"last_epoch": 2, "base_lrs": [0.1], "_last_lr": [0.1]}],
        "dsv41": {"text_config": {"hidden_size": 1}, "tokens_seen": 3},
    }  # fmt: skip
    return whole | changes


def test_what_a_run_writes_passes() -> None:
    require_structure(Path("a.ckpt"), checkpoint(), training=True)


def test_only_training_needs_progress_and_optimizers() -> None:
    require_structure(Path("a.ckpt"), checkpoint(loops=None, optimizer_states=None, lr_schedulers=3), training=False)


def test_anothers_checkpoint_is_left_to_the_next_check() -> None:
    require_structure(Path("a.ckpt"), {"state_dict": 3}, training=True)


GROUPS = [{"lr": 0.1, "params": [0]}]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"epoch": -1}, "epoch"),
        ({"global_step": None}, "global_step"),
        ({"global_step": True}, "global_step"),
        ({"pytorch-lightning_version": 0}, "pytorch-lightning_version"),
        ({"pytorch-lightning_version": "new"}, "pytorch-lightning_version"),
        ({"state_dict": []}, "state_dict"),
        ({"state_dict": {"a": 1}}, "state_dict"),
        ({"dsv41": {"text_config": 3}}, "dsv41"),
        ({"dsv41": {"text_config": {}, "tokens_seen": "x"}}, "dsv41.tokens_seen"),
        ({"loops": None}, "loops"),
        ({"loops": {}}, "loops"),
        ({"loops": {"fit_loop": {}}}, "loops"),
        ({"loops": {"fit_loop": {"epoch_progress": {}}}}, "loops.fit_loop.epoch_progress"),
        ({"loops": {"fit_loop": {"a_progress": {"total": {"ready": -1}}}}}, "loops.fit_loop.a_progress.total.ready"),
        ({"optimizer_states": {}}, "optimizer_states"),
        ({"optimizer_states": []}, "optimizer_states"),
        ({"optimizer_states": [[1]]}, "optimizer_states[0]"),
        ({"optimizer_states": [{"param_groups": "x", "state": {}}]}, "optimizer_states[0].param_groups"),
        ({"optimizer_states": [{"param_groups": [3], "state": {}}]}, "optimizer_states[0].param_groups[0]"),
        ({"optimizer_states": [{"param_groups": GROUPS}]}, "optimizer_states[0].state"),
        ({"optimizer_states": [{"param_groups": GROUPS, "state": {0: ""}}]}, "optimizer_states[0].state[0]"),
        ({"lr_schedulers": {}}, "lr_schedulers"),
        ({"lr_schedulers": 3}, "lr_schedulers"),
        ({"lr_schedulers": [{}]}, "lr_schedulers[0]"),
        ({"lr_schedulers": [{"last_epoch": "2"}]}, "lr_schedulers[0].last_epoch"),
        ({"lr_schedulers": [{"base_lrs": [float("nan")]}]}, "lr_schedulers[0].base_lrs"),
    ],
)
def test_a_part_of_another_kind_is_named(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ckpt_path: a.ckpt: {part}: must ")):
        require_structure(Path("a.ckpt"), checkpoint(**changes), training=True)
