"""Models into folders: the released layout (ARCHITECTURE 9) and that of transformers.

Names are in `names.py`, encodings in `formats.py`, files in `tensor_files.py` and `writing.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsv41.inherited import PARAMETER_DTYPES
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.weights.metadata import RELEASED_QUANTIZATION, describe, write_beside
from dsv41.weights.names import format_of, held_tensors, module_slots, owners, released_slots, stored_dtype
from dsv41.weights.writing import Item, SaveAudit, write_folder

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer


def save_released(
    model: DeepseekV41ForCausalLM,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    quantized: bool = False,
    max_shard_size: int | str = "5GB",
    tokenizer: AnyTokenizer | None = None,
    card: str | None = None,
) -> SaveAudit:
    """Write a model in the released layout. All ranks of a sharded model call it; each writes its own files.

    Args:
        model: Whole or sharded.
        folder: Must not exist, or be empty; it appears when everything is in it. Shared by all ranks.
        dtype: Of what is not quantised; sinks, mHC parameters and router biases stay fp32 beside a narrower one. None
            keeps the model's dtypes, or with `quantized` takes bf16 as the release does.
        quantized: Store projections, shared experts and Engram tables in FP8 and routed experts in FP4, with scales, as
            the release does. Values that came from these formats are kept exactly (if the model's dtype holds them,
            which fp16 may not), others are rounded.
        max_shard_size: Bytes of a file, or "5GB". A tensor that is larger has a file of its own.
        tokenizer: Saved beside; None takes the one that the model was built with, if any.
        card: Text of README.md; None writes none.

    Returns:
        What was written.

    Raises:
        FileExistsError: `folder` holds something.
        ValueError: `dtype` or `max_shard_size` is not valid, a value is not finite and cannot be quantised, or the
            model is on the meta device.
        OSError: A rank could not write; nothing is left behind. Ranks without an error of their own raise an
            `OtherRankError`, a ValueError.
    """
    if quantized and dtype is None:
        dtype = torch.bfloat16
    _require_export_dtype(dtype)
    held = held_tensors(model)
    items = [
        Item(name, slot, stored_dtype(name, held[slot.name].local.dtype, dtype), format_of(name) if quantized else None)
        for name, slot in released_slots(model).items()
    ]
    tokenizer = tokenizer or model.tokenizer
    config = describe(model, dtype, tokenizer)
    if quantized:
        config.quantization_config = dict(RELEASED_QUANTIZATION)

    def beside(partial: Path) -> None:
        write_beside(partial, config, tokenizer, card)

    return write_folder(Path(folder), items, held, owners(held), max_shard_size, beside)


def save_for_transformers(
    model: DeepseekV41ForCausalLM,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: AnyTokenizer | None = None,
    card: str | None = None,
) -> SaveAudit:
    """Write a model under the names of its modules, as transformers does. Arguments and errors as in `save_released`.

    What stays fp32 in the model (see `DeepseekV41ForCausalLM.stays_fp32`) does so in the files.
    """
    _require_export_dtype(dtype)
    held = held_tensors(model)
    parameters = {name for name, _ in model.named_parameters()}

    def dtype_of(name: str) -> torch.dtype:
        if dtype is None or name not in parameters or (model.stays_fp32(name) and dtype != torch.float64):
            return held[name].local.dtype
        return dtype

    items = [Item(name, slot, dtype_of(name)) for name, slot in module_slots(model).items()]
    tokenizer = tokenizer or model.tokenizer
    config = describe(model, dtype, tokenizer)

    def beside(partial: Path) -> None:
        write_beside(partial, config, tokenizer, card)

    return write_folder(Path(folder), items, held, owners(held), max_shard_size, beside)


def _require_export_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in PARAMETER_DTYPES:
        raise ValueError(f"dtype: must be one of {PARAMETER_DTYPES} or None, got {dtype}")
