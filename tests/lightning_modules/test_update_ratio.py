"""The ratio of updates to weights, against parameters copied around each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsv41.engram.table import EngramTable
from lightning_modules.callbacks import UpdateRatio
from lightning_modules.cli import DeepseekV41CLI, main
from lightning_modules.task import DeepseekV41Task

Curves = dict[str, dict[int, float]]


def part_by_hand(name: str) -> str:
    marks = {"engram.embed.": "engram_tables", "_hc.": "mhc", ".ffn.gate.": "router"}
    return next((part for mark, part in marks.items() if mark in name), "rest")


class ByHand(L.Callback):
    """Copies every parameter around every step, in float64, and notes which rows of tables have a gradient in it."""

    def __init__(self, rows_alone: bool) -> None:
        super().__init__()
        self.rows_alone = rows_alone
        self.before: dict[str, Tensor] = {}
        self.hit: dict[str, Tensor] = {}
        self.hit_shares: list[float] = []
        self.found: Curves = {}

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for name, module in pl_module.named_modules():
            if isinstance(module, EngramTable):
                assert module.weight.grad is not None
                self.hit[f"{name}.weight"] = module.weight.grad.to_dense().any(1).nonzero().squeeze(1)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.before:
            self.before = {name: p.detach().double().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        squares: dict[str, list[float]] = {}
        for name, parameter in pl_module.named_parameters():
            if ".indexer." in name or not parameter.requires_grad:
                continue
            old, new = self.before[name], parameter.detach().double()
            if self.rows_alone and name in self.hit:
                rows = self.hit[name]
                self.hit_shares.append(len(rows) / len(new))
                old, new = old[rows], new[rows]
            for part in (part_by_hand(name), "total"):
                sums = squares.setdefault(part, [0.0, 0.0])
                sums[0] += float((new - old).square().sum())
                sums[1] += float(old.square().sum())
        for part, (change, size) in squares.items():
            self.found.setdefault(f"within/update_ratio/{part}", {})[trainer.global_step - 1] = (change / size) ** 0.5
        self.before = {}


class SGDTask(DeepseekV41Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def ratios(folder: Path) -> Curves:
    """Curves of the first run under `folder`: by tag and step."""
    events = EventAccumulator(str(folder / "runs" / "nano" / "version_0"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("within/update_ratio/")]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def matches(found: Curves, expected: Curves) -> None:
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, rel=1e-5), tag


def fit_sgd(cli: DeepseekV41CLI) -> None:
    made = cli.model
    cli.trainer.fit(SGDTask(made.text_config, made.backend, tokenizer=made.tokenizer), cli.datamodule)


# Nothing but training.
BARE = ("--trainer.limit_val_batches", "0", "--checkpoint.every_n_steps", "100", "--trainer.max_steps", "3")
SPARSE = ("--model.backend.sparse_table_gradient", "true")
DENSE = ("--model.optimizer.tables", "dense")
ACCUMULATED = ("--trainer.accumulate_grad_batches", "2")


@pytest.mark.parametrize("options", [SPARSE, (*SPARSE, *ACCUMULATED), DENSE], ids=["rows", "accumulated", "dense"])
def test_sgd_moves_weights_by_what_is_logged(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path, options: tuple[str, ...]
) -> None:
    cli = nano_cli(*BARE, *options)
    by_hand = ByHand(rows_alone=options != DENSE)
    cli.trainer.callbacks.insert(0, by_hand)  # type: ignore[attr-defined]
    fit_sgd(cli)
    assert list(by_hand.found["within/update_ratio/total"]) == [0, 1, 2]
    matches(ratios(tmp_path), by_hand.found)
    assert options == DENSE or max(by_hand.hit_shares) < 1, "rows that are not read have to matter"


@pytest.mark.parametrize("options", [(), DENSE], ids=["rows", "dense"])
def test_adam_moves_weights_by_what_is_logged(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path, options: tuple[str, ...]
) -> None:
    cli = nano_cli(*BARE, *options, *ACCUMULATED)
    by_hand = ByHand(rows_alone=options != DENSE)
    cli.trainer.callbacks.insert(0, by_hand)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    found = ratios(tmp_path)
    matches(found, by_hand.found)
    assert set(found) == {f"within/update_ratio/{part}" for part in ("total", "engram_tables", "mhc", "router", "rest")}


def test_frozen_parameters_take_no_part(nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path) -> None:
    cli = nano_cli(*BARE)
    cli.model.configure_model()
    for name, parameter in cli.model.named_parameters():
        parameter.requires_grad = ".ffn.gate." not in name
    by_hand = ByHand(rows_alone=True)
    cli.trainer.callbacks.insert(0, by_hand)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    found = ratios(tmp_path)
    matches(found, by_hand.found)
    assert "within/update_ratio/router" not in found


class Weights(L.LightningModule):
    """Parameters with a gradient of one."""

    def __init__(self, *values: Tensor, lr: float = 1.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(values)
        self.lr = lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Points(Logger):
    """Keeps what a logger is given, by step."""

    name = version = "points"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith("within/update_ratio/")}
        self.points[step] = self.points.get(step, {}) | found

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Holding(L.Callback):
    """In which steps copies exist while the optimizer works; afterwards there must be none."""

    def __init__(self, watched: UpdateRatio) -> None:
        super().__init__()
        self.watched = watched
        self.steps: list[int] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if self.watched._before is not None:
            self.steps.append(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert self.watched._before is None


def train(
    module: Weights, callback: UpdateRatio, steps: int, log_every: int = 1
) -> tuple[list[int], dict[int | None, dict[str, float]]]:
    """Fit; the steps in which copies were held, and what has been logged by step."""
    points, holding = Points(), Holding(callback)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        log_every_n_steps=log_every,
        logger=points,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, holding],
    )
    trainer.fit(module, DataLoader([torch.zeros(1)] * steps))  # type: ignore[arg-type]
    return holding.steps, {step: values for step, values in points.points.items() if values}


@pytest.mark.parametrize(
    ("every_n_steps", "log_every", "steps"),
    [(1, 1, [0, 1, 2, 3]), (3, 1, [2]), (1, 2, [1, 3]), (4, 2, [3]), (0, 1, [])],
)
def test_steps_are_those_that_are_logged_and_asked_for(every_n_steps: int, log_every: int, steps: list[int]) -> None:
    callback = UpdateRatio(every_n_steps)
    held, logged = train(Weights(torch.full((3,), 9.0)), callback, 4, log_every)
    assert held == list(logged) == steps


def test_a_weight_that_stays_has_a_ratio_of_zero_and_weights_of_zero_have_none() -> None:
    stays = train(Weights(torch.ones(3), lr=0.0), UpdateRatio(), 1)
    assert stays == ([0], {0: {"within/update_ratio/rest": 0.0, "within/update_ratio/total": 0.0}})
    assert train(Weights(torch.zeros(3)), UpdateRatio(), 1) == ([0], {})


def test_sums_are_wide() -> None:
    """In fp32, squares of these weights would be infinite."""
    _, logged = train(Weights(torch.full((3,), 1e25), lr=1e23), UpdateRatio(), 1)
    assert logged[0]["within/update_ratio/total"] == pytest.approx(0.01, rel=1e-5)


def test_the_command_line_sets_it(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    for options, every_n_steps in (((), 1), (("--update_ratio.every_n_steps", "7"), 7)):
        (callback,) = (c for c in nano_cli(*options).trainer.callbacks if isinstance(c, UpdateRatio))  # type: ignore[attr-defined]
        assert callback.every_n_steps == every_n_steps


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^every_n_steps: must be at least 0 .*got -1"):
        UpdateRatio(every_n_steps=-1)


@pytest.mark.parametrize("option", ["every_n_step", "every_n_steps"])
def test_a_misspelt_option_or_value_ends_the_command(
    nano_args: list[str], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, f"--update_ratio.{option}", "never"])
    assert f"update_ratio.{option}" in capsys.readouterr().err
