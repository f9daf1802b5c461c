"""What notebooks start from: a run's own configuration and weights, and rows of its validation text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from lightning_modules.ablation.curves import read_run
from lightning_modules.cli import DeepseekV41CLI, get_cli
from lightning_modules.notebook import arguments, build, run_directory, train_or_load, validation_batch

NanoCLI = Callable[..., DeepseekV41CLI]
# Not those of the nano configuration, so that one can see which file has been read.
OPTIONS = ("--model.config.sliding_window", "3", "--data.sequence_length", "24")


@pytest.fixture
def trained(nano_cli: NanoCLI, capfd: pytest.CaptureFixture[str]) -> DeepseekV41CLI:
    cli = nano_cli(*OPTIONS)
    train_or_load(cli)
    return cli


def checkpoint_of(cli: DeepseekV41CLI) -> str:
    assert cli.trainer.log_dir is not None
    (path,) = Path(cli.trainer.log_dir).glob("checkpoints/step-*4.ckpt")
    return str(path)


def test_without_a_checkpoint_the_file_comes_first_and_options_after_it() -> None:
    assert arguments("a.yaml", "--data.batch_size", "2") == ["--config", "a.yaml", "--data.batch_size", "2"]


def test_a_checkpoint_brings_its_run_s_configuration(tmp_path: Path) -> None:
    checkpoint = tmp_path / "version_0" / "checkpoints" / "best.ckpt"
    with pytest.raises(FileNotFoundError, match=r"^checkpoint: .*best\.ckpt does not exist$"):
        arguments("a.yaml", checkpoint=str(checkpoint))
    checkpoint.mkdir(parents=True)  # a sharded one is a folder
    with pytest.raises(
        FileNotFoundError, match=r"^checkpoint: .*has no configuration of its run at .*version_0.config"
    ):
        arguments("a.yaml", checkpoint=str(checkpoint))
    saved = tmp_path / "version_0" / "config.yaml"
    saved.write_text("data: {}\n")
    assert arguments("a.yaml", "--x", "1", checkpoint=str(checkpoint)) == ["--config", str(saved), "--x", "1"]


def test_a_checkpoint_may_be_named_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "best.ckpt").touch()
    (tmp_path / "version_0" / "config.yaml").touch()
    monkeypatch.chdir(folder)
    assert arguments("a.yaml", checkpoint="best.ckpt") == ["--config", str(tmp_path / "version_0" / "config.yaml")]
    monkeypatch.chdir("/")
    with pytest.raises(FileNotFoundError, match="has no configuration of its run"):
        arguments("a.yaml", checkpoint="tmp")


def test_training_leaves_a_model_that_is_ready_to_be_looked_at(trained: DeepseekV41CLI) -> None:
    assert trained.trainer.global_step == 4
    assert not trained.model.training
    assert not any(module.training for module in trained.model.modules())


def test_what_was_built_to_be_looked_at_still_trains(nano_cli: NanoCLI) -> None:
    cli = nano_cli("--model.config.indexer", "learned")
    build(cli)
    assert not cli.model.training
    train_or_load(cli)
    assert "train/indexer_loss" in cli.trainer.logged_metrics, "an indexer learns in training mode alone"


def test_a_checkpoint_s_architecture_and_weights_are_the_ones_in_use(
    trained: DeepseekV41CLI, nano_cli: NanoCLI
) -> None:
    path = checkpoint_of(trained)
    cli = get_cli(arguments("absent.yaml", "--data.batch_size", "1", checkpoint=path), run=False)
    train_or_load(cli, path)
    assert not cli.model.training
    config = cli.model.built.config.text_config
    assert (config.sliding_window, cli.datamodule.sequence_length) == (3, 24), "the run's"
    assert cli.datamodule.batch_size == 1, "the option counts more"
    assert cli.trainer.global_step == 0, "validated, not trained"
    ours, theirs = cli.model.built.state_dict(), trained.model.built.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    untrained = nano_cli(*OPTIONS)
    build(untrained)
    assert not torch.equal(untrained.model.built.lm_head.weight, cli.model.built.lm_head.weight)


def test_building_gives_initial_values_and_trains_nothing(nano_cli: NanoCLI) -> None:
    cli = nano_cli(*OPTIONS)
    build(cli)
    assert not any(module.training for module in cli.model.modules())
    torch.manual_seed(0)
    config = DeepseekV41Config(text_config=cli.model.built.config.text_config)
    expected = DeepseekV41ForCausalLM(config, tokenizer=cli.datamodule.fast_tokenizer).state_dict()
    found = cli.model.built.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_batch_has_the_first_rows_of_the_validation_text(nano_cli: NanoCLI) -> None:
    cli = nano_cli("--data.sequence_length", "24")
    build(cli)
    batch = validation_batch(cli, rows=2)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    rows = cli.datamodule.dataset("val")
    for name, values in batch.items():
        assert values.shape == (2, 24)
        assert values.dtype == torch.int64
        assert torch.equal(values, torch.stack([rows[0][name], rows[1][name]]))
    assert torch.equal(validation_batch(cli)["labels"], batch["labels"][:1])
    with torch.no_grad():
        cli.model.built(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    for count in (0, 3):
        with pytest.raises(ValueError, match=rf"^rows: must lie in 1\.\.2, got {count}$"):
            validation_batch(cli, rows=count)


def test_a_run_without_validation_text_has_no_batch(nano_cli: NanoCLI) -> None:
    cli = nano_cli("--data.val_fraction", "0")
    build(cli)
    with pytest.raises(ValueError, match="the val split is empty"):
        validation_batch(cli)


def test_the_curves_of_a_run_are_found(nano_cli: NanoCLI, tmp_path: Path) -> None:
    cli = nano_cli()
    train_or_load(cli)
    folder = tmp_path / "runs" / "nano" / "version_0"
    assert run_directory(cli) == folder
    run = read_run(folder, "some")
    assert (run.variant, list(run.curve), list(run.train_curve)) == ("some", [2, 4], [1, 2, 3, 4])
    assert run.loss == pytest.approx(float(cli.trainer.callback_metrics["val/loss"]))
    other = nano_cli("--trainer.max_steps", "2")
    assert run_directory(other, str(folder / "checkpoints" / "best.ckpt")) == folder


def test_a_run_without_a_logger_has_no_curves(nano_cli: NanoCLI) -> None:
    cli = nano_cli("--trainer.logger", "false")
    with pytest.raises(ValueError, match=r"^trainer.logger: must be a TensorBoardLogger"):
        run_directory(cli)
