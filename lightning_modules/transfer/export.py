"""A Lightning checkpoint as a folder of weights for others: ``dsv41 export``.

Everything is taken from the checkpoint and its run's directory: architecture, tokenizer, numbers for the model card.
One process opens what any number of ranks has written, and reads the model's tensors alone: the optimizer's stay on the
disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.initialization import initialize_parameters
from dsv41.weights.card import model_card
from dsv41.weights.folder import read_tokenizer
from dsv41.weights.saving import save_for_transformers, save_released
from dsv41.weights.writing import SaveAudit, require_free, size_in_bytes
from lightning_modules.checkpoint import rule as checkpoint_rule
from lightning_modules.checkpoint import sharded as sharded_checkpoint
from lightning_modules.checkpoint.find import missing, run_of
from lightning_modules.checkpoint.safe_load import read_plain, require_sound
from lightning_modules.checkpoint.schema import require_weights
from lightning_modules.transfer.run_record import run_numbers

Format = Literal["released", "hf"]
FORMATS: tuple[Format, ...] = ("released", "hf")

# The model's tensors in the state dict of the task.
_PREFIX = "model."


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of which everything but the tensors is in memory.

    Attributes:
        path: File or folder.
        meta: Plain values.
        tensors: The model's, by its own names: mapped from a file, or of a folder their shapes alone (meta device).
    """

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    def fill(self, model: DeepseekV41ForCausalLM) -> None:
        """Read the weights into `model`; ValueError if they are not its own."""
        own = model.state_dict()
        stored = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        sharded_checkpoint.require_same_tensors(self.path, stored, own, strict=True)
        if self.path.is_dir():
            targets = {_PREFIX + name: tensor.detach() for name, tensor in own.items()}
            sharded_checkpoint.read_model(self.path, targets, no_dist=True)
            return
        for name, tensor in own.items():
            tensor.detach().copy_(self.tensors[name])


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Open a file or a folder of this project.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is incomplete or damaged, or none of a DeepSeek-V4.1 task.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"ckpt_path: {missing(path)}; it is a path here, such as runs/tiny/version_0/checkpoints/best.ckpt"
        )
    if path.is_dir():
        meta = sharded_checkpoint.read_meta(path)
        state = sharded_checkpoint.model_tensors(path)
    else:
        require_sound(path)
        meta = read_plain(path, mmap=True)
        state = meta.pop("state_dict", None)
    if not isinstance(meta.get(checkpoint_rule.KEY), dict):
        raise ValueError(f"ckpt_path: {path} is no checkpoint of a DeepSeek-V4.1 task")
    require_weights(sharded_checkpoint.plain_file(path), meta | {"state_dict": state}, checkpoint_rule.KEY, True)
    own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    return OpenCheckpoint(path, meta, own)


def model_of(checkpoint: OpenCheckpoint, tokenizer: PreTrainedTokenizerFast | None) -> DeepseekV41ForCausalLM:
    """The checkpoint's model with its weights, in the precision that they are stored in."""
    about = checkpoint.meta[checkpoint_rule.KEY]
    config = DeepseekV41Config(text_config=DeepseekV41TextConfig(**about["text_config"]))
    if config.text_config.active_engram_layer_ids and tokenizer is None:
        raise ValueError(
            f"tokenizer: the model's Engram hashes texts, but {run_of(checkpoint.path)} has no tokenizer; give "
            "its folder with --tokenizer"
        )
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config, tokenizer=tokenizer)
    checkpoint_rule.require_same_function(
        checkpoint.meta, checkpoint_rule.architecture(model.config.text_config, model.map_fingerprint)
    )
    model.cast_parameters(checkpoint.tensors["model.embed_tokens.weight"].dtype)
    model.to_empty(device="cpu")
    initialize_parameters(model, 0.0, draw=False)
    checkpoint.fill(model)
    return model


def export_checkpoint(
    ckpt_path: str,
    output: str,
    format: Format = "released",
    dtype: torch.dtype | None = None,
    quantized: bool = False,
    max_shard_size: str = "5GB",
    tokenizer: str | None = None,
    license: str = "unknown",
) -> SaveAudit:
    """Write the weights of a checkpoint, with configuration, tokenizer and model card.

    Args:
        ckpt_path: File, or folder of many ranks.
        output: Folder that does not exist yet, or is empty.
        format: "released" for the names of the release, "hf" for those of the modules.
        dtype: See `save_released`.
        quantized: FP8 and FP4 as in the release; "released" only.
        max_shard_size: Of a file.
        tokenizer: Folder of the tokenizer; None takes the run's.
        license: Of the weights, in the card: an identifier of Hugging Face, such as "apache-2.0".

    Returns:
        What was written.

    Raises:
        FileNotFoundError: No such checkpoint or tokenizer.
        FileExistsError: `output` holds something.
        ValueError: The checkpoint is incomplete, damaged or of another kind, or an option does not fit.
    """
    if format not in FORMATS:
        raise ValueError(f"format: must be one of {FORMATS}, got {format!r}")
    if quantized and format != "released":
        raise ValueError("quantized: only the released layout has FP8 and FP4 weights; leave out --format hf")
    folder = Path(output)
    # Before a large checkpoint is read, not after.
    require_free(folder, "output")
    size_in_bytes(max_shard_size)
    path = Path(ckpt_path)
    checkpoint = open_checkpoint(path)
    place = run_of(path) / "tokenizer" if tokenizer is None else Path(tokenizer)
    found = read_tokenizer(place) if place.is_dir() else None
    if tokenizer is not None and found is None:
        raise FileNotFoundError(f"tokenizer: no tokenizer.json in {tokenizer}")
    model = model_of(checkpoint, found)
    card = model_card(model, run_numbers(checkpoint.meta, run_of(path)), license=license)
    if format == "hf":
        return save_for_transformers(model, folder, dtype, max_shard_size, card=card)
    return save_released(model, folder, dtype, quantized, max_shard_size, card=card)
