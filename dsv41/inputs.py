"""Inputs of a forward: token ids, masks, positions and labels, checked once, before any work.

Every error names the argument and the valid values. Checks that read numbers from a GPU cost a wait for it; without
``strict`` they are device-side asserts there. A program made by `torch.export` checks shapes and dtypes alone.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv41.config import IGNORE_INDEX


class TokenInputs(NamedTuple):
    """Inputs of a block beside the streams, equal for all blocks. A tuple, so that hooks find the tensors in it.

    Attributes:
        position_ids: int64 [B, S], 0 to S - 1 in every row.
        token_mask: Bool [B, S], false at padding, which is on the right only.
        text_mask: Bool [B, S], true at live tokens that are no image: those that Engram hashes.
        image_mask: Bool [B, S], true at image tokens, or None.
        engram_hash_ids: int64 [B, S, engram_layers, columns], or None if the model has no Engram.
    """

    position_ids: Tensor
    token_mask: Tensor
    text_mask: Tensor
    image_mask: Tensor | None = None
    engram_hash_ids: Tensor | None = None


def check_integer_ids(ids: Tensor, name: str, limit: int, strict: bool) -> None:
    """Check an id tensor of any shape.

    Args:
        ids: The tensor.
        name: Name for the message.
        limit: Ids must lie in 0 to ``limit - 1``.
        strict: Check on the host; false uses a device-side assert on CUDA.

    Raises:
        ValueError: Not int32 or int64, or out of range; the message has the range and the offending id.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: must be int32 or int64 ids in 0..{limit - 1}, got {ids.dtype}")
    if torch.compiler.is_exporting():
        return  # the program has no way to raise for the ids that it will be given
    # The choice depends on the device and the flag only, never on how many ids there are.
    if ids.is_cuda and not strict:
        torch._assert_async(((ids >= 0) & (ids < limit)).all())
        return
    if ids.numel() and not ids.is_meta:
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name}: ids must lie in 0..{limit - 1}, got {low if low < 0 else high}")


def check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    image_mask: Tensor | None = None,
    *,
    limit: int,
    longest: int,
    strict: bool,
) -> TokenInputs:
    """Checked masks and positions of a batch.

    Args:
        input_ids: int32 or int64 token ids [B, S].
        attention_mask: 0/1 [B, S] with padding on the right, or None.
        position_ids: None or 0 to S - 1 in every row.
        image_mask: Bool [B, S], true at image tokens, or None.
        limit: Ids must lie in 0 to ``limit - 1``.
        longest: Greatest S (`max_position_embeddings`).
        strict: See `check_integer_ids`.

    Returns:
        Everything but the hash ids.

    Raises:
        ValueError: Wrong shape, dtype or range.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: must have shape [batch, sequence >= 1], got {list(input_ids.shape)}")
    check_integer_ids(input_ids, "input_ids", limit, strict)
    batch, length = input_ids.shape
    if length > longest:
        raise ValueError(f"input_ids: sequence length {length} exceeds max_position_embeddings={longest}")
    on_host = (strict or not input_ids.is_cuda) and not torch.compiler.is_exporting()
    positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
    if position_ids is not None:
        if position_ids.is_floating_point() or position_ids.shape != input_ids.shape:
            raise ValueError(
                f"position_ids: must be integers {[batch, length]}, got {position_ids.dtype} {list(position_ids.shape)}"
            )
        if on_host and not torch.equal(position_ids.long(), positions):
            raise ValueError(f"position_ids: rows are whole sequences, so they must be 0..{length - 1} in each row")
    if image_mask is not None and (image_mask.dtype != torch.bool or image_mask.shape != input_ids.shape):
        raise ValueError(f"image_mask: must be bool {[batch, length]}, got {image_mask.dtype} {list(image_mask.shape)}")
    mask = _token_mask(attention_mask, input_ids, on_host)
    return TokenInputs(positions, mask, mask if image_mask is None else mask & ~image_mask, image_mask)


def _token_mask(attention_mask: Tensor | None, input_ids: Tensor, on_host: bool) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.is_floating_point() or attention_mask.is_complex() or attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: must be bool or integer 0/1 of shape {list(input_ids.shape)}, "
            f"got {attention_mask.dtype} {list(attention_mask.shape)}"
        )
    mask = attention_mask.bool()
    if on_host:
        if not torch.equal(mask.to(attention_mask.dtype), attention_mask):
            raise ValueError("attention_mask: entries must be 0 or 1")
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError("attention_mask: padding must be on the right: no 1 may follow a 0 in a row")
    return mask


def check_labels(labels: Tensor, input_ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless `labels` are ids of the vocabulary or -100, shaped like `input_ids`."""
    if labels.shape != input_ids.shape:
        raise ValueError(f"labels: must have the shape of input_ids {list(input_ids.shape)}, got {list(labels.shape)}")
    live = torch.where(labels == IGNORE_INDEX, torch.zeros_like(labels), labels)
    check_integer_ids(live, f"labels (apart from {IGNORE_INDEX})", vocab_size, strict=not labels.is_cuda)


def select_positions(hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Positions of `hidden` [B, S, H] that get logits; see `DeepseekV41ForCausalLM.forward`."""
    length = hidden.shape[1]
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dim() != 1:
            raise ValueError(f"logits_to_keep: positions must be one-dimensional, got {list(logits_to_keep.shape)}")
        check_integer_ids(logits_to_keep, "logits_to_keep", length, strict=True)
        return hidden[:, logits_to_keep]
    if not 0 <= logits_to_keep <= length:
        raise ValueError(f"logits_to_keep: must lie in 0..{length}, got {logits_to_keep}")
    return hidden if logits_to_keep == 0 else hidden[:, -logits_to_keep:]
