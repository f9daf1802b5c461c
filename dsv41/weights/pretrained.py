"""`from_pretrained`, `save_pretrained` and `from_config` of the model, in the way of transformers.

Not transformers' own: its loader would draw parameters anew, leave out buffers that follow from the tokenizer, and cast
what has to stay fp32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41Config
from dsv41.initialization import initialize_parameters
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.weights.card import model_card
from dsv41.weights.folder import (
    chosen_device,
    chosen_dtype,
    local_folder,
    read_config,
    refuse_save_options,
    require_own_choices,
    tokenizer_for,
)
from dsv41.weights.metadata import forget_file
from dsv41.weights.names import held_tensors, owners
from dsv41.weights.reading import load_released
from dsv41.weights.saving import save_for_transformers
from dsv41.weights.writing import SaveAudit

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer

M = TypeVar("M", bound=DeepseekV41ForCausalLM)


def _settle_dtype(model: DeepseekV41ForCausalLM, dtype: torch.dtype) -> None:
    model.cast_parameters(dtype)
    model.config.dtype = model.config.text_config.dtype = dtype


def from_config(
    cls: type[M],
    config: DeepseekV41Config,
    *,
    backend: BackendConfig | None = None,
    tokenizer: AnyTokenizer | None = None,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
) -> M:
    """Freshly drawn model, for ``AutoModelForCausalLM.from_config``. Arguments as in `from_pretrained`.

    transformers would make every parameter of one dtype, those that stay fp32 included.
    """
    require_own_choices(config)
    chosen = chosen_dtype(dtype or torch_dtype, config)
    model = cls(config, backend, tokenizer)
    _settle_dtype(model, chosen)
    return model


def from_pretrained(
    cls: type[M],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    config: DeepseekV41Config | None = None,
    backend: BackendConfig | None = None,
    tokenizer: AnyTokenizer | None = None,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
    device_map: torch.device | str | int | dict[str, Any] | None = None,
    verify: bool = True,
    **options: Any,
) -> M:
    """A model with the weights of a folder, in evaluation mode. Nothing is drawn, and nothing is held twice.

    Args:
        pretrained_model_name_or_path: Folder as `save_pretrained`, `save_released`, transformers itself or the
            release leaves it, with ``config.json``; or a repository's name, which is downloaded.
        config: Takes the place of the folder's.
        backend: Implementation choices; None takes the defaults.
        tokenizer: None takes the folder's.
        dtype: Of parameters that do not stay fp32, or its name; None or "auto" takes the configuration's, else
            fp32.
        torch_dtype: The older name of `dtype`, which counts if both are given.
        device_map: One device, see `chosen_device`; None is the CPU.
        verify: See `load_released`.
        **options: `subfolder`, and for downloads `revision`, `cache_dir`, `token`, `local_files_only`,
            `force_download`.

    Raises:
        OSError: No such folder or repository, or no configuration in it.
        ValueError: The weights do not fit the configuration, it is another model's, or an Engram has no tokenizer.
        TypeError: `config` is no `DeepseekV41Config`, or an option of transformers that this model does not have.
    """
    if config is not None and not isinstance(config, DeepseekV41Config):
        raise TypeError(f"config: must be a DeepseekV41Config, got {type(config).__name__}")
    path = local_folder(pretrained_model_name_or_path, options)
    config = config or read_config(path)
    require_own_choices(config)
    chosen, device = chosen_dtype(dtype or torch_dtype, config), chosen_device(device_map)
    tokenizer = tokenizer or tokenizer_for(config, path)
    with torch.device("meta"):
        model = cls(config, backend, tokenizer)
    forget_file(model.config)
    _settle_dtype(model, chosen)
    model.to_empty(device=device)
    initialize_parameters(model, 0.0, draw=False)
    load_released(model, path, verify=verify)
    return model.eval()


def save_pretrained(
    model: DeepseekV41ForCausalLM,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    tokenizer: AnyTokenizer | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    card: str | None = None,
    **options: Any,
) -> SaveAudit | None:
    """Write weights under the names of the modules, ``config.json``, the tokenizer and a model card.

    Args:
        save_directory: See `save_for_transformers`, also for the other arguments.
        is_main_process: False writes nothing, unless the model is sharded: then all ranks write together.
        tokenizer: None takes the one that the model was built with.
        dtype: None keeps the model's.
        max_shard_size: Of a file.
        card: None writes one with the model's sizes.
        **options: What else transformers has, with values that ask for nothing (``push_to_hub=False``).

    Returns:
        What was written, or None.

    Raises:
        TypeError: An option that this model does not have.
        FileExistsError, ValueError, OSError: See `save_for_transformers`.
    """
    refuse_save_options(options)
    if not is_main_process and owners(held_tensors(model)) is None:
        return None
    text = card or model_card(model, tokenizer=tokenizer)
    return save_for_transformers(model, Path(save_directory), dtype, max_shard_size, tokenizer, text)
