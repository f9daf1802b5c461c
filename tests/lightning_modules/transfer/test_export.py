"""A checkpoint becomes a folder for others, and such a folder the start of a run: `dsv41 export`, `dsv41 import`,
``--model.pretrained``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dsv41 import DeepseekV41ForCausalLM
from dsv41.files import is_complete
from lightning_modules import __main__ as entry
from lightning_modules.cli import main
from lightning_modules.transfer.export import export_checkpoint
from lightning_modules.transfer.import_weights import import_folder

Make = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def base(make_nano_args: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four steps as one file and, by the strategy on one rank, as a folder; and exports of the former."""
    folder = tmp_path_factory.mktemp("base")
    main(["fit", *make_nano_args(folder)])
    main(["fit", *make_nano_args(folder), "--trainer.strategy", "engram_fsdp"])
    torch.distributed.destroy_process_group()
    for format in ("released", "hf"):
        export_checkpoint(str(checkpoint_of(folder)), str(folder / format), format)
    return folder


def checkpoint_of(folder: Path, version: int = 0) -> Path:
    return folder / "runs" / "nano" / f"version_{version}" / "checkpoints" / "step-00000004.ckpt"


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        entry.main(args)
    assert caught.value.code == 1
    return capsys.readouterr().err


def losses(capsys: pytest.CaptureFixture[str], *args: str) -> float:
    """Validation loss that the command line prints."""
    capsys.readouterr()
    main(["validate", *args])
    line = next(line for line in capsys.readouterr().out.splitlines() if "val/loss" in line)
    return float(line.split("│")[2])


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("format", ["released", "hf"])
def test_an_export_has_the_checkpoints_weights_exactly(base: Path, format: str) -> None:
    model = DeepseekV41ForCausalLM.from_pretrained(base / format)
    stored = torch.load(checkpoint_of(base), weights_only=True)["state_dict"]
    own = model.state_dict()
    assert {f"model.{name}" for name in own} == set(stored)
    for name, value in own.items():
        assert torch.equal(value, stored[f"model.{name}"]), name
    assert is_complete(base / format)


def test_a_folder_of_a_rank_exports_to_the_same_files_as_a_single_file(base: Path, tmp_path: Path) -> None:
    """One rank of the strategy trains bit-equally, so nothing may differ."""
    assert checkpoint_of(base, 1).is_dir()
    export_checkpoint(str(checkpoint_of(base, 1)), str(tmp_path / "out"))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / "released" / name).read_bytes(), name


def test_the_model_card_has_the_runs_own_numbers(base: Path) -> None:
    about = torch.load(checkpoint_of(base), weights_only=True)["dsv41"]
    assert about["validated_at"] == 4
    card = (base / "released" / "README.md").read_text()
    assert f"{about['metrics']['val/loss']:.3f}"[:5] in card
    assert f"{about['tokens_seen']:,}" in card or str(about["tokens_seen"]) in card


@pytest.mark.parametrize(("step", "factor"), [(2, 1.0), (4, float("nan"))])
def test_numbers_that_say_nothing_of_the_weights_stay_out_of_the_card(
    base: Path, tmp_path: Path, step: int, factor: float
) -> None:
    """A checkpoint between two validations has not been measured, nor has one where nothing was predicted."""
    loaded = torch.load(checkpoint_of(base), weights_only=True)
    loss = loaded["dsv41"]["metrics"]["val/loss"]
    loaded["dsv41"]["metrics"]["val/loss"] = loss * factor
    loaded["dsv41"]["validated_at"] = step
    shutil.copytree(base / "runs" / "nano" / "version_0", tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000004.ckpt"
    torch.save(loaded, path)
    export_checkpoint(str(path), str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{loss:.3f}"[:5] not in card
    assert "nan" not in card


def test_the_command_exports_in_the_formats_of_the_release(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    entry.main(["export", "--ckpt_path", str(checkpoint_of(base)), "--output", str(out), "--quantized"])
    assert "fit --config CONFIG --model.pretrained" in capsys.readouterr().out
    stored = load_file(out / "model.safetensors")
    assert stored["layers.1.engram.embed.weight"].dtype == torch.float8_e4m3fn
    assert stored["layers.0.ffn.experts.1.w2.weight"].dtype == torch.int8
    assert stored["head.weight"].dtype == torch.bfloat16
    again = DeepseekV41ForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "hf", "--quantized"], "quantized: only the released layout"),
        (["--max_shard_size", "5 apples"], "max_shard_size: must be a positive number of bytes"),
        (["--tokenizer", "nowhere"], "tokenizer: no tokenizer.json in nowhere"),
    ],
)
def test_options_that_do_not_fit_are_named_and_nothing_is_written(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    args = ["export", "--ckpt_path", str(checkpoint_of(base)), "--output", str(tmp_path / "out"), *options]
    assert message in error_of(args, capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    args = ["export", "--ckpt_path", str(checkpoint_of(base)), "--output", str(tmp_path)]
    assert f"output: {tmp_path} exists and is not an empty directory" in error_of(args, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_no_checkpoint_of_ours_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        return error_of(["export", "--ckpt_path", str(path), "--output", str(tmp_path / "out")], capsys)

    assert "does not exist" in refused(tmp_path / "nowhere.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert "no checkpoint of a DeepSeek-V4.1 task" in refused(tmp_path / "other.ckpt")
    data = bytearray(checkpoint_of(base).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(data)
    assert "damaged.ckpt: its content is not what was written" in refused(tmp_path / "damaged.ckpt")
    half = tmp_path / "half.ckpt"
    shutil.copytree(checkpoint_of(base, 1), half)
    (half / "complete.json").unlink()
    assert "not a complete sharded checkpoint" in refused(half)
    assert not (tmp_path / "out").exists()


def test_a_copied_checkpoint_needs_its_tokenizer(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "somewhere" / "checkpoints" / "a.ckpt"
    path.parent.mkdir(parents=True)
    shutil.copy(checkpoint_of(base), path)
    args = ["export", "--ckpt_path", str(path), "--output", str(tmp_path / "out")]
    assert "give its folder with --tokenizer" in error_of(args, capsys)
    entry.main([*args, "--tokenizer", str(base / "released")])
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in load_file(base / "released" / "model.safetensors").items():
        assert torch.equal(exported[name], value), name


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size, so that shapes alone would not tell."""
    other = tmp_path / "other"
    other.mkdir()
    values: dict[str, Any] = json.loads((base / "released" / "tokenizer.json").read_text())
    ids = values["model"]["vocab"]
    first, second = sorted(ids, key=ids.get)[40:42]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(values))
    shutil.copy(base / "released" / "tokenizer_config.json", other)
    args = ["export", "--ckpt_path", str(checkpoint_of(base)), "--output", str(tmp_path / "out")]
    assert "hashes another tokenizer" in error_of([*args, "--tokenizer", str(other)], capsys)


@pytest.mark.parametrize("format", ["released", "hf"])
def test_what_the_data_tokenizer_says_of_itself_reaches_the_export(
    base: Path, nano_args: list[str], tmp_path: Path, format: str
) -> None:
    """By way of the run's directory: chat template, further special tokens, other roles, greatest length."""
    source = tmp_path / "source"
    shutil.copytree(base / "runs" / "nano" / "version_0" / "tokenizer", source)
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"model_max_length": 48, "extra_special_tokens": ["a", "b"]}
    settings["eos_token"], settings["pad_token"] = settings["pad_token"], settings["eos_token"]
    path.write_text(json.dumps(settings))
    main(["fit", *nano_args, "--data.tokenizer", str(source)])
    export_checkpoint(str(checkpoint_of(tmp_path)), str(tmp_path / "out"), format, license="mit")  # type: ignore[arg-type]
    live = AutoTokenizer.from_pretrained(source)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(saved, name) == getattr(live, name) == text[name] == generation[name], name
    assert (saved.eos_token_id, saved.pad_token_id) == (2, 1)
    assert text["engram_pad_token_id"] == 2, "a parameter of the hash"
    assert saved.chat_template == live.chat_template == template
    assert saved.model_max_length == live.model_max_length == 48
    assert saved.all_special_tokens == live.all_special_tokens
    assert {"a", "b"} <= set(saved.all_special_tokens)
    assert saved.encode("abba <s>") == live.encode("abba <s>")
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()
    assert "tensors fit" in import_folder(tmp_path / "out", tmp_path / "finetune.yaml")


def test_the_command_writes_the_licence(base: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    entry.main(["export", "--ckpt_path", str(checkpoint_of(base)), "--output", out, "--license", "apache-2.0"])
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()
    assert "license: unknown" in (base / "released" / "README.md").read_text()


# ---------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize("format", ["released", "hf"])
def test_a_run_starts_where_the_exported_one_ended(
    base: Path, nano_args: list[str], capsys: pytest.CaptureFixture[str], format: str
) -> None:
    expected = losses(capsys, *nano_args, "--ckpt_path", str(checkpoint_of(base)))
    assert losses(capsys, *nano_args, "--model.pretrained", str(base / format)) == expected
    assert losses(capsys, *nano_args, f"--model.pretrained={base / format}") == expected
    assert losses(capsys, *nano_args) != expected


def test_the_folder_gives_architecture_and_tokenizer(
    base: Path, nano_args: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes in a file before it do not count; what is typed after it does, and is listed if it fits."""
    changed = ["--model.config.hidden_size", "24", "--data.vocab_size", "280"]
    options = ["--model.pretrained", str(base / "released")]
    with caplog.at_level("INFO"):
        main(["validate", *nano_args, *changed, *options, "--model.config.index_topk", "3"])
    differs = [record.message for record in caplog.records if "differs from" in record.message]
    assert differs == ["differs from released/config.json, the command line counts: model.config.index_topk: 4 -> 3"]
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, *options, "--model.config.hidden_size", "24"])
    message = capsys.readouterr().err
    assert "but the model has [300, 24]" in message
    assert "hidden_size: 16 -> 24" in message
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, *options, "--data.tokenizer", "bpe", "--data.vocab_size", "280"])
    assert "engram_compressed_vocab_size: 258 was asked for, but the tokenizer" in capsys.readouterr().err


def test_a_tokenizer_that_numbers_otherwise_is_refused(
    base: Path, nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same size, and no Engram that would notice."""
    folder = tmp_path / "plain"
    options = ["--model.config.engram_layer_ids", "[]", "--model.config.engram_num_embeddings", "null"]
    main(["fit", *nano_args, *options])
    export_checkpoint(str(checkpoint_of(tmp_path)), str(folder))
    values: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    ids = values["model"]["vocab"]
    first, second = sorted(ids, key=ids.get)[40:42]
    ids[first], ids[second] = ids[second], ids[first]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, "--model.pretrained", str(folder), "--data.tokenizer", "bpe"])
    assert "data.tokenizer: numbers texts otherwise" in capsys.readouterr().err


def test_a_resumed_run_takes_its_checkpoint_and_not_the_folder(
    base: Path, nano_args: list[str], tmp_path: Path
) -> None:
    options = [*nano_args, "--model.pretrained", str(base / "released")]
    main(["fit", *options])
    unbroken = torch.load(checkpoint_of(tmp_path), weights_only=True)
    # To the third step, where the run's schedule ends as in the other, and on.
    shutil.rmtree(tmp_path / "runs")
    main(["fit", *options, "--checkpoint.keep", "-1"])
    kept = checkpoint_of(tmp_path).with_name("step-00000003.ckpt")
    checkpoint_of(tmp_path).unlink()
    assert kept.is_file()
    main(["fit", *options, "--ckpt_path", "last"])
    again = torch.load(checkpoint_of(tmp_path), weights_only=True)
    for name, value in unbroken["state_dict"].items():
        assert torch.equal(again["state_dict"][name], value), name


def test_a_folder_without_a_configuration_is_refused(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, "--model.pretrained", str(tmp_path / "nowhere")])
    assert "model.pretrained: " in (told := capsys.readouterr().err)
    assert "is no folder with a config.json" in told


# ---------------------------------------------------------------- import


def test_import_judges_a_folder_and_writes_a_configuration_that_trains(
    base: Path, corpus: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "finetune.yaml"
    entry.main(["import", "--from", str(base / "released"), "--output", str(output)])
    told = capsys.readouterr().out
    tensors = load_file(base / "released" / "model.safetensors")
    assert f"{len(tensors)} tensors fit" in told
    assert "F32" in told
    saved = yaml.safe_load(output.read_text())
    assert saved["model"]["config"]["hidden_size"] == 16
    main(
        [
            *("fit", "--config", str(output), "--data.source", str(corpus), "--data.cache_dir", str(cache)),
            *("--data.val_fraction", "0.2", "--data.test_fraction", "0.2"),
            *("--data.sequence_length", "32", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"),
            *("--trainer.limit_val_batches", "1", "--trainer.logger.init_args.save_dir", str(tmp_path / "runs")),
            *("--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"),
        ]
    )
    (made,) = (tmp_path / "runs").rglob("step-00000002.ckpt")
    trained = torch.load(made, weights_only=True)["state_dict"]
    start = DeepseekV41ForCausalLM.from_pretrained(base / "released").state_dict()
    largest = max(float((trained[f"model.{name}"] - value).abs().max()) for name, value in start.items())
    assert 0 < largest < 2.5e-4, "two steps of AdamW at a rate of at most 1e-4"
    assert "exists" in error_of(["import", "--from", str(base / "released"), "--output", str(output)], capsys)


def test_import_names_what_does_not_fit(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(base / "released", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    save_file({name: t for name, t in tensors.items() if name != "norm.weight"}, folder / "model.safetensors")
    output = tmp_path / "finetune.yaml"
    message = error_of(["import", "--from", str(folder), "--output", str(output)], capsys)
    assert "1 tensors missing ['norm.weight']" in message
    (folder / "tokenizer.json").unlink()
    message = error_of(["import", "--from", str(folder), "--output", str(output)], capsys)
    assert "has no tokenizer.json, which the model's Engram needs" in message
    assert not output.exists()


def test_import_takes_no_memory_for_a_model(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights stay on the meta device, so the release itself can be judged on a laptop."""
    devices = set()
    from lightning_modules.transfer import import_weights as importing

    real = importing.held_tensors

    def watched(model: torch.nn.Module) -> Any:
        devices.update(parameter.device.type for parameter in model.parameters())
        return real(model)

    monkeypatch.setattr(importing, "held_tensors", watched)
    importing.import_folder(base / "hf", tmp_path / "a.yaml")
    assert devices == {"meta"}


@pytest.mark.parametrize("command", ["export", "import"])
def test_options_that_do_not_exist_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        entry.main([command, "--ckpt-path", "a"])
    assert caught.value.code == 2
    assert "usage: dsv41" in capsys.readouterr().err
