"""Evaluation and prediction of rows that no number of ranks divides, on one process, on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_runs import OF_THE_MACHINE, Runs

from lightning_modules.callbacks import PredictionFile
from lightning_modules.cli import get_cli

# Lightning's own code on the newest torch, where ranks gather predictions.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning")

EVERY_ROW = ("--data.batch_size", "5", "--trainer.limit_val_batches", "1.0", "--trainer.max_steps", "2")


def evaluate(options: list[str], rank: int = 0) -> dict[str, Any] | None:
    """Fit, validate, test, predict and fit again with one trainer; all metrics, and the rows that rank 0 predicts."""
    cli = get_cli([*options, *EVERY_ROW], run=False)
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    trainer.fit(model, data)
    found: dict[str, Any] = {f"fit/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    for stage in ("validate", "test"):
        found |= {f"{stage}/{n}": v for n, v in getattr(trainer, stage)(model, data, verbose=False)[0].items()}
    best = trainer.checkpoint_callbacks[0].best_model_path
    found |= {f"best/{n}": v for n, v in trainer.validate(model, data, ckpt_path=best, verbose=False)[0].items()}
    trainer.callbacks.append(PredictionFile())
    predictions = trainer.predict(model, data)
    found["predicted rows"] = [row for part in predictions or [] for row in part["row_id"].tolist()]
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, data)
    found |= {f"again/{name}": float(value) for name, value in trainer.callback_metrics.items()}
    return found if rank == 0 else None


def evaluated(runs: Runs, ranks: int | None) -> dict[str, Any]:
    found: dict[str, Any] = runs.call(evaluate, ranks, "evaluated", "evaluated")
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_counts_every_row_once(runs: Runs, ranks: int) -> None:
    ours, plain = evaluated(runs, ranks), evaluated(runs, None)
    assert ours.keys() == plain.keys()
    assert {"fit/val/loss", "validate/val/loss", "test/test/loss", "best/val/loss", "again/val/loss"} <= plain.keys()
    for name, value in plain.items():
        if name != "predicted rows" and not name.endswith(OF_THE_MACHINE):
            assert ours[name] == pytest.approx(value, rel=1e-6), name
    assert plain["validate/val/loss"] == plain["best/val/loss"] == plain["fit/val/loss"]
    assert plain["again/val/loss"] != plain["fit/val/loss"]
    mine = [row for row in ours["predicted rows"] if row >= 0]
    batches = [plain["predicted rows"][start : start + 5] for start in range(0, len(plain["predicted rows"]), 5)]
    assert mine == [row for batch in batches for row in batch[::ranks]]  # those of rank 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_file_of_predictions_has_every_row_in_its_order(runs: Runs, ranks: int) -> None:
    evaluated(runs, ranks), evaluated(runs, None)
    ours, plain = (
        torch.load(next(runs.log(number, "evaluated").parent.rglob("predictions.pt")), weights_only=True)
        for number in (ranks, None)
    )
    assert torch.equal(plain["row_id"], torch.arange(len(plain["row_id"])))
    assert torch.equal(ours["row_id"], plain["row_id"])
    assert torch.equal(ours["next_token"], plain["next_token"])
    assert torch.allclose(ours["log_probability"], plain["log_probability"], rtol=1e-9)


def test_one_device_without_the_strategy_evaluates_what_three_ranks_saved(runs: Runs) -> None:
    expected = evaluated(runs, 3)
    best = runs.log(3, "evaluated") / "checkpoints" / "best.ckpt"
    assert best.is_dir()
    cli = runs.cli("--trainer.limit_val_batches", "1.0", "--trainer.logger", "false")
    (metrics,) = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=str(best), verbose=False)
    # The best is that of the second fit, which the "again" values are about.
    assert metrics["val/loss"] == pytest.approx(expected["again/val/loss"], rel=1e-6)
