"""Hashing, buckets and gates of the Engram, against loops written from docs/ARCHITECTURE.md, section 6."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_modules.cli import DeepseekV41CLI
from lightning_modules.insight.engram_buckets import Buckets, Column, fill_table, fills_of_batches
from lightning_modules.insight.engram_gates import gates_of
from lightning_modules.insight.engram_hashing import HashedToken, hash_table, hashed, hashing_of, rows_of_text
from lightning_modules.notebook import build, validation_batch

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


def hashed_text(cli: DeepseekV41CLI, text: str) -> list[HashedToken]:
    tokenizer = cli.datamodule.fast_tokenizer
    return hashed(cli.model.built, tokenizer, torch.tensor(tokenizer.encode(text, add_special_tokens=False)), LAYER)


def rows_read(cli: DeepseekV41CLI, text: str, layer: int = LAYER) -> tuple[int, ...]:
    return rows_of_text(cli.model.built, cli.datamodule.fast_tokenizer, text, layer)


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
    seen = hashed(cli.model.built, cli.datamodule.fast_tokenizer, ids, LAYER)
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
    seen = hashed_text(cli, "A?\tb")
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
    first, _, last = hashed_text(cli, "A?B")
    assert first.shared == ()
    assert last.ngrams == (("?", "B"), ("A", "?", "B"))


def test_equal_compressed_ngrams_reach_equal_rows(cli: DeepseekV41CLI) -> None:
    rows = rows_read(cli, "A?b")
    assert rows == rows_read(cli, "a?B") == rows_read(cli, "!a?b")
    assert len(rows) == len(SIZES) * HEADS
    other = rows_read(cli, "c?b")
    assert other[:HEADS] == rows[:HEADS], "the same 2-gram"
    assert all(a != b for a, b in zip(other[HEADS:], rows[HEADS:], strict=True)), "another 3-gram"


def test_what_cannot_be_hashed_is_refused(cli: DeepseekV41CLI, nano_cli: NanoCli) -> None:
    with pytest.raises(ValueError, match=r"^layer: must be one of \(1,\), those with an Engram, got 0$"):
        rows_read(cli, "a", 0)
    with pytest.raises(ValueError, match=r"^text: must have at least one token, got ''$"):
        rows_read(cli, "")
    none = nano_cli("--model.config.engram_layer_ids", "[]")
    build(none)
    for look in (
        lambda: rows_read(none, "a"),
        lambda: hashing_of(none.model.built),
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
    by_hand = ByHand(cli, 401)
    validation_batch(cli)
    fills = fills_of_batches(hashing_of(cli.model.built), islice(cli.datamodule.val_dataloader(), batches))
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
        fills_of_batches(hashing_of(cli.model.built), [])


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
    gates, seen_ids = gates_of(cli.model.built, batch, tokens)
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
    assert torch.equal(seen_ids, batch["input_ids"][0, :shown])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in cli.model.modules())


def test_a_model_without_gates_is_refused(nano_cli: NanoCli) -> None:
    cli = nano_cli("--model.config.engram_gate", "open")
    build(cli)
    with pytest.raises(ValueError, match=r"^model.config: no layer has a gate; it takes engram_layer_ids"):
        gates_of(cli.model.built, validation_batch(cli))
    with pytest.raises(ValueError, match=r"^tokens: must be at least 1, got 0$"):
        gates_of(cli.model.built, validation_batch(cli), 0)
