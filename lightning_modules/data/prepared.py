"""A corpus made ready: its splits, its tokenizer and its tokens, each made or loaded when first needed."""

import math
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lightning_modules.data.corpus import iterate_documents
from lightning_modules.data.rows import RowDataset, entropy, predicted_token_counts
from lightning_modules.data.splits import SPLITS, Split, split_documents
from lightning_modules.data.token_bytes import token_byte_lengths
from lightning_modules.data.token_store import TokenStore, tokenized
from lightning_modules.data.tokenization import load_tokenizer, tokenizer_fingerprint


class PreparedText:
    """A corpus with its tokenizer and tokens.

    Args:
        source: Where the text comes from. See ``TextDataModule`` for all arguments.
        tokenizer: Which tokenizer.
        vocab_size: Tokens of the trained tokenizer.
        val_fraction: Share for validation.
        test_fraction: Share for test.
        text_field: Field with the text.
        max_documents: Limit on the documents.
        cache_dir: Folder of the caches.
    """

    def __init__(
        self,
        source: str | list[str],
        tokenizer: str,
        vocab_size: int,
        val_fraction: float,
        test_fraction: float,
        text_field: str,
        max_documents: int | None,
        cache_dir: Path,
    ) -> None:
        self._source = source
        self._tokenizer_spec = tokenizer
        self._vocab_size = vocab_size
        self._fractions = (val_fraction, test_fraction)
        self._text_field = text_field
        self._max_documents = max_documents
        self._cache_dir = cache_dir

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The splits by name. Their lists of documents are emptied when ``stores`` has been used."""
        return split_documents(iterate_documents(self._source, self._text_field, self._max_documents), *self._fractions)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, trained if need be."""
        # Only a trained tokenizer needs the corpus, which may be slow to read.
        documents = self.splits["train"].documents if self._tokenizer_spec == "bpe" else []
        return load_tokenizer(self._tokenizer_spec, documents, self._vocab_size, self._cache_dir)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that decides how text becomes token ids."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def byte_lengths(self) -> torch.Tensor:
        """UTF-8 bytes that each token id stands for: int64 ``[len(tokenizer)]``, 0 for special tokens."""
        return token_byte_lengths(self.tokenizer)

    @cached_property
    def stores(self) -> dict[str, TokenStore]:
        """The tokens of each split by its name, tokenised if need be."""
        stores = {
            name: tokenized(split, name, self.tokenizer, self.fingerprint, self._cache_dir)
            for name, split in self.splits.items()
        }
        for split in self.splits.values():
            split.documents.clear()  # To free memory: the tokens lie on disk, and nothing needs the texts any more.
        return stores

    def rows(self, split: str, sequence_length: int) -> RowDataset:
        """The rows of a split.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.
            sequence_length: Tokens in a row, at least 2.

        Returns:
            The rows.

        Raises:
            ValueError: If there is no such split.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return RowDataset(self.stores[split], sequence_length, self.tokenizer.pad_token_id)

    def check_enough(self, split: str, least_tokens: int = 1) -> None:
        """Check that a split can be used.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.
            least_tokens: Number of tokens that it must have.

        Raises:
            ValueError: If it has fewer. The message gives the counts and says what to change.
        """
        tokens = len(self.stores[split])
        if tokens >= least_tokens:
            return
        counts = ", ".join(f"{store.documents} {name}" for name, store in self.stores.items())
        if split == "train":
            raise ValueError(
                f"the train split has {tokens} tokens, less than one row of sequence_length = {least_tokens}"
                f" (documents: {counts}); give more text in source, or lower sequence_length, val_fraction or"
                " test_fraction"
            )
        without = ", or set val_fraction to 0 to train without validation" if split == "val" else ""
        raise ValueError(
            f"the {split} split is empty (documents: {counts}); raise {split}_fraction or give more documents{without}"
        )

    def unigram(self, split: str, sequence_length: int) -> tuple[float, float]:
        """How well a model without context can do on the rows of a split: one that knows the tokens' frequencies in it.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.
            sequence_length: Tokens in a row, at least 2.

        Returns:
            Nats per predicted token, and bits per byte of the predicted tokens' text.

        Raises:
            ValueError: If there is no such split, or no text is predicted in it.
        """
        rows = self.rows(split, sequence_length)
        counts: np.ndarray = predicted_token_counts(rows.store, sequence_length, len(self.tokenizer))
        size = int(counts @ self.byte_lengths.numpy())
        if size == 0:
            raise ValueError(f"no text is predicted in the {split} split, which has {len(rows.store)} tokens")
        nats = entropy(counts)
        return nats, nats * int(counts.sum()) / math.log(2) / size

    def describe(self, sequence_length: int) -> str:
        """The size of each split, in one line.

        Args:
            sequence_length: Tokens in a row, at least 2.

        Returns:
            Documents, tokens, rows and bytes of each split.
        """
        return "; ".join(
            f"{name} {store.documents:,} documents, {len(store):,} tokens,"
            f" {len(self.rows(name, sequence_length)):,} rows, {self.splits[name].bytes:,} bytes"
            for name, store in self.stores.items()
        )
