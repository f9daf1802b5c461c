"""The training step against a gradient written out; every token with the same weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from dsv41 import DeepseekV41Config
from dsv41.config import IGNORE_INDEX
from dsv41.ops.cross_entropy import causal_lm_loss
from lightning_modules.data import TextDataModule
from lightning_modules.optim.groups import OptimizerConfig
from lightning_modules.optim.schedule import ScheduleConfig
from lightning_modules.task import DeepseekV41Task
from lightning_modules.training.checks import NonFiniteError


class SGDTask(DeepseekV41Task):
    """Plain SGD: a constant factor in the gradient shows, which AdamW would hide."""

    rate = 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Record(L.Callback):
    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        for name, value in trainer.callback_metrics.items():
            self.values.setdefault(name, []).append(float(value))


class Points(Logger):
    """Keeps the training losses that a logger is given."""

    name = version = "points"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int | None, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            self.points.append((step, metrics["train/loss"]))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def make_batches(count: int, rows: int = 2, length: int = 12) -> list[dict[str, Tensor]]:
    """Batches whose rows have different numbers of live labels; one has none at all."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for index in range(count):
        ids = torch.randint(3, 500, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        labels = ids.clone()
        mask[1, length - 2 * index :] = 0
        labels[mask == 0] = IGNORE_INDEX
        labels[0, : 3 * index] = IGNORE_INDEX
        if index == 2:
            labels[:] = IGNORE_INDEX
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "row_id": torch.arange(rows)})
    return batches


def loader(batches: list[dict[str, Tensor]]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def make_task(cls: type[DeepseekV41Task], config: DeepseekV41Config, tokenizer: Any, **kwargs: Any) -> DeepseekV41Task:
    torch.manual_seed(0)
    task = cls(config.text_config, **kwargs)
    task.tokenizer = tokenizer
    task.register_buffer("token_bytes", torch.arange(512) % 5 + 1, persistent=False)
    task.configure_model()
    return task


def fit(task: DeepseekV41Task, batches: list[dict[str, Tensor]], **kwargs: Any) -> Record:
    record = Record()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[record],
        **kwargs,
    )
    trainer.fit(task, loader(batches))
    return record


def oracle_gradient(model: torch.nn.Module, batches: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """Gradient and value of the mean loss over all live labels of all batches, in one go per batch."""
    model = copy.deepcopy(model)
    tokens = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
    value = 0.0
    for batch in batches:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = causal_lm_loss(logits, batch["labels"]).nats / tokens
        loss.backward()
        value += float(loss.detach())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, value


def assert_moved(before: torch.nn.Module, after: torch.nn.Module, gradients: dict[str, Tensor]) -> None:
    """One step of `SGDTask` along `gradients`, by the norm of every parameter: single entries may cancel, and what
    is left of them depends on the CPU."""
    old = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        moved = (old[name] - parameter).detach() / SGDTask.rate
        gradient = gradients.get(name, torch.zeros_like(moved))
        rounding = 1e-15 * float(parameter.detach().norm())  # of the difference above
        assert float((moved - gradient).norm()) <= 1e-9 * float(gradient.norm()) + rounding, name


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_is_the_gradient_of_the_mean_over_its_tokens(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any, accumulate: int
) -> None:
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    before = copy.deepcopy(task.built)
    batches = make_batches(3)[:accumulate] if accumulate == 1 else make_batches(3)
    expected, value = oracle_gradient(before, batches)
    record = fit(task, batches, accumulate_grad_batches=accumulate)
    assert_moved(before, task.built, expected)
    assert record.values["train/loss"][-1] == pytest.approx(value, rel=1e-6)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert record.values["train/grad_norm"][-1] == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.usefixtures("double")
def test_an_unfinished_accumulation_at_the_end_weighs_its_own_tokens(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    batches = make_batches(4)
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    fit(task, batches[:3], accumulate_grad_batches=3)
    middle = copy.deepcopy(task.built)
    expected, _ = oracle_gradient(middle, batches[3:])
    whole = make_task(SGDTask, tiny_config(), golden_tokenizer)
    fit(whole, batches, accumulate_grad_batches=3)
    assert_moved(middle, whole.built, expected)


@pytest.mark.usefixtures("double")
def test_clipping_scales_the_finished_gradient(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    batches = make_batches(2)
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    before = copy.deepcopy(task.built)
    expected, _ = oracle_gradient(before, batches)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    limit = norm / 7
    record = fit(task, batches, accumulate_grad_batches=2, gradient_clip_val=limit)
    assert record.values["train/grad_norm"][-1] == pytest.approx(norm, rel=1e-6), "logged before clipping"
    old = dict(before.named_parameters())
    moved = torch.cat([(old[n] - p).detach().flatten() for n, p in task.built.named_parameters()]) / SGDTask.rate
    assert float(moved.norm()) == pytest.approx(limit, rel=1e-5)


def test_a_batch_without_labels_changes_nothing(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    before = copy.deepcopy(task.built.state_dict())
    record = fit(task, make_batches(3)[2:])
    assert record.values["train/loss"] == [0.0]
    assert all(torch.equal(value, before[name]) for name, value in task.built.state_dict().items())


@pytest.mark.usefixtures("double")
def test_validation_is_the_same_for_any_batch_size(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer)
    batches = make_batches(4)
    rows = [{name: value[i : i + 1] for name, value in batch.items()} for batch in batches for i in range(2)]
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    results = [trainer.validate(task, loader(data), verbose=False)[0] for data in (batches, rows)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    nats = tokens = byte_count = 0.0
    for batch in batches:
        with torch.no_grad():
            logits = task.built(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        nats += float(causal_lm_loss(logits, batch["labels"]).nats)
        live = batch["labels"][:, 1:][batch["labels"][:, 1:] != IGNORE_INDEX]
        tokens += len(live)
        byte_count += float((live % 5 + 1).sum())
    assert results[0]["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert results[0]["val/bits_per_byte"] == pytest.approx(nats / 0.6931471805599453 / byte_count, rel=1e-5)


def test_bits_per_byte_count_the_text_that_a_tokenizer_loses(
    tiny_config: Callable[..., DeepseekV41Config],
    golden_tokenizer: Any,
) -> None:
    class Lossy(TextDataModule):
        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str) -> None:
            pass

        def val_dataloader(self) -> Any:
            return loader(make_batches(4))

        def text_bytes_per_token_byte(self, split: str) -> float:
            return {"val": 1.25}[split]

    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    tokens = trainer.validate(task, loader(make_batches(4)), verbose=False)[0]
    text = trainer.validate(task, datamodule=Lossy(sequence_length=12), verbose=False)[0]
    assert text["val/loss"] == tokens["val/loss"]
    assert text["val/bits_per_byte"] == pytest.approx(tokens["val/bits_per_byte"] / 1.25, rel=1e-6)


def test_predict_gives_the_most_likely_next_tokens(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer)
    batch = make_batches(1)[0]
    out = task.predict_step(batch, 0)
    probabilities = task.built(batch["input_ids"]).logits.double().softmax(-1)
    assert torch.equal(out["next_token"], probabilities.argmax(-1))
    torch.testing.assert_close(out["log_probability"].double().exp(), probabilities.max(-1).values)


def test_a_loss_that_is_not_finite_names_step_and_parameter(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    with torch.no_grad():
        task.built.model.layers[2].ffn.experts.w2[5, 3, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"step 1; parameters .*: model\.layers\.2\.ffn\.experts\.w2$"):
        fit(task, make_batches(1))


def test_a_gradient_that_is_not_finite_names_step_and_parameter(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any
) -> None:
    task = make_task(SGDTask, tiny_config(), golden_tokenizer)
    calls = []

    def poison(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * float("inf") if len(calls) == 2 else gradient

    task.built.model.layers[1].attn.wo_b.weight.register_hook(poison)
    with pytest.raises(NonFiniteError, match=r"step 2; gradients .*: model\.layers\.1\.attn\.wo_b\.weight$"):
        fit(task, make_batches(2))


def test_short_runs_log_every_step(tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any) -> None:
    logger = Points()
    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer, schedule=ScheduleConfig(warmup_steps=1))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=50,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader(make_batches(3)))
    assert [step for step, _ in logger.points] == [0, 1, 2]


def test_the_model_is_built_once(tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any) -> None:
    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer, optimizer=OptimizerConfig(lr=1e-3))
    model = task.built
    task.configure_model()
    assert task.built is model
    with pytest.raises(RuntimeError, match="configure_model"):
        _ = DeepseekV41Task(tiny_config().text_config).built


def test_the_seed_decides_the_run(tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Any) -> None:
    losses = []
    for seed in (0, 0, 1):
        L.seed_everything(seed, verbose=False)
        task = DeepseekV41Task(tiny_config().text_config)
        task.tokenizer = golden_tokenizer
        losses.append(fit(task, make_batches(2)).values["train/loss"])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
