"""Reading of a model's folder: its place, configuration and tokenizer, and the options of `from_pretrained`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerFast

from dsv41.config import DeepseekV41Config
from dsv41.inherited import PARAMETER_DTYPES

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"


def read_config(folder: Path) -> DeepseekV41Config:
    """The configuration of a folder.

    Raises:
        FileNotFoundError: It has none.
        ValueError: It is another model's, or a field is wrong.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"folder: no {CONFIG_NAME} in {folder}")
    config: DeepseekV41Config = DeepseekV41Config.from_pretrained(folder)
    return config


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The fast tokenizer of a folder, None if it has none.

    Raises:
        ValueError: ``tokenizer.json`` cannot be read.
    """
    file = folder / TOKENIZER_NAME
    if not file.is_file():
        return None
    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"tokenizer: {file} cannot be read ({error})") from error
    return tokenizer


def tokenizer_for(config: DeepseekV41Config, folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer that a folder has beside the weights of `config`.

    Raises:
        ValueError: It has none, and an Engram needs it.
    """
    tokenizer = read_tokenizer(folder)
    layers = config.text_config.active_engram_layer_ids
    if tokenizer is None and layers:
        raise ValueError(
            f"tokenizer: no {TOKENIZER_NAME} in {folder}, but layers {layers} have an Engram, which hashes the "
            "tokenizer's texts; pass tokenizer=..., the one that the model was trained with"
        )
    return tokenizer


_DOWNLOAD = ("revision", "cache_dir", "token", "local_files_only", "force_download")
# Options that transformers' automatic classes pass on or people are used to giving, and that choose nothing here.
_WITHOUT_EFFECT = ("_from_auto", "adapter_kwargs", "trust_remote_code", "weights_only", "low_cpu_mem_usage")


def local_folder(place: str | os.PathLike[str], options: dict[str, Any]) -> Path:
    """The folder itself, or the snapshot of a repository that has its name.

    Args:
        place: Path or name.
        options: Of `from_pretrained`.

    Raises:
        TypeError: An option that does not exist here.
        OSError: Neither a folder nor a repository that can be reached.
    """
    if options.get("use_safetensors") is False:
        raise TypeError("from_pretrained: use_safetensors=False is not possible; only safetensors files are read")
    chosen = {name: options[name] for name in _DOWNLOAD if options.get(name) is not None}
    subfolder = options.get("subfolder") or ""
    known = {*_DOWNLOAD, *_WITHOUT_EFFECT, "subfolder", "use_safetensors"}
    # Switches that are off ask for nothing.
    unknown = sorted(name for name in set(options) - known if options[name] is not None and options[name] is not False)
    if unknown:
        raise TypeError(
            f"from_pretrained: no option {', '.join(unknown)} here; there are config, backend, tokenizer, dtype, "
            f"device_map and verify, subfolder, and for downloads {', '.join(_DOWNLOAD)}"
        )
    path = Path(place)
    if not path.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(place)):
            raise FileNotFoundError(f"folder: {place} is not a directory")
        path = _download(os.fspath(place), subfolder, chosen)
    if subfolder and not (path / subfolder).is_dir():
        raise FileNotFoundError(f"subfolder: {path / subfolder} is not a directory")
    return path / subfolder


def _download(repository: str, subfolder: str, options: dict[str, Any]) -> Path:
    patterns = [f"{subfolder}/{name}" if subfolder else name for name in ("*.safetensors", "*.json", "*.jinja")]
    try:
        # A pattern's star matches slashes too, and other folders of a repository may be as large again.
        snapshot = snapshot_download(
            repository, allow_patterns=patterns, ignore_patterns=[] if subfolder else ["*/*"], **options
        )
    except OSError as error:
        raise OSError(f"folder: {repository} is not a directory, and no repository to be had: {error}") from error
    return Path(snapshot)


def chosen_dtype(dtype: torch.dtype | str | None, config: DeepseekV41Config) -> torch.dtype:
    """What parameters are to be: as asked for, or as the configuration says, or fp32.

    Raises:
        ValueError: No floating dtype of torch.
    """
    if dtype is None or dtype == "auto":
        dtype = config.dtype or config.text_config.dtype or torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in PARAMETER_DTYPES:
        valid = ", ".join(str(kind).removeprefix("torch.") for kind in PARAMETER_DTYPES)
        raise ValueError(f"dtype: must be one of {valid}, or 'auto', got {dtype!r}")
    return found


def chosen_device(device_map: Any) -> torch.device:
    """The device that holds the whole model.

    Args:
        device_map: A device, its name or number, ``{"": device}``, "auto" for the accelerator if there is one, or None
            for the CPU.

    Raises:
        ValueError: No device, or more than one.
    """
    device = device_map
    if isinstance(device, dict) and list(device) == [""]:
        device = device[""]
    if device is None:
        return torch.device("cpu")
    if device == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map: must be one device, such as 'cuda:0', 0 or 'cpu', or 'auto', got {device_map!r}; a model is "
            "spread over devices by the training strategies"
        ) from error


def require_own_choices(config: DeepseekV41Config) -> None:
    """Refuse implementations that are chosen in the way of transformers: they would choose nothing.

    Raises:
        ValueError: One is chosen; "eager", which transformers writes into every model's configuration, is not.
    """
    for name, field in (("attn_implementation", "attn"), ("experts_implementation", "experts")):
        chosen = getattr(config, f"_{name}", None)
        if chosen not in (None, "eager"):
            raise ValueError(f"{name}: choose by backend=BackendConfig({field}=...) instead, got {chosen!r}")


# What `save_pretrained` of transformers has and this one cannot do, with the values that ask for nothing.
_SAVE_DEFAULTS: dict[str, tuple[Any, str]] = {
    "state_dict": (None, "the model's own tensors are written; load others into it first"),
    "push_to_hub": (False, "call model.push_to_hub(name), or upload the folder with huggingface_hub"),
    "variant": (None, "files have their usual names"),
    "safe_serialization": (True, "only safetensors files are written"),
    "distributed_checkpoint": (False, "the ranks of a sharded model write one folder together"),
}
# These matter for an upload or for adapters and renamed weights, of which there are none.
_SAVE_WITHOUT_EFFECT = ("token", "save_peft_format", "save_original_format")


def refuse_save_options(options: dict[str, Any]) -> None:
    """Raise TypeError for an option of `save_pretrained` that cannot be honoured."""
    for name, value in options.items():
        if name in _SAVE_WITHOUT_EFFECT:
            continue
        if name not in _SAVE_DEFAULTS:
            raise TypeError(
                f"save_pretrained: no option {name} here; there are is_main_process, tokenizer, dtype, max_shard_size "
                "and card"
            )
        default, reason = _SAVE_DEFAULTS[name]
        if value is not default:
            raise TypeError(f"save_pretrained: {name} must be {default}: {reason}")
