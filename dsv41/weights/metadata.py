"""Metadata files beside exported weights: configurations, tokenizer, model card, and the module for remote code.

They say what the model is, not what the release was: no draft layers are built, so none are listed; special ids are the
tokenizer's. `engram_pad_token_id` is a parameter of the hash and stays, whatever token pads.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dsv41.config import DeepseekV41Config
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.weights.folder import CONFIG_NAME

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer

# Quantised weights in config.json, under DeepSeek's own keys. Reading goes by the files alone.
RELEASED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# What `trust_remote_code=True` runs, in a process that has not imported `dsv41`; nothing else ever does. Imports inside
# "try" are left out of the check by transformers, whose message would name a package that does not exist.
REMOTE_CODE_NAME = "modeling_dsv41.py"
REMOTE_CODE = '''"""Classes of this model for transformers' trust_remote_code=True, from the installed package."""

try:
    from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
except ImportError as error:
    raise ImportError("this model needs the package dsv41: pip install dsv41-lightning") from error

__all__ = ["DeepseekV41Config", "DeepseekV41ForCausalLM"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_dsv41.DeepseekV41Config",
    "AutoModelForCausalLM": "modeling_dsv41.DeepseekV41ForCausalLM",
}


def describe(
    model: DeepseekV41ForCausalLM, dtype: torch.dtype | None, tokenizer: AnyTokenizer | None
) -> DeepseekV41Config:
    """The configuration as it is written beside weights.

    Args:
        model: The model.
        dtype: Of the weights; None takes the embedding's.
        tokenizer: That is saved beside; its special ids replace the configuration's, None where it has no such token.
    """
    config = copy.deepcopy(model.config)
    config.architectures = ["DeepseekV41ForCausalLM"]  # whatever fully_shard has renamed the model's class to
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    text = config.text_config
    config.dtype = text.dtype = dtype or weight.dtype
    text.num_nextn_predict_layers, text.dspark_target_layer_ids = 0, []
    if tokenizer is not None:
        named = as_transformers(tokenizer)
        for name in SPECIAL_IDS:
            setattr(text, name, getattr(named, name))
            if name in config.__dict__:
                setattr(config, name, getattr(named, name))
    forget_file(config)
    return config


def forget_file(config: DeepseekV41Config) -> None:
    """Remove what a file said of its weights and code: the model in memory has plain floats and this package's code."""
    for part in (config, config.text_config):
        for name in ("quantization_config", "auto_map"):
            part.__dict__.pop(name, None)


def config_values(config: DeepseekV41Config) -> dict[str, Any]:
    """Contents of ``config.json``: rotary settings under both names that are in use, and where the classes are."""
    values: dict[str, Any] = json.loads(config.to_json_string())
    rope = config.text_config.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values["text_config"]["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    for name in SPECIAL_IDS:  # also where they are None, which is not the default
        values["text_config"][name] = getattr(config.text_config, name)
    return values | {"auto_map": AUTO_MAP}


def write_beside(folder: Path, config: DeepseekV41Config, tokenizer: AnyTokenizer | None, card: str | None) -> None:
    """Write ``config.json``, ``generation_config.json``, the tokenizer, the remote code and ``README.md``.

    Args:
        folder: That the weights are in.
        config: From `describe`.
        tokenizer: None writes none.
        card: None writes none.
    """
    _write_json(folder / CONFIG_NAME, config_values(config))
    GenerationConfig(**{name: getattr(config.text_config, name) for name in SPECIAL_IDS}).save_pretrained(folder)
    (folder / REMOTE_CODE_NAME).write_text(REMOTE_CODE, encoding="utf-8")
    if tokenizer is not None:
        _write_tokenizer(folder, as_transformers(tokenizer))
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # where transformers has read it from, not what it is
        values.pop(name, None)
    _write_json(path, values)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def as_transformers(tokenizer: AnyTokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that transformers can save, around the same ids."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
