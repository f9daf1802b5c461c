"""How a run has learned, as the model card says it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lightning_modules.optim.groups import OptimizerConfig
from lightning_modules.transfer.run_record import run_numbers


@pytest.mark.parametrize(
    ("optimizer", "layers", "name"),
    [
        (OptimizerConfig(), [1], "AdamW, Adam by rows for Engram tables"),
        (OptimizerConfig(), [], "AdamW"),
        (OptimizerConfig(tables="dense"), [1], "AdamW"),
        (OptimizerConfig(matrices="muon", tables="dense"), [1], "AdamW, Muon for hidden matrices"),
        (
            OptimizerConfig(matrices="muon"),
            [1],
            "AdamW, Muon for hidden matrices, Adam by rows for Engram tables",
        ),
        (None, [1], None),
    ],
)
def test_the_card_names_the_rules_that_were_used(
    optimizer: OptimizerConfig | None, layers: list[int], name: str | None, tmp_path: Path
) -> None:
    hyper: dict[str, Any] = {} if optimizer is None else {"optimizer": asdict(optimizer)}
    meta = {"dsv41": {"text_config": {"engram_layer_ids": layers}}, "hyper_parameters": hyper}
    assert run_numbers(meta, tmp_path).optimizer == name


def test_a_checkpoint_from_before_the_choice_was_adamws(tmp_path: Path) -> None:
    meta = {
        "dsv41": {"text_config": {"engram_layer_ids": [1]}},
        "hyper_parameters": {"optimizer": {"lr": 0.1, "weight_decay": 0.2}},
    }
    numbers = run_numbers(meta, tmp_path)
    assert (numbers.optimizer, numbers.learning_rate, numbers.weight_decay) == ("AdamW", 0.1, 0.2)
