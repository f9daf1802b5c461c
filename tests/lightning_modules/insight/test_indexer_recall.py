"""What a selection keeps of the attention's mass, against a float64 loop over queries, heads and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.attention import AttentionCore
from dsv41.config import IGNORE_INDEX
from dsv41.ops.selection import stable_topk, visible_positions
from lightning_modules.callbacks import IndexerRecall
from lightning_modules.insight.selection import selection_recall
from lightning_modules.task import DeepseekV41Task

MakeConfig = Callable[..., DeepseekV41Config]
Arguments = tuple[Tensor, ...]
Batch = dict[str, Tensor]

# Of the golden-tiny model; the last one's selection obeys the candidates of the one before.
SELECTING = (1, 3, 4, 5)


def recall_by_hand(core: AttentionCore, arguments: Arguments) -> list[float]:
    """Sums over the queries that have a choice: kept, kept by chance, kept at best, and their number."""
    q, kv, compressed, selection, live = (x.detach().double() if x.is_floating_point() else x for x in arguments)
    sink = core.attn_sink.detach().double()
    scale = q.shape[-1] ** -0.5
    sums = [0.0] * 4
    for b in range(len(q)):
        for s in range(q.shape[1]):
            seen = min((s + 1) // core.ratio, compressed.shape[1])
            chosen = [t for t in selection[b, s].tolist() if t >= 0]
            assert set(chosen) <= set(range(seen))
            if not live[b, s] or seen <= len(chosen):
                continue
            mass = [0.0] * seen
            for h in range(q.shape[2]):
                near = [
                    math.exp(scale * float(q[b, s, h] @ kv[b, t])) for t in range(max(0, s - core.window + 1), s + 1)
                ]
                far = [math.exp(scale * float(q[b, s, h] @ compressed[b, t])) for t in range(seen)]
                whole = sum(near) + sum(far) + math.exp(float(sink[h]))
                mass = [m + share / whole for m, share in zip(mass, far, strict=True)]
            sums[0] += sum(mass[t] for t in chosen) / sum(mass)
            sums[1] += len(chosen) / seen
            sums[2] += sum(sorted(mass)[-len(chosen) :]) / sum(mass)
            sums[3] += 1
    return sums


@pytest.mark.parametrize("implementation", ["sparse", "eager", "sdpa"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_the_recall_equals_a_loop_over_queries(implementation: str, ratio: int) -> None:
    length, window, topk = 21, 3, 4
    positions = length // ratio
    generator = torch.Generator().manual_seed(ratio)
    core = AttentionCore(2, window, ratio, implementation).double()
    with torch.no_grad():
        core.attn_sink.copy_(torch.tensor([0.5, -1.0]))
    q, kv, compressed = (
        2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, length, 2, 6), (2, length, 6), (2, positions, 6))
    )
    live = torch.arange(length) < torch.tensor([[length], [14]])
    scores = torch.rand(2, length, positions, generator=generator)
    selection = stable_topk(scores.masked_fill(~visible_positions(length, positions, ratio, q.device), -math.inf), topk)
    # A candidate pool can leave fewer than top-k of many.
    selection[0, 15] = torch.tensor([2, 5, -1, -1])
    arguments = (q, kv, compressed, selection, live)
    expected = recall_by_hand(core, arguments)
    found = selection_recall(core, *arguments)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-10)
    assert expected[3] == sum(live[:, s].sum() for s in range(length) if (s + 1) // ratio > topk or s == 15)
    assert 0 < expected[0] < expected[2]


def test_a_selection_of_everything_or_of_nothing_is_no_choice() -> None:
    core = AttentionCore(2, 3, 4, "sparse")
    for length in (12, 3):
        count = length // 4
        q, kv, compressed = (torch.randn(shape) for shape in ((1, length, 2, 6), (1, length, 6), (1, count, 6)))
        exists = visible_positions(length, count, 4, q.device)
        selection = torch.arange(count).masked_fill(~exists, -1)[None]
        live = torch.ones(1, length, dtype=torch.bool)
        assert selection_recall(core, q, kv, compressed, selection, live).tolist() == [0.0] * 4


# ------------------------------------------------------------------ the callback


def make_batches(count: int = 3, rows: int = 2, length: int = 24) -> list[Batch]:
    """Batches with more and more padding in their second row."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for index in range(count):
        ids = torch.randint(3, 500, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 5 * index :] = 0
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "row_id": torch.arange(rows)})
    return batches


def make_task(config: DeepseekV41Config, tokenizer: Any, **options: Any) -> DeepseekV41Task:
    torch.manual_seed(0)
    task = DeepseekV41Task(config.text_config, **options)
    task.tokenizer = tokenizer
    task.register_buffer("token_bytes", torch.ones(512, dtype=torch.int64), persistent=False)
    task.configure_model()
    # Freshly drawn weights attend evenly, so that no selection would be better than another.
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, parameter in task.built.named_parameters():
            if ".attn." in name and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[1] ** -0.5)
    return task


def cores(task: DeepseekV41Task) -> dict[int, AttentionCore]:
    return {block.attn.layer_idx: block.attn.core for block in task.built.model.layers}


class Watch(L.Callback):
    """Keeps what every attention of a validation is given, by layer and batch, and the final hidden states."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Arguments]] = {}
        self.hidden: list[Tensor] = []
        self.hooks_while_running = 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.handles = [
            core.register_forward_pre_hook(lambda _, given, layer=layer: self.seen.setdefault(layer, []).append(given))
            for layer, core in cores(pl_module).items()
        ]
        self.handles.append(pl_module.built.model.norm.register_forward_hook(lambda *x: self.hidden.append(x[2])))

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.hooks_while_running = sum(len(core._forward_pre_hooks) for core in cores(pl_module).values())

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()


def make_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def loader(batches: list[Batch]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def validate(task: DeepseekV41Task, batches: list[Batch], *callbacks: L.Callback) -> dict[str, float]:
    return dict(make_trainer(*callbacks).validate(task, loader(batches), verbose=False)[0])


def recall_names(found: dict[str, float]) -> set[str]:
    return {name for name in found if "recall" in name}


@pytest.mark.parametrize("batches", [1, 2, 9])
@pytest.mark.parametrize("indexer", ["frozen", "learned"])
def test_the_logged_numbers_are_means_over_queries_then_layers(
    tiny_config: MakeConfig, golden_tokenizer: Any, batches: int, indexer: str
) -> None:
    task = make_task(tiny_config(index_topk=4, candidate_topk_blocks=3, indexer=indexer), golden_tokenizer)
    watch = Watch()
    found = validate(task, make_batches(), IndexerRecall(batches), watch)
    means = []
    for layer in SELECTING:
        assert len(watch.seen[layer]) == 3, "looking costs no forward that others would see"
        one = [recall_by_hand(cores(task)[layer], given) for given in watch.seen[layer][:batches]]
        sums = [sum(column) for column in zip(*one, strict=True)]
        assert sums[3] > 20
        means.append([value / sums[3] for value in sums[:3]])
        assert found[f"within/indexer_recall/layer_{layer}"] == pytest.approx(means[-1][0], rel=1e-5)
    kept, chance, best = ([row[column] for row in means] for column in range(3))
    assert found["within/indexer_recall"] == pytest.approx(sum(kept) / 4, rel=1e-5)
    assert found["within/indexer_recall_chance"] == pytest.approx(sum(chance) / 4, rel=1e-5)
    assert found["within/indexer_recall_best"] == pytest.approx(sum(best) / 4, rel=1e-5)
    expected = {"within/indexer_recall", "within/indexer_recall_chance", "within/indexer_recall_best"}
    assert recall_names(found) == expected | {f"within/indexer_recall/layer_{layer}" for layer in SELECTING}
    assert len({round(value, 4) for value in kept + chance + best}) > 8, "numbers that could not be mistaken"


def test_the_candidate_pool_counts_as_the_selection_of_the_layer_behind_it(
    tiny_config: MakeConfig, golden_tokenizer: Any
) -> None:
    """Two blocks of two positions leave four of the six that a layer may select."""
    task = make_task(tiny_config(index_topk=6, candidate_topk_blocks=2), golden_tokenizer)
    watch = Watch()
    found = validate(task, make_batches(1), IndexerRecall(), watch)
    selection = watch.seen[5][0][3]
    assert int((selection >= 0).sum(-1).max()) == 4
    expected = recall_by_hand(cores(task)[5], watch.seen[5][0])
    assert found["within/indexer_recall/layer_5"] == pytest.approx(expected[0] / expected[3], rel=1e-5)


def test_layers_in_which_no_query_has_a_choice_are_left_out(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    def names(**fields: Any) -> set[str]:
        task = make_task(tiny_config(**fields), golden_tokenizer)
        return recall_names(validate(task, make_batches(1), IndexerRecall()))

    means = {"within/indexer_recall", "within/indexer_recall_chance", "within/indexer_recall_best"}
    # 24 tokens are 12 pairs.
    some = names(index_topk=12, candidate_topk_blocks=12)
    assert some == means | {"within/indexer_recall/layer_4", "within/indexer_recall/layer_5"}
    assert names(index_topk=24, candidate_topk_blocks=12) == set()
    # Without a single group in a row.
    ratios = {"compress_ratios": [0, 32, 32, 32, 1, 1]}
    assert names(index_topk=12, candidate_topk_blocks=12, **ratios) == some
    assert (
        names(compress_ratios=[0] * 6, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1)
        == set()
    )


def test_no_batches_switch_it_off_and_fewer_are_an_error(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task, watch = make_task(tiny_config(), golden_tokenizer), Watch()
    assert recall_names(validate(task, make_batches(1), IndexerRecall(0), watch)) == set()
    assert watch.hooks_while_running == 6, "the test's own"
    with pytest.raises(ValueError, match=r"^batches: must be at least 0, got -1$"):
        IndexerRecall(-1)


@pytest.mark.parametrize("attn", ["sparse", "sdpa"])
def test_looking_changes_no_bit_of_what_the_model_gives(
    tiny_config: MakeConfig, golden_tokenizer: Any, attn: Any
) -> None:
    task = make_task(tiny_config(indexer="learned"), golden_tokenizer, backend=BackendConfig(attn=attn))
    without, looked_at = Watch(), Watch()
    plain = validate(task, make_batches(), without)
    found = validate(task, make_batches(), IndexerRecall(9), looked_at)
    assert {name: value for name, value in found.items() if name in plain} == plain
    assert len(without.hidden) == 3
    assert all(torch.equal(a, b) for a, b in zip(without.hidden, looked_at.hidden, strict=True))
    assert looked_at.hooks_while_running == without.hooks_while_running + len(SELECTING)


def hooks(task: DeepseekV41Task) -> int:
    return sum(len(core._forward_pre_hooks) for core in cores(task).values())


def test_no_hook_stays_after_a_validation_and_each_counts_anew(tiny_config: MakeConfig, golden_tokenizer: Any) -> None:
    task, recall = make_task(tiny_config(index_topk=4), golden_tokenizer), IndexerRecall()
    first = validate(task, make_batches(), recall)
    assert hooks(task) == 0
    assert validate(task, make_batches(), recall) == first
    other = validate(task, make_batches()[1:], recall)
    assert hooks(task) == 0
    assert other["within/indexer_recall"] != first["within/indexer_recall"]
    assert other == validate(task, make_batches()[1:], IndexerRecall())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_no_hook_stays_after_an_exception_in_a_validation(
    tiny_config: MakeConfig, golden_tokenizer: Any, error: type[BaseException]
) -> None:
    class Failing(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            assert hooks(task) == len(SELECTING)
            raise error

    task, recall = make_task(tiny_config(index_topk=4), golden_tokenizer), IndexerRecall()
    with pytest.raises((error, SystemExit)):
        validate(task, make_batches(1), recall, Failing())
    assert hooks(task) == 0
    assert "within/indexer_recall" in validate(task, make_batches(1), recall)
    assert hooks(task) == 0
