"""Which documents are held out."""

import hashlib

import pytest

from lightning_modules.data.corpus import Document
from lightning_modules.data.splits import corpus_digest, split_documents, split_of


def test_split_follows_the_hash_of_the_name() -> None:
    share = int(hashlib.sha256(b"document").hexdigest()[:16], 16) / 2**64
    assert split_of("document", share + 0.001, 0.0) == "val"
    assert split_of("document", share - 0.001, 0.002) == "test"
    assert split_of("document", share - 0.002, 0.001) == "train"
    assert split_of("document", 0.0, 0.0) == "train"


def test_shares_are_about_the_fractions() -> None:
    splits = [split_of(f"name {number}", 0.1, 0.2) for number in range(5000)]
    assert splits.count("val") == pytest.approx(500, abs=70)
    assert splits.count("test") == pytest.approx(1000, abs=90)


def test_documents_keep_their_split_when_others_come_or_go() -> None:
    documents = [Document(f"name {number}", f"text {number}") for number in range(200)]
    whole = split_documents(documents, 0.2, 0.2)
    fewer = split_documents(documents[::3], 0.2, 0.2)
    for name in ("train", "val", "test"):
        assert fewer[name].documents == [document for document in documents[::3] if document in whole[name].documents]
    assert sum(len(split.documents) for split in whole.values()) == 200


def test_single_document_is_cut_by_characters() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(100))
    splits = split_documents([Document("only", text)], 0.1, 0.25)
    assert [splits[name].documents for name in ("train", "val", "test")] == [
        [Document("only", text[:65])],
        [Document("only", text[65:75])],
        [Document("only", text[75:])],
    ]
    assert splits["val"].bytes == 30
    assert split_documents([Document("only", text)], 0.0, 0.25)["val"].documents == []


def test_digest_covers_names_texts_order_and_borders() -> None:
    corpora = [
        [("a", "bc"), ("d", "e")],
        [("d", "e"), ("a", "bc")],
        [("ab", "c"), ("d", "e")],
        [("a", "bcd"), ("", "e")],
        [("a", "bc")],
    ]
    digests = {corpus_digest(Document(*pair) for pair in corpus) for corpus in corpora}
    assert len(digests) == len(corpora)
    assert corpus_digest([Document("a", "bc")]) in digests
