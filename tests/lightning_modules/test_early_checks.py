"""Mistakes that need no data are told before data is read: one line, with the option's name and its range."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as L
import pytest
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser

from dsv41 import DeepseekV41TextConfig
from dsv41.config.fields import Flag
from lightning_modules import __main__ as entry
from lightning_modules.cli import DeepseekV41CLI, main
from lightning_modules.command_line.ranges import RULES
from lightning_modules.data import TextDataModule
from lightning_modules.inspecting import Parsed
from lightning_modules.options.metric_names import METRICS


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records every look at the data; the test ends with an error if there was one."""
    looks: list[str] = []
    for name in ("fast_tokenizer", "splits", "stores", "_fingerprint", "_byte_lengths"):
        real = TextDataModule.__dict__[name]

        def seen(self: TextDataModule, name: str = name, real: Any = real) -> Any:
            looks.append(name)
            return real.__get__(self, TextDataModule)

        monkeypatch.setattr(TextDataModule, name, property(seen))
    yield looks
    assert looks == []


def refusal(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        entry.main(args)
    assert caught.value.code in (1, 2)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("dsv41: error: ")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    return lines[0].removeprefix("dsv41: error: ")


def test_a_run_that_works_looks_at_the_data(
    nano_args: list[str], monkeypatch: pytest.MonkeyPatch, untouched: list[str]
) -> None:
    main(["fit", *nano_args])
    assert {"fast_tokenizer", "stores"} <= set(untouched)
    untouched.clear()


EARLY_STOPPING = "lightning.pytorch.callbacks.EarlyStopping"
FSDP = "lightning_modules.strategy.EngramFSDPStrategy"


def part(path: str, **arguments: Any) -> str:
    """A class and its arguments, as they are typed."""
    return json.dumps({"class_path": path, "init_args": arguments})


MISTAKES: list[tuple[list[str], str]] = [
    (["--model.config.hidden_size=-3"], "model.config.hidden_size: must be an integer of at least 1"),
    (["--model.config.num_experts_per_tok=9"], "num_experts_per_tok"),
    (["--model.config.hidden_size=1048576", "--model.config.moe_intermediate_size=1048576"], "parameters take"),
    (["--model.backend.attn=flash"], "model.backend.attn: must be of type"),
    (["--model.backend.sparse_table_gradient=true", "--model.optimizer.tables=dense"], "_gradient: must be false"),
    (["--model.optimizer.lr=-1"], "model.optimizer.lr: must be a number above 0 and at most 1000, got -1"),
    (["--model.optimizer.beta2=1"], "model.optimizer.beta2: must be a number of at least 0 and below 1, got 1"),
    (["--model.schedule.floor=.nan"], "model.schedule.floor: must be a number of at least 0 and at most 1, got nan"),
    (["--trainer.max_steps=-1", "--trainer.max_epochs=-1"], "model.schedule.total_steps: 'cosine' needs"),
    (["--model.indexer.warmup_steps=3"], "indexer.warmup_steps: must be 0, got 3"),
    (["--data.sequence_length=65"], "data.sequence_length: 65 exceeds model.config.max_position_embeddings=64"),
    (["--data.val_fraction=2"], "val_fraction"),
    (["--trainer.precision=bf16-true"], "trainer.precision: must be one of"),
    (["--trainer.devices=0"], "trainer.devices: must be at least 1"),
    (["--trainer.devices=2", "--trainer.strategy=ddp"], "trainer.strategy: 2 devices need engram_fsdp"),
    (["--trainer.devices=3", "--trainer.strategy=engram_fsdp"], "data.batch_size: must be at least the number of"),
    (["--trainer.strategy=" + part(FSDP, tensor_parallel_size=2)], "trainer.strategy.init_args.tensor_parallel_size: "),
    (
        [
            "--trainer.strategy=" + part(FSDP, mixed_precision="bf16"),
            "--trainer.precision=bf16-mixed",
        ],
        "trainer.precision: must be '32-true' with the strategy's mixed_precision 'bf16'",
    ),
    (["--trainer.strategy=engram_fdsp"], "engram_fdsp"),
    (["--trainer.accelerator=cpuu"], "cpuu"),
    (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val: must be a number of at least 0"),
    (["--trainer.gradient_clip_algorithm=nrm"], "trainer.gradient_clip_algorithm: must be one of norm, value or null"),
    (["--trainer.accumulate_grad_batches=-1"], "trainer.accumulate_grad_batches: must be an integer of at least 1"),
    (["--trainer.val_check_interval=0"], "trainer.val_check_interval: must be a number of batches"),
    (["--trainer.val_check_interval=0.5"], "trainer.val_check_interval: must be a number of batches with check_val"),
    (["--trainer.log_every_n_steps=-1"], "trainer.log_every_n_steps: must be an integer of at least 1"),
    (["--trainer.max_time=soon"], "trainer.max_time: must be a time above 0 such as 00:12:00:00"),
    (["--trainer.limit_val_batches=-1"], "trainer.limit_val_batches: must be a number of batches"),
    (["--trainer.barebones=true"], "trainer.barebones: must be false"),
    (["--trainer.logger.init_args.save_dir=/dev/null/runs"], "trainer.logger.init_args.save_dir: /dev/null is a file"),
    (["--checkpoint.every_n_steps=0"], "checkpoint.every_n_steps: must be an integer of at least 1"),
    (["--checkpoint.keep=-2"], "checkpoint.keep: must be an integer of at least 1"),
    (["--engram_gates.tokens=0"], "engram_gates.tokens: must be an integer of at least 1"),
    (["--seed_everything=-1"], "seed_everything: must be an integer of at least 0"),
    (
        [f"--trainer.callbacks=[{part(EARLY_STOPPING, monitor='val/los')}]"],
        "EarlyStopping.init_args.monitor: there is no number 'val/los'; did you mean val/loss?",
    ),
    (
        [f"--trainer.callbacks=[{part(EARLY_STOPPING, monitor='val/loss', patience=-1)}]"],
        "trainer.callbacks[0].init_args.patience: must be an integer of at least 0",
    ),
    (
        [
            f"--trainer.callbacks=[{part('lightning.pytorch.callbacks.ModelCheckpoint')}]",
            "--trainer.enable_checkpointing=false",
        ],
        "trainer.enable_checkpointing: must be true or null, since a run ends with a checkpoint",
    ),
    (["--model_class=nowhere.Task"], "model_class: nowhere.Task cannot be imported"),
    (["--model_class=lightning_modules.data.TextDataModule"], "TextDataModule is not derived from"),
    (["--data_class=9"], "data_class: must be the path of a class"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_told_before_data_is_read(
    options: list[str],
    message: str,
    nano_args: list[str],
    capsys: pytest.CaptureFixture[str],
    untouched: list[str],
    tmp_path: Path,
) -> None:
    assert message in refusal(["fit", *nano_args, *options], capsys)
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- every number has a range

STRANGE = [-1, 0, float("nan"), float("inf"), 1e308, 2**63, None, True, "x", []]


def numeric_options(parser: Any) -> list[str]:
    """Options that take numbers, but not those of the data module, which checks them itself."""

    def kinds(kind: Any) -> Iterator[Any]:
        yield kind
        for inner in get_args(kind):
            yield from kinds(inner)

    return [
        action.dest
        for action in parser._actions
        if {int, float} & set(kinds(getattr(action, "_typehint", None))) and not action.dest.startswith("data.")
    ]


@pytest.fixture(scope="module")
def parser(make_nano_args: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Parsed(make_nano_args(tmp_path_factory.mktemp("parser"))).parser


def test_every_number_has_a_range_or_a_rule_of_the_model(parser: Any) -> None:
    """What has no entry in the table is checked with other fields, by `DeepseekV41TextConfig`."""
    numbers = numeric_options(parser)
    assert len(numbers) > 90
    left = {name for name in numbers if name not in RULES}
    assert left == {
        "model.config.candidate_source_layer_id",
        "model.config.engram_layer_ids",
        "model.config.engram_max_ngram_size",
        "model.config.engram_num_embeddings",
        "model.config.engram_pad_token_id",
        "model.config.index_source_layer_ids",
        "model.config.kv_source_layer_ids",
        "model.config.num_key_value_heads",
        "model.config.qk_rope_head_dim",
        "model.config.rope_parameters",
        "model.config.rope_scaling",
        "trainer.deterministic",
        "trainer.precision",
    } - ({"trainer.deterministic", "trainer.precision"} - set(numbers))
    dests = {action.dest for action in parser._actions}
    assert set(RULES) <= dests


def test_a_strange_number_is_in_the_range_or_one_line(parser: Any, nano_args: list[str]) -> None:
    """What the option's type takes, its rule or the model's configuration refuses with a line that begins with it."""
    config = yaml.safe_load(Path(nano_args[1]).read_text())["model"]["config"]
    kinds = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    refused, told = 0, {}
    for option in numeric_options(parser):
        alone = LightningArgumentParser(exit_on_error=False)
        alone.add_argument("--value", type=kinds[option])
        for value in STRANGE:
            try:
                taken = alone.parse_object({"value": value}).value
            except ArgumentError:  # the wrong type, which the parser tells with the option's name
                refused += 1
                continue
            try:
                if option in RULES:
                    RULES[option].check(option, taken)
                elif option.startswith("model.config."):
                    DeepseekV41TextConfig(**(config | {option.removeprefix("model.config."): taken}))
            except ValueError as error:
                told[option, repr(value)] = str(error)
    assert refused + len(told) > 500
    for (option, value), message in told.items():
        assert message.startswith((option, option.removeprefix("model.config."))), (option, value, message)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("trainer.devices", [1, -1, "auto", "2", "0,1", "0,", [0], [0, 1]]),
        ("trainer.max_time", ["00:12:00:00", {"hours": 12}, None]),
        ("trainer.val_check_interval", [1, 0.5, 1.0, "00:00:10:00", None]),
        ("trainer.limit_val_batches", [0, 3, 0.0, 0.5, 1.0, None]),
        ("trainer.max_epochs", [-1, 3, None]),
        ("trainer.fast_dev_run", [True, False, 0, 3]),
        ("checkpoint.keep", [-1, 1, 5]),
        ("model.optimizer.weight_decay", [0, 0.1, 3]),
        ("trainer.gradient_clip_val", [0, 0.5, 10, None]),
        ("trainer.num_sanity_val_steps", [-1, 0, 2, None]),
    ],
)
def test_values_of_the_range_are_taken(option: str, values: list[Any]) -> None:
    for value in values:
        RULES[option].check(option, value)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("trainer.devices", [0, -2, "0", "00", "a", "1,a", [], [0, 0], [True], [-1], True, None, 1.0]),
        ("trainer.max_time", ["00:00:00:00", "1:2:3", "00:12:00:xx", {}, {"hour": 1}, {"hours": -1}, {"hours": 10**9}]),
        ("trainer.val_check_interval", [0, -1, 0.0, 1.5, float("nan"), True, "soon", {"hours": 0}]),
        ("trainer.limit_val_batches", [-1, -0.5, 1.5, float("inf"), True, "x"]),
        ("trainer.max_epochs", [-2, True, 1.0, 2**63]),
        ("trainer.fast_dev_run", [-1, None, "x"]),
        ("checkpoint.keep", [0, -2, True, None]),
    ],
)  # fmt: skip
def test_values_outside_the_range_are_refused(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{option}: must be"):
            RULES[option].check(option, value)


def test_a_switch_is_true_or_false() -> None:
    for name, rule in RULES.items():
        if isinstance(rule, Flag):
            with pytest.raises(ValueError, match=f"^{name}: must be true or false"):
                rule.check(name, "false")


# ---------------------------------------------------------------- nearest names


@pytest.mark.parametrize(
    ("options", "file", "message"),
    [
        (["--model.config.hiden_size=8"], "", "did you mean --model.config.hidden_size?"),
        (["--hidden_size", "8"], "", "did you mean --model.config.hidden_size?"),
        (["--trainer.max_step", "3"], "", "did you mean --trainer.max_steps?"),
        (["--trainer.logger.init_args.sav_dir", "x"], "", "trainer.logger: sav_dir: there is no such"),
        ([], "model: {config: {hiden_size: 8}}", "did you mean model.config.hidden_size?"),
        ([], "modl: {optimiser: {lr: 8}}", "did you mean model.optimizer.lr?"),
        ([], "checkpoint: {every_n_step: 3}", "did you mean checkpoint.every_n_steps?"),
        ([], "trainer: {callbacks: [{class_path: EarlyStoping}]}", "did you mean EarlyStopping?"),
        ([], "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: a}}]}", "did you mean monitor?"),
        ([], f"trainer: {{strategy: {part(FSDP, mixed_precison='bf16')}}}", "did you mean mixed_precision?"),
    ],
)  # fmt: skip
def test_a_misspelt_option_has_its_nearest_name(
    options: list[str],
    file: str,
    message: str,
    nano_args: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file:
        (tmp_path / "overlay.yaml").write_text(file)
        options = ["--config", str(tmp_path / "overlay.yaml")]
    assert message in refusal(["fit", *nano_args, *options], capsys)


# ---------------------------------------------------------------- features that Lightning has


def test_a_run_without_a_name_resumes(nano_args: list[str], tmp_path: Path) -> None:
    args = ["fit", *nano_args, "--trainer.logger.init_args.name", "null"]
    main(args)
    assert (tmp_path / "runs" / "version_0" / "checkpoints" / "step-00000004.ckpt").is_file()
    main([*args, "--trainer.max_steps", "5", "--ckpt_path", "last"])
    assert (tmp_path / "runs" / "version_0" / "checkpoints" / "step-00000005.ckpt").is_file()


@pytest.mark.parametrize("strategy", ["engram_fsdp", json.dumps({"class_path": FSDP})])
def test_a_strategy_by_name_and_by_class_takes_the_same_precisions(
    strategy: str, nano_cli: Callable[..., DeepseekV41CLI]
) -> None:
    for precision in ("32-true", "64-true", "bf16-mixed"):
        cli = nano_cli(f"--trainer.strategy={strategy}", f"--trainer.precision={precision}")
        assert cli.trainer.precision == precision
        cli.model.require_ready(cli.trainer, cli.datamodule, "fit")


def test_every_number_that_a_run_logs_may_be_watched(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--model.config.indexer=learned", "--model.config.router_balance_loss_weight=0.1")
    cli.trainer.fit(cli.model, cli.datamodule)
    groups = tuple(name for name in METRICS if name.endswith("/"))
    seen = set(cli.trainer.callback_metrics)
    assert len(seen) > 20
    assert not {name for name in seen if name not in METRICS and not name.startswith(groups)}
    unseen = {name for name in METRICS if name not in seen and not name.endswith("/")}
    assert {name for name in unseen if not name.startswith("test/")} == set()


class Watching(L.Callback):
    """A user's, which may log anything; it fails when the first validation ends, as EarlyStopping does."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise RuntimeError("no such number")


def test_a_checkpoint_that_was_due_outlives_a_failing_callback(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path
) -> None:
    cli = nano_cli("--checkpoint.every_n_steps=2")
    cli.trainer.callbacks.insert(0, Watching())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no such number"):
        cli.trainer.fit(cli.model, cli.datamodule)
    assert (tmp_path / "runs" / "nano" / "version_0" / "checkpoints" / "step-00000002.ckpt").is_file()


def test_ctrl_c_while_importing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_run", interrupted)
    with pytest.raises(SystemExit) as caught:
        entry.main(["fit"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "dsv41: interrupted\n"


def test_an_unexpected_error_is_one_line_unless_the_traceback_is_asked_for(
    nano_args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: TextDataModule) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(TextDataModule, "prepare_data", broken)
    assert refusal(["fit", *nano_args], capsys) == "KeyError: 'lost' (DSV41_TRACEBACK=1 shows where)"
    monkeypatch.setenv("DSV41_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["fit", *nano_args])
