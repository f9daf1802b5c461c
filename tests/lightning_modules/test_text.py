"""Tables, numbers and texts of tokens as people read them."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from lightning_modules.text import (
    code,
    code_cell,
    duration,
    first_few,
    markdown_table,
    plain_table,
    readable,
    readable_count,
    readable_size,
    token_texts,
)


def test_tables() -> None:
    assert markdown_table(("a", "b"), [("x", 1), ("y", 2.5)]) == "| a | b |\n|---|---:|\n| x | 1 |\n| y | 2.5 |\n"
    assert markdown_table(("a", "b"), [], align="rl") == "| a | b |\n|---:|---|\n"
    for rows, align in (([("x",)], None), ([], "l")):
        with pytest.raises(ValueError, match=r"^rows: must have 2 cells each, got"):
            markdown_table(("a", "b"), rows, align)
    assert plain_table([("a", "number"), ("long", "1")]) == ["a     number", "long       1"]


def test_numbers() -> None:
    assert [readable_size(n) for n in (0, 999, 1500, 2.5e9, 3e15)] == ["0 B", "999 B", "1.5 kB", "2.5 GB", "3,000.0 TB"]
    assert [readable_count(n) for n in (7, 1500, 2e6, 3e9, 4e12)] == ["7.0", "1.5 k", "2.0 M", "3.0 G", "4.0 T"]
    assert [duration(s) for s in (3.2, 29, 90, 4000)] == ["3 s", "29 s", "2 min", "1 h 07 min"]
    assert first_few("abc", 3) == "a, b, c"
    assert first_few("abcde", 3) == "a, b, c and 2 more"


def test_tokens_are_readable_on_an_axis() -> None:
    words = [" the", "\n", "\t\t", "", "$x$", "<｜begin▁of▁sentence｜>", "'", "é"]
    shown = ["·the", "\\n", "\\t\\t", "", "$x$", "<|begin▁of▁…", "'", "é"]
    assert [readable(word) for word in words] == shown
    assert readable("x" * 30, None) == "x" * 30


def test_code_spans_show_any_text() -> None:
    assert code("a") == "`a`"
    assert code("a``b`") == "``` a``b` ```"
    assert code_cell("|`") == "`` \\|` ``"


def test_texts_are_those_of_single_tokens(golden_tokenizer: Tokenizer) -> None:
    ids = golden_tokenizer.encode("abc  de\nf", add_special_tokens=False).ids
    texts = token_texts(golden_tokenizer, torch.tensor(ids))
    assert len(texts) == len(ids) > 1
    assert "".join(texts) == "abc  de\nf"
    special = next(token for token, added in golden_tokenizer.get_added_tokens_decoder().items() if added.special)
    assert token_texts(golden_tokenizer, [special]) == [golden_tokenizer.id_to_token(special)]
