"""Fixtures that more than one test file uses. Data with provenance lies in `data/golden` (see its README)."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import load_released

GOLDEN = Path(__file__).parent / "data" / "golden"

# The smallest run that has most kinds of layers: it trains within a second.
NANO = {
    "model": {
        "config": {
            "vocab_size": None,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 8,
            "qk_rope_head_dim": 4,
            "q_lora_rank": 8,
            "o_lora_rank": 4,
            "o_groups": 2,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "default"},
            "sliding_window": 4,
            "compress_ratios": [0, 2, 2, 1],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3],
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "candidate_source_layer_id": -1,
            "engram_layer_ids": [1],
            "engram_max_ngram_size": 3,
            "engram_vocab_size": 61,
            "engram_n_heads": 2,
            "engram_head_dim": 4,
            "engram_compressed_vocab_size": None,
        },
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup_steps": 2},
    },
    "data": {
        "tokenizer": "bpe",
        "vocab_size": 300,
        "sequence_length": 32,
        "batch_size": 2,
        "val_fraction": 0.2,
        "test_fraction": 0.2,
    },
    "checkpoint": {"every_n_steps": 3},
    # Drawing takes longer than such a run; test_looking_inside.py has the pictures.
    "engram_gates": {"pictures": False},
    "stream_mixers": {"pictures": False},
    "expert_load": {"pictures": False},
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "logger": {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"name": "nano", "default_hp_metric": False},
        },
    },
}

# Two workers share two cores, and tiny tensors gain nothing from threads. Comparisons must hold with any number, and on
# any CPU. Others are emulated by an environment, for example
# DSV41_TEST_THREADS=2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 pytest ...
torch.set_num_threads(int(os.environ.get("DSV41_TEST_THREADS", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests that compare with recorded files."""
    parser.addoption("--record-curves", action="store_true", help="record tests/data/golden_curves.json anew")
    parser.addoption("--record-options", action="store_true", help="record tests/data/options.json anew")


@pytest.fixture(autouse=True)
def no_launch_left() -> Iterator[None]:
    """Lightning leaves a launch's variables in this process, where ranks that a later test starts would take them up:
    they would meet at the port of a store that may still be there."""
    yield
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 text files of different lengths, about 20 kB."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
    for index in range(24):
        text = " ".join(rng.choices(words, k=rng.randint(60, 300)))
        (folder / f"text{index:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def make_nano_args(corpus: Path, cache: Path) -> Callable[[Path], list[str]]:
    """Options of the smallest run, written under a given folder's ``runs``."""

    def make(folder: Path) -> list[str]:
        config = folder / "nano.yaml"
        config.write_text(yaml.safe_dump(NANO))
        return [
            *("--config", str(config)),
            *("--data.source", str(corpus)),
            *("--data.cache_dir", str(cache)),
            *("--trainer.logger.init_args.save_dir", str(folder / "runs")),
        ]

    return make


@pytest.fixture
def nano_args(make_nano_args: Callable[[Path], list[str]], tmp_path: Path) -> list[str]:
    """Options of the smallest run; runs are written under ``tmp_path / "runs"``."""
    return make_nano_args(tmp_path)
