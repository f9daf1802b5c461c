"""Runs, checkpoints, exports and import paths from before the packages were divided into folders still work.

The files are described in `tests/data/before_layout/README.md`.
"""

from __future__ import annotations

import importlib
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

from dsv41 import DeepseekV41ForCausalLM
from lightning_modules.cli import get_cli

ARCHIVE = Path(__file__).parents[1] / "data" / "before_layout" / "before_layout.tar.xz"
LOSS = 5.5571618


@pytest.fixture(scope="module")
def old_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(old_files: Path, corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the old commands were typed: their configurations name files relative to it."""
    for name, target in (("corpus", corpus), ("cache", cache)):
        (tmp_path / name).symlink_to(target)
    for name in ("runs", "released", "hf"):
        (tmp_path / name).symlink_to(old_files / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("run", ["nano", "sharded"])
def test_an_old_run_is_validated_and_resumed(old: Path, run: str) -> None:
    home = old / "runs" / run / "version_0"
    config = yaml.safe_load((home / "config.yaml").read_text())
    config["trainer"] |= {"strategy": "auto", "devices": 1, "logger": False, "max_steps": 6, "val_check_interval": 2}
    (old / "config.yaml").write_text(yaml.safe_dump(config))
    checkpoint = str(home / "checkpoints" / "step-00000004.ckpt")
    cli = get_cli(["--config", str(old / "config.yaml"), "--trainer.default_root_dir", str(old / "own")], run=False)
    (found,) = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=checkpoint, verbose=False)
    assert found["val/loss"] == pytest.approx(LOSS, abs=1e-4)
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint)
    assert cli.trainer.global_step == 6
    assert cli.model.tokens_seen == 370  # 4 steps of 2 rows of 32, a short row among them, and 2 more
    assert float(cli.trainer.callback_metrics["val/loss"]) < LOSS


def test_old_exports_give_the_same_logits(old: Path) -> None:
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        released, hf = (DeepseekV41ForCausalLM.from_pretrained(old / name)(ids).logits for name in ("released", "hf"))
    assert torch.equal(released, hf)
    assert released.std() > 0.01


# Paths that users' files and code may hold: class paths of configurations, the reference API, the design's interfaces.
NAMES = {
    "dsv41": "BackendConfig DeepseekV41Config DeepseekV41ForCausalLM DeepseekV41TextConfig DeepseekV41VisionConfig",
    "dsv41.checkpoint": "load_released save_released save_for_transformers LoadAudit SaveAudit",
    "dsv41.engram": "DeepseekV41Engram DeepseekV41NgramHash compile_engram_gate compressed_token_map engram_gates",
    "dsv41.model": "DeepseekV41Block DeepseekV41Model DeepseekV41ForCausalLM",
    "lightning_modules.strategy": "EngramFSDPStrategy",
    "lightning_modules.cli": "main get_cli DeepseekV41CLI",
    "lightning_modules.task": "DeepseekV41Task IndexerConfig",
    "lightning_modules.data": "TextDataModule",
    "lightning_modules.optim": "OptimizerConfig ScheduleConfig",
    "lightning_modules.callbacks": "BestCheckpoint EngramGates EngramMemory ExpertLoad GracefulInterrupt IndexerRecall "
    "LatestCheckpoint PartSummary PeakMemory PredictionFile StreamMixers TokenThroughput UnigramBaseline UpdateRatio",
}


@pytest.mark.parametrize("module", NAMES)
def test_import_paths_stay(module: str) -> None:
    found = importlib.import_module(module)
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]
