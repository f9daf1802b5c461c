"""Import of a folder of weights as the start of a run: ``dsv41 import``.

The headers are compared with a model on the meta device, which takes no memory, so a folder of any size is judged in
seconds; no weight is read. The configuration that comes out has the folder's architecture in full, and modest settings
of training to be changed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.files import written_whole
from dsv41.weights.folder import read_tokenizer
from dsv41.weights.names import held_tensors
from dsv41.weights.reading import match_tensors, slots_for
from dsv41.weights.tensor_files import find_tensors
from lightning_modules.transfer.pretrained import require_folder, typed_fields

_LEARNING_RATE = 1e-4
_LONGEST = 1024


def finetune_config(folder: Path, config: DeepseekV41Config, tokenizer: str) -> dict[str, Any]:
    """Configuration of ``dsv41 fit`` as plain values."""
    text = config.text_config
    return {
        "seed_everything": 0,
        "model": {
            "pretrained": str(folder),
            "config": typed_fields(text),
            "optimizer": {"lr": _LEARNING_RATE},
            "schedule": {"name": "cosine", "warmup_steps": 20},
        },
        "data": {
            "source": "stdlib",
            "tokenizer": tokenizer,
            "sequence_length": min(text.max_position_embeddings, _LONGEST),
            "batch_size": 4,
            "val_fraction": 0.02,
            "test_fraction": 0.02,
        },
        "checkpoint": {"every_n_steps": 100},
        "trainer": {
            "max_steps": 400,
            "val_check_interval": 100,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 10,
            "num_sanity_val_steps": 0,
            "logger": {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": "runs", "name": f"{folder.name}-finetune", "default_hp_metric": False},
            },
        },
    }


def import_folder(folder: Path, output: Path) -> str:
    """Check a folder and write the configuration.

    Args:
        folder: With ``config.json`` and safetensors, in either layout.
        output: YAML file, which must not exist.

    Returns:
        What was found, for people.

    Raises:
        FileNotFoundError: No configuration or no safetensors.
        FileExistsError: `output` exists.
        ValueError: The tensors are not those of the configuration, or a file is broken; named.
    """
    path = require_folder(str(folder))
    if output.exists():
        raise FileExistsError(f"output: {output} exists; give another with --output")
    config = DeepseekV41Config.from_pretrained(path)
    tokenizer = read_tokenizer(path)
    if tokenizer is None and config.text_config.active_engram_layer_ids:
        raise FileNotFoundError(f"from: {path} has no tokenizer.json, which the model's Engram needs")
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config, tokenizer=tokenizer)
    stored = find_tensors(path)
    sources, skipped = match_tensors(slots_for(model, stored), held_tensors(model), stored)
    formats = Counter(source.fmt.name if source.fmt else source.weight.dtype for source in sources.values())
    size = sum(tensor.nbytes for tensor in stored.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    values = finetune_config(path, model.config, str(path) if tokenizer is not None else "bpe")
    written = f"# Fine-tunes {path}: dsv41 fit --config {output}\n" + yaml.safe_dump(values, sort_keys=False)
    with written_whole(output) as partial:
        partial.write_text(written)
    lines = [
        f"{path}: {len(sources)} tensors fit, {parameters / 1e6:,.2f} M parameters, {size / 1e6:,.1f} MB in "
        f"{len({tensor.file for tensor in stored.values()})} file(s)",
        "formats: " + ", ".join(f"{count} {name}" for name, count in formats.most_common()),
    ]
    if skipped:
        lines.append(f"skipped, since no part of this model: {len(skipped)} tensors, such as {skipped[0]}")
    lines.append(f"written: {output}; adapt data and trainer, then\n  dsv41 fit --config {output}")
    return "\n".join(lines)
