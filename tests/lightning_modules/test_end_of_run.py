"""The end of a training: a validation after the last step, a report with commands that work, pages of TensorBoard."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from lightning_modules import __main__ as entry
from lightning_modules.callbacks import FinalValidation
from lightning_modules.callbacks.report import FILE, Report
from lightning_modules.cli import get_cli, main


def events(run: Path) -> EventAccumulator:
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    return reader


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    reader = events(run)
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture(scope="module")
def five(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of five steps with a validation every two; not to be changed."""
    folder = tmp_path_factory.mktemp("five")
    main(["fit", *make_nano_args(folder), "--trainer.max_steps", "5"])
    return folder / "runs" / "nano" / "version_0"


def test_a_run_ends_with_one_validation_whatever_the_interval(five: Path, nano_args: list[str], tmp_path: Path) -> None:
    main(["fit", *nano_args, "--trainer.max_steps", "5", "--trainer.val_check_interval", "5"])
    due = scalars(tmp_path / "runs" / "nano" / "version_0")
    forced = scalars(five)
    assert [step for step, _ in forced["val/loss"]] == [1, 3, 4]
    assert [step for step, _ in due["val/loss"]] == [4]
    assert forced["val/loss"][-1] == due["val/loss"][0]
    for tag in ("train/loss", "train/grad_norm", "train/lr/decay"):
        assert forced[tag] == due[tag], tag
    assert (five / "checkpoints" / "best.ckpt").is_file()


class Validations(L.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # 8 batches an epoch
        (
            {"limit_train_batches": 8, "max_epochs": 3, "check_val_every_n_epoch": 2, "val_check_interval": 1.0},
            [16, 24],
        ),
        ({"limit_train_batches": 8, "max_epochs": 2, "check_val_every_n_epoch": 1, "val_check_interval": 1.0}, [8, 16]),
        ({"max_steps": 3, "val_check_interval": "00:01:00:00"}, [3]),
        ({"max_steps": 3, "val_check_interval": 2, "accumulate_grad_batches": 2}, [1, 2, 3]),
        ({"max_steps": 3, "val_check_interval": 4, "accumulate_grad_batches": 2}, [2, 3]),
        ({"max_steps": 3, "val_check_interval": 2, "limit_val_batches": 0}, []),
    ],
)
def test_every_kind_of_interval(
    options: dict[str, Any], steps: list[int], nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a run without a logger keeps its checkpoints
    overrides = [f"--trainer.{name}={value}" for name, value in ({"max_steps": -1} | options).items()]
    cli = get_cli([*nano_args, *overrides, "--trainer.logger", "false"], run=False)
    trainer, seen = cli.trainer, Validations()
    trainer.callbacks.insert(0, seen)
    before = trainer.check_val_every_n_epoch
    trainer.fit(cli.model, cli.datamodule)
    assert seen.steps == steps
    assert trainer.check_val_every_n_epoch == before
    if isinstance(options["val_check_interval"], int):
        assert trainer.val_check_batch == options["val_check_interval"]


def test_a_run_extended_after_its_last_validation_has_the_numbers_of_an_unbroken_one(
    make_nano_args: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """With a schedule that does not depend on the length of the run."""
    args = [*make_nano_args(tmp_path), "--model.schedule.name", "constant"]
    main(["fit", *args, "--trainer.max_steps", "5"])
    main(["fit", *args, "--trainer.max_steps", "8", "--ckpt_path", "last"])
    main(["fit", *args, "--trainer.max_steps", "8"])
    resumed, unbroken = (scalars(tmp_path / "runs" / "nano" / f"version_{number}") for number in (0, 1))
    for tag in ("train/loss", "train/grad_norm"):
        assert resumed[tag] == unbroken[tag], tag
    assert [step for step, _ in resumed["val/loss"]] == [1, 3, 4, 5, 7]
    assert [point for point in resumed["val/loss"] if point[0] != 4] == unbroken["val/loss"]


def test_the_report_names_what_there_is(five: Path) -> None:
    text = (five / FILE).read_text()
    values = scalars(five)
    facts = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))
    assert text.startswith("# finished after 5 steps\n")
    assert facts["directory"] == str(five)
    assert Path(facts["last checkpoint"]) == five / "checkpoints" / "step-00000005.ckpt"
    assert Path(facts["best checkpoint"]) == five / "checkpoints" / "best.ckpt"
    entropy = values["val/unigram_entropy"][0][1] if "val/unigram_entropy" in values else None
    assert facts["validation loss"].startswith(f"{values['val/loss'][-1][1]:.4f} nats per token")
    assert entropy is None or facts["validation loss"].endswith(f"unigram entropy {entropy:.4f}")
    assert facts["training loss"].startswith(f"{values['train/loss'][-1][1]:.4f} nats")
    assert facts["tokens"].startswith(f"{values['train/tokens'][-1][1]:,.0f} predicted, ")
    assert "data" not in facts, "nothing is left out"
    shown = events(five).Tensors("report/text_summary")[0].tensor_proto.string_val[0].decode()
    assert shown == text


def commands_of(text: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip().startswith("dsv41 ")]


def test_the_commands_of_the_report_work(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", *nano_args, "--trainer.max_steps", "3", "--trainer.logger.init_args.save_dir", "my runs"])
    run = Path("my runs") / "nano" / "version_0"
    validate, longer, export = commands_of((run / FILE).read_text())
    capsys.readouterr()
    main(validate[1:])
    assert f"{scalars(run)['val/loss'][-1][1]:.6f}"[:6] in capsys.readouterr().out
    main(longer[1:])
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(6))
    entry.main(export[1:])
    assert (run / "exported" / "config.json").is_file()


class CtrlC(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_says_where_it_saved_and_how_to_resume(
    nano_args: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli = get_cli([*nano_args], run=False)
    cli.trainer.callbacks.insert(0, CtrlC())
    with caplog.at_level("INFO"):
        cli.trainer.fit(cli.model, cli.datamodule)
    text = "\n".join(record.getMessage() for record in caplog.records)
    run = tmp_path / "runs" / "nano" / "version_0"
    assert "stopped after 3 steps of 4" in text
    assert f"last checkpoint  {run / 'checkpoints' / 'step-00000003.ckpt'}" in text
    if (run / "config.yaml").is_file():
        resume = next(words for words in commands_of(text) if words[1] == "fit")
        assert resume == ["dsv41", "fit", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]


def test_a_run_without_a_logger_reports_to_the_terminal_alone(
    nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("corpus")
    with caplog.at_level("INFO"):
        main(["fit", *nano_args, "--trainer.max_steps", "1", "--trainer.logger", "false"])
    assert "finished after 1 steps" in "\n".join(record.getMessage() for record in caplog.records)
    assert not list(tmp_path.rglob(FILE))


def test_a_report_without_checkpoints_has_no_commands() -> None:
    report = Report("finished after 1 steps", [("duration", "1 s"), ("data", "a|b")], [])
    assert report.text() == "finished after 1 steps\n  duration  1 s\n  data      a|b"
    assert "| data | a\\|b |" in report.markdown()
    assert "next" not in report.text() + report.markdown()


def test_tensorboard_has_a_page_of_main_charts_of_the_runs_own_tags(five: Path) -> None:
    reader = events(five)
    layout = layout_pb2.Layout.FromString(reader.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    [page] = layout.category
    assert page.title == "main"
    charts = {chart.title: list(chart.multiline.tag) for chart in page.chart}
    assert list(charts) == ["loss", "learning rate", "tokens per second", "gradient norm"]
    tags = [*reader.Tags()["scalars"], "train/tokens_per_sec"]  # logged from the eighth batch on
    for title, patterns in charts.items():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, tag) for tag in tags), (title, pattern)


def test_tensorboard_lists_a_single_run_with_its_options_and_metrics(five: Path) -> None:
    reader = events(five)

    def content(tag: str) -> plugin_data_pb2.HParamsPluginData:
        return plugin_data_pb2.HParamsPluginData.FromString(reader.SummaryMetadata(tag).plugin_data.content)

    start = content("_hparams_/session_start_info").session_start_info
    shown = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert (shown["lr"], shown["hidden_size"], shown["max_steps"]) == (0.01, 16, 5)
    assert shown["engram_layer_ids"] == "[1]"
    metrics = [info.name.tag for info in content("_hparams_/experiment").experiment.metric_infos]
    assert {"val/loss", "train/loss"} <= set(metrics)
    assert set(metrics) <= {*reader.Tags()["scalars"], "train/tokens_per_sec"}


def test_tensorboard_has_the_configuration_as_text(five: Path) -> None:
    text = events(five).Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    body = re.fullmatch(r"```yaml\n(.*)\n```", text, re.DOTALL)
    assert body is not None
    assert yaml.safe_load(body[1]) == yaml.safe_load((five / "config.yaml").read_text())


def test_the_intervals_are_given_back_after_an_error() -> None:
    trainer = L.Trainer(max_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.val_check_batch = 7
    callback = FinalValidation()
    callback.on_train_batch_end(trainer)
    assert trainer.val_check_batch == 1
    callback.on_exception(trainer, L.LightningModule(), ValueError())
    assert trainer.val_check_batch == 7
