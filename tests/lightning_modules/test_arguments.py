"""What is put before the words of a command line, and which file is missing where one is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from lightning_modules import commands
from lightning_modules.cli import main
from lightning_modules.command_line.arguments import check_environment, values_of, with_joined_name, with_saved_config
from lightning_modules.options.paths import PATH_OPTIONS, expand_paths, expanded

RELEASE = "748 billion"
OVERLAYS = Path(__file__).parents[2] / "configs" / "overlays"
TINY = str(OVERLAYS.parent / "tiny.yaml")


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("dsv41: error: ")


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_a_reading_subcommand_says_which_file_is_missing(
    subcommand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs" / "tiny" / "version_3" / "checkpoints" / "best.ckpt"
    error = error_of([subcommand, "--ckpt_path", str(path)], capsys)
    assert error == f"ckpt_path: {path} does not exist (there is no {tmp_path / 'runs'})"
    path.parent.mkdir(parents=True)
    assert error_of([subcommand, f"--ckpt_path={path}"], capsys) == f"ckpt_path: {path} does not exist"
    path.touch()
    saved = path.parent.parent / "config.yaml"
    error = error_of([subcommand, "--ckpt_path", str(path)], capsys)
    assert error == f"ckpt_path: {path} has no configuration of its run: {saved} is missing; give --config"
    error = error_of([subcommand], capsys)
    assert error.startswith("ckpt_path: no checkpoint is named; give --config too, or --ckpt_path RUN/")
    error = error_of([subcommand, "--ckpt_path", "best"], capsys)
    assert error.startswith("ckpt_path: 'best' is looked for among the runs of a configuration; give --config too")
    saved.write_text("a: 1")
    assert with_saved_config([subcommand, "--ckpt_path", str(path)])[1:3] == ["--config", str(saved)]
    assert with_saved_config([subcommand, "--help"]) == [subcommand, "--help"]


def test_the_release_is_named_only_where_no_configuration_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RELEASE in error_of(["fit"], capsys)
    gone = tmp_path / "run" / "checkpoints" / "step-00000001.ckpt"
    error = error_of(["fit", "--ckpt_path", str(gone)], capsys)
    assert error == f"ckpt_path: {gone} does not exist (there is no {tmp_path / 'run'})"
    error = error_of(["fit", "--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path),
                      "--ckpt_path", "last"], capsys)  # fmt: skip
    assert RELEASE not in error
    assert "no 'last' checkpoint" in error
    gone.parent.mkdir(parents=True)
    gone.touch()
    error = error_of(["fit", "--ckpt_path", str(gone)], capsys)
    assert error.endswith(f"give that of its run, --config {gone.parent.parent / 'config.yaml'}")


def test_export_says_the_first_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "version_7" / "checkpoints" / "best.ckpt"
    with pytest.raises(SystemExit):
        commands.main("export", ["--ckpt_path", str(path), "--output", str(tmp_path / "out")])
    assert f"{path} does not exist (there is no {tmp_path / 'version_7'})" in capsys.readouterr().err


def configs(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(OVERLAYS / f"{name}.yaml"))]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--config", TINY], None),
        (["--config", TINY, *configs("no_engram")], None),
        (["--config", TINY, *configs("no_engram", "window_only")], "tiny-no-engram-window-only"),
        (
            [f"--config={TINY}", f"--config={OVERLAYS / 'plain_residual.yaml'}", *configs("no_engram", "no_engram")],
            "tiny-plain-residual-no-engram",
        ),
        (configs("no_engram", "window_only"), None),
    ],
)
def test_an_experiment_is_named_after_all_its_overlays(words: list[str], name: str | None) -> None:
    joined = with_joined_name(["fit", *words, "--trainer.max_steps", "3"])
    added = [] if name is None else ["--trainer.logger.init_args.name", name]
    assert joined == ["fit", *words, *added, "--trainer.max_steps", "3"]


def test_the_joined_name_is_parsed_and_a_typed_one_counts_more(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--config", TINY, *configs("no_engram", "window_only")]
    for more, name in (([], "tiny-no-engram-window-only"), (["--trainer.logger.init_args.name", "mine"], "mine")):
        with pytest.raises(SystemExit):
            main([*words, *more, "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]["init_args"]["name"] == name


@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("DSV41_FIT__TRAINER__MAX_STEPS", "--trainer.max_steps"),
        ("DSV41_MODEL__OPTIMIZER__LR", "--model.optimizer.lr"),
        ("DSV41_CKPT_PATH", "--ckpt_path"),
    ],
)
def test_variables_that_look_like_options_are_refused(
    variable: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "5")
    error = error_of(["fit"], capsys)
    assert error.startswith(f"{variable}: options are not read from the environment")
    assert error.endswith(f"and give {option} if that was meant")


def test_other_variables_are_left_alone() -> None:
    check_environment({"DSV41_CACHE": "x", "DSV41_TRACEBACK": "1", "DSV41_HOME": "y", "TRAINER__MAX_STEPS": "3"})


def test_values_are_found_in_both_spellings() -> None:
    args = ["fit", "-c", "a", "--config=b", "--config", "c", "--configs", "d", "--config"]
    assert values_of(args, "-c", "--config") == ["a", "b", "c"]


def test_every_path_option_is_expanded_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("DATA", "/data")
    config = Namespace(
        data=Namespace(source=["~/a", "$DATA/b", "stdlib"], text_field="$DATA", cache_dir=None),
        trainer=Namespace(
            default_root_dir="~",
            logger=[Namespace(class_path="x.Y", init_args=Namespace(save_dir="${DATA}/runs", name="~name"))],
            callbacks=[Namespace(class_path="x.Z", init_args={"dirpath": "~/c"})],
        ),
        model=Namespace(pretrained="$DATA/w"),
    )
    expand_paths(config)
    assert config.data == Namespace(source=["/users/me/a", "/data/b", "stdlib"], text_field="$DATA", cache_dir=None)
    assert config.trainer.default_root_dir == "/users/me"
    assert config.trainer.logger[0].init_args == Namespace(save_dir="/data/runs", name="~name")
    assert config.trainer.callbacks[0].init_args == {"dirpath": "/users/me/c"}
    assert config.model.pretrained == "/data/w"
    assert {"save_dir", "source", "tokenizer", "ckpt_path"} <= PATH_OPTIONS


def test_what_cannot_be_expanded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ValueError, match=r"^--output: \$NOWHERE/x: the environment variable \$NOWHERE is not set$"):
        expanded("$NOWHERE/x", "--output")
    with pytest.raises(ValueError, match=r"^--output: ~no_such_user_here/x: there is no such home directory$"):
        expanded("~no_such_user_here/x", "--output")
    monkeypatch.chdir(tmp_path)
    Path("$NOWHERE").mkdir()
    assert expanded("$NOWHERE", "--output") == "$NOWHERE"
