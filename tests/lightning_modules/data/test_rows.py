"""From documents to rows: nothing lost, nothing doubled, and no document predicted from another."""

import math
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lightning_modules.data import token_store
from lightning_modules.data.corpus import Document
from lightning_modules.data.rows import RowDataset, entropy, predicted_token_counts
from lightning_modules.data.splits import Split, split_documents
from lightning_modules.data.token_store import TokenStore, tokenized
from lightning_modules.data.tokenization import SPECIAL_TOKENS, load_tokenizer, tokenizer_fingerprint

TEXTS = ["The first text, of some length.", "b", "A text that is longer than a row is. " * 3, "the last of them"]
DOCUMENTS = [Document(f"doc {number}", text) for number, text in enumerate(TEXTS)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer("bpe", DOCUMENTS, 280, tmp_path)


def _split(documents: list[Document]) -> Split:
    return split_documents([*documents, Document("", "x")], 0, 0)["train"]._replace(documents=documents)


def _store(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, documents: list[Document] = DOCUMENTS) -> TokenStore:
    return tokenized(_split(documents), "train", tokenizer, tokenizer_fingerprint(tokenizer), tmp_path)


def _expected(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [[0, *tokenizer.encode(text, add_special_tokens=False), 1] for text in TEXTS]


@pytest.mark.parametrize("length", [2, 7, 16, 1000])
def test_live_tokens_of_all_rows_are_the_documents(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, length: int
) -> None:
    rows = RowDataset(_store(tmp_path, tokenizer), length, 2)
    items = [rows[number] for number in range(len(rows))]
    flat = [token for document in _expected(tokenizer) for token in document]
    assert torch.cat([item["input_ids"][item["attention_mask"] == 1] for item in items]).tolist() == flat
    assert len(rows) == math.ceil(len(flat) / length)
    for number, item in enumerate(items):
        assert {key: (value.dtype, tuple(value.shape)) for key, value in item.items()} == {
            **dict.fromkeys(("input_ids", "attention_mask", "labels", "document_ids"), (torch.int64, (length,))),
            "row_id": (torch.int64, ()),
        }
        assert item["row_id"] == number
        padding = item["attention_mask"] == 0
        assert padding.any() == (number == len(rows) - 1 and len(flat) % length > 0)
        assert (item["input_ids"][padding] == 2).all()
        assert (item["labels"][padding] == -100).all()
        assert (item["document_ids"][padding] == 0).all()
        assert (item["document_ids"][~padding] > 0).all()
    with pytest.raises(IndexError, match=f"from 0 to {len(rows) - 1}"):
        rows[len(rows)]


def test_labels_and_document_numbers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = RowDataset(_store(tmp_path, tokenizer), 16, 2)
    documents = _expected(tokenizer)
    flat = [(number, place) for number, document in enumerate(documents) for place in range(len(document))]
    seen_inner_start = seen_cut = False
    for number in range(len(rows)):
        item = rows[number]
        here = flat[number * 16 : (number + 1) * 16]
        first = here[0][0]
        live = len(here)
        assert item["document_ids"][:live].tolist() == [document - first + 1 for document, _ in here]
        assert item["labels"][:live].tolist() == [
            -100 if place == 0 else documents[document][place] for document, place in here
        ]
        seen_inner_start |= any(place == 0 for _, place in here[1:])
        seen_cut |= here[0][1] > 0
    assert seen_inner_start
    assert seen_cut


def test_special_tokens_in_text_stay_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "before " + " ".join(SPECIAL_TOKENS.values()) + " after"
    store = _store(tmp_path, tokenizer, [Document("attack", text)])
    inner = store.tokens[1:-1]
    assert not np.isin(inner, (0, 1, 2)).any()
    assert tokenizer.decode(inner.tolist()) == text
    assert tokenizer.encode(SPECIAL_TOKENS["eos_token"], add_special_tokens=False) == [1]  # The tokenizer is as it was.


def test_deepseek_special_tokens_in_text_stay_text(tmp_path: Path) -> None:
    deepseek = load_tokenizer("deepseek", [], 0, tmp_path)
    text = "a".join(SPECIAL_TOKENS.values())
    store = _store(tmp_path, deepseek, [Document("attack", text)])
    assert not np.isin(store.tokens[1:-1], (0, 1, 2)).any()
    assert deepseek.decode(store.tokens[1:-1].tolist()) == text
    assert store.tokens.dtype == np.uint32


def test_tokens_are_mapped_and_made_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path, tokenizer)
    assert isinstance(store.tokens, np.memmap)
    assert store.tokens.dtype == np.uint16
    assert store.starts.dtype == np.int64
    assert store.starts.tolist() == np.cumsum([0, *map(len, _expected(tokenizer))]).tolist()
    assert not list(tmp_path.rglob("*.partial"))

    def refuse(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(token_store, "_tokenize", refuse)
    assert (_store(tmp_path, tokenizer).tokens == store.tokens).all()
    with pytest.raises(AssertionError, match="tokenised again"):
        tokenized(store_split := _split(DOCUMENTS), "train", tokenizer, "another tokenizer", tmp_path)
    with pytest.raises(AssertionError, match="tokenised again"):
        tokenized(store_split._replace(digest="0"), "train", tokenizer, tokenizer_fingerprint(tokenizer), tmp_path)


def test_store_is_sent_to_workers_without_its_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    store = _store(tmp_path, tokenizer, [Document("long", "words " * 50_000)])
    copy = pickle.dumps(store) if store.tokens.size else b""
    assert len(copy) < 5_000 < store.tokens.nbytes
    assert (pickle.loads(copy).tokens == store.tokens).all()


def test_broken_cache_file_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    store = _store(tmp_path, tokenizer)
    store.tokens_file.write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"has 3 bytes instead of .* remove it"):
        _store(tmp_path, tokenizer)


def test_nothing_is_left_when_tokenising_fails(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def special_ids(_: object, documents: list[Document]) -> list[list[int]]:
        return [[5, 1, 6] for _ in documents]

    monkeypatch.setattr(token_store._Encoder, "_encodings", special_ids)
    with pytest.raises(
        ValueError, match=r"document 'doc 0' an id of 280 or more, or one of the special ids \[0, 1, 2\]"
    ):
        _store(tmp_path, load_tokenizer("bpe", DOCUMENTS, 280, tmp_path))
    assert not list((tmp_path / "tokens").iterdir())


def test_unigram_counts_and_entropy_by_hand(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    store = _store(tmp_path, tokenizer)
    rows = RowDataset(store, 7, 2)
    predicted = [label for row in range(len(rows)) for label in rows[row]["labels"][1:].tolist() if label != -100]
    counts = predicted_token_counts(store, 7, 280)
    assert counts.tolist() == [predicted.count(token) for token in range(280)]
    assert entropy(np.array([2, 0, 1, 1])) == pytest.approx(1.5 * math.log(2))
    assert str(entropy(np.array([0, 5]))) == "0.0"


def test_documents_are_tokenised_in_batches(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _store(tmp_path / "whole", tokenizer)
    monkeypatch.setattr(token_store, "_BATCH_CHARACTERS", 20)
    batched = _store(tmp_path / "batched", tokenizer)
    assert (batched.tokens == whole.tokens).all()
    assert all(begin < end for begin, end in pairwise(batched.starts))
