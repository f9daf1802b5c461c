"""N-gram hash from token ids to rows of the Engram tables (ARCHITECTURE 6; Engram, arXiv:2601.07372).

1. A token map merges ids whose text differs only in case, accents or white space (see `token_map.py`).
2. The last N compressed ids at each position are multiplied by odd constants and XORed; after k + 1 tokens the value
   is the hash of the (k + 1)-gram.
3. Every (n-gram size, head) takes it modulo its prime and adds the offset of its rows.

Everything is integer arithmetic on int64 that wraps, so results are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.engram.token_map import compressed_token_map, fast_backend, fingerprint
from dsv41.inputs import check_integer_ids

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer

# Layer l seeds its multipliers with this times l (released inference code, engram.py).
MULTIPLIER_SEED = 10007


def hash_multipliers(layer: int, ngram_size: int, compressed_vocab_size: int) -> npt.NDArray[np.int64]:
    """Odd multipliers int64 [ngram_size] of an Engram layer; products with compressed ids do not overflow."""
    bound = max(1, (np.iinfo(np.int64).max // compressed_vocab_size) // 2)
    generator = np.random.default_rng(MULTIPLIER_SEED * layer)
    return generator.integers(0, bound, size=ngram_size, dtype=np.int64) * 2 + 1


def hashed_tokens(config: DeepseekV41TextConfig, tokenizer: AnyTokenizer) -> npt.NDArray[np.int64]:
    """Token map named by ``config.engram_token_map``: hashed id of each token id, int64 [ids]."""
    if config.engram_token_map == "raw":
        return np.arange(fast_backend(tokenizer).get_vocab_size(with_added_tokens=True), dtype=np.int64)
    return compressed_token_map(tokenizer)


class DeepseekV41NgramHash(nn.Module):
    """N-gram hash of all Engram layers at once, over whole sequences.

    Args:
        config: Text configuration; `engram_compressed_vocab_size` must be the tokenizer's.
        tokenizer: Fast tokenizer that made the ids.
        strict_validation: See `check_integer_ids`.

    Raises:
        ValueError: The tokenizer compresses to another size than configured, or has more ids than `vocab_size`.

    Attributes:
        config: The configuration, with sizes that it left open taken from the tokenizer.
        map_fingerprint: `fingerprint` of the token map, equal for models that hash alike.
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: DeepseekV41TextConfig, tokenizer: AnyTokenizer, strict_validation: bool = True) -> None:
        super().__init__()
        mapping = hashed_tokens(config, tokenizer)
        compressed = int(mapping.max()) + 1
        config = config.for_tokenizer(len(mapping), compressed)
        if config.engram_pad_token_id >= len(mapping):
            raise ValueError(
                f"engram_pad_token_id: must lie in 0..{len(mapping) - 1}, the ids of the tokenizer, "
                f"got {config.engram_pad_token_id}"
            )
        self.config = config
        self.strict_validation = strict_validation
        self.layer_ids = tuple(config.engram_layer_ids)
        self.max_ngram_size = config.engram_max_ngram_size
        self.pad_id = int(mapping[config.engram_pad_token_id])
        self.map_fingerprint = fingerprint(mapping)
        primes = np.array(config.rows_of_engram_primes(), dtype=np.int64)
        self._values = {
            "token_map": mapping,
            "multipliers": np.stack([hash_multipliers(i, self.max_ngram_size, compressed) for i in self.layer_ids]),
            "primes": primes.reshape(len(self.layer_ids), self.max_ngram_size - 1, config.engram_n_heads),
            "offsets": (np.cumsum(primes, axis=1) - primes).reshape(
                len(self.layer_ids), self.max_ngram_size - 1, config.engram_n_heads
            ),
        }
        # Not saved: they follow from configuration and tokenizer, which a checkpoint must not override.
        for name, value in self._values.items():
            self.register_buffer(name, torch.empty(value.shape, dtype=torch.int64), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, draws: object = None) -> None:
        """Restore the derived integer buffers, for example after meta-device materialisation."""
        for name, value in self._values.items():
            buffer = getattr(self, name)
            if not buffer.is_meta:
                buffer.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        token_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        checked: bool = False,
    ) -> Tensor:
        """Hash every position's n-grams.

        Args:
            input_ids: int32 or int64 token ids [B, S], rows complete from their start.
            token_mask: Bool [B, S]; a false token (image, padding) counts as blocked for itself and all behind it.
            sequence_ids: Integer document numbers [B, S]; lookback stops where they change, 0 marks padding.
            checked: The caller has checked the range of the ids (saves a second host read).

        Returns:
            int64 table rows [B, S, engram_layers, (N - 1) * heads]; columns ordered by n-gram size, then head.

        Raises:
            ValueError: Ids out of range, wrong dtypes or shapes.
        """
        tokens = self._tokens_back(input_ids, token_mask, sequence_ids, checked)
        value = next(tokens).unsqueeze(-1) * self.multipliers[:, 0]
        # Written in place: the rows are as many times larger than everything before them as there are heads.
        rows = value.new_empty(*value.shape, *self.primes.shape[1:])
        for back, token in enumerate(tokens, start=1):
            value = value ^ (token.unsqueeze(-1) * self.multipliers[:, back])
            torch.remainder(value.unsqueeze(-1), self.primes[:, back - 1], out=rows[..., back - 1, :])
        return rows.add_(self.offsets).flatten(-2)

    @torch.no_grad()
    def ngrams(self, input_ids: Tensor, token_mask: Tensor | None = None, sequence_ids: Tensor | None = None) -> Tensor:
        """N-grams that `forward` hashes: the compressed ids of every position and of those behind it.

        Args, errors: As in `forward`.

        Returns:
            int64 [B, S, N]: at k the compressed id k positions back, or the padding token's where lookback ends.
        """
        return torch.stack(list(self._tokens_back(input_ids, token_mask, sequence_ids)), dim=-1)

    def _tokens_back(
        self, input_ids: Tensor, token_mask: Tensor | None, sequence_ids: Tensor | None, checked: bool = False
    ) -> Iterator[Tensor]:
        """Compressed ids of every position, then of the one behind it, and so on: N times int64 [B, S]."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: must have shape [batch, sequence], got {list(input_ids.shape)}")
        if not checked:
            check_integer_ids(input_ids, "input_ids", len(self.token_map), self.strict_validation)
        alive = _check_token_mask(token_mask, sequence_ids, input_ids)
        compressed = self.token_map[input_ids.long()].masked_fill(~alive, self.pad_id)
        yield compressed
        reachable = alive
        for back in range(1, self.max_ngram_size):
            reachable = reachable & _same_document(alive, sequence_ids, back)
            yield _shift(compressed, back, self.pad_id).masked_fill(~reachable, self.pad_id)


def _check_token_mask(token_mask: Tensor | None, sequence_ids: Tensor | None, input_ids: Tensor) -> Tensor:
    """Tokens that hash as themselves, bool [B, S]."""
    alive = torch.ones_like(input_ids, dtype=torch.bool)
    if token_mask is not None:
        if token_mask.dtype != torch.bool or token_mask.shape != input_ids.shape:
            raise ValueError(
                f"token_mask: must be bool {list(input_ids.shape)}, got {token_mask.dtype} {list(token_mask.shape)}"
            )
        alive = token_mask
    if sequence_ids is not None:
        if sequence_ids.is_floating_point() or sequence_ids.shape != input_ids.shape:
            raise ValueError(
                f"sequence_ids: must be integers {list(input_ids.shape)}, "
                f"got {sequence_ids.dtype} {list(sequence_ids.shape)}"
            )
        alive = alive & (sequence_ids != 0)
    return alive


def _shift(x: Tensor, back: int, fill: int) -> Tensor:
    """Shift of `x` [B, S] by `back` columns to the right; `fill` before the start."""
    return torch.nn.functional.pad(x, (back, 0), value=fill)[:, : x.shape[1]]


def _same_document(alive: Tensor, sequence_ids: Tensor | None, back: int) -> Tensor:
    """Mask bool [B, S]: position p - `back` exists, is alive and belongs to the document of p."""
    reached = _shift(alive.to(torch.uint8), back, 0).bool()
    if sequence_ids is not None:
        reached = reached & (_shift(sequence_ids, back, 0) == sequence_ids)
    return reached
