"""A user's own task and data module, with their options, optimizers and schedules, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_modules.cli import DeepseekV41CLI, get_cli, main
from lightning_modules.inspecting import Parsed
from lightning_modules.options.classes import written_out
from lightning_modules.task import DeepseekV41Task

MODULE = '''
from typing import Any

import torch

from lightning_modules.data import TextDataModule
from lightning_modules.task import DeepseekV41Task


class Scaled(DeepseekV41Task):
    """The loss times a factor.

    Args:
        factor: Of the loss.
    """

    def __init__(self, factor: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


class WithOptimizer(Scaled):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Reversed(TextDataModule):
    """Rows of text.

    Args:
        backwards: Whether rows are read from their end.
    """

    def __init__(self, backwards: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backwards = backwards
'''


@pytest.fixture(autouse=True)
def own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_classes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(__import__("sys").modules, "own_classes", raising=False)


def test_a_task_and_a_data_module_have_their_options(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli(
        *("--model", "own_classes.Scaled", "--model.factor", "3", "--model.config.hidden_size", "24"),
        *("--data", "own_classes.Reversed", "--data.backwards", "true"),
    )
    assert type(cli.model).__name__ == "Scaled"
    assert (cli.model.factor, cli.model.text_config.hidden_size) == (3, 24)
    assert cli.model.tokenizer is cli.datamodule.fast_tokenizer
    assert (type(cli.datamodule).__name__, cli.datamodule.backwards) == ("Reversed", True)
    own = nano_cli("--model_class", "own_classes.WithOptimizer").model
    assert type(own).__name__ == "WithOptimizer"
    assert own.configure_optimizers.__func__ is type(own).configure_optimizers


def test_a_configuration_file_chooses_too_and_inspect_follows(nano_args: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model_class: own_classes.Scaled\nmodel: {factor: 4}\n")
    assert get_cli([*nano_args, "--config", str(tmp_path / "own.yaml")], run=False).model.factor == 4
    assert Parsed([*nano_args, "--config", str(tmp_path / "own.yaml")]).config.model.factor == 4


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 1, "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 8},
    "CosineAnnealingLR": {"T_max": 4},
    "ReduceLROnPlateau": {"monitor": "val/loss"},
}


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("SGD", "StepLR"),
        ("AdamW", "OneCycleLR"),
        ("RMSprop", None),
        ("Adam", "CosineAnnealingLR"),
        ("NAdam", "ReduceLROnPlateau"),
    ],
)
def test_any_optimizer_and_schedule_of_torch_train(
    optimizer: str, schedule: str | None, nano_cli: Callable[..., DeepseekV41CLI]
) -> None:
    options = ["--model", "own_classes.Scaled", "--optimizer", optimizer, "--optimizer.lr", "0.01"]
    if schedule is not None:
        options += ["--lr_scheduler", schedule]
        for name, value in SCHEDULES[schedule].items():
            options += [f"--lr_scheduler.{name}", str(value)]
    cli = nano_cli(*options)
    cli.trainer.fit(cli.model, cli.datamodule)
    made = cli.trainer.optimizers[0]
    assert type(made) is getattr(torch.optim, optimizer)
    count = sum(len(group["params"]) for group in made.param_groups)
    assert count == sum(parameter.requires_grad for parameter in cli.model.parameters())
    if schedule == "StepLR":
        assert made.param_groups[0]["lr"] == 0.01 / 2**4
    if schedule is not None:
        assert type(cli.trainer.lr_scheduler_configs[0].scheduler).__name__ == schedule


def test_a_run_keeps_its_classes_for_resuming_and_validating(nano_args: list[str], tmp_path: Path) -> None:
    options = ["--model", "own_classes.Scaled", "--optimizer=SGD", "--optimizer.lr=0.02", "--lr_scheduler=StepLR"]
    options += ["--lr_scheduler.step_size=2", "--lr_scheduler.gamma=0.5"]
    main(["fit", *nano_args, *options])
    run = tmp_path / "runs" / "nano" / "version_0"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model_class"] == "own_classes.Scaled"
    assert saved["optimizer"]["class_path"] == "torch.optim.SGD"
    in_runs = ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
    main(["validate", "--ckpt_path", str(run / "checkpoints" / "best.ckpt"), *in_runs])
    main(["fit", "--config", str(run / "config.yaml"), *in_runs, "--trainer.max_steps=6", "--ckpt_path=last"])
    resumed = torch.load(run / "checkpoints" / "step-00000006.ckpt", weights_only=True)
    main(["fit", *nano_args, *options, "--trainer.max_steps=6"])
    newest = max(run.parent.glob("version_*/checkpoints/step-00000006.ckpt"))
    assert run not in newest.parents
    unbroken = torch.load(newest, weights_only=True)
    assert resumed["lr_schedulers"][0]["_last_lr"] == [0.02 / 2**3]
    assert all(torch.equal(value, unbroken["state_dict"][name]) for name, value in resumed["state_dict"].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer", "SGD"], "unrecognized arguments: --optimizer"),
        (["--model", "own_classes.WithOptimizer", "--optimizer", "SGD"], "unrecognized arguments: --optimizer"),
        (["--model", "own_classes.Scaled", "--lr_scheduler", "StepLR", "--lr_scheduler.step_size=1"], "lr_scheduler: "),
        (["--model", "own_classes.Scaled", "--optimizer", "SDG"], "did you mean SGD?"),
        (["--model", "own_classes.Scaled", "--model.fator", "3"], "did you mean --model.factor?"),
        (["--model", "own_classes.Lost"], "model_class: own_classes.Lost cannot be imported"),
        (["--model_class", "own_classes.Reversed"], "own_classes.Reversed is not derived from Deepseek"),
        (["--data_class", "own_classes.Scaled"], "own_classes.Scaled is not derived from Lightning"),
        (["--model", "torch.nn.Linear"], "model_class: torch.nn.Linear is not derived from DeepseekV41Task"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_one_line(
    options: list[str], message: str, nano_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, *options])
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_files_and_values_after_model_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    for words in (["--model", "model.yaml"], ["--model={config: {}}"], ["--model"], ["--model.config", "a.b"]):
        assert written_out(words) == words
    assert written_out(["fit", "--model=a.B", "--data", "a.C"]) == ["fit", "--model_class=a.B", "--data_class", "a.C"]


def test_the_projects_own_task_keeps_its_optimizer(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli()
    assert type(cli.model) is DeepseekV41Task
    assert "optimizer" not in cli.config
