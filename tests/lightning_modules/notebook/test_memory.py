"""What the notebook shows of the Engram, against loops written from docs/ARCHITECTURE.md, section 6."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dsv41.engram import layer as engram
from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight.engram_buckets import Buckets, Column
from lightning_modules.insight.engram_gates import readable
from lightning_modules.notebook import memory
from lightning_modules.notebook.memory import (
    GatePaths,
    HashedToken,
    column_fills,
    compare_gates,
    fill_table,
    gate_pictures,
    gates_of,
    gates_table,
    hash_table,
    hashed,
    hashed_text,
    rows_of_text,
)
from lightning_modules.notebook.opened import build, validation_batch

NanoCli = Callable[..., DeepseekV41CLI]
LAYER, SIZES, HEADS, SMALLEST = 1, (2, 3), 2, 61  # of the smallest run's Engram


@pytest.fixture
def cli(nano_cli: NanoCli) -> DeepseekV41CLI:
    """The smallest model, with weights large enough for gates that open and close."""
    made = nano_cli()
    build(made)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in engram_of(made).parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def engram_of(cli: DeepseekV41CLI) -> Any:
    return cli.model.built.model.layers[LAYER].engram


def padded(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The batch with `length` tokens left in its rows."""
    mask = batch["attention_mask"].clone()
    mask[:, length:] = 0
    return batch | {"attention_mask": mask}


class ByHand:
    """Hashes of the smallest run: token map, primes, multipliers and XOR in Python's own integers."""

    def __init__(self, cli: DeepseekV41CLI, smallest: int = SMALLEST) -> None:
        tokenizer = cli.datamodule.fast_tokenizer
        self.texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        numbers: dict[str, int] = {}
        self.compressed = []
        for token, text in enumerate(self.texts):
            key = text.lower()
            if "\ufffd" in text:
                key = f"raw {token}"
            elif (key := re.sub(r"[ \t\r\n]+", " ", key)) != " ":
                key = key.strip(" \t\n\v\f\r") or text
            self.compressed.append(numbers.setdefault(key, len(numbers)))
        self.pad = self.compressed[tokenizer.pad_token_id]
        bound = max(1, (2**63 - 1) // len(numbers) // 2)
        drawn = np.random.default_rng(10007 * LAYER).integers(0, bound, size=3, dtype=np.int64)
        self.multipliers = [2 * int(number) + 1 for number in drawn]
        primes = (n for n in count(smallest) if all(n % divisor for divisor in range(2, n)))
        self.primes = list(islice(primes, len(SIZES) * HEADS))

    def ngram(self, ids: list[int], position: int, size: int) -> tuple[int, ...]:
        """Compressed ids, the newest first."""
        return tuple(self.compressed[ids[p]] if p >= 0 else self.pad for p in range(position, position - size, -1))

    def rows(self, ids: list[int], position: int) -> tuple[int, ...]:
        found = []
        for column, prime in enumerate(self.primes):
            value = 0
            for token, multiplier in zip(
                self.ngram(ids, position, SIZES[column // HEADS]), self.multipliers, strict=False
            ):
                value ^= token * multiplier
            found.append(value % prime + sum(self.primes[:column]))
        return tuple(found)


# ------------------------------------------------------------------ what is hashed


def test_tokens_are_hashed_as_by_hand(cli: DeepseekV41CLI) -> None:
    by_hand, ids = ByHand(cli), validation_batch(cli)["input_ids"][0]
    tokens = ids.tolist()
    seen = hashed(cli, ids, LAYER)
    assert len({token.rows for token in seen}) > 20, "rows that could not be mistaken"
    for position, token in enumerate(seen):
        mine = by_hand.compressed[tokens[position]]
        alike = [other for other, compressed in enumerate(by_hand.compressed) if compressed == mine]
        assert (token.text, token.token, token.compressed) == (by_hand.texts[token.token], tokens[position], mine)
        assert token.shared == tuple(by_hand.texts[other] for other in alike if other != token.token)
        assert token.rows == by_hand.rows(tokens, position)
    assert sum(len(token.shared) > 1 for token in seen) > 5


def test_ngrams_are_shown_as_the_texts_that_their_ids_stand_for(cli: DeepseekV41CLI) -> None:
    """One text for all that are the same to the hash; padding before the start."""
    (pad,) = cli.datamodule.fast_tokenizer.convert_ids_to_tokens([cli.datamodule.fast_tokenizer.pad_token_id])
    seen = hashed_text(cli, "A?\tb", LAYER)
    assert [token.text for token in seen] == ["A", "?", "\t", "b"]
    assert [token.ngrams for token in seen] == [
        ((pad, "a"), (pad, pad, "a")),
        (("a", "?"), (pad, "a", "?")),
        (("?", " "), ("a", "?", " ")),
        ((" ", "b"), ("?", " ", "b")),
    ]
    assert {"a", " a"} <= set(seen[0].shared)
    assert "A" not in seen[0].shared


def test_raw_ids_are_shown_as_they_are(nano_cli: NanoCli) -> None:
    cli = nano_cli("--model.config.engram_token_map", "raw")
    build(cli)
    first, _, last = hashed_text(cli, "A?B", LAYER)
    assert first.shared == ()
    assert last.ngrams == (("?", "B"), ("A", "?", "B"))


def test_equal_compressed_ngrams_reach_equal_rows(cli: DeepseekV41CLI) -> None:
    rows = rows_of_text(cli, "A?b", LAYER)
    assert rows == rows_of_text(cli, "a?B", LAYER) == rows_of_text(cli, "!a?b", LAYER)
    assert len(rows) == len(SIZES) * HEADS
    other = rows_of_text(cli, "c?b", LAYER)
    assert other[:HEADS] == rows[:HEADS], "the same 2-gram"
    assert all(a != b for a, b in zip(other[HEADS:], rows[HEADS:], strict=True)), "another 3-gram"


def test_what_cannot_be_hashed_is_refused(cli: DeepseekV41CLI, nano_cli: NanoCli) -> None:
    with pytest.raises(ValueError, match=r"^layer: must be one of \(1,\), those with an Engram, got 0$"):
        rows_of_text(cli, "a", 0)
    with pytest.raises(ValueError, match=r"^text: must have at least one token, got ''$"):
        rows_of_text(cli, "", LAYER)
    none = nano_cli("--model.config.engram_layer_ids", "[]")
    build(none)
    for look in (
        lambda: rows_of_text(none, "a", LAYER),
        lambda: column_fills(none, 1),
        lambda: compare_gates(none, {}, LAYER),
    ):
        with pytest.raises(ValueError, match=r"^model.config.engram_layer_ids: must name a layer"):
            look()


def test_the_table_takes_any_text() -> None:
    tokens = [
        HashedToken("|", 5, 4, ("a", " a", "A", " A", "á"), (("b", "|"), ("`", "b", "|")), (1, 2, 3, 4)),
        HashedToken(" x", 6, 5, (), (("|", " x"), ("b", "|", " x")), (5, 6, 7, 8)),
    ]
    assert hash_table(tokens) == (
        "| token | id | compressed id | same to the hash | 2-gram | 3-gram "
        "| row of 2-gram, head 0 | row of 2-gram, head 1 | row of 3-gram, head 0 | row of 3-gram, head 1 |\n"
        "|---|---:|---:|---|---|---|---:|---:|---:|---:|\n"
        "| `\\|` | 5 | 4 | `a`, `·a`, `A`, `·A` and 1 more | `b` `\\|` | `` ` `` `b` `\\|` | 1 | 2 | 3 | 4 |\n"
        "| `·x` | 6 | 5 |  | `\\|` `·x` | `b` `\\|` `·x` | 5 | 6 | 7 | 8 |\n"
    )


# ------------------------------------------------------------------ buckets


@pytest.mark.parametrize("batches", [1, 99])
def test_fills_equal_a_loop_over_different_ngrams(nano_cli: NanoCli, batches: int) -> None:
    cli = nano_cli("--model.config.engram_vocab_size", "401")
    build(cli)
    by_hand, fills = ByHand(cli, 401), column_fills(cli, batches)
    assert [column for column, _ in fills] == [
        Column(f"layer_1_{size}gram_head_{head}", size, by_hand.primes[(size - 2) * HEADS + head])
        for size in SIZES
        for head in range(HEADS)
    ]
    rows = [
        [token for token, live in zip(ids, mask, strict=True) if live]
        for batch in islice(cli.datamodule.val_dataloader(), batches)
        for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    ]
    lengths = {len(row) for row in rows}
    assert (len(rows) == 2 and lengths == {32}) if batches == 1 else (len(rows) > 50 and min(lengths) < 32)
    for index, (column, found) in enumerate(fills):
        buckets: dict[int, set[tuple[int, ...]]] = {}
        for row in rows:
            for position in range(len(row)):
                ngram = by_hand.ngram(row, position, column.size)
                buckets.setdefault(by_hand.rows(row, position)[index], set()).add(ngram)
        loads = [len(inside) for inside in buckets.values()]
        assert found == Buckets(sum(loads), max(loads), sum(load for load in loads if load > 1))
        assert 0 < found.colliding < found.distinct < sum(map(len, rows))


def test_no_batches_are_refused(cli: DeepseekV41CLI) -> None:
    with pytest.raises(ValueError, match=r"^batches: must be at least 1, got 0$"):
        column_fills(cli, 0)


def test_the_table_of_fills_has_shares() -> None:
    table = fill_table([(Column("layer_1_2gram_head_0", 2, 40), Buckets(10, 3, 4))])
    assert table.splitlines()[1] == "|---|---:|---:|---:|---:|---:|---:|"
    chance = 1 - (39 / 40) ** 9
    assert table.splitlines()[2] == f"| layer 1 2gram head 0 | 40 | 10 | 0.250 | 3 | 40.0% | {chance:.1%} |"


# ------------------------------------------------------------------ gates


def run_through(cli: DeepseekV41CLI, batch: dict[str, Tensor]) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments and result of the Engram in a forward."""
    seen = []
    hook = engram_of(cli).register_forward_hook(lambda _, given, made: seen.append((given, made)))
    with torch.no_grad():
        cli.model.built(batch["input_ids"], attention_mask=batch["attention_mask"])
    hook.remove()
    return seen[0]


@pytest.mark.parametrize(("length", "tokens"), [(32, 20), (12, 20)])
def test_gates_are_what_the_layer_has_applied(cli: DeepseekV41CLI, length: int, tokens: int) -> None:
    """What is added to a stream is the gate times a value; the gate follows by division."""
    batch = padded(validation_batch(cli, rows=2), length)
    gates, texts = gates_of(cli, batch, tokens)
    (given, ids, _), made = run_through(cli, batch)
    layer = engram_of(cli)
    assert list(gates) == [LAYER]
    shown = min(length, tokens)
    assert gates[LAYER].shape == (4, shown)
    for token in range(shown):
        rows = layer.embed.weight[ids[0, token]].flatten().double()
        value = layer.wkv.weight[layer.key_width :].double() @ rows
        added = made[0, token].double() - given[0, token].double()
        expected = (added @ value) / (value @ value)
        torch.testing.assert_close(gates[LAYER][:, token].double(), expected, rtol=0, atol=1e-4)
    assert gates[LAYER].std() > 0.1
    assert texts == [cli.datamodule.fast_tokenizer.decode([token]) for token in batch["input_ids"][0, :shown].tolist()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in cli.model.modules())


def test_there_is_a_picture_for_each_layer(cli: DeepseekV41CLI) -> None:
    batch = validation_batch(cli)
    gates, texts = gates_of(cli, batch, 9)
    (figure,) = gate_pictures(cli, batch, 9)
    image = figure.axes[0].images[0].get_array()
    torch.testing.assert_close(torch.tensor(np.asarray(image)), gates[LAYER])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(map(readable, texts))
    assert figure.get_suptitle() == "Engram gates of layer 1"


def test_a_model_without_gates_is_refused(nano_cli: NanoCli) -> None:
    cli = nano_cli("--model.config.engram_gate", "open")
    build(cli)
    with pytest.raises(ValueError, match=r"^model.config: no layer has a gate; it takes engram_layer_ids"):
        gates_of(cli, validation_batch(cli))
    with pytest.raises(ValueError, match=r"^model.config.engram_gate: must be 'learned' .*, got 'open'$"):
        compare_gates(cli, validation_batch(cli), LAYER)


# ------------------------------------------------------------------ eager and compiled


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """What the process calls meanwhile, and has to be calling afterwards."""

    def of_the_process(*arguments: Any) -> Tensor:
        return engram._engram_gate_core(*arguments)

    monkeypatch.setattr(engram, "_engram_gate", of_the_process)
    monkeypatch.setattr(engram, "_ENGRAM_GATE_COMPILED", True)
    return of_the_process


def test_differences_are_between_equal_layers_on_what_the_model_gives_them(
    cli: DeepseekV41CLI, monkeypatch: pytest.MonkeyPatch, switch: Callable[..., Tensor]
) -> None:
    """A compiler that is wrong by a thousandth is found out, in the output and in gradients."""
    calls: list[tuple[Any, ...]] = []

    def wrong(core: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def compiled(*arguments: Any) -> Tensor:
            calls.append(arguments)
            return core(*arguments) * 1.001

        return compiled

    monkeypatch.setattr(torch, "compile", wrong)
    batch = padded(validation_batch(cli, rows=2), 25)
    found = compare_gates(cli, batch, LAYER, rounds=2)
    assert found.compiled
    assert found.output == pytest.approx(1e-3, rel=1e-3)
    assert found.gradient == pytest.approx(1e-3, rel=1e-3)
    assert found.eager > 0
    assert found.other > 0
    assert len(calls) == 3, "the compared run and two that are timed"
    (given, ids, mask), _ = run_through(cli, batch)
    layer = engram_of(cli)
    key, value = layer.wkv(layer.embed(ids).flatten(-2)).split((layer.key_width, given.shape[-1]), dim=-1)
    for ours, theirs in zip(calls[0], (given, key, value, layer.q_weight, layer.k_weight), strict=False):
        assert torch.equal(ours, theirs)
    assert torch.equal(calls[0][6], mask)
    assert 0 < mask.sum() < mask.numel()
    assert engram._engram_gate is switch
    assert engram._ENGRAM_GATE_COMPILED


# torch's tracer itself looks at `.grad` of inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_second_path_is_compiled(cli: DeepseekV41CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compile_ = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda core, **options: compile_(core, backend=counter, **options))
    torch._dynamo.reset()
    found = compare_gates(cli, validation_batch(cli), LAYER, rounds=2)
    torch._dynamo.reset()
    assert counter.frame_count == 1, "one shape"
    assert found.compiled
    assert found.output < 1e-6
    assert found.gradient < 1e-4
    assert engram._engram_gate is engram._engram_gate_core


def test_without_a_compiler_there_are_words(
    cli: DeepseekV41CLI, monkeypatch: pytest.MonkeyPatch, switch: Callable[..., Tensor]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch, "compile", broken)
    found = compare_gates(cli, validation_batch(cli), LAYER, rounds=1)
    assert not found.compiled
    assert found.output == found.gradient == 0.0, "both are eager"
    assert gates_table(found).startswith("The gate could not be compiled here")
    assert "|" not in gates_table(found)
    assert engram._engram_gate is switch


def test_the_table_of_paths_has_both() -> None:
    table = gates_table(GatePaths(True, 1.2e-7, 3.4e-5, 6.625, 4.98))
    assert table.splitlines()[2:] == [
        "| eager | 6.62 ms | | |",
        "| compiled | 4.98 ms | 1.2e-07 | 3.4e-05 |",
    ]


def test_no_rounds_are_refused(cli: DeepseekV41CLI) -> None:
    with pytest.raises(ValueError, match=r"^rounds: must be at least 1, got 0$"):
        compare_gates(cli, {}, LAYER, rounds=0)


def test_runs_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    took = {"a": iter((1.0, 9.0, 2.0)), "b": iter((5.0, 4.0, 6.0))}
    now = [0.0]

    def run(name: str) -> Callable[[], None]:
        def step() -> None:
            order.append(name)
            now[0] += next(took[name])

        return step

    monkeypatch.setattr(memory.time, "process_time", lambda: now[0])
    assert memory._median_milliseconds([run("a"), run("b")], 3) == [2000.0, 5000.0]
    assert order == ["a", "b"] * 3
