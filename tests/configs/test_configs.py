"""Every file in configs/ parses and trains, overlays on top of the base as users compose them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_modules.ablation.ablate import dry_run
from lightning_modules.ablation.plan import make_plan
from lightning_modules.ablation.study import read_study
from lightning_modules.cli import get_cli

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = sorted(CONFIGS.glob("overlays/*.yaml"))
STRATEGIES = sorted(CONFIGS.glob("strategy/*.yaml"))
STUDIES = sorted(CONFIGS.glob("ablations/*.yaml"))


def test_there_is_something_to_test() -> None:
    assert CONFIGS / "tiny.yaml" in BASES
    assert set(CONFIGS.rglob("*.yaml")) == {*BASES, *OVERLAYS, *STRATEGIES, *STUDIES}, (
        "a folder of configs that nobody tests"
    )


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def small_run(files: tuple[Path, ...], cache: Path, folder: Path) -> list[str]:
    """Options that train on one batch, on CPUs."""
    small = {
        "--trainer.fast_dev_run": "true",
        "--trainer.accelerator": "cpu",
        "--trainer.enable_progress_bar": "false",
        "--trainer.logger.init_args.save_dir": str(folder),
        "--data.cache_dir": str(cache),
        # The first files of the standard library are enough to build every part.
        "--data.max_documents": "60",
        "--data.val_fraction": "0.1",
        "--data.vocab_size": "600",
        "--data.batch_size": "2",
        "--data.sequence_length": "64",
    }
    chosen = [option for file in files for option in ("--config", str(file))]
    return chosen + [part for option in small.items() for part in option]


def fit_elsewhere(options: list[str]) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_modules", "fit", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.parametrize(
    "files",
    [pytest.param((base,), id=base.stem) for base in BASES]
    + [pytest.param((CONFIGS / "tiny.yaml", overlay), id=overlay.stem) for overlay in OVERLAYS],
)
def test_config_trains_and_validates(files: tuple[Path, ...], shared_cache: Path, tmp_path: Path) -> None:
    cli = get_cli(small_run(files, shared_cache, tmp_path), run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    metrics: dict[str, Any] = cli.trainer.callback_metrics
    assert 5 < float(metrics["train/loss"]) < 8
    assert 5 < float(metrics["val/loss"]) < 8


@pytest.mark.parametrize("strategy", STRATEGIES, ids=[path.stem for path in STRATEGIES])
def test_strategy_trains_the_default_configuration(strategy: Path, shared_cache: Path, tmp_path: Path) -> None:
    """As a user starts it, in processes of its own, since a strategy leaves a process group behind."""
    options = small_run((CONFIGS / "tiny.yaml", strategy), shared_cache, tmp_path)
    if strategy.stem == "fsdp":
        options += ["--trainer.devices", "1"]  # it says "auto", which on CPUs means nothing
    done = fit_elsewhere(options)
    assert ("MEMBER: 2/2" in done.stderr) == (strategy.stem == "fsdp_cpu2")
    assert re.search(r"validation loss\s+[56]\.\d+ nats per token", done.stderr)


@pytest.mark.parametrize("file", STUDIES, ids=[path.stem for path in STUDIES])
def test_study_is_planned_and_its_last_variant_trains(file: Path, shared_cache: Path, tmp_path: Path) -> None:
    plan = make_plan(replace(read_study(file), output=tmp_path / "out"))
    assert len(plan.runs) == 3 * len(plan.variants) > 3
    shown = dry_run(plan)
    assert shown.count("new, 400 steps") == len(plan.runs)
    assert "WARNING" not in shown, "a match that is none"
    head = file.read_text().split("base:")[0]
    assert head.startswith(f"# dsv41 ablate --config configs/ablations/{file.name}\n")
    assert all(f"# {word}: " in head for word in ("Changes", "Equal", "Expected"))
    assert str(read_study(file).output) == f"runs/ablations/{file.stem}"
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(plan.runs[-1].config))
    options = small_run((run,), shared_cache, tmp_path)
    if plan.runs[-1].config["model"]["backend"]["compile_engram"]:  # for the whole process, so in one of its own
        done = fit_elsewhere(options)
        assert "Engram gate compiled in" in done.stderr
        assert re.search(r"validation loss\s+[5-7]\.\d+ nats per token", done.stderr)
        return
    cli = get_cli(options, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert 5 < float(cli.trainer.callback_metrics["val/loss"]) < 8


def test_the_default_configuration_has_every_kind_of_layer(shared_cache: Path) -> None:
    small = ["--data.cache_dir", str(shared_cache), "--data.max_documents", "60", "--data.vocab_size", "600"]
    cli = get_cli(["--config", str(CONFIGS / "tiny.yaml"), *small], run=False)
    config = cli.model.text_config
    kinds = set()
    for layer in config.layers:
        ratio = config.compress_ratios[layer]
        if ratio == 0:
            kinds.add("window")
        elif layer in config.kv_source_layer_ids:
            kinds.add(f"full-{ratio}")
        elif layer in config.index_source_layer_ids:
            kinds.add("reindex")
        else:
            kinds.add("reuse")
    assert kinds == {"window", "full-2", "full-1", "reindex", "reuse"}
    assert config.candidate_source_layer_id in config.layers
    assert len(config.active_engram_layer_ids) == 2
