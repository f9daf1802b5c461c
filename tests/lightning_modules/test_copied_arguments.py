"""Edits of what a model, a task or a data module was made from do not reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.config import TEXT_FIELDS
from dsv41.model import DeepseekV41Model
from lightning_modules.data import TextDataModule
from lightning_modules.optim import OptimizerConfig
from lightning_modules.optim.schedule import ScheduleConfig
from lightning_modules.task import DeepseekV41Task, IndexerConfig

Configs = Callable[..., DeepseekV41Config]

NO_ENGRAM: dict[str, Any] = {"engram_layer_ids": [], "engram_num_embeddings": [], "vocab_size": 512}


def spoil(config: DeepseekV41TextConfig) -> None:
    """Give every field another value, lists and dictionaries in place."""
    for name in sorted(TEXT_FIELDS - {"rope_scaling"}):
        value = getattr(config, name)
        if isinstance(value, list):
            value += [7]
        elif isinstance(value, dict):
            value.update(rope_theta=3.0, factor=99)
        elif isinstance(value, str):
            setattr(config, name, value + "?")
        else:
            setattr(config, name, 2 * (value or 1) + 1)


@pytest.mark.parametrize("engram", [True, False])
def test_a_model_keeps_its_configuration(tiny_config: Configs, golden_tokenizer: Tokenizer, engram: bool) -> None:
    config = tiny_config(**{} if engram else NO_ENGRAM)
    tokenizer = golden_tokenizer if engram else None
    model = DeepseekV41ForCausalLM(config, tokenizer=tokenizer)
    decoder = DeepseekV41Model(config.text_config, BackendConfig(), tokenizer)
    ids = torch.arange(3, 35).view(1, -1)
    logits, hidden = model(ids).logits, decoder(ids)[0]
    about = model.config.text_config.fields()
    spoil(config.text_config)
    config.image_token_id = 1
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(decoder(ids)[0], hidden)
    assert model.config.text_config.fields() == decoder.config.fields() == about
    assert model.config.image_token_id != 1


def test_a_nested_configuration_keeps_its_parts(tiny_config: Configs) -> None:
    text = tiny_config().text_config
    vision = tiny_config().vision_config
    nested = DeepseekV41Config(text_config=text, vision_config=vision)
    before, size = nested.text_config.fields(), nested.vision_config.hidden_size
    spoil(text)
    vision.hidden_size = 1
    assert nested.text_config.fields() == before
    assert nested.vision_config.hidden_size == size


@pytest.mark.parametrize("as_fields", [False, True], ids=["object", "fields"])
def test_layers_of_a_task_are_those_of_its_hyper_parameters(
    tiny_config: Configs, golden_tokenizer: Tokenizer, as_fields: bool
) -> None:
    config = tiny_config().text_config
    given: Any = config.fields() if as_fields else config
    task = DeepseekV41Task(given)
    task.tokenizer = golden_tokenizer  # type: ignore[assignment]
    if as_fields:
        given["engram_layer_ids"].append(5)
        given["compress_ratios"].clear()
    else:
        spoil(config)
    task.configure_model()
    task.hparams["config"]["engram_layer_ids"].append(4)  # nor does it share with the checkpoint's record
    expected = tiny_config().text_config
    assert task.text_config.fields() == expected.fields()
    made = [layer for layer, block in enumerate(task.built.model.layers) if block.engram is not None]
    assert made == expected.active_engram_layer_ids


@pytest.mark.parametrize("options", [BackendConfig(), OptimizerConfig(), ScheduleConfig(), IndexerConfig()])
def test_other_options_cannot_be_edited(options: Any) -> None:
    for field in fields(options):
        assert isinstance(getattr(options, field.name), bool | int | float | str | None), field.name
        with pytest.raises(FrozenInstanceError):
            setattr(options, field.name, 1)


def test_a_source_added_later_is_not_read(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text " * 200)
    source = [str(tmp_path / "first.txt")]
    options: dict[str, Any] = {"vocab_size": 259, "sequence_length": 8, "val_fraction": 0.0, "test_fraction": 0.0}
    data = TextDataModule(source, cache_dir=str(tmp_path / "cache"), **options)
    source.append(str(tmp_path / "second.txt"))
    assert data.source == source[:1]
    alone = TextDataModule(source[:1], cache_dir=str(tmp_path / "other"), **options)
    assert data.state_dict() == alone.state_dict()
