"""Hash of the Engram layers on a text: n-grams of compressed ids, and the rows of a table that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.model import DeepseekV41ForCausalLM
from lightning_modules.text import code_cell, first_few, markdown_table, readable, token_texts


class HashedToken(NamedTuple):
    """Token as the hash of a layer sees it.

    Attributes:
        text: Its own.
        token: Its id.
        compressed: Its compressed id.
        shared: Texts of the other tokens that have this compressed id.
        ngrams: The n-grams of sizes 2 to N that end here, each the texts of its compressed ids, the oldest first.
        rows: Of the layer's table, one for each column: by size of the n-gram, then by head.
    """

    text: str
    token: int
    compressed: int
    shared: tuple[str, ...]
    ngrams: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]


def hashing_of(model: DeepseekV41ForCausalLM) -> DeepseekV41NgramHash:
    """The hash of a model's Engram layers.

    Raises:
        ValueError: The model has no Engram.
    """
    hashing = model.model.engram_hash
    if hashing is None:
        raise ValueError("model.config.engram_layer_ids: must name a layer, or there is no memory to look at; got []")
    return hashing


def _text_of_all(texts: Sequence[str]) -> str:
    """One text for tokens that the hash takes for the same; a single token is shown as it is."""
    if len(texts) == 1:
        return texts[0]
    return " ".join(texts[0].lower().split()) or " "


def hashed(model: DeepseekV41ForCausalLM, tokenizer: Any, input_ids: Tensor, layer: int) -> list[HashedToken]:
    """Tokens of a text as the hash of a layer sees them.

    Args:
        model: Built.
        tokenizer: The model's, of the tokenizers library or of transformers.
        input_ids: int64 [S], from the start of a row: before it there is padding.
        layer: One that has an Engram.

    Raises:
        ValueError: The layer has none.
    """
    hashing = hashing_of(model)
    if layer not in hashing.layer_ids:
        raise ValueError(f"layer: must be one of {hashing.layer_ids}, those with an Engram, got {layer}")
    input_ids = input_ids.to(hashing.token_map.device)
    mapping = hashing.token_map.tolist()
    texts = token_texts(tokenizer, range(len(mapping)))
    tokens_of: dict[int, list[int]] = {}
    for token, compressed in enumerate(mapping):
        tokens_of.setdefault(compressed, []).append(token)

    def shown(compressed: int) -> str:
        return _text_of_all([texts[token] for token in tokens_of[compressed]])

    ngrams = hashing.ngrams(input_ids[None])[0].tolist()
    rows = hashing(input_ids[None])[0, :, hashing.layer_ids.index(layer)].tolist()
    return [
        HashedToken(
            text=texts[token],
            token=token,
            compressed=mapping[token],
            shared=tuple(texts[other] for other in tokens_of[mapping[token]] if other != token),
            ngrams=tuple(tuple(map(shown, reversed(ngram[:size]))) for size in range(2, len(ngram) + 1)),
            rows=tuple(row),
        )
        for token, ngram, row in zip(input_ids.tolist(), ngrams, rows, strict=True)
    ]


def rows_of_text(model: DeepseekV41ForCausalLM, tokenizer: Any, text: str, layer: int) -> tuple[int, ...]:
    """Rows of a layer's table that the last token of a text reads, one for each column.

    Args:
        model: Built.
        tokenizer: The model's, of transformers.
        text: From the start of a row.
        layer: One that has an Engram.

    Raises:
        ValueError: The text has no token, or as `hashed`.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError(f"text: must have at least one token, got {text!r}")
    return hashed(model, tokenizer, torch.tensor(ids), layer)[-1].rows


def _cell(text: str) -> str:
    return code_cell(readable(text))


def hash_table(tokens: Sequence[HashedToken]) -> str:
    """Markdown of `hashed`: a line per token."""
    sizes = range(2, 2 + len(tokens[0].ngrams))
    heads = len(tokens[0].rows) // len(sizes)
    titles = ["token", "id", "compressed id", "same to the hash"]
    titles += [f"{size}-gram" for size in sizes]
    titles += [f"row of {size}-gram, head {head}" for size in sizes for head in range(heads)]
    cells = [
        (
            _cell(token.text),
            token.token,
            token.compressed,
            first_few(map(_cell, token.shared), 4),
            *(" ".join(map(_cell, ngram)) for ngram in token.ngrams),
            *token.rows,
        )
        for token in tokens
    ]
    return markdown_table(titles, cells, align="lrrl" + "l" * len(sizes) + "r" * len(tokens[0].rows))
