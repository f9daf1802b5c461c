"""Rows of a fixed number of tokens, cut from the documents of a split."""

import math

import numpy as np
import torch
from torch.utils.data import Dataset

from dsv41.config import IGNORE_INDEX
from lightning_modules.data.token_store import TokenStore

# In place of a row's number: a row of padding alone, for a process that has no row left where others have one.
NO_ROW = -1


class RowDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of ``sequence_length`` tokens across documents; the last is filled up with padding.

    Args:
        store: The tokens of the split.
        sequence_length: Tokens in a row, at least 2.
        pad_id: Id of the padding token.
    """

    def __init__(self, store: TokenStore, sequence_length: int, pad_id: int) -> None:
        self.store = store
        self.sequence_length = sequence_length
        self.pad_id = pad_id

    def __len__(self) -> int:
        """Number of rows."""
        return -(-len(self.store) // self.sequence_length)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """One row.

        Args:
            row: Number of the row, from 0, or ``NO_ROW`` for a row of padding alone.

        Returns:
            ``input_ids``, int64 ``[S]``; ``attention_mask``, int64 ``[S]``, 1 at tokens and 0 at padding;
            ``labels``, int64 ``[S]``, not shifted: the token itself, or -100 at padding and at the first token of each
            document, so that no document is predicted from the one before; ``document_ids``, int64 ``[S]``, which
            numbers the row's documents from 1 and is 0 at padding; ``row_id``, int64 scalar, ``row``.

        Raises:
            IndexError: If there is no such row.
        """
        if row == NO_ROW:
            return self._padding()
        if not 0 <= row < len(self):
            raise IndexError(f"row must be from 0 to {len(self) - 1}, or {NO_ROW}, got {row}")
        begin = row * self.sequence_length
        end = min(begin + self.sequence_length, len(self.store))
        live = end - begin
        input_ids = np.full(self.sequence_length, self.pad_id, dtype=np.int64)
        input_ids[:live] = self.store.tokens[begin:end]
        starts = self.store.starts
        # The documents that have tokens in the row: from the one at its first token to the last that starts in it.
        first, last = np.searchsorted(starts[:-1], (begin, end - 1), side="right") - 1
        inside = starts[first : last + 1] - begin
        inside = inside[inside >= 0]
        labels = np.full(self.sequence_length, IGNORE_INDEX, dtype=np.int64)
        labels[:live] = input_ids[:live]
        labels[inside] = IGNORE_INDEX
        begins = np.zeros(self.sequence_length, dtype=np.int64)
        begins[inside] = 1
        document_ids = np.cumsum(begins) + (starts[first] < begin)
        document_ids[live:] = 0
        attention_mask = np.zeros(self.sequence_length, dtype=np.int64)
        attention_mask[:live] = 1
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(document_ids),
            "row_id": torch.tensor(row),
        }

    def _padding(self) -> dict[str, torch.Tensor]:
        size = (self.sequence_length,)
        return {
            "input_ids": torch.full(size, self.pad_id, dtype=torch.int64),
            "attention_mask": torch.zeros(size, dtype=torch.int64),
            "labels": torch.full(size, IGNORE_INDEX, dtype=torch.int64),
            "document_ids": torch.zeros(size, dtype=torch.int64),
            "row_id": torch.tensor(NO_ROW),
        }


def predicted_token_counts(store: TokenStore, sequence_length: int, vocab_size: int) -> np.ndarray:
    """Count how often each token has to be predicted in the rows of a split.

    The first token of a row and of a document is not predicted: nothing of its document stands before it in the row.

    Args:
        store: The tokens of the split.
        sequence_length: Tokens in a row, at least 2.
        vocab_size: Number of token ids.

    Returns:
        int64 ``[vocab_size]``.
    """
    predicted = np.ones(len(store), dtype=bool)
    predicted[::sequence_length] = False
    predicted[store.starts[:-1]] = False
    return np.bincount(store.tokens[predicted], minlength=vocab_size)


def unigram(store: TokenStore, sequence_length: int, byte_lengths: np.ndarray) -> tuple[float, float]:
    """Unigram loss on the rows of a split: of the best model without context, which knows the tokens' frequencies.

    Args:
        store: The tokens of the split.
        sequence_length: Tokens in a row, at least 2.
        byte_lengths: int64 ``[vocab_size]``, bytes of text that each token id stands for.

    Returns:
        Nats per predicted token, and bits per byte of the predicted tokens' text.

    Raises:
        ValueError: If no text is predicted.
    """
    counts = predicted_token_counts(store, sequence_length, len(byte_lengths))
    size = int(counts @ byte_lengths)
    if size == 0:
        raise ValueError(f"no text is predicted in {len(store)} tokens")
    nats = entropy(counts)
    return nats, nats * int(counts.sum()) / math.log(2) / size


def entropy(counts: np.ndarray) -> float:
    """Entropy of the distribution given by counts.

    Args:
        counts: int64 ``[n]``, with a sum above 0.

    Returns:
        The entropy in nats.
    """
    shares = counts[counts > 0] / counts.sum()
    # Adding 0.0 turns the -0.0 of a single outcome into 0.0.
    return float(-(shares * np.log(shares)).sum() + 0.0)
