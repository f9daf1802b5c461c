"""The command line as a user meets it: runs, files, resuming, and messages."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules import __main__ as entry
from lightning_modules import commands
from lightning_modules.checkpoint.callbacks import find_checkpoint
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.cli import DeepseekV41CLI, get_cli, main
from lightning_modules.optim.schedule import ScheduleConfig, learning_rate_factor
from lightning_modules.task import DeepseekV41Task

FOLDER = "version_0"
ROOT = Path(__file__).parents[2]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a run's event files, as TensorBoard itself reads them."""
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture(scope="module")
def finished_runs(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all runs after one of four steps; made once, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    main(["fit", *make_nano_args(folder)])
    return folder / "runs"


@pytest.fixture
def trained(finished_runs: Path, tmp_path: Path) -> Path:
    """Directory of a finished run of four steps, a copy for this test."""
    shutil.copytree(finished_runs, tmp_path / "runs")
    return tmp_path / "runs" / "nano" / FOLDER


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ends on stderr when the command fails."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code != 0
    return capsys.readouterr().err


def test_a_run_leaves_curves_checkpoints_and_its_configuration(
    trained: Path, capsys: pytest.CaptureFixture[str], nano_args: list[str]
) -> None:
    values = scalars(trained)
    assert [step for step, _ in values["train/loss"]] == [0, 1, 2, 3]
    expected = {"train/grad_norm", "train/tokens", "val/loss", "val/perplexity", "val/bits_per_byte"}
    expected |= {f"train/lr/{group}" for group in ("decay", "no_decay", "tables")}
    expected |= {
        "val/unigram_entropy",
        "grad_norm/engram_tables",
        "grad_norm/mhc",
        "grad_norm/router",
        "grad_norm/rest",
    }
    assert expected <= set(values)
    assert values["train/tokens"][-1][1] > values["train/tokens"][0][1] > 0
    # warm-up of two steps, then cosine over the two that remain
    assert [value for _, value in values["train/lr/decay"]] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.001])
    for decay, tables in zip(values["train/lr/decay"], values["train/lr/tables"], strict=True):
        assert tables == (decay[0], pytest.approx(5 * decay[1]))
    assert sorted(path.name for path in (trained / "checkpoints").iterdir()) == ["best.ckpt", "step-00000004.ckpt"]
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    assert saved["model"]["config"]["hidden_size"] == 16


def test_the_saved_configuration_reproduces_the_run(trained: Path, tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    main(["fit", "--config", str(trained / "config.yaml"), "--trainer.logger.init_args.save_dir", runs])
    again = tmp_path / "runs" / "nano" / "version_1"
    for tag in ("train/loss", "val/loss", "train/grad_norm"):
        assert scalars(again)[tag] == scalars(trained)[tag], tag


def test_another_seed_gives_another_run(trained: Path, nano_args: list[str], tmp_path: Path) -> None:
    main(["fit", *nano_args, "--seed_everything", "5"])
    assert scalars(tmp_path / "runs" / "nano" / "version_1")["train/loss"] != scalars(trained)["train/loss"]


def test_validate_and_test_open_a_checkpoint_without_a_config(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last_val = scalars(trained)["val/loss"][-1][1]
    best = min(value for _, value in scalars(trained)["val/loss"])
    in_runs = ["--trainer.logger.init_args.save_dir", str(trained.parent.parent)]
    for subcommand, name in (("validate", "val/loss"), ("test", "test/loss")):
        main([subcommand, "--ckpt_path", str(trained / "checkpoints" / "best.ckpt"), *in_runs])
        out = capsys.readouterr().out
        assert name in out
    main(["validate", "--config", str(trained / "config.yaml"), "--ckpt_path", "best", *in_runs])
    assert f"{best:.6f}"[:7] in capsys.readouterr().out
    main(["validate", "--config", str(trained / "config.yaml"), "--ckpt_path", "last", *in_runs])
    assert f"{last_val:.6f}"[:7] in capsys.readouterr().out


def test_last_goes_on_in_the_same_directory(
    trained: Path, nano_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config_before = (trained / "config.yaml").read_text()
    main(["fit", *nano_args, "--trainer.max_steps", "6", "--ckpt_path", "last"])
    assert [step for step, _ in scalars(trained)["train/loss"]] == [0, 1, 2, 3, 4, 5]
    assert find_checkpoint(trained.parent, "last") == trained / "checkpoints" / "step-00000006.ckpt"
    assert (trained / "config.yaml").read_text() == config_before


def test_settings_follow_the_command_line_and_are_listed(
    trained: Path, nano_cli: Callable[..., DeepseekV41CLI], caplog: pytest.LogCaptureFixture
) -> None:
    cli = nano_cli(
        *("--model.optimizer.weight_decay", "0.33", "--model.optimizer.lr", "0.02"),
        *("--model.schedule.name", "constant", "--trainer.max_steps", "5"),
    )
    with caplog.at_level("INFO"):
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=str(trained / "checkpoints" / "step-00000004.ckpt"))
    groups = {group["name"]: group for group in cli.trainer.optimizers[0].param_groups}
    assert groups["decay"]["weight_decay"] == 0.33
    assert groups["no_decay"]["weight_decay"] == 0.0
    assert groups["decay"]["lr"] == 0.02
    listed = [record.getMessage() for record in caplog.records if "the command line counts" in record.getMessage()]
    assert any("model.optimizer.lr: 0.01 -> 0.02" in line for line in listed)
    assert any("model.optimizer.weight_decay: 0.1 -> 0.33" in line for line in listed)
    assert len(listed) == 3


def test_another_architecture_is_refused_with_both_values(
    trained: Path, nano_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(["fit", *nano_args, "--ckpt_path", "last", "--model.config.head_dim", "12"], capsys)
    assert "head_dim: checkpoint 8, command line 12" in error
    assert "Traceback" not in error


def test_a_resumed_run_with_another_tokenizer_is_refused(
    trained: Path, nano_args: list[str], capsys: pytest.CaptureFixture[str], golden_dir: Path
) -> None:
    error = error_of(
        ["fit", *nano_args, "--ckpt_path", "last", "--data.tokenizer", str(golden_dir / "tokenizer.json")], capsys
    )
    assert re.search(r"vocab_size: checkpoint \d+, command line 512", error)


def test_a_strangers_checkpoint_is_refused(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.ckpt"
    stranger = {"pytorch-lightning_version": "2.6.6", "state_dict": {}, "epoch": 0, "global_step": 0, "loops": {}}
    AtomicCheckpointIO().save_checkpoint(stranger, path)
    assert "not a checkpoint of a DeepSeek-V4.1 task" in error_of(["fit", *nano_args, "--ckpt_path", str(path)], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.config.hiden_size", "8"], "unrecognized arguments: --model.config.hiden_size"),
        (["--model.optimizer.lr", "fast"], '"model.optimizer.lr"'),
        (["--data.sequence_lenght", "8"], "unrecognized arguments: --data.sequence_lenght"),
        (["--model.schedule.name", "linear"], "model.schedule.name"),
        (["--model.backend.attn", "flash"], "model.backend.attn"),
        (["--data.sequence_length", "65"], "data.sequence_length: 65 exceeds model.config.max_position_embeddings=64"),
        (["--data.source", "nowhere/at/all"], "nowhere/at/all"),
        (["--model.config.engram_compressed_vocab_size", "7"], "engram_compressed_vocab_size: 7 was asked for"),
        (["--model.config.vocab_size", "100"], "vocab_size: 100 is smaller than the tokenizer"),
        (["--model.config.compress_ratios", "[0, 2]"], "compress_ratios: needs an entry for each of the 4 layers"),
        (["--model.config.num_experts_per_tok", "9"], "num_experts_per_tok"),
        (["--ckpt_path", "gone.ckpt"], "gone.ckpt does not exist"),
        (["--ckpt_path", "last"], "no 'last' checkpoint under"),
        (["--data.max_documents", "1", "--data.sequence_length", "64", "--data.val_fraction", "0"], "sequence_length"),
    ],
)
def test_bad_input_is_named_before_training(
    options: list[str], message: str, nano_args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--data.max_documents" in options:
        short = tmp_path / "short"
        short.mkdir()
        (short / "a.txt").write_text("too short")
        options = [*options, "--data.source", str(short), "--data.test_fraction", "0"]
    error = error_of(["fit", *nano_args, *options], capsys)
    assert message in error
    assert "Traceback" not in error


def test_an_empty_corpus_is_named(nano_args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in error_of(["fit", *nano_args, "--data.source", str(empty)], capsys)


def test_a_misspelt_key_in_a_file_is_an_error(
    nano_args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {config: {engram_layers: []}}")
    assert "engram_layers" in error_of(["fit", *nano_args, "--config", str(overlay)], capsys)


def test_without_a_config_nothing_huge_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config configs/tiny.yaml" in error_of(["fit"], capsys)


def test_print_config_shows_every_option(nano_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", *nano_args, "--print_config"])
    assert caught.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["config"]["hc_sinkhorn_iters"] == 20
    assert printed["model"]["config"]["engram_max_ngram_size"] == 3
    assert printed["checkpoint"]["every_n_steps"] == 3


def test_the_model_hashes_with_the_tokenizer_of_the_data(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli()
    cli.model.configure_model()
    assert cli.model.tokenizer is cli.datamodule.fast_tokenizer
    text = cli.model.built.config.text_config
    assert text.vocab_size == len(cli.datamodule.fast_tokenizer)
    hashing = cli.model.built.model.engram_hash
    assert hashing is not None
    assert text.engram_compressed_vocab_size == int(hashing.token_map.max()) + 1
    rows = text.engram_num_embeddings
    assert rows == [sum(primes) for primes in text.rows_of_engram_primes()]
    assert len(cli.model.built.model.layers[1].engram.embed.weight) == rows[0]


def test_fit_validate_test_in_one_process(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli()
    cli.trainer.fit(cli.model, cli.datamodule)
    first = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    second = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
    assert second[0]["val/loss"] <= first[0]["val/loss"]
    assert "test/bits_per_byte" in cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    predictions = cli.trainer.predict(cli.model, cli.datamodule)
    assert predictions is not None
    assert predictions[0]["next_token"].shape == (2, 32)


def test_checkpoints_open_without_pickle_and_in_python(trained: Path, nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    path = trained / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["dsv41"]["text_config"]["hidden_size"] == 16
    task = DeepseekV41Task.load_from_checkpoint(path, tokenizer=nano_cli().datamodule.fast_tokenizer)
    assert task.optimizer_config.lr == 0.01
    weight = "model.lm_head.weight"
    assert torch.equal(task.state_dict()[weight], checkpoint["state_dict"][weight])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions_train_clip_and_validate(precision: str, nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--trainer.precision", precision, "--trainer.gradient_clip_val", "0.01")
    cli.trainer.fit(cli.model, cli.datamodule)
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {parameter.dtype for parameter in cli.model.built.parameters()} == {expected}
    assert cli.model.metrics.tokens.dtype == torch.float64
    assert 3 < float(cli.trainer.callback_metrics["val/loss"]) < 7


@pytest.mark.parametrize("rule", ["norm", "value"])
def test_clipping_rules_bite(rule: str, nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--trainer.gradient_clip_algorithm", rule, "--trainer.gradient_clip_val", "1e-3")
    seen: list[tuple[float, float]] = []
    cli.trainer.callbacks.append(AfterClipping(seen))  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    norms, largest = zip(*seen, strict=True)
    assert len(seen) == 4
    if rule == "norm":
        assert norms == pytest.approx([1e-3] * 4, rel=1e-3)
    else:
        assert largest == pytest.approx([1e-3] * 4)
        assert min(norms) > 2e-3


class AfterClipping(L.Callback):
    """Reads the gradients that the optimizer used: they stay until the next step clears them."""

    def __init__(self, seen: list[tuple[float, float]]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        gradients = torch.cat([p.grad.to_dense().flatten() for p in pl_module.parameters() if p.grad is not None])
        self.seen.append((float(gradients.norm()), float(gradients.abs().max())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trainer.precision", "bf16-true"],
            "trainer.precision: must be one of ('32-true', '64-true', 'bf16-mixed')",
        ),
        (["--trainer.devices", "2", "--trainer.strategy", "ddp"], "trainer.strategy: 2 devices need engram_fsdp"),
        (
            ["--model.backend.sparse_table_gradient", "true", "--model.optimizer.tables", "dense"],
            "model.backend.sparse_table_gradient: must be false with model.optimizer.tables 'dense'",
        ),
    ],
)
def test_what_cannot_work_is_refused(options: list[str], message: str, nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli(*options)
    cli.model.trainer = cli.trainer
    with pytest.raises(ValueError, match=re.escape(message)):
        cli.model.setup("fit")


def test_training_without_validation_text(nano_args: list[str], tmp_path: Path) -> None:
    main(["fit", *nano_args, "--data.val_fraction", "0", "--data.test_fraction", "0"])
    values = scalars(tmp_path / "runs" / "nano" / FOLDER)
    assert len(values["train/loss"]) == 4
    assert not any(tag.startswith("val/") for tag in values)


def test_training_without_a_logger(nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", *nano_args[:6], "--trainer.logger", "false"])
    assert (tmp_path / "checkpoints" / "step-00000004.ckpt").is_file()


def test_a_run_by_epochs_ends_with_a_checkpoint_to_go_on_from(nano_args: list[str], tmp_path: Path) -> None:
    five_batches = [*nano_args, "--trainer.max_steps=-1", "--trainer.limit_train_batches", "5"]
    main(["fit", *five_batches, "--trainer.max_epochs", "1"])
    run = tmp_path / "runs" / "nano" / FOLDER
    assert (run / "checkpoints" / "step-00000005.ckpt").is_file()
    main(["fit", *five_batches, "--trainer.max_epochs", "2", "--ckpt_path", "last"])
    assert [step for step, _ in scalars(run)["train/loss"]] == list(range(10))


def test_going_on_from_the_best_starts_a_new_run(trained: Path, nano_args: list[str]) -> None:
    before = {path: path.read_bytes() for path in (trained / "checkpoints").iterdir()}
    main(["fit", *nano_args, "--trainer.max_steps", "6", "--ckpt_path", "best"])
    assert {path: path.read_bytes() for path in (trained / "checkpoints").iterdir()} == before
    assert (trained.parent / "version_1" / "checkpoints" / "step-00000006.ckpt").is_file()


def test_a_longer_schedule_rules_from_the_first_step_after_a_resume(trained: Path, nano_args: list[str]) -> None:
    main(["fit", *nano_args, "--trainer.max_steps", "9", "--ckpt_path", "last"])
    rates = dict(scalars(trained)["train/lr/decay"])
    expected = ScheduleConfig(warmup_steps=2)
    assert [rates[step] for step in range(4, 9)] == pytest.approx(
        [0.01 * learning_rate_factor(step, 9, expected) for step in range(4, 9)]
    )


def test_predictions_are_a_file(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_runs = ["--trainer.logger.init_args.save_dir", str(trained.parent.parent)]
    main(["predict", "--ckpt_path", str(trained / "checkpoints" / "best.ckpt"), *in_runs])
    found = list(trained.parent.rglob("predictions.pt"))
    assert len(found) == 1
    predictions = torch.load(found[0], weights_only=True)
    assert predictions["next_token"].shape == predictions["log_probability"].shape
    assert torch.equal(predictions["row_id"], torch.arange(len(predictions["row_id"])))


def test_the_run_keeps_its_tokenizer(trained: Path, nano_args: list[str], corpus: Path, tmp_path: Path) -> None:
    """Without the training text, the saved tokenizer still fits the checkpoint."""
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(corpus.iterdir())[:8]:
        (other / path.name).write_text(path.read_text()[::-1])
    main(
        [
            *("validate", *nano_args, "--ckpt_path", "last", "--data.source", str(other)),
            *("--data.tokenizer", str(trained / "tokenizer"), "--data.val_fraction", "0.6"),
        ]
    )


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["--help"], 0, r"dsv41 fit --config configs/tiny\.yaml"),
        (["--version"], 0, rf"torch {re.escape(torch.__version__)}"),
        ([], 2, r"dsv41 fit --config configs/tiny\.yaml"),
        (["fti", "--config", "configs/tiny.yaml"], 2, r"no subcommand 'fti'; did you mean fit\?"),
        (["--config", "a.yaml", "fit"], 2, r"the subcommand comes before its options, such as: dsv41 fit --config"),
        (["frobnicate"], 2, r"no subcommand 'frobnicate'; one of fit, validate, test, predict"),
    ],
)
def test_what_needs_no_model_is_answered_without_the_frameworks(words: list[str], status: int, expected: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_modules", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    imports, said = [], []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else said).append(line)
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in imports}
    assert "lightning_modules" in imported
    assert not imported & {"torch", "lightning", "transformers", "torchmetrics", "jsonargparse", "numpy"}
    assert re.search(expected, done.stdout if status == 0 else "\n".join(said))


def test_the_configuration_of_a_run_opens_from_python(trained: Path) -> None:
    saved = trained / "config.yaml"
    config = yaml.safe_load(saved.read_text())
    # What the run was resumed from, which may be gone, is no matter of who opens its configuration.
    saved.write_text(yaml.safe_dump(config | {"ckpt_path": str(trained / "gone.ckpt")}))
    cli = get_cli(["--config", str(saved)], run=False)
    asked = {name: value for name, value in config["model"]["config"].items() if value is not None}
    opened = cli.model.text_config.fields()
    assert len(asked) > 40
    assert {name: opened[name] for name in asked if name in opened} == {n: v for n, v in asked.items() if n in opened}
    assert cli.trainer.max_steps == config["trainer"]["max_steps"] == 4
    assert cli.config.ckpt_path == str(trained / "gone.ckpt")


@pytest.mark.parametrize("option", ["--trainer.max_step", "--model.config.hidden_siz", "--model.optimizer.l"])
def test_an_option_has_to_be_written_out(option: str, nano_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{option.lstrip('-')}" in error_of(["fit", *nano_args, option, "1"], capsys)


def test_from_python_what_does_not_parse_raises(nano_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_step"):
        get_cli([*nano_args, "--trainer.max_step", "1"], run=False)
    assert not capsys.readouterr().err


def test_help_lists_the_subcommands_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.search(r"\{([a-z,]+)\}", capsys.readouterr().out)
    assert listed is not None
    assert list(entry.SUBCOMMANDS) == listed[1].split(",")
    assert set(entry.FOLDER_COMMANDS) == set(commands.COMMANDS)
    everything = [*entry.SUBCOMMANDS, *entry.FOLDER_COMMANDS]
    assert re.findall(r"^  (\w+)  ", entry.HELP, re.MULTILINE) == everything


def test_help_names_files_and_subcommands_that_exist() -> None:
    paths = set(re.findall(r"configs/[\w./]*\w", entry.HELP))
    assert "configs/tiny.yaml" in paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert set(re.findall(r"^  dsv41 (\w+)", entry.HELP, re.MULTILINE)) <= {*entry.SUBCOMMANDS, *entry.FOLDER_COMMANDS}


def test_every_way_to_start_is_the_same() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dsv41"]
    assert EntryPoint("dsv41", script, "console_scripts").load() is entry.main
    assert EntryPoint("dsv41", "lightning_modules.__main__:main", "console_scripts").load() is entry.main


def test_the_rest_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["predict", "--config", "a.yaml"]
    seen: list[list[str]] = []
    monkeypatch.setattr("lightning_modules.cli.main", seen.append)
    try:
        entry.main(words)
    finally:
        gc.unfreeze()
    assert seen == [words]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("words", "made"),
    [(["fit", "--help"], ["fit"]), (["test", "--help"], ["test"]), (["--help"], list(entry.SUBCOMMANDS))],
)
def test_options_are_made_for_the_subcommand_that_was_typed(
    words: list[str], made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Lightning's 3 s of parsing, three quarters were for options that nobody asked for."""
    count = []
    add = DeepseekV41CLI.add_arguments_to_parser
    monkeypatch.setattr(
        DeepseekV41CLI, "add_arguments_to_parser", lambda self, parser: (count.append(parser), add(self, parser))
    )
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert len(count) == len(made)
    out = capsys.readouterr().out
    assert f"{{{','.join(entry.SUBCOMMANDS)}}}" in out or f"dsv41 [options] {made[0]}" in out
    assert ("--data.sequence_length" in out) == (words[0] != "--help")


def test_a_mistake_on_the_command_line_is_one_line(nano_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(["fit", *nano_args, "--data.sequence_lenght", "8"], capsys)
    assert len(error.strip().splitlines()) <= 4
    assert error.startswith("dsv41: error: ")


def test_what_the_tokenizer_complains_about_is_said_plainly(
    nano_args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    error = error_of(["fit", *nano_args, "--data.source", str(empty)], capsys)
    assert "compute_fn" not in error


def test_a_directory_that_cannot_be_written_is_one_line(
    nano_args: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    error = error_of(["fit", *nano_args, "--trainer.logger.init_args.save_dir", str(tmp_path / "file")], capsys)
    assert "dsv41: error: " in error
    assert "Traceback" not in error


def test_ctrl_c_ends_with_a_checkpoint_to_go_on_from(
    nano_cli: Callable[..., DeepseekV41CLI], nano_args: list[str], tmp_path: Path
) -> None:
    options = ["--trainer.max_steps", "7", "--trainer.accumulate_grad_batches", "2", "--checkpoint.every_n_steps", "40"]
    cli = nano_cli(*options)
    handler = signal.getsignal(signal.SIGINT)
    cli.trainer.callbacks.insert(0, Interrupt(at_batch=4))  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    assert signal.getsignal(signal.SIGINT) is handler
    runs = tmp_path / "runs" / "nano"
    path = find_checkpoint(runs, "last")
    assert path is not None
    assert path.name == "step-00000003.ckpt"
    progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["completed"] == 6
    main(["fit", *nano_args, *options, "--ckpt_path", "last"])
    main(["fit", *nano_args, *options])
    for tag in ("train/loss", "train/tokens", "train/lr/decay"):
        # By step: the learning rate is logged for every micro-batch.
        resumed, unbroken = (dict(scalars(runs / version)[tag]) for version in (FOLDER, "version_1"))
        assert list(unbroken) == list(range(7))
        assert resumed == unbroken, tag


class Interrupt(L.Callback):
    """Ctrl-C in the first half of an accumulation."""

    def __init__(self, at_batch: int) -> None:
        self.at_batch = at_batch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at_batch:
            signal.raise_signal(signal.SIGINT)


def test_the_start_shows_data_parts_and_progress(
    nano_args: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        main(["fit", *nano_args, "--trainer.enable_progress_bar", "true"])
    printed = "\n".join(record.getMessage() for record in caplog.records)
    for shown in ("data: train", "unigram entropy of the validation text", "routed experts", "validation loss"):
        assert shown in printed
    captured = capsys.readouterr()
    assert "4/4" in captured.out + captured.err


RECORDER = """
import os, signal
import lightning.pytorch as L

class Recorder(L.Callback):
    '''Writes step, rows, loss and learning rate after each step; may kill its own process.'''

    def __init__(self, path: str, kill_at_batch: int = -1) -> None:
        self.path, self.kill_at_batch = path, kill_at_batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop._should_accumulate():
            rows = batch["row_id"].tolist()
            loss = rate = None
        else:
            rows = batch["row_id"].tolist()
            loss = float(trainer.callback_metrics["train/loss"])
            rate = trainer.optimizers[0].param_groups[0]["lr"]
        with open(self.path, "a") as file:
            print(trainer.global_step, batch_idx, rows, loss, rate, file=file, flush=True)
        if batch_idx == self.kill_at_batch:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_resumes_to_the_same_numbers(nano_args: list[str], tmp_path: Path) -> None:
    """Kill -9 inside an epoch, twice, with accumulation and a worker process; each time go on with ``last``."""
    (tmp_path / "recorder.py").write_text(textwrap.dedent(RECORDER))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(name: str, record: str, *extra: str) -> subprocess.CompletedProcess[str]:
        overlay = tmp_path / f"{record}.yaml"
        kill = {"killed": {"kill_at_batch": 16}, "again": {"kill_at_batch": 13}}.get(record, {})
        recorder = {"class_path": "recorder.Recorder", "init_args": {"path": str(tmp_path / f"{record}.txt")} | kill}
        overlay.write_text(yaml.safe_dump({"trainer": {"callbacks": [recorder]}}))
        command = [sys.executable, "-m", "lightning_modules", "fit", *nano_args, "--config", str(overlay)]
        command += ["--trainer.max_steps", "12", "--trainer.accumulate_grad_batches", "2"]
        command += ["--trainer.logger.init_args.name", name, *extra]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    whole = run("whole", "whole")
    assert whole.returncode == 0, whole.stderr
    killed = run("broken", "killed", "--data.num_workers", "1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run("broken", "again", "--data.num_workers", "1", "--ckpt_path", "last")
    assert again.returncode == -signal.SIGKILL, again.stderr
    resumed = run("broken", "resumed", "--data.num_workers", "1", "--ckpt_path", "last")
    assert resumed.returncode == 0, resumed.stderr

    def lines(record: str) -> list[str]:
        return (tmp_path / f"{record}.txt").read_text().splitlines()

    assert len(lines("whole")) == 24
    assert lines("killed") == lines("whole")[:17]
    assert lines("again") == lines("whole")[12:14], "from step 6, the newest checkpoint before the first kill"
    assert lines("resumed") == lines("whole")[12:], "from step 6 again, not from inside an accumulation"
    # Eight batches fill the throughput's window, so that a run that short has a point.
    rates = scalars(tmp_path / "runs" / "whole" / FOLDER)["train/tokens_per_sec"]
    assert [step for step, _ in rates] == list(range(3, 12))
    assert all(rate > 0 for _, rate in rates)
    curve: Any = scalars(tmp_path / "runs" / "broken" / FOLDER)["train/loss"]
    assert curve == scalars(tmp_path / "runs" / "whole" / FOLDER)["train/loss"]
    for tag in ("val/loss", "train/tokens", "train/grad_norm"):
        broken, unbroken = (scalars(tmp_path / "runs" / name / FOLDER)[tag] for name in ("broken", "whole"))
        assert dict(broken) == dict(unbroken), tag


def test_the_loop_profile_accounts_for_the_whole_loop(nano_args: list[str], tmp_path: Path) -> None:
    """Shares add up to one; validation and checkpoints are counted apart."""
    command = [sys.executable, "benchmarks/loop_profile.py", "--steps", "4", "--warm-up", "1", "--threads", "1"]
    command += ["--json", str(tmp_path / "profile.json"), *nano_args, "--trainer.enable_progress_bar", "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "profile.json").read_text())
    assert report["options"]["batches"] == 4
    rows = {row["part"]: row for row in report["rows"]}
    assert min(row["wall_ms"] for row in rows.values()) > 0
    for clock in ("wall", "cpu"):
        loop = {name: row for name, row in rows.items() if name not in ("validation", "checkpoints")}
        assert sum(row[f"{clock}_share"] for row in loop.values()) == pytest.approx(1)
        total = sum(row[f"{clock}_ms"] for row in loop.values())
        assert loop["backward"][f"{clock}_share"] == pytest.approx(loop["backward"][f"{clock}_ms"] / total)
    shown = re.search(r"^work +(\d+\.\d+)%", done.stdout, re.MULTILINE)
    assert shown is not None
    work = sum(rows[name]["wall_share"] for name in ("forward", "backward", "optimizer", "clipping"))
    assert float(shown[1]) == pytest.approx(100 * work, abs=0.01)
    assert not (tmp_path / "runs").exists(), "what the profiled run writes goes to a temporary folder"
