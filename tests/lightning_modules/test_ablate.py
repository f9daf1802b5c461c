"""``dsv41 ablate`` and ``dsv41 compare``: runs, kills, failures, what is written. Most children here are quick scripts
in the place of a training, whose runs have been made in this process."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter

from dsv41.files import discard
from lightning_modules import __main__ as entry
from lightning_modules.ablation import running
from lightning_modules.ablation.ablate import ablate, collect, run_plan, write_all
from lightning_modules.ablation.comparing import compare
from lightning_modules.ablation.curves import MEMORY, RATE, scalars
from lightning_modules.ablation.plan import Plan, Run, make_plan, runs_of
from lightning_modules.ablation.progress import PAUSE, Progress
from lightning_modules.ablation.running import Job, finished, run_all, steps_done
from lightning_modules.ablation.study import read_study
from lightning_modules.callbacks.peak_memory import peak_memory
from lightning_modules.cli import main
from lightning_modules.text import duration

MakeStudyFile = Callable[..., Path]


def train(run: Run) -> None:
    """Do in this process what the run's child would do."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / running.CONFIG).write_text(yaml.safe_dump(run.config))
    main(["fit", "--config", str(run.folder / running.CONFIG)])


@pytest.fixture(scope="module")
def finished_study(make_study_file: MakeStudyFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, str]:
    """A study of two variants and two seeds whose runs are done, and what it has printed. Not to be changed."""
    folder = tmp_path_factory.mktemp("study")
    plan = make_plan(read_study(make_study_file(folder)))
    for run in plan.runs:
        train(run)
    stream = io.StringIO()
    assert run_plan(plan, 1, False, stream) == 0
    return plan, stream.getvalue()


@pytest.fixture
def study(finished_study: tuple[Plan, str], make_study_file: MakeStudyFile, tmp_path: Path) -> Plan:
    """The finished study, a copy for this test."""
    shutil.copytree(finished_study[0].study.output, tmp_path / "out")
    make_study_file(tmp_path)
    of = replace(finished_study[0].study, output=tmp_path / "out")
    return Plan(of, finished_study[0].variants, runs_of(of, finished_study[0].variants))


@pytest.fixture(scope="module")
def losses(finished_study: tuple[Plan, str]) -> dict[tuple[str, int], float]:
    """Last validation loss of each run, from its event files."""
    return {(r.variant, r.seed): scalars(r.directory)["val/loss"][-1].value for r in finished_study[0].runs}


def undo(run: Run) -> None:
    """As before the run."""
    shutil.rmtree(run.folder)


class Script:
    """Shell scripts as children, by the name of the run; ``$F`` is its folder."""

    def __init__(self, scripts: dict[str, str]) -> None:
        self.scripts = scripts
        self.began: list[str] = []

    def __call__(self, run: Run) -> list[str]:
        self.began.append(run.name)
        return ["sh", "-c", f"F={run.folder}; {self.scripts[run.name]}"]


# ---------------------------------------------------------------- results


def test_results_are_those_of_the_event_files(
    finished_study: tuple[Plan, str], losses: dict[tuple[str, int], float]
) -> None:
    plan, printed = finished_study
    loaded = json.loads((plan.study.output / "results.json").read_text())
    base, variant = loaded["variants"]
    assert (base["variant"], variant["variant"]) == ("base", "no_engram")
    assert base["val_loss"] == pytest.approx((losses["base", 0] + losses["base", 1]) / 2, rel=1e-6)
    first, second = (losses["no_engram", seed] - losses["base", seed] for seed in (0, 1))
    assert variant["difference"] == pytest.approx((first + second) / 2, abs=1e-6)
    assert variant["difference_half_interval"] == pytest.approx(12.7062 * abs(first - second) / 2, abs=1e-4)
    assert [row["steps"] for row in loaded["variants"]] == [4, 4]
    costs = [planned.cost for planned in plan.variants]
    # The tokenizer of so little text comes out smaller than the configuration promises.
    assert base["parameters"] <= costs[0].parameters
    assert base["parameters"] - variant["parameters"] == costs[0].parameters - costs[1].parameters
    assert base["peak_memory_mb"] > 50
    assert base["training_flops_per_token"] > variant["training_flops_per_token"] > 0
    table = (plan.study.output / "results.md").read_text()
    assert table in printed
    cells = re.sub(" +", " ", table)
    assert f"| no_engram | 2 | {variant['val_loss']:.4f} | {variant['difference']:+.4f} [" in cells
    assert (plan.study.output / "results.csv").read_text().count("\n") == 3
    assert loaded["software"].startswith("torch ")


def test_tensorboard_shows_switches_metrics_and_overlaid_variants(finished_study: tuple[Plan, str]) -> None:
    plan, _ = finished_study
    run = plan.runs[3]
    reader = EventAccumulator(str(run.directory))
    reader.Reload()
    plugin = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data
    start = plugin_data_pb2.HParamsPluginData.FromString(plugin.content).session_start_info
    shown = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert shown == {"variant": "no_engram", "seed": 1, "model.config.engram_layer_ids": "[]"}
    assert reader.Scalars("final/val_loss")[0].value == reader.Scalars("val/loss")[-1].value
    assert {"final/parameters", "final/training_flops_per_token", "final/peak_memory_mb"} <= set(
        reader.Tags()["scalars"]
    )
    layout = EventAccumulator(str(plan.study.output / "layout"))
    layout.Reload()
    [event] = layout.Tensors("custom_scalars__config__")
    category = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category[0]
    assert category.title == "some"
    assert "^val/loss$" in [tag for chart in category.chart for tag in chart.multiline.tag]


def test_results_written_again_replace_themselves(study: Plan) -> None:
    def files() -> list[Path]:
        return sorted(path.parent for path in study.study.output.rglob("*") if path.is_file())

    before = files()
    assert "results.md" in write_all(study, 1)
    assert files() == before


def test_pictures_are_drawn(study: Plan) -> None:
    picture = study.study.output / "curves.png"
    picture.unlink(missing_ok=True)
    assert str(picture) in write_all(study, 1)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_last_loss_is_the_checkpoints_own(study: Plan) -> None:
    """A kill may have kept the last event from the disk."""
    run = study.runs[0]
    marker = json.loads((run.folder / "finished.json").read_text())
    marker["metrics"]["val/loss"] = 1.5
    (run.folder / "finished.json").write_text(json.dumps(marker))
    assert collect(study)[0].loss == 1.5


# ---------------------------------------------------------------- what runs and what does not


def test_a_dry_run_says_what_is_done_and_does_nothing(study: Plan, tmp_path: Path, capsys: Any) -> None:
    undo(study.runs[0])
    (study.runs[1].folder / "finished.json").unlink()
    before = sorted(study.study.output.rglob("*"))
    entry.main(["ablate", "--config", str(tmp_path / "some.yaml"), "--dry-run"])
    out = capsys.readouterr().out
    assert sorted(study.study.output.rglob("*")) == before
    assert out.splitlines()[-4:] == [
        "base seed 0       new, 4 steps",
        "no_engram seed 0  step 4 of 4",
        "base seed 1       finished",
        "no_engram seed 1  finished",
    ]
    assert "what changes: model.config.engram_layer_ids" in out


def test_finished_runs_are_skipped_and_those_without_a_marker_get_it(
    study: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Script({})
    monkeypatch.setattr(running, "fit_command", children)
    marker = study.runs[2].folder / "finished.json"
    before = marker.read_bytes()
    marker.unlink()
    assert run_all(study.runs, 1, Progress(study, 1, io.StringIO())) == []
    assert children.began == []
    assert marker.read_bytes() == before


def test_another_configuration_is_refused_with_what_differs(
    study: Plan, make_study_file: MakeStudyFile, tmp_path: Path
) -> None:
    options = {"model": {"config": {"engram_layer_ids": []}, "optimizer": {"lr": 0.5}}}
    path = make_study_file(tmp_path, variants={"no_engram": {"options": options}})
    before = {file: file.read_bytes() for file in study.study.output.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"no_engram/seed_0: holds a run with another configuration") as caught:
        ablate(path, None, 1, False, io.StringIO())
    assert str(caught.value).splitlines()[1:] == ["  model.optimizer.lr: 0.01 there, 0.5 in the study"]
    assert {file: file.read_bytes() for file in study.study.output.rglob("*") if file.is_file()} == before
    assert ablate(path, tmp_path / "other", 1, True, io.StringIO()) == 0
    (study.runs[0].folder / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"has a run, but no run.yaml"):
        running.require_same(study.runs[0])


def test_a_folder_may_move(study: Plan, make_study_file: MakeStudyFile, tmp_path: Path) -> None:
    study.study.output.rename(tmp_path / "moved")
    stream = io.StringIO()
    assert ablate(tmp_path / "some.yaml", tmp_path / "moved", 1, True, stream) == 0
    assert stream.getvalue().count(" finished") == 4


def test_a_failed_run_does_not_end_the_others(study: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, other = study.runs[0], study.runs[1]
    done = tmp_path / "done"
    shutil.copytree(other.directory, done)
    undo(failing)
    undo(other)
    scripts = {failing.name: "echo what went wrong; exit 3", other.name: f"cp -r {done} $F/version_0"}
    monkeypatch.setattr(running, "fit_command", Script(scripts))
    stream = io.StringIO()
    assert run_plan(study, 1, False, stream) == 1
    out = stream.getvalue()
    assert "FAILED: base seed 0 ended with status 3 at step 0 of 4" in out
    assert "what went wrong" in out
    assert "what went wrong" in (failing.folder / "log.txt").read_text()
    assert finished(other) is not None
    assert finished(failing) is None
    assert "WARNING: not finished, and not counted: base seed 0." in out
    assert "FAILED: base seed 0; the same command tries again" in out
    assert "\x1b" not in out, "no terminal, no control characters"
    # A run that ends in peace, but early, has not finished either.
    monkeypatch.setattr(running, "fit_command", Script({failing.name: "exit 0"}))
    assert run_all(study.runs, 1, Progress(study, 1, stream)) == [failing.name]


def test_what_was_begun_without_a_checkpoint_begins_again(study: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study.runs[0]
    (run.folder / "finished.json").unlink()
    assert running.fit_command(run)[-2:] == ["--ckpt_path", "last"]
    for path in (run.directory / "checkpoints").iterdir():
        discard(path)
    assert "--ckpt_path" not in running.fit_command(run)
    monkeypatch.setattr(running, "fit_command", Script({run.name: "ls $F; exit 1"}))
    assert run_all([run], 1, Progress(study, 1, io.StringIO())) == [run.name]
    assert "version_0" not in (run.folder / "log.txt").read_text()


def test_jobs_run_at_once_and_share_the_threads(study: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to have begun."""
    first, second = study.runs[:2]
    for run in (first, second):
        undo(run)
    meet = "echo threads $OMP_NUM_THREADS; touch $F/here; for i in $(seq 400); do [ -f {} ] && exit 1; sleep 0.05; done"
    scripts = {one.name: meet.format(two.folder / "here") for one, two in ((first, second), (second, first))}
    monkeypatch.setattr(running, "fit_command", Script(scripts))
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    begin = time.monotonic()
    assert sorted(run_all([first, second], 2, Progress(study, 2, io.StringIO()))) == [first.name, second.name]
    assert time.monotonic() - begin < 15
    assert "threads 3\n" in (first.folder / "log.txt").read_text()
    with pytest.raises(ValueError, match="--jobs: must be at least 1, got 0"):
        ablate(Path("any.yaml"), None, 0, True)


def test_ctrl_c_ends_children_after_their_step(study: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study.runs[0]
    undo(run)
    waits = "trap 'echo finished the step; exit 0' TERM; touch $F/here; while :; do sleep 0.05; done"
    monkeypatch.setattr(running, "fit_command", Script({run.name: waits}))

    class Interrupted(Progress):
        def look(self, jobs: Sequence[Job], waiting: Sequence[Run]) -> None:
            if (run.folder / "here").exists():
                raise KeyboardInterrupt

    monkeypatch.setattr("lightning_modules.ablation.ablate.Progress", Interrupted)
    stream = io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert run_plan(study, 1, False, stream) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "the same command resumes from here" in stream.getvalue()
    assert (run.folder / "log.txt").read_text().endswith("finished the step\n")


def test_a_process_left_behind_is_waited_for(study: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed ``dsv41 ablate`` leaves its children training; nobody else may write where they do."""
    run = study.runs[0]
    done = tmp_path / "done"
    shutil.move(run.directory, done)
    (run.folder / "finished.json").unlink()
    held = running._take(run.folder / "lock")
    assert held is not None
    children = Script({})
    monkeypatch.setattr(running, "fit_command", children)

    class Watching(Progress):
        looks = 0

        def look(self, jobs: Sequence[Job], waiting: Sequence[Run]) -> None:
            self.looks += 1
            assert self.looks > 3 or [job.process for job in jobs] == [None]
            if self.looks == 3:  # the process ends
                shutil.move(done, run.directory)
                os.close(held)

    assert run_all([run], 1, Watching(study, 1, io.StringIO())) == []
    assert finished(run) is not None
    assert children.began == []


def test_a_second_study_is_kept_out(study: Plan) -> None:
    with running.alone(study.study.output), pytest.raises(ValueError, match="another dsv41 ablate is working in"):
        run_plan(study, 1, False, io.StringIO())
    assert run_plan(study, 1, False, io.StringIO()) == 0


KILLER = """
import os, pathlib, signal
import lightning.pytorch as L

class KillOnce(L.Callback):
    '''Kills its own process and the one that has started it, unless that has happened before.'''

    def __init__(self, flag: str) -> None:
        self.flag = pathlib.Path(flag)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_of_all_changes_no_number(
    make_study_file: MakeStudyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killer.py").write_text(textwrap.dedent(KILLER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag = tmp_path / "killed"
    killer = {"class_path": "killer.KillOnce", "init_args": {"flag": str(flag)}}
    more = {"trainer": {"max_steps": 12, "callbacks": [killer]}, "checkpoint": {"every_n_steps": 5}}
    path = make_study_file(tmp_path, seeds=[0])
    content = yaml.safe_load(path.read_text())
    content["base"]["options"]["trainer"] |= more["trainer"]
    content["base"]["options"]["checkpoint"] = more["checkpoint"]
    path.write_text(yaml.safe_dump(content))

    flag.touch()
    plan = make_plan(read_study(path))
    run, other = plan.runs
    train(run)
    unbroken = {tag: [(e.step, e.value) for e in scalars(run.directory)[tag]] for tag in ("train/loss", "val/loss")}
    undo(run)
    train(other)
    flag.unlink()

    command = [sys.executable, "-m", "lightning_modules", "ablate", "--config", str(path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps_done(run) == 5
    assert finished(run) is None
    stream = io.StringIO()
    assert run_plan(plan, 1, False, stream) == 0
    assert "base seed 0       step 5 of 12" in stream.getvalue()
    assert (run.folder / "log.txt").read_text().count("\n--- ") == 1, "one start, then one that goes on"
    again = {tag: [(e.step, e.value) for e in scalars(run.directory)[tag]] for tag in ("train/loss", "val/loss")}
    assert again == unbroken
    marker = finished(run)
    assert marker is not None
    assert marker["metrics"]["val/loss"] == pytest.approx(unbroken["val/loss"][-1][1], rel=1e-6)
    assert json.loads((plan.study.output / "results.json").read_text())["variants"][0]["val_loss"] == pytest.approx(
        unbroken["val/loss"][-1][1], rel=1e-6
    )


def test_sigterm_is_ctrl_c_while_runs_train_and_nothing_else_after(
    study: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, meanwhile = signal.getsignal(signal.SIGTERM), []

    def interrupted(*_: Any) -> list[str]:
        meanwhile.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not interrupted")

    monkeypatch.setattr("lightning_modules.ablation.ablate.run_all", interrupted)
    assert run_plan(study, 1, False, io.StringIO()) == 130
    assert meanwhile != [before]
    assert signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_redrawn_on_a_terminal_and_said_now_and_then_elsewhere(
    study: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    run, waiting = study.runs[0], study.runs[2]
    for one in (run, waiting):
        (one.folder / "finished.json").unlink()
    for path in (waiting.directory / "checkpoints").iterdir():
        discard(path)
    monkeypatch.setattr("lightning_modules.ablation.progress.steps_done", lambda run: 0)
    wall = [event.wall_time for event in scalars(run.directory)["train/loss"]]
    pace = (wall[-1] - wall[0]) / 3
    # Start-up of 20 seconds, which the waiting run will take as well.
    left = duration(4 * pace + 20)
    for stream in (Terminal(), io.StringIO()):
        job = Job(run, subprocess.Popen(["true"]), started=wall[0] - pace - 20)
        assert job.process is not None
        job.process.wait()
        with Progress(study, 1, stream) as progress:
            progress.started(job)
            line, counts = "seed 0   step 4 of 4, loss", []
            for seconds in (0.0, PAUSE, 0.0, PAUSE):
                progress._watched[run.name].spoke -= seconds  # as if they had passed
                progress._next = 0
                progress.look([job], [waiting])
                counts.append(stream.getvalue().count(line))
        assert counts == ([1, 2, 3, 4] if stream.isatty() else [0, 1, 1, 1])
        out = stream.getvalue()
        assert ("\x1b[1A\x1b[2K" in out) == ("\x1b[?25l" in out) == stream.isatty()
        assert not stream.isatty() or out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is there again"
        assert f"2 of 4 runs finished, about {left} left" in out
    assert left.endswith(" s")


def test_the_time_left_counts_what_ended_runs_took_beside_their_steps(
    study: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waiting = study.runs[0], study.runs[2]
    (waiting.folder / "finished.json").unlink()
    monkeypatch.setattr("lightning_modules.ablation.progress.steps_done", lambda run: 0)
    wall = [event.wall_time for event in scalars(run.directory)["train/loss"]]
    pace = (wall[-1] - wall[0]) / 3
    job = Job(run, None, started=wall[0] - pace - 20)
    monkeypatch.setattr("time.time", lambda: job.started + 4 * pace + 100)
    progress = Progress(study, 1, io.StringIO())
    progress.started(job)
    progress.ended(run, None)
    assert progress.total([], [waiting, waiting]).endswith(f"about {duration(2 * (4 * pace + 100))} left")


def test_every_run_logs_its_peak_memory(finished_study: tuple[Plan, str]) -> None:
    values = [event.value for event in scalars(finished_study[0].runs[0].directory)[MEMORY]]
    assert len(values) == 4
    assert values == sorted(values)
    before = peak_memory(torch.device("cpu"))
    block = b"x" * before
    assert before < peak_memory(torch.device("cpu")) < 3 * before
    del block


# ---------------------------------------------------------------- compare


def test_compare_makes_the_table_of_the_study(
    finished_study: tuple[Plan, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, _ = finished_study
    entry.main(["compare", str(plan.study.output)])
    assert capsys.readouterr().out == (plan.study.output / "results.md").read_text()


def test_compare_takes_single_runs_with_names_and_another_base(
    finished_study: tuple[Plan, str], losses: dict[tuple[str, int], float]
) -> None:
    runs = [run.directory for run in finished_study[0].runs]
    table = compare([f"one={runs[0]}", f"two={runs[1]}"])
    difference = losses["no_engram", 0] - losses["base", 0]
    assert f"| two | 1 | {losses['no_engram', 0]:.4f} | {difference:+.4f} (one" in re.sub(" +", " ", table)
    turned = compare([f"one={runs[0]}", f"two={runs[1]}"], "two")
    assert f"{losses['base', 0] - losses['no_engram', 0]:+.4f} (one seed" in turned
    assert turned.index("| two ") < turned.index("| one ")
    with pytest.raises(ValueError, match="two runs of base have seed 0"):
        compare([str(runs[0]), str(runs[0])])
    with pytest.raises(ValueError, match="--base: must be one of base, got 'three'"):
        compare([str(runs[0])], "three")
    with pytest.raises(FileNotFoundError, match="no event files of TensorBoard"):
        compare([str(runs[0] / "tokenizer")])


def test_compare_reads_runs_that_this_project_has_not_made(tmp_path: Path) -> None:
    for name, loss in (("mine", 2.0), ("theirs", 2.5)):
        writer = SummaryWriter(str(tmp_path / name / "version_3"))
        for step in range(4):
            writer.add_scalar("val/loss", loss + 1 / (step + 1), step)
            writer.add_scalar(RATE, 100 + step, step)
        writer.close()
    table = re.sub(" +", " ", compare([str(tmp_path / "mine"), str(tmp_path / "theirs")]))
    assert "| mine | 1 | 2.2500 | |" in table
    assert "| mine | 102 | | | | |" in table
    assert "| theirs | 1 | 2.7500 | |" in table
    assert "| theirs | 102 |" in table
    assert "No seed in common with mine, so no difference: theirs." in table
    SummaryWriter(str(tmp_path / "empty")).close()
    with pytest.raises(ValueError, match="empty: has no val/loss, so there is nothing to compare"):
        compare([str(tmp_path / "empty")])
