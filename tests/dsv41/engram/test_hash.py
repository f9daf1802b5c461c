"""Hash ids are exact integers: equal to the stored ones, to a pure-Python walk over n-grams, and to a prime sieve.

Also here: how wrong inputs are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv41 import DeepseekV41Config, DeepseekV41TextConfig
from dsv41.engram.hash import DeepseekV41NgramHash, hash_multipliers
from dsv41.engram.token_map import fingerprint
from dsv41.primes import engram_primes

ConfigFactory = Callable[..., DeepseekV41Config]

pytestmark = pytest.mark.usefixtures("own_cache")


def wrap(number: int) -> int:
    """`number` as a wrapping signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def walked_hash_ids(
    module: DeepseekV41NgramHash, ids: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
) -> Tensor:
    """Hash ids by walking back from every position, with Python integers."""
    token_map, pad = module.token_map.tolist(), module.pad_id
    multipliers, primes, offsets = (t.tolist() for t in (module.multipliers, module.primes, module.offsets))

    def dead(row: int, position: int) -> bool:
        masked = mask is not None and not bool(mask[row, position])
        return masked or (documents is not None and int(documents[row, position]) == 0)

    result: list[list[list[list[int]]]] = []
    for row in range(ids.shape[0]):
        result.append([])
        for position in range(ids.shape[1]):
            tokens: list[int] = []
            open_ = True
            for back in range(len(multipliers[0])):
                at = position - back
                open_ = open_ and at >= 0 and not dead(row, at)
                if open_ and documents is not None:
                    open_ = int(documents[row, at]) == int(documents[row, position])
                tokens.append(token_map[int(ids[row, at])] if open_ else pad)
            per_layer: list[list[int]] = []
            for layer in range(len(multipliers)):
                value, columns = 0, []
                for back, token in enumerate(tokens):
                    value ^= wrap(token * multipliers[layer][back])
                    if back:
                        pairs = zip(primes[layer][back - 1], offsets[layer][back - 1], strict=True)
                        columns += [value % prime + offset for prime, offset in pairs]
                per_layer.append(columns)
            result[-1].append(per_layer)
    return torch.tensor(result)


@pytest.fixture(scope="module")
def released_hash(own_cache: Path, real_tokenizer: Tokenizer) -> DeepseekV41NgramHash:
    return DeepseekV41NgramHash(DeepseekV41TextConfig(), real_tokenizer)


@pytest.fixture
def tiny_hash(tiny_config: ConfigFactory, golden_tokenizer: Tokenizer) -> Callable[..., DeepseekV41NgramHash]:
    def make(**overrides: Any) -> DeepseekV41NgramHash:
        return DeepseekV41NgramHash(tiny_config(**overrides).text_config, golden_tokenizer)

    return make


# ---------------------------------------------------------------- the reference's numbers


def test_tables_of_the_tiny_model_equal_the_reference(
    tiny_hash: Callable[..., DeepseekV41NgramHash], golden: dict[str, Tensor]
) -> None:
    module = tiny_hash()
    for name in ("token_map", "primes", "offsets", "multipliers"):
        ours = getattr(module, name)
        assert ours.dtype == torch.int64
        assert torch.equal(ours.flatten(), golden[f"engram.{name}"].flatten()), name
    assert int(module.token_map.max()) + 1 == 403
    assert module.map_fingerprint == fingerprint(golden["engram.token_map"].numpy())


def test_hash_ids_of_the_padded_batch_equal_the_reference_also_at_padding(
    tiny_hash: Callable[..., DeepseekV41NgramHash], golden: dict[str, Tensor]
) -> None:
    ids = tiny_hash()(golden["input_ids"], golden["attention_mask"].bool())
    assert ids.dtype == torch.int64
    assert torch.equal(ids, golden["engram_hash_ids"])


def test_hash_ids_of_the_packed_batch_equal_the_reference_at_live_positions(
    tiny_hash: Callable[..., DeepseekV41NgramHash], golden: dict[str, Tensor]
) -> None:
    documents = golden["packed.sequence_ids"]
    ids = tiny_hash()(golden["packed_input_ids"], sequence_ids=documents)
    live = documents != 0
    assert 0 < int((~live).sum()) < live.numel()
    assert torch.equal(ids[live], golden["packed.engram_hash_ids"][live])


def test_tables_of_the_released_model_are_the_released_ones(
    released_hash: DeepseekV41NgramHash, hash_goldens: dict[str, Any]
) -> None:
    assert released_hash.layer_ids == (1, 14)
    assert released_hash.pad_id == hash_goldens["token_map"]["compressed_pad_id"]
    for index, layer in enumerate(("1", "14")):
        assert len(hash_goldens["primes"][layer]) == 24
        for name in ("primes", "offsets", "multipliers"):
            assert getattr(released_hash, name)[index].flatten().tolist() == hash_goldens[name][layer], (name, layer)


@pytest.mark.parametrize("example", ["english", "accents_whitespace", "chinese_code"])
def test_hash_ids_of_real_texts_equal_the_reference(
    released_hash: DeepseekV41NgramHash, real_tokenizer: Tokenizer, hash_goldens: dict[str, Any], example: str
) -> None:
    expected = hash_goldens["examples"][example]
    start = [0] if example == "chinese_code" else []  # one example begins with the BOS token
    assert start + real_tokenizer.encode(expected["text"], add_special_tokens=False).ids == expected["input_ids"]
    ids = torch.tensor([expected["input_ids"]])
    assert released_hash.token_map[ids[0]].tolist() == expected["compressed_ids"]
    assert released_hash(ids)[0].tolist() == expected["hash_ids"]


def test_dead_positions_and_documents_of_a_real_text_equal_the_reference(
    released_hash: DeepseekV41NgramHash, hash_goldens: dict[str, Any]
) -> None:
    examples = hash_goldens["examples"]
    ids = torch.tensor([examples["english"]["input_ids"]])
    dead, split = examples["english_dead_4_5"], examples["english_split_6"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, dead["dead_positions"]] = False
    assert released_hash(ids, mask)[0].tolist() == dead["hash_ids"]
    assert released_hash(ids, None, torch.tensor([split["document_ids"]]))[0].tolist() == split["hash_ids"]
    assert dead["hash_ids"] != examples["english"]["hash_ids"] != split["hash_ids"]


# ---------------------------------------------------------------- independent oracles


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("blocking", ["nothing", "mask", "documents", "both"])
def test_hash_ids_equal_a_walk_over_python_integers(
    tiny_hash: Callable[..., DeepseekV41NgramHash], ngram: int, blocking: str
) -> None:
    module = tiny_hash(engram_max_ngram_size=ngram, engram_num_embeddings=None)
    generator = torch.Generator().manual_seed(ngram)
    ids = torch.randint(512, (4, 24), generator=generator)
    mask = documents = None
    if blocking in ("mask", "both"):
        mask = torch.rand(4, 24, generator=generator) < 0.8
    if blocking in ("documents", "both"):
        # Numbers 0 (padding) to 2 that also come back after a change: an equal number further back is no same document.
        documents = torch.randint(3, (4, 8), generator=generator).repeat_interleave(3, dim=1)
        assert (documents == 0).any()
    got = module(ids, mask, documents)
    assert got.shape == (4, 24, 2, (ngram - 1) * 2)
    assert torch.equal(got, walked_hash_ids(module, ids, mask, documents))


def test_a_blocked_token_blocks_everything_behind_it(tiny_hash: Callable[..., DeepseekV41NgramHash]) -> None:
    module = tiny_hash(engram_max_ngram_size=4, engram_num_embeddings=None)
    ids = torch.arange(100, 112).unsqueeze(0)
    changed = ids.clone()
    changed[0, :6] += 40
    mask = torch.ones(1, 12, dtype=torch.bool)
    assert not torch.equal(module(ids, mask)[0, 7], module(changed, mask)[0, 7])
    mask[0, 6] = False
    assert torch.equal(module(ids, mask)[0, 7:], module(changed, mask)[0, 7:])
    # A position that is blocked itself hashes as a row of pads, and so does the start of a row behind nothing.
    pads = module(torch.full_like(ids, 2))[0, 0]
    assert torch.equal(module(ids, mask)[0, 6], pads)
    alone = module(torch.cat((torch.full((1, 3), 2), ids[:, 7:8]), dim=1))[0, 3]
    assert torch.equal(module(ids, mask)[0, 7], alone)


@pytest.mark.parametrize("position", [0, 1, 5, 10])
def test_hash_ids_never_depend_on_later_tokens(tiny_hash: Callable[..., DeepseekV41NgramHash], position: int) -> None:
    module = tiny_hash(engram_max_ngram_size=4, engram_num_embeddings=None)
    generator = torch.Generator().manual_seed(position)
    ids = torch.randint(512, (2, 11), generator=generator)
    changed = ids.clone()
    changed[:, position:] = (ids[:, position:] + 1 + torch.randint(400, (2, 11 - position), generator=generator)) % 512
    before, after = module(ids), module(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.equal(before[:, position], after[:, position])
    assert torch.equal(before[:, :position], module(ids[:, :position]))


def test_short_and_empty_rows_and_int32_ids_hash(tiny_hash: Callable[..., DeepseekV41NgramHash]) -> None:
    module = tiny_hash()
    ids = torch.tensor([[7, 300, 41]])
    whole = module(ids)
    for length in range(4):
        assert torch.equal(module(ids[:, :length]), whole[:, :length])
    assert torch.equal(module(ids.int()), whole)
    assert module(ids[:0]).shape == (0, 3, 2, 4)


@pytest.mark.parametrize(
    ("layers", "ngram", "heads", "start"), [(2, 3, 2, 97), (3, 4, 5, 1000), (1, 2, 4, 2), (2, 2, 3, 1)]
)
def test_bucket_counts_are_the_next_unused_primes_of_a_sieve(layers: int, ngram: int, heads: int, start: int) -> None:
    composite = {multiple for factor in range(2, 100) for multiple in range(2 * factor, 10_000, factor)}
    primes = iter(number for number in range(max(start, 2), 10_000) if number not in composite)
    expected = [[next(primes) for _ in range((ngram - 1) * heads)] for _ in range(layers)]
    assert engram_primes(layers, ngram, heads, start) == expected


def test_prime_search_of_the_released_sizes_is_exact(hash_goldens: dict[str, Any]) -> None:
    rows = DeepseekV41TextConfig().rows_of_engram_primes()
    assert rows == [hash_goldens["primes"]["1"], hash_goldens["primes"]["14"]]
    assert [sum(row) for row in rows] == [384006168, 384016682]
    assert DeepseekV41TextConfig().engram_num_embeddings == [384006168, 384016682]


def test_every_column_owns_its_rows_and_reaches_both_ends(tiny_hash: Callable[..., DeepseekV41NgramHash]) -> None:
    module = tiny_hash()
    ids = module(torch.randint(512, (8, 400), generator=torch.Generator().manual_seed(0))).flatten(0, 1)
    for layer, primes in enumerate(module.primes.flatten(1).tolist()):
        first = 0
        for column, prime in enumerate(primes):
            values = ids[:, layer, column]
            assert int(values.min()) == first, "3200 draws over about 100 buckets reach the first"
            assert int(values.max()) == first + prime - 1
            first += prime


def test_multipliers_are_odd_and_products_fit_64_bits() -> None:
    for vocabulary in (403, 99092):
        for layer in (0, 1, 14):
            values = hash_multipliers(layer, 4, vocabulary)
            assert values.dtype == np.int64
            assert (values % 2 == 1).all()
            assert max(int(value) * (vocabulary - 1) for value in values) < 2**63
    expected = np.random.default_rng(10007 * 14).integers(0, (2**63 - 1) // 99092 // 2, size=4, dtype=np.int64) * 2 + 1
    assert hash_multipliers(14, 4, 99092).tolist() == expected.tolist()
    assert hash_multipliers(1, 4, 99092).tolist() != hash_multipliers(14, 4, 99092).tolist()


# ---------------------------------------------------------------- sizes and inputs


@pytest.mark.parametrize("asked", [402, 404, 512])
def test_another_compressed_size_than_the_tokenizers_is_refused(
    tiny_hash: Callable[..., DeepseekV41NgramHash], asked: int
) -> None:
    with pytest.raises(ValueError, match=rf"^engram_compressed_vocab_size: .*{asked}\b.*\b403\b"):
        tiny_hash(engram_compressed_vocab_size=asked)


def test_sizes_left_open_are_taken_from_the_tokenizer(tiny_hash: Callable[..., DeepseekV41NgramHash]) -> None:
    module = tiny_hash(vocab_size=None, engram_compressed_vocab_size=None)
    assert (module.config.vocab_size, module.config.engram_compressed_vocab_size) == (512, 403)
    assert torch.equal(module.multipliers, tiny_hash().multipliers)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tiny_hash: Callable[..., DeepseekV41NgramHash]) -> None:
    with pytest.raises(ValueError, match=r"^vocab_size: 511 .*512"):
        tiny_hash(vocab_size=511)


def test_ids_and_pads_that_only_the_larger_vocabulary_has_are_refused(
    tiny_hash: Callable[..., DeepseekV41NgramHash],
) -> None:
    module = tiny_hash(vocab_size=600)
    with pytest.raises(ValueError, match=r"^input_ids: ids must lie in 0\.\.511, got 512"):
        module(torch.tensor([[511, 512]]))
    with pytest.raises(ValueError, match=r"^engram_pad_token_id: must lie in 0\.\.511.*550"):
        tiny_hash(vocab_size=600, engram_pad_token_id=550)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrong", [-1, -100, 512])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_the_vocabulary_are_refused(
    tiny_config: ConfigFactory, golden_tokenizer: Tokenizer, strict: bool, wrong: int, dtype: torch.dtype
) -> None:
    module = DeepseekV41NgramHash(tiny_config().text_config, golden_tokenizer, strict_validation=strict)
    ids = torch.tensor([[5, 511, 0], [1, wrong, 2]], dtype=dtype)
    with pytest.raises(ValueError, match=rf"^input_ids: ids must lie in 0\.\.511, got {wrong}$"):
        module(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.int16, torch.bfloat16])
def test_ids_of_another_dtype_are_refused(tiny_hash: Callable[..., DeepseekV41NgramHash], dtype: torch.dtype) -> None:
    message = rf"^input_ids: must be int32 or int64 ids in 0\.\.511, got {re.escape(str(dtype))}$"
    with pytest.raises(ValueError, match=message):
        tiny_hash()(torch.ones(1, 4, dtype=dtype))


@pytest.mark.parametrize("shape", [(4,), (), (1, 4, 1)])
def test_ids_of_another_rank_are_refused(
    tiny_hash: Callable[..., DeepseekV41NgramHash], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"^input_ids: must have shape \[batch, sequence\]"):
        tiny_hash()(torch.ones(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 4, dtype=torch.int64),
        torch.ones(2, 4),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 5, dtype=torch.bool),
        torch.ones(1, 4, dtype=torch.bool),
        torch.ones(4, dtype=torch.bool),
    ],
    ids=["int64", "float", "narrow", "wide", "one row", "one axis"],
)
def test_a_token_mask_of_another_dtype_or_shape_is_refused(
    tiny_hash: Callable[..., DeepseekV41NgramHash], mask: Tensor
) -> None:
    with pytest.raises(ValueError, match=r"^token_mask: must be bool \[2, 4\], got"):
        tiny_hash()(torch.ones(2, 4, dtype=torch.int64), mask)


@pytest.mark.parametrize(
    "documents",
    [torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int64), torch.ones(8, dtype=torch.int64)],
    ids=["float", "narrow", "flat"],
)
def test_sequence_ids_of_another_dtype_or_shape_are_refused(
    tiny_hash: Callable[..., DeepseekV41NgramHash], documents: Tensor
) -> None:
    with pytest.raises(ValueError, match=r"^sequence_ids: must be integers \[2, 4\], got"):
        tiny_hash()(torch.ones(2, 4, dtype=torch.int64), None, documents)
