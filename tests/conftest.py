"""Fixtures that more than one test file uses. Data with provenance lies in `data/golden` (see its README)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import load_released

GOLDEN = Path(__file__).parent / "data" / "golden"

# Two workers share two cores, and tiny tensors gain nothing from threads.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def golden_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """Forward tensors and gradients of the reference; integers as int64."""
    tensors: dict[str, torch.Tensor] = {}
    for part in ("forward", "streams", "gradients"):
        tensors |= load_file(GOLDEN / f"{part}.safetensors")
    return {name: t.long() if t.dtype == torch.int32 else t for name, t in tensors.items()}


@pytest.fixture
def tiny_config() -> Callable[..., DeepseekV41Config]:
    """Factory of the golden-tiny configuration (every kind of layer in six); keywords replace text fields."""

    def make(**overrides: Any) -> DeepseekV41Config:
        raw = json.loads((GOLDEN / "config.json").read_text())
        raw["text_config"].pop("dspark_noise_token_id")
        text = raw["text_config"] | overrides
        if "rope_scaling" in overrides or "rope_theta" in overrides:
            text.pop("rope_parameters")
        return DeepseekV41Config(**(raw | {"text_config": text}))

    return make


@pytest.fixture
def tiny_model(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Tokenizer
) -> Callable[..., DeepseekV41ForCausalLM]:
    """Factory of freshly drawn golden-tiny models: ``tiny_model(backend=..., seed=0, **text_overrides)``."""

    def make(backend: BackendConfig | None = None, seed: int = 0, **overrides: Any) -> DeepseekV41ForCausalLM:
        torch.manual_seed(seed)
        return DeepseekV41ForCausalLM(tiny_config(**overrides), backend=backend, tokenizer=golden_tokenizer)

    return make


@pytest.fixture
def golden_model(
    tiny_model: Callable[..., DeepseekV41ForCausalLM], golden_dir: Path
) -> Callable[..., DeepseekV41ForCausalLM]:
    """Factory of models with the golden weights (same keywords as `tiny_model`; sizes must stay)."""

    def make(backend: BackendConfig | None = None, **overrides: Any) -> DeepseekV41ForCausalLM:
        model = tiny_model(backend=backend, **overrides)
        load_released(model, golden_dir / "weights")
        return model

    return make
