"""One run's directory with any logger: where it lies, what "last" and "best" find, and what a run leaves alone."""

from __future__ import annotations

import csv
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.checkpoint.csv_history import ResumedCSVLogger
from lightning_modules.checkpoint.find import find_checkpoint, missing, run_of, step_of
from lightning_modules.checkpoint.run_directory import place_of, resolve
from lightning_modules.cli import DeepseekV41CLI, main
from lightning_modules.transfer.export import export_checkpoint

SERVICES = '''
from lightning.pytorch.loggers.logger import Logger

class Service(Logger):
    """As W&B's: a local folder, a project, and an id that the service gives when the run begins."""
    begun, points = [], []

    def __init__(self, name=None, save_dir=".", version=None, project="project"):
        super().__init__()
        self._save_dir, self._project, self._id, self._run = save_dir, project, version, None

    @property
    def experiment(self):
        if self._run is None:
            self._run = self._id or f"id{len(self.begun)}"
            self.begun.append(self._run)
        return self._run

    save_dir = property(lambda self: self._save_dir)
    name = property(lambda self: self._project)
    version = property(lambda self: self._run or self._id)

    def log_metrics(self, metrics, step=None):
        if "train/loss" in metrics:
            self.points.append((self.experiment, step))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Tracker(Service):
    """As MLflow's with a server: no local folder, and asking for the run's name begins it."""

    def __init__(self, experiment_name="default", run_id=None):
        super().__init__(save_dir=None, version=run_id, project=experiment_name)

    version = property(lambda self: self.experiment)
    name = property(lambda self: self.experiment and self._project)


class Nameless(Service):
    """Takes no run to continue."""

    def __init__(self, save_dir="."):
        super().__init__(save_dir=save_dir)
'''


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Module of loggers like those of services."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "service_loggers.py").write_text(textwrap.dedent(SERVICES))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "service_loggers", raising=False)
    import service_loggers  # type: ignore[import-not-found]

    yield service_loggers
    sys.modules.pop("service_loggers", None)


def fit_args(nano_args: list[str], logger: Any, folder: Path) -> list[str]:
    """Options of the smallest run with another logger and `folder` as its root."""
    content = yaml.safe_load(Path(nano_args[1]).read_text())
    content["trainer"] |= {"logger": logger, "default_root_dir": str(folder)}
    content["trainer"] |= {"limit_val_batches": 1}
    file = folder / "other.yaml"
    file.write_text(yaml.safe_dump(content))
    return ["--config", str(file), *nano_args[2:6]]


def tensorboard(folder: Path, **options: Any) -> dict[str, Any]:
    init = {"save_dir": str(folder / "runs"), "name": "nano", "default_hp_metric": False} | options
    return {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": init}


def csv_logger(folder: Path, **options: Any) -> dict[str, Any]:
    init = {"save_dir": str(folder / "runs"), "name": "nano"} | options
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": init}


def points(run: Path, tag: str = "train/loss") -> list[int]:
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    return [event.step for event in reader.Scalars(tag)]


def rows(run: Path) -> list[int]:
    """Steps with a training loss in the run's metrics.csv."""
    with (run / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    return line


def all_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Logger = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("logger", "directory"),
    [
        (lambda folder: [tensorboard(folder), csv_logger(folder)], "runs/nano/version_0"),
        (lambda folder: tensorboard(folder, sub_dir="curves"), "runs/nano/version_0"),
        (lambda folder: csv_logger(folder), "runs/nano/version_0"),
        (lambda folder: True, "lightning_logs/version_0"),
        (lambda folder: False, "."),
    ],
    ids=["list", "sub_dir", "csv", "true", "false"],
)
def test_a_run_is_resumed_validated_and_exported_with_any_logger(
    logger: Logger, directory: str, nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = logger(tmp_path)
    args, run = fit_args(nano_args, made, tmp_path), tmp_path / directory
    main(["fit", *args])
    saved = (run / "config.yaml").read_text()
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    main(["fit", *args, "--trainer.max_steps", "6", "--ckpt_path", "last"])
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "step-00000006.ckpt"}
    assert (run / "config.yaml").read_text() == saved
    assert len(list(tmp_path.rglob("checkpoints"))) == 1
    if made is not False and "csv" not in str(made).lower():
        curves = run / "curves" if "sub_dir" in str(made) else run
        assert points(curves) == list(range(6))
    if "csv" in str(made).lower():
        assert rows(run) == list(range(6))
    before = all_files(tmp_path)
    capsys.readouterr()
    main(["validate", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")])
    main(["test", *args, "--ckpt_path", "best"])
    assert f"best is {run / 'checkpoints' / 'best.ckpt'}" in capsys.readouterr().err
    assert all_files(tmp_path) == before
    export_checkpoint(str(run / "checkpoints" / "best.ckpt"), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("kind", "local"), [("Service", "kept/project"), ("Tracker", "project")])
def test_runs_of_services_are_found_by_time_and_continued_by_their_name(
    kind: str, local: str, services: Any, nano_args: list[str], tmp_path: Path
) -> None:
    init = {"project": "project", "save_dir": str(tmp_path / "kept")}
    if kind == "Tracker":
        init = {"experiment_name": "project"}
    args = fit_args(nano_args, {"class_path": f"service_loggers.{kind}", "init_args": init}, tmp_path)
    main(["fit", *args, "--trainer.max_steps", "2"])
    main(["fit", *args, "--trainer.max_steps", "3"])
    second = services.Service.begun[-1]
    run = tmp_path / local / second
    assert len(list((tmp_path / local).glob("*/config.yaml"))) == 2, "each run has a directory"
    main(["fit", *args, "--trainer.max_steps", "4", "--ckpt_path", "last"])
    assert services.Service.begun[-1] == second
    assert len(services.Service.begun) == 3, "looking for the run began none"
    assert services.Service.points[-4:] == [(second, step) for step in range(4)]
    assert (run / "checkpoints" / "step-00000004.ckpt").is_file()
    begun = list(services.Service.begun)
    main(["validate", "--ckpt_path", str(run / "checkpoints" / "best.ckpt")])
    main(["validate", *args, "--ckpt_path", "last"])
    assert services.Service.begun == begun, "validate begins no run"


def test_a_logger_that_takes_no_run_is_named(
    services: Any, nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = {"save_dir": str(tmp_path)}
    args = fit_args(nano_args, {"class_path": "service_loggers.Nameless", "init_args": init}, tmp_path)
    checkpoints = tmp_path / "project" / "a" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000004.ckpt").touch()
    saved = {"trainer": {"logger": {"class_path": "service_loggers.Nameless", "init_args": init}}}
    (tmp_path / "project" / "a" / "config.yaml").write_text(yaml.safe_dump(saved))
    assert "service_loggers.Nameless takes none of version" in error_of(["fit", *args, "--ckpt_path", "last"], capsys)


VERSION = "--trainer.logger.init_args.version"


def test_a_typed_version_is_the_run_that_is_meant(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, short = tmp_path / "runs" / "nano", [*nano_args, "--trainer.max_steps", "2"]
    main(["fit", *short])
    main(["fit", *short])
    main(["fit", *short, VERSION, "named"])
    newer = all_files(runs / "version_1")
    for version, folder in (("0", "version_0"), ("named", "named")):
        main(["fit", *nano_args, "--trainer.max_steps", "3", VERSION, version, "--ckpt_path", "last"])
        assert [path.name for path in sorted((runs / folder / "checkpoints").iterdir())][-1] == "step-00000003.ckpt"
        assert points(runs / folder) == [0, 1, 2]
    assert all_files(runs / "version_1") == newer
    assert {path.name for path in runs.iterdir()} == {"version_0", "version_1", "named"}
    capsys.readouterr()
    main(["validate", *nano_args, VERSION, "named", "--ckpt_path", "best"])
    assert f"best is {runs / 'named' / 'checkpoints' / 'best.ckpt'}" in capsys.readouterr().err
    error = error_of(["fit", *nano_args, VERSION, "7", "--ckpt_path", "last"], capsys)
    assert f"no 'last' checkpoint in {runs / 'version_7'}, which trainer.logger.init_args.version names" in error
    error = error_of(["fit", *nano_args, VERSION, "absent", "--ckpt_path", "last"], capsys)
    assert str(runs / "absent") in error
    error = error_of(["fit", *nano_args, VERSION, "0"], capsys)
    assert error.endswith(
        "version_0 holds a run already (config.yaml); resume it with --ckpt_path last, or give another"
    )
    best = str(runs / "version_0" / "checkpoints" / "best.ckpt")
    error = error_of(["fit", *nano_args, VERSION, "1", "--ckpt_path", best], capsys)
    assert "has step-00000002.ckpt, and is not continued from" in error
    assert all_files(runs / "version_1") == newer


def test_a_path_and_its_own_version_continue_the_run(nano_args: list[str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "nano" / "version_0"
    args = fit_args(nano_args, csv_logger(tmp_path), tmp_path)
    main(["fit", *args])
    step = str(run / "checkpoints" / "step-00000004.ckpt")
    main(["fit", *args, "--trainer.max_steps", "6", VERSION, "0", "--ckpt_path", step])
    assert rows(run) == list(range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.sequence_length", "65"], "max_position_embeddings"),
        (["--trainer.accumulate_grad_batches", "8", "--trainer.limit_train_batches", "2"], "at most 2, the batches"),
        (["--trainer.precision", "bf16-true"], "trainer.precision"),
        (["--ckpt_path", "best", "--model.config.head_dim", "12"], "head_dim: checkpoint 8, command line 12"),
    ],
)
def test_a_refused_run_leaves_no_directory(
    options: list[str], message: str, nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *nano_args, "--trainer.max_steps", "2"])
    before = all_files(tmp_path / "runs")
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, *options])
    assert message in capsys.readouterr().err
    assert all_files(tmp_path / "runs") == before
    assert [path.name for path in (tmp_path / "runs" / "nano").iterdir()] == ["version_0"]


def test_home_and_variables_are_expanded_once(
    nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    save_dir = "--trainer.logger.init_args.save_dir"
    for typed, folder in (("~/runs", "home"), ("${SCRATCH}/runs", "scratch")):
        main(["fit", *nano_args, save_dir, typed, "--trainer.max_steps", "2"])
        run = tmp_path / folder / "runs" / "nano" / "version_0"
        assert points(run) == [0, 1]
        assert (run / "checkpoints" / "step-00000002.ckpt").is_file()
        assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["logger"]["init_args"]["save_dir"] == str(
            tmp_path / folder / "runs"
        )
        main(["validate", *nano_args, save_dir, typed, "--ckpt_path", "last"])
        main(["validate", "--ckpt_path", f"{typed}/nano/version_0/checkpoints/best.ckpt"])
    assert {path.name for path in tmp_path.iterdir()} == {"home", "scratch", "nano.yaml"}
    error = error_of(["fit", *nano_args, save_dir, "$NOWHERE/runs"], capsys)
    assert error.endswith(
        "trainer.logger.init_args.save_dir: $NOWHERE/runs: the environment variable $NOWHERE is not set"
    )


def test_last_from_python_resumes(nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path) -> None:
    cli = nano_cli("--trainer.max_steps", "2")
    with pytest.raises(FileNotFoundError, match=r"no 'last' checkpoint in .*version_0 or beside it"):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path="last")
    cli = nano_cli("--trainer.max_steps", "2")
    cli.trainer.fit(cli.model, cli.datamodule)
    again = nano_cli("--trainer.max_steps", "3")
    again.trainer.fit(again.model, again.datamodule, ckpt_path="last")
    assert points(tmp_path / "runs" / "nano" / "version_1") == [2]
    assert again.model.tokens_seen > cli.model.tokens_seen
    resumed = nano_cli("--trainer.max_steps", "4", VERSION, "1")
    resumed.trainer.fit(resumed.model, resumed.datamodule, ckpt_path="last")
    assert find_checkpoint(tmp_path / "runs" / "nano", "last") == (
        tmp_path / "runs" / "nano" / "version_1" / "checkpoints" / "step-00000004.ckpt"
    )


def test_predictions_lie_beside_the_run_and_are_not_overwritten(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *nano_args, "--trainer.max_steps", "2"])
    run = tmp_path / "runs" / "nano" / "version_0"
    for _ in range(2):
        main(["predict", "--ckpt_path", str(run / "checkpoints" / "best.ckpt"), "--trainer.limit_predict_batches", "1"])
    first, second = (torch.load(run / f"predictions-best{n}.pt", weights_only=True) for n in ("", "-1"))
    assert torch.equal(first["next_token"], second["next_token"])
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]


def test_a_resumed_csv_history_survives_a_kill_while_it_is_restored(tmp_path: Path) -> None:
    logger = ResumedCSVLogger(tmp_path, "nano", version=0)
    for step in range(3):
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.save()
    run = tmp_path / "nano" / "version_0"
    (run / "metrics.csv").rename(run / "metrics.csv.resuming")
    (run / "metrics.csv").write_text("step,train/lo")  # half of what was being restored
    again = ResumedCSVLogger(tmp_path, "nano", version=0, resume_step=2)
    again.log_metrics({"train/loss": 5.0, "val/loss": 1.0}, 2)
    again.save()
    assert rows(run) == [0, 1, 2]
    with (run / "metrics.csv").open(newline="") as file:
        assert [row["train/loss"] for row in csv.DictReader(file)] == ["0.0", "1.0", "5.0"]
    assert not (run / "metrics.csv.resuming").exists()


def test_a_run_of_no_number_is_found_by_its_time_where_there_are_none_with_one(tmp_path: Path) -> None:
    for index, name in enumerate(("b", "a")):
        folder = tmp_path / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "step-00000001.ckpt").touch()
        os.utime(folder, ns=(index * 10**9, index * 10**9))
    assert find_checkpoint(tmp_path, "last") == tmp_path / "a" / "checkpoints" / "step-00000001.ckpt"
    (tmp_path / "version_0" / "checkpoints").mkdir(parents=True)
    assert find_checkpoint(tmp_path, "last") is None


def test_paths_and_names(tmp_path: Path) -> None:
    assert run_of(tmp_path / "run" / "checkpoints" / "best.ckpt") == tmp_path / "run"
    assert run_of(tmp_path / "copied" / "best.ckpt") == tmp_path / "copied"
    assert step_of(Path(f"x/step-00000012.ckpt.{'0f' * 16}.partial")) == 12
    assert step_of(Path("x/best.ckpt")) is None
    path = tmp_path / "a" / "b" / "best.ckpt"
    assert missing(path) == f"{path} does not exist (there is no {tmp_path / 'a'})"
    path.parent.mkdir(parents=True)
    assert missing(path) == f"{path} does not exist"
    assert place_of(Namespace(logger=[], default_root_dir=str(tmp_path))).run == tmp_path
    with pytest.raises(FileNotFoundError, match=r"^ckpt_path: no 'best' checkpoint in .*default_root_dir names"):
        resolve(Namespace(logger=False, default_root_dir=str(tmp_path)), "best", resume=False)


def test_runs_of_another_experiment_of_a_service_are_not_taken(services: Any, tmp_path: Path) -> None:
    def trainer(project: str, **more: str) -> Namespace:
        init = Namespace(project=project, save_dir=str(tmp_path), **more)
        return Namespace(logger=[Namespace(class_path="service_loggers.Service", init_args=init)])

    for project, run in (("mine", "a"), ("mine", "b"), ("other", "c")):
        folder = tmp_path / project / run
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000001.ckpt").touch()
        spec = trainer(project).logger[0]
        saved = {"trainer": {"logger": [{"class_path": spec.class_path, "init_args": spec.init_args.as_dict()}]}}
        (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    os.utime(tmp_path / "mine" / "a" / "checkpoints", ns=(10**9, 10**9))
    assert resolve(trainer("mine"), "last", resume=False).parents[1] == tmp_path / "mine" / "b"
    assert resolve(trainer("mine", version="a"), "last", resume=False).parents[1] == tmp_path / "mine" / "a"
    for missing_run in (trainer("third"), trainer("mine", version="c")):
        with pytest.raises(FileNotFoundError, match=r"^ckpt_path: no 'last' checkpoint "):
            resolve(missing_run, "last", resume=False)
    assert services.Service.begun == []
