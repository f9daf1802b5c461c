"""Options, callbacks and environments of the trainer that cannot work are refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_modules.cli import DeepseekV41CLI, get_cli, main
from lightning_modules.data import TextDataModule
from lightning_modules.task import DeepseekV41Task


def callback(name: str, **init: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": init}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_checkpointing": False}, "trainer.enable_checkpointing: must be true or null"),
        ({"barebones": True}, "trainer.barebones: must be false"),
        ({"callbacks": [callback("BatchSizeFinder")]}, "trainer.callbacks: BatchSizeFinder is not supported: it"),
        ({"callbacks": callback("LearningRateFinder")}, "trainer.callbacks: LearningRateFinder is not supported: it"),
        ({"callbacks": [callback("OnExceptionCheckpoint", dirpath="x")]}, "OnExceptionCheckpoint is not supported"),
        (
            {"callbacks": [callback("EMAWeightAveraging")], "strategy": "engram_fsdp"},
            "trainer.callbacks: EMAWeightAveraging is not supported under strategy engram_fsdp: it",
        ),
        (
            {
                "callbacks": [callback("StochasticWeightAveraging", swa_lrs=0.1)],
                "strategy": {"class_path": "lightning_modules.strategy.EngramFSDPStrategy"},
            },
            "StochasticWeightAveraging is not supported under strategy engram_fsdp",
        ),
        (
            {"plugins": [{"class_path": "lightning.pytorch.plugins.environments.SLURMEnvironment"}]},
            "trainer.plugins: SLURMEnvironment: auto_requeue must be false",
        ),
    ],
)
def test_each_is_one_line_before_the_data_is_touched(
    options: dict[str, Any],
    message: str,
    nano_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def asked(_: TextDataModule) -> None:
        raise AssertionError("the tokenizer was trained")

    monkeypatch.setattr(TextDataModule, "fast_tokenizer", property(asked))
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": options}))
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, "--config", str(tmp_path / "more.yaml")])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_weight_averaging_works_on_one_device(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay", "0.5")
    cli.trainer.fit(cli.model, cli.datamodule)
    (averaging,) = [one for one in cli.trainer.callbacks if isinstance(one, EMAWeightAveraging)]  # type: ignore[attr-defined]
    assert int(averaging._average_model.n_averaged) == 4  # type: ignore[union-attr]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10, cycle_momentum=False)


class OneCycle(DeepseekV41Task):
    """A user's task with a schedule that is no function of the step."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        schedule = one_cycle(made["optimizer"])
        return made | {"lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_schedule_of_torch_in_a_subclass_trains_and_resumes(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    rates = []
    for steps, path in (("2", None), ("4", "last")):
        cli = nano_cli("--trainer.max_steps", steps)
        task = OneCycle(cli.model.text_config, tokenizer=cli.datamodule.fast_tokenizer)
        cli.trainer.fit(task, cli.datamodule, ckpt_path=path)
        rates.append(cli.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])  # type: ignore[union-attr]
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule = one_cycle(reference)
    expected = []
    for _ in range(4):
        reference.step()
        schedule.step()
        expected.append(schedule.get_last_lr()[0])
    assert rates == pytest.approx([expected[1], expected[3]])


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a job of one task."""
    for name, value in {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "here",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("slurm")
def test_under_slurm_nothing_is_loaded_unasked_and_nothing_is_requeued(
    nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SLURMEnvironment.detect()
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"of another experiment")
    cli = get_cli(nano_args, run=False)
    environment = cli.trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.global_step == 4
    cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    assert {path.name for path in tmp_path.iterdir()} == {"hpc_ckpt_1.ckpt", "nano.yaml", "runs"}


def test_a_given_environment_is_kept(nano_args: list[str], tmp_path: Path, slurm: None) -> None:
    content = {"plugins": [{"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"}]}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": content}))
    cli = get_cli([*nano_args, "--config", str(tmp_path / "more.yaml")], run=False)
    assert not isinstance(cli.trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
