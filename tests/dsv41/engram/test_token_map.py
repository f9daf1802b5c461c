"""The compressed token map: what it merges and keeps apart, how it is kept on disk, which tokenizers are refused."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dsv41
from dsv41 import DeepseekV41Config
from dsv41.engram import token_map
from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.engram.token_map import compressed_token_map, fingerprint

ConfigFactory = Callable[..., DeepseekV41Config]

pytestmark = pytest.mark.usefixtures("own_cache")

# Byte-level alphabet: "Ġ" writes a space; "Ã", "â" write the bytes C3 and E2, which alone are no UTF-8.
BYTE_LEVEL_VOCABULARY = ["<pad>", "the", "Ġthe", "THE", "Ġ", "ĠĠ", "Ã", "â", "Ã©", "e", "ï¿½", "l", "ł", "ÅĤ"]


def word_tokenizer(words: list[str], decoder: Any = None) -> Tokenizer:
    """A tokenizer whose id i stands for `words[i]` (decoded by `decoder`, or as it is)."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


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
        "import sys; from tokenizers import Tokenizer; from dsv41.engram import token_map; token_map.CACHED_FROM = 0; "
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
    with caplog.at_level(logging.INFO, "dsv41.engram.token_map"):
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
    with caplog.at_level(logging.INFO, "dsv41.engram.token_map"):
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
