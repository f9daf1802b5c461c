"""What the language model's loss does not reach: selection biases, the balance loss and indexers, in training.

Oracles listen to routers and attentions and count, by loops and without the batch's padding, on their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.config import IGNORE_INDEX
from dsv41.moe import Router, Routing
from dsv41.ops.cross_entropy import causal_lm_loss
from lightning_modules.cli import DeepseekV41CLI, main
from lightning_modules.task import DeepseekV41Task, IndexerConfig

MakeConfig = Callable[..., DeepseekV41Config]
Batch = dict[str, Tensor]
State = dict[str, Tensor]

EXPERTS, LAYERS = 8, 6
# A power of two, so that biases are exact sums.
RATE = 2.0**-6


class SGDTask(DeepseekV41Task):
    """Plain SGD: a factor in the gradient shows."""

    rate = 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def make_batches(count: int, rows: int = 2, length: int = 20) -> list[Batch]:
    """Batches with more and more padding, whose live tokens are not all predicted."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for index in range(count):
        ids = torch.randint(3, 500, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 4 * (index % 4) :] = 0
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        labels[0, : 3 * (index % 3)] = IGNORE_INDEX
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "row_id": torch.arange(rows)})
    return batches


def loader(batches: list[Batch]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def make_task(cls: type[DeepseekV41Task], config: DeepseekV41Config, tokenizer: Any, **options: Any) -> DeepseekV41Task:
    torch.manual_seed(0)
    task = cls(config.text_config, **options)
    task.tokenizer = tokenizer
    task.register_buffer("token_bytes", torch.ones(512, dtype=torch.int64), persistent=False)
    task.configure_model()
    return task


def fit(task: DeepseekV41Task, batches: list[Batch], *callbacks: L.Callback, **options: Any) -> L.Trainer:
    validated = options.pop("validated", None)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(task, loader(batches), None if validated is None else loader(validated))
    return trainer


def state(task: DeepseekV41Task) -> State:
    return {name: value.clone() for name, value in task.built.state_dict().items()}


def biases(values: State, kind: str) -> list[list[float]]:
    """`bias` or `bias_vl` of every layer."""
    return [values[f"model.layers.{layer}.ffn.gate.{kind}"].tolist() for layer in range(LAYERS)]


class RouterWatch(L.Callback):
    """Keeps the experts that each training batch's tokens were sent to, by layer; a repeated forward replaces them."""

    def __init__(self) -> None:
        self.experts: list[dict[int, Tensor]] = []
        self.live: list[Tensor] = []
        self.states: list[State] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for layer, block in enumerate(pl_module.built.model.layers):
            block.ffn.gate.register_forward_hook(lambda gate, _, routing, n=layer: self._keep(gate, routing, n))

    def _keep(self, gate: nn.Module, routing: Routing, layer: int) -> None:
        if gate.training:
            self.experts[-1][layer] = routing.experts.clone()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        self.experts.append({})
        self.live.append(batch["attention_mask"].flatten().bool())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.states.append(state(pl_module))

    def load(self, batch: int, layer: int) -> list[int]:
        load = [0] * EXPERTS
        for token, row in enumerate(self.experts[batch][layer].tolist()):
            for expert in row:
                load[expert] += bool(self.live[batch][token])
        return load

    def step_load(self, batches: range, layer: int) -> list[int]:
        return [sum(column) for column in zip(*(self.load(batch, layer) for batch in batches), strict=True)]


def moved_by_hand(bias: list[float], load: list[int]) -> list[float]:
    mean = sum(load) / len(load)
    return [b + RATE * ((mean > visits) - (mean < visits)) for b, visits in zip(bias, load, strict=True)]


# ------------------------------------------------------------------ biases


@pytest.mark.parametrize(("checkpointing", "count"), [(False, 5), (True, 3)])
def test_biases_move_against_the_load_of_every_step(
    tiny_config: MakeConfig, golden_tokenizer: Any, checkpointing: bool, count: int
) -> None:
    """Over all micro-batches of a step, the last one alone too, and none of the validations between and inside."""
    config = tiny_config(router_bias_update_rate=RATE)
    backend = BackendConfig(gradient_checkpointing=checkpointing)
    task = make_task(SGDTask, config, golden_tokenizer, backend=backend)
    start = torch.arange(EXPERTS) * 2.0**-4 % 0.25
    for block in task.built.model.layers:
        block.ffn.gate.bias.copy_(start)
        block.ffn.gate.bias_vl.copy_(-start)
    watch = RouterWatch()
    fit(task, make_batches(count), watch, accumulate_grad_batches=2, val_check_interval=1, validated=make_batches(1))
    assert [len(kept) for kept in watch.experts] == [LAYERS] * count
    expected = [start.tolist()] * LAYERS
    for step in (range(first, min(first + 2, count)) for first in range(0, count, 2)):
        loads = [watch.step_load(step, layer) for layer in range(LAYERS)]
        assert all(sum(load) == 2 * int(sum(watch.live[batch].sum() for batch in step)) for load in loads)
        assert biases(watch.states[step.start], "bias") == expected or len(step) == 1, "not before the step's end"
        expected = [moved_by_hand(bias, load) for bias, load in zip(expected, loads, strict=True)]
        assert biases(watch.states[step.stop - 1], "bias") == expected
    assert len({tuple(layer) for layer in expected}) > 1
    assert biases(state(task), "bias_vl") == [(-start).tolist()] * LAYERS, "no image has come"


def test_recomputing_blocks_trains_the_same_model(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    config = tiny_config(router_bias_update_rate=RATE, router_balance_loss_weight=0.1, indexer="learned", index_topk=4)
    states = []
    for checkpointing in (False, True):
        backend = BackendConfig(gradient_checkpointing=checkpointing)
        task = make_task(DeepseekV41Task, config, golden_tokenizer, backend=backend, indexer=IndexerConfig(1))
        fit(task, make_batches(2))
        states.append(state(task))
    assert_equal_states(*states)


def assert_equal_states(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_image_biases_move_by_the_load_of_images(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    """The task has no images yet, so every second token is made one on the way into the router's layer."""
    task = make_task(SGDTask, tiny_config(router_bias_update_rate=RATE), golden_tokenizer)
    images = torch.arange(40).view(2, 20) % 2 == 1
    for block in task.built.model.layers:
        block.ffn.register_forward_pre_hook(lambda _, given: (given[0], given[1], images))
    watch = RouterWatch()
    logged = fit(task, make_batches(2)[1:], watch).callback_metrics
    live = watch.live[0]
    busiest = [max(load) * EXPERTS / sum(load) for load in (watch.load(0, layer) for layer in range(LAYERS))]
    assert float(logged["within/experts/imbalance"]) == pytest.approx(sum(busiest) / LAYERS, rel=1e-6), (
        "both kinds together"
    )
    for kind, mask in (("bias", live & ~images.flatten()), ("bias_vl", live & images.flatten())):
        watch.live[0] = mask
        expected = [moved_by_hand([0.0] * EXPERTS, watch.load(0, layer)) for layer in range(LAYERS)]
        assert biases(state(task), kind) == expected
    assert biases(state(task), "bias") != biases(state(task), "bias_vl")


def test_the_load_is_that_of_all_ranks(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    """Another rank's load turns some biases round; the sum is made once for a step."""
    other = torch.randint(0, 20, (LAYERS, 2, EXPERTS), generator=torch.Generator().manual_seed(9))

    class OneOfTwo(SGDTask):
        sums = 0

        def _over_ranks(self, values: Tensor) -> Tensor:
            if values.shape != other.shape:
                return values
            self.sums += 1
            return values.add_(other)

    task = make_task(OneOfTwo, tiny_config(router_bias_update_rate=RATE), golden_tokenizer)
    watch = RouterWatch()
    fit(task, make_batches(2), watch, accumulate_grad_batches=2)
    assert task.sums == 1
    loads = [watch.step_load(range(2), layer) for layer in range(LAYERS)]
    together = [[a + b for a, b in zip(load, other[n, 0].tolist(), strict=True)] for n, load in enumerate(loads)]
    zero = [0.0] * EXPERTS
    assert biases(state(task), "bias") == [moved_by_hand(zero, load) for load in together]
    assert biases(state(task), "bias") != [moved_by_hand(zero, load) for load in loads]
    assert biases(state(task), "bias_vl") == [moved_by_hand(zero, row) for row in other[:, 1].tolist()]


def test_without_a_rate_biases_stay_as_they_were_loaded(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task = make_task(DeepseekV41Task, tiny_config(), golden_tokenizer)
    generator = torch.Generator().manual_seed(7)
    for block in task.built.model.layers:
        for bias in (block.ffn.gate.bias, block.ffn.gate.bias_vl):
            bias.copy_(torch.randn(EXPERTS, generator=generator))
    before = state(task)
    fit(task, make_batches(2), validated=make_batches(1))
    after = state(task)
    for kind in ("bias", "bias_vl"):
        assert biases(after, kind) == biases(before, kind)
    assert not torch.equal(after["model.layers.0.ffn.gate.weight"], before["model.layers.0.ffn.gate.weight"])


def test_a_validation_or_a_forward_alone_moves_nothing(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task = make_task(DeepseekV41Task, tiny_config(router_bias_update_rate=RATE), golden_tokenizer)
    before = state(task)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(task, loader(make_batches(2)), verbose=False)
    trainer.test(task, loader(make_batches(2)), verbose=False)
    task.built.train()(make_batches(1)[0]["input_ids"])
    assert_equal_states(state(task), before)


# ------------------------------------------------------------------ gradients


def balance_by_hand(routing: Routing, live: Tensor) -> Tensor:
    """Sum over rows of live tokens x sum of f P, with the scores' graph; see `dsv41/moe.py`."""
    scores, experts = (x.unflatten(0, live.shape) for x in (routing.scores, routing.experts))
    total = scores.new_zeros(())
    for b in range(len(live)):
        tokens = [s for s in range(live.shape[1]) if live[b, s]]
        visits = [sum(e in experts[b, s].tolist() for s in tokens) for e in range(EXPERTS)]
        for s in tokens:
            share = scores[b, s] / scores[b, s].sum()
            f = share.new_tensor(visits) * EXPERTS / (experts.shape[-1] * len(tokens))
            total = total + (f * share).sum()
    return total


def oracle_gradients(
    model: nn.Module, batches: list[Batch], weight: float, language: bool = True
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient of the sum of everything that is trained over predicted tokens, in one go; and the sums themselves."""
    model = copy.deepcopy(model).train()
    routings: list[Routing] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda *given: routings.append(given[2]))
    predicted = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
    sums = {"balance": 0.0, "indexer": 0.0, "live": 0.0}
    for batch in batches:
        routings.clear()
        live = batch["attention_mask"].bool()
        out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
        balance = torch.stack([balance_by_hand(routing, live) for routing in routings]).sum()
        indexer = out.report.indexer_loss
        loss = indexer
        if language:
            loss = loss + causal_lm_loss(out.logits, batch["labels"]).nats + weight * balance
        (loss / predicted).backward()
        for name, value in (("balance", balance), ("indexer", indexer), ("live", live.sum())):
            sums[name] += float(value.detach())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sums


def assert_moved(before: nn.Module, after: nn.Module, expected: dict[str, Tensor]) -> None:
    """By the norm of every parameter: single entries may cancel, and what is left of them depends on the CPU."""
    old = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        moved = (old[name] - parameter).detach() / SGDTask.rate
        reference = expected.get(name, torch.zeros_like(moved))
        rounding = 1e-15 * float(parameter.detach().norm())  # of the difference above
        assert float((moved - reference).norm()) <= 1e-9 * float(reference.norm()) + rounding, name


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_all_losses_over_the_tokens_of_the_step(
    tiny_config: MakeConfig, golden_tokenizer: Any, accumulate: int
) -> None:
    """Micro-batches with different numbers of live and of predicted tokens; the logged losses are per live token."""
    weight = 0.7
    config = tiny_config(router_balance_loss_weight=weight, indexer="learned", index_topk=4)
    task = make_task(SGDTask, config, golden_tokenizer)
    before = copy.deepcopy(task.built)
    batches = make_batches(4)[1 : 1 + accumulate]
    expected, sums = oracle_gradients(before, batches, weight)
    assert {name for name in expected if ".indexer." in name}
    trainer = fit(task, batches, accumulate_grad_batches=accumulate)
    assert_moved(before, task.built, expected)
    logged = trainer.callback_metrics
    assert float(logged["train/balance_loss"]) == pytest.approx(sums["balance"] / sums["live"] / LAYERS, rel=1e-6)
    assert float(logged["train/indexer_loss"]) == pytest.approx(sums["indexer"] / sums["live"] / 4, rel=1e-6)


@pytest.mark.usefixtures("double")
def test_while_warming_up_the_gradient_is_that_of_the_indexers_loss_alone(
    tiny_config: MakeConfig, golden_tokenizer: Any
) -> None:
    config = tiny_config(router_balance_loss_weight=0.7, indexer="learned", index_topk=4)
    task = make_task(SGDTask, config, golden_tokenizer, indexer=IndexerConfig(warmup_steps=1))
    before = copy.deepcopy(task.built)
    for block in before.model.layers:
        if block.attn.indexer is not None:
            block.attn.indexer.warming_up = True
    batches = make_batches(4)[1:]
    expected, _ = oracle_gradients(before, batches, 0.7, language=False)
    fit(task, batches, accumulate_grad_batches=3)
    assert_moved(before, task.built, expected)
    assert all(".indexer." in name for name in expected)


# ------------------------------------------------------------------ indexers


class AttentionWatch(L.Callback):
    """Keeps, for each forward in training or validation, whether every layer's live queries see all positions."""

    def __init__(self) -> None:
        self.sees_all: list[tuple[bool, list[bool]]] = []
        self.states: list[State] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.built.register_forward_pre_hook(lambda model, _: self.sees_all.append((model.training, [])))
        for block in pl_module.built.model.layers:
            block.attn.core.register_forward_pre_hook(self._look)

    def _look(self, core: Any, given: tuple[Any, ...]) -> None:
        q, _, compressed, selection, live = given
        if compressed is not None:
            ended = (torch.arange(q.shape[1]) + 1) // core.ratio
            whole = ((selection >= 0).sum(-1) == ended)[live].all()
            self.sees_all[-1][1].append(bool(whole))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.states.append(state(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.states.append(state(pl_module))


def changed(one: State, other: State) -> set[str]:
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_while_warming_up_the_indexers_alone_learn_and_attention_sees_everything(
    tiny_config: MakeConfig, golden_tokenizer: Any, accumulate: int
) -> None:
    config = tiny_config(router_bias_update_rate=RATE, router_balance_loss_weight=0.1, indexer="learned", index_topk=4)
    task = make_task(DeepseekV41Task, config, golden_tokenizer, indexer=IndexerConfig(warmup_steps=2))
    watch = AttentionWatch()
    batches = make_batches(3 * accumulate)
    fit(
        task, batches, watch, accumulate_grad_batches=accumulate,
        val_check_interval=accumulate, validated=make_batches(1), gradient_clip_val=0.01,
    )  # fmt: skip
    start, first, second, third = watch.states[::accumulate]
    parameters = {name for name, _ in task.built.named_parameters()}
    indexers = {name for name in parameters if ".indexer." in name}
    assert len(indexers) == 2 * 4 + 2 * 2, "queries and weights of four layers, keys and norms of two"
    assert changed(start, first) == indexers
    assert changed(first, second) == indexers
    moved = changed(second, third)
    assert {name for name in moved if "gate.bias" in name} == {f"model.layers.{i}.ffn.gate.bias" for i in range(LAYERS)}
    assert {name for name in moved if "gate.bias" not in name} == parameters
    # A sanity check, then after each step's batches a validation: never with everything but in the warm-up's training.
    validation = (False, [False] * 5)
    warm, trained = [(True, [True] * 5)] * accumulate, [(True, [False] * 5)] * accumulate
    assert watch.sees_all == [validation, *warm, validation, *warm, validation, *trained, validation]


def test_a_frozen_indexer_never_moves(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task = make_task(DeepseekV41Task, tiny_config(index_topk=4), golden_tokenizer)
    before = state(task)
    fit(task, make_batches(2))
    moved = changed(before, state(task))
    assert moved == {name for name, _ in task.built.named_parameters() if ".indexer." not in name}


def test_a_learned_indexer_that_selects_everything_changes_nothing_else(
    tiny_config: MakeConfig, golden_tokenizer: Any
) -> None:
    """Bit for bit under tight clipping: its gradient counts in no norm but its own."""
    states, norms = [], []
    for indexer in ("frozen", "learned"):
        config = tiny_config(indexer=indexer, index_topk=20, candidate_topk_blocks=10, router_bias_update_rate=RATE)
        task = make_task(SGDTask, config, golden_tokenizer)
        trainer = fit(task, make_batches(4), accumulate_grad_batches=2, gradient_clip_val=0.05)
        states.append(state(task))
        norms.append(float(trainer.callback_metrics["train/grad_norm"]))
    assert changed(*states) == {name for name in states[0] if ".indexer." in name}
    assert norms[1] > norms[0] > 0.05, "the norm of all gradients, which is logged, has the indexers' in it"


def test_the_indexers_gradient_is_clipped_by_its_own_norm(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task = make_task(SGDTask, tiny_config(indexer="learned", index_topk=4), golden_tokenizer)
    before = state(task)
    limit = 1e-3
    fit(task, make_batches(2)[1:], gradient_clip_val=limit)
    after = state(task)
    for own in (True, False):
        moved = torch.cat(
            [(after[n] - before[n]).flatten() for n, _ in task.built.named_parameters() if (".indexer." in n) == own]
        )
        assert float(moved.norm() / SGDTask.rate) == pytest.approx(limit, rel=1e-2)


def test_no_warm_up_stays_switched_on_after_a_run_that_ends_inside_it(
    tiny_config: MakeConfig, golden_tokenizer: Any
) -> None:
    config = tiny_config(indexer="learned", index_topk=4)
    task = make_task(DeepseekV41Task, config, golden_tokenizer, indexer=IndexerConfig(warmup_steps=9))
    fit(task, make_batches(1))
    assert not any(getattr(module, "warming_up", False) for module in task.built.modules())


@pytest.mark.parametrize(
    ("fields", "steps", "message"),
    [
        ({}, 3, r"^indexer\.warmup_steps: must be 0, got 3: .*config\.indexer 'learned'"),
        (
            {
                "indexer": "learned",
                "compress_ratios": [0] * 6,
                "kv_source_layer_ids": [],
                "index_source_layer_ids": [],
                "candidate_source_layer_id": -1,
            },
            1,
            r"^indexer\.warmup_steps: must be 0, got 1: .*index_source_layer_ids",
        ),
        # The only layers that select are cut off.
        ({"indexer": "learned", "num_hidden_layers": 1}, 1, r"^indexer\.warmup_steps: must be 0, got 1: "),
    ],
)
def test_a_warm_up_without_an_indexer_to_warm_up_is_an_error(
    tiny_config: MakeConfig, fields: dict[str, Any], steps: int, message: str
) -> None:
    config = tiny_config(**fields).text_config
    with pytest.raises(ValueError, match=message):
        DeepseekV41Task(config, indexer=IndexerConfig(steps))
    DeepseekV41Task(config)


def test_a_negative_warm_up_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^indexer\.warmup_steps: must be at least 0, got -1$"):
        IndexerConfig(-1)


# ------------------------------------------------------------------ the command line

LEARNING = [
    *("--model.config.router_bias_update_rate", str(RATE)),
    *("--model.config.router_balance_loss_weight", "0.1"),
    *("--model.config.indexer", "learned"),
    *("--model.schedule.name", "constant"),
]
# Two of four steps, each of two micro-batches.
WARMING_UP = [
    *LEARNING,
    *("--model.indexer.warmup_steps", "2", "--model.config.index_topk", "3"),
    *("--trainer.accumulate_grad_batches", "2", "--checkpoint.every_n_steps", "1", "--checkpoint.keep", "4"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.indexer.warmup_steps", "3"], "indexer.warmup_steps: must be 0, got 3"),
        (["--model.indexer.warmup_steps=-1"], "indexer.warmup_steps: must be an integer of at least 0 and at most"),
        (["--model.indexer.warmup_steps", "1.5"], "model.indexer.warmup_steps"),
        (["--model.config.indexer", "thawed"], "indexer: must be one of"),
        (["--model.config.router_bias_update_rate=-0.1"], "router_bias_update_rate: must be a number of at least 0"),
    ],
)
def test_bad_settings_are_named_before_training(
    options: list[str], message: str, nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", *nano_args, *options])
    assert caught.value.code != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def scalars(run: Path) -> dict[str, dict[int, float]]:
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def same_bits(one: Any, other: Any) -> bool:
    """Whether nested containers of tensors and plain values are equal throughout."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def unbroken(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of four steps with all their checkpoints; made once, not to be changed."""
    folder = tmp_path_factory.mktemp("unbroken")
    main(["fit", *make_nano_args(folder), *WARMING_UP])
    return folder / "runs" / "nano" / "version_0"


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_equals_the_unbroken_one(unbroken: Path, nano_args: list[str], tmp_path: Path, step: int) -> None:
    """From the middle of the warm-up, when only the indexers have a state in the optimizer, and from behind it."""
    checkpoint = unbroken / "checkpoints" / f"step-{step:08d}.ckpt"
    main(["fit", *nano_args, *WARMING_UP, "--ckpt_path", str(checkpoint)])
    resumed = tmp_path / "runs" / "nano" / "version_0"
    whole, broken = (
        torch.load(run / "checkpoints" / "step-00000004.ckpt", weights_only=True) for run in (unbroken, resumed)
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same_bits(whole[part], broken[part]), part
    assert any(value.any() for name, value in whole["state_dict"].items() if name.endswith("gate.bias"))
    curves = [scalars(run) for run in (unbroken, resumed)]
    for tag in ("train/loss", "train/indexer_loss", "train/balance_loss", "within/experts/imbalance"):
        assert sorted(curves[0][tag]) == [0, 1, 2, 3], tag
        assert curves[1][tag] == {at: value for at, value in curves[0][tag].items() if at >= step}, tag


@pytest.fixture(scope="module")
def plain(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of two steps that balances nothing and has frozen indexers."""
    folder = tmp_path_factory.mktemp("plain")
    main(["fit", *make_nano_args(folder), "--model.schedule.name", "constant", "--trainer.max_steps", "2"])
    return folder / "runs" / "nano" / "version_0"


def test_what_is_trained_may_change_on_resume_and_is_listed(
    plain: Path,
    nano_args: list[str],
    nano_cli: Callable[..., DeepseekV41CLI],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = plain / "checkpoints" / "step-00000002.ckpt"
    before = torch.load(path, weights_only=True)["state_dict"]
    cli = nano_cli(*LEARNING, "--model.indexer.warmup_steps", "3", "--trainer.max_steps", "4")
    watch = AttentionWatch()
    cli.trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    with caplog.at_level("INFO"):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=str(path))
    listed = {record.getMessage() for record in caplog.records if "the command line counts" in record.getMessage()}
    assert listed == {
        f"differs from the checkpoint, the command line counts: model.{line}"
        for line in (
            "config.indexer: 'frozen' -> 'learned'",
            "config.router_balance_loss_weight: 0.0 -> 0.1",
            f"config.router_bias_update_rate: 0.0 -> {RATE}",
            "indexer.warmup_steps: 0 -> 3",
        )
    }
    start, warm, trained = watch.states
    assert all(torch.equal(value, before[f"model.{name}"]) for name, value in start.items())
    assert {".indexer." in name for name in changed(start, warm)} == {True}, "step 3 is in the warm-up of three"
    moved = changed(warm, trained)
    assert {"model.layers.0.ffn.gate.bias", "model.layers.0.ffn.gate.weight", "lm_head.weight"} <= moved
    # Back again: what has been learned is kept, and is not trained any more.
    main(["fit", *nano_args, "--model.schedule.name", "constant", "--trainer.max_steps", "5", "--ckpt_path", "last"])
    resumed = tmp_path / "runs" / "nano" / "version_0" / "checkpoints" / "step-00000005.ckpt"
    after = torch.load(resumed, weights_only=True)["state_dict"]
    kept = [name for name in trained if ".indexer." in name or "gate.bias" in name]
    assert all(torch.equal(after[f"model.{name}"], trained[name]) for name in kept)


class LoggedNumbers(L.Callback):
    """What the curves of a run should show, from what routers and the model give in training."""

    def __init__(self) -> None:
        self.routings: list[Routing] = []
        self.indexer: list[float] = []
        self.balance: list[float] = []
        self.loads: list[Tensor] = []
        self.live: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for block in pl_module.built.model.layers:
            block.ffn.gate.register_forward_hook(lambda _, __, routing: self.routings.append(routing))
        pl_module.built.register_forward_hook(self._indexer)

    def _indexer(self, model: nn.Module, inputs: Any, out: Any) -> None:
        if model.training:
            self.indexer.append(float(out.report.indexer_loss.detach()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        self.routings.clear()
        if batch_idx % 2:  # the text fills its rows
            batch["attention_mask"][0, 20:] = 0
            batch["labels"][0, 20:] = IGNORE_INDEX

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        live = batch["attention_mask"].bool()
        self.live.append(int(live.sum()))
        loads = torch.zeros(len(self.routings), 4, dtype=torch.float64)
        balance = 0.0
        for layer, routing in enumerate(self.routings):
            experts, shares = routing.experts.view(*live.shape, 2), routing.scores.detach().double()
            shares = (shares / shares.sum(-1, keepdim=True)).view(*live.shape, 4)
            for b in range(len(live)):
                count = int(live[b].sum())
                visits = torch.bincount(experts[b, :count].flatten(), minlength=4).double()
                loads[layer] += visits
                balance += float((visits * 4 / (2 * count) * shares[b, :count].sum(0)).sum())
        self.loads.append(loads)
        self.balance.append(balance)


def test_the_curves_show_what_the_steps_have_counted(nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path) -> None:
    options = ["--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "3", "--model.config.index_topk", "3"]
    cli = nano_cli(*LEARNING, *options)
    numbers = LoggedNumbers()
    cli.trainer.callbacks.append(numbers)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    curves = scalars(tmp_path / "runs" / "nano" / "version_0")
    for step in range(3):
        pair = slice(2 * step, 2 * step + 2)
        live = sum(numbers.live[pair])
        load = torch.stack(numbers.loads[pair]).sum(0)
        busiest = load.amax(-1) / load.mean(-1)
        assert curves["train/indexer_loss"][step] == pytest.approx(sum(numbers.indexer[pair]) / live / 2, rel=1e-5)
        assert curves["train/balance_loss"][step] == pytest.approx(sum(numbers.balance[pair]) / live / 4, rel=1e-5)
        assert curves["within/experts/imbalance"][step] == pytest.approx(float(busiest.mean()), rel=1e-6)
        assert curves["within/experts/imbalance_worst"][step] == pytest.approx(float(busiest.max()), rel=1e-6)
        assert float(busiest.max()) > float(busiest.mean()) > 1
    recall = {"within/indexer_recall", "within/indexer_recall_best"}
    recall |= {"within/indexer_recall/layer_1", "within/indexer_recall/layer_3"}
    assert {tag for tag in curves if "recall" in tag} == recall, "chance does not change"
    assert 0 < curves["within/indexer_recall"][2] < curves["within/indexer_recall_best"][2] < 1
    assert not any(block.attn.core._forward_pre_hooks for block in cli.model.built.model.layers)
    # The last validation of fit was one of the last parameters, whatever has been trained since the one before.
    again = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)[0]
    assert {tag: list(curves[tag].values())[-1] for tag in recall} == {tag: again[tag] for tag in recall}


def test_curves_of_what_is_not_trained_are_not_drawn(plain: Path) -> None:
    tags = set(scalars(plain))
    assert not tags & {"train/indexer_loss", "train/balance_loss"}
    assert tags >= {"within/experts/imbalance", "within/experts/imbalance_worst"}
