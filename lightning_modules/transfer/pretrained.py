"""Pretrained weights of a folder as the start of a run: ``model.pretrained``.

The folder's ``config.json`` and tokenizer are the defaults of the run, so sizes are not typed again. The weights are
read once the model exists, whole or sharded, and only where no checkpoint is restored afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerFast

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.weights.folder import CONFIG_NAME, TOKENIZER_NAME, read_tokenizer
from dsv41.weights.reading import LoadAudit, load_released
from lightning_modules.checkpoint.rule import differences
from lightning_modules.text import first_few


def require_folder(folder: str) -> Path:
    """Path of the folder, or FileNotFoundError if it lacks a configuration."""
    path = Path(folder).expanduser()
    if not (path / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"model.pretrained: {folder} is no folder with a {CONFIG_NAME}")
    return path


def typed_fields(config: DeepseekV41TextConfig) -> dict[str, Any]:
    """Fields of a configuration as typed, YaRN under the name whose default they replace."""
    fields = config.fields()
    fields["rope_scaling"] = {key: value for key, value in fields.pop("rope_parameters").items() if key != "rope_theta"}
    return fields


def default_options(folder: str) -> list[str]:
    """Command-line options implied by a folder: its architecture, and its tokenizer if it has one.

    Raises:
        FileNotFoundError: It has no configuration; begins with the option.
        ValueError: Its configuration or its tokenizer cannot be read; names the file.
    """
    path = require_folder(folder)
    fields = typed_fields(DeepseekV41Config.from_pretrained(path).text_config)
    options = ["--model.config", json.dumps(fields)]
    if (path / TOKENIZER_NAME).is_file():
        try:
            read_tokenizer(path)
        except Exception as error:  # the library has no type of its own
            raise ValueError(f"model.pretrained: {path / TOKENIZER_NAME} is no tokenizer: {error}") from error
        options += ["--data.tokenizer", str(path)]
    return options


def load_pretrained(model: DeepseekV41ForCausalLM, folder: str, tokenizer: PreTrainedTokenizerFast | None) -> LoadAudit:
    """Read a folder's weights into `model`. All ranks of a sharded model call it.

    What does not change shapes may differ from the folder's configuration, and is listed.

    Args:
        model: With the architecture of this run.
        folder: See `load_released`.
        tokenizer: Of this run's data.

    Raises:
        ValueError: Weights do not fit, or another tokenizer numbers the ids; the model is unchanged.
    """
    path = require_folder(folder)
    stored = DeepseekV41Config.from_pretrained(path).text_config.fields()
    own = model.config.text_config.fields()
    lines = differences(stored, own)
    theirs = read_tokenizer(path)
    if theirs is not None and tokenizer is not None and theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            "data.tokenizer: numbers texts otherwise than the one of model.pretrained; take that: "
            f"--data.tokenizer {path}"
        )
    try:
        audit = load_released(model, path)
    except ValueError as error:
        told = f"; config.json -> this run: {first_few(lines)}" if lines else ""
        raise ValueError(f"model.pretrained: {error}{told}") from error
    for line in lines:
        rank_zero_info(f"differs from {path.name}/{CONFIG_NAME}, the command line counts: model.config.{line}")
    left = f", {len(audit.skipped)} skipped" if audit.skipped else ""
    rank_zero_info(f"model.pretrained: {len(audit.loaded)} tensors from {path}{left}")
    return audit
