"""A corpus, a configuration and a command line small enough to train within a second."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_modules.cli import DeepseekV41CLI, get_cli

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


@pytest.fixture
def nano_cli(nano_args: list[str]) -> Callable[..., DeepseekV41CLI]:
    """Build the objects of a run: ``nano_cli("--trainer.max_steps", "2")``."""

    def make(*extra: str) -> DeepseekV41CLI:
        return get_cli([*nano_args, *extra], run=False)

    return make
