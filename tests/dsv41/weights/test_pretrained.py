"""Hugging Face folders: what is saved loads again, also by transformers' automatic classes and in a fresh process."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dsv41
from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import save_released
from dsv41.files import is_complete
from dsv41.weights import folder as model_folder

Make = Callable[..., DeepseekV41ForCausalLM]
IDS = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tiny_model: Make) -> DeepseekV41ForCausalLM:
    """Drawn, with router biases that are not all zero."""
    made = tiny_model(seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, buffer in made.named_buffers():
        if name.endswith((".bias", ".bias_vl")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return made.eval()


@pytest.fixture
def folder(model: DeepseekV41ForCausalLM, tmp_path: Path) -> Path:
    """The model, saved."""
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@torch.no_grad()
def logits(model: DeepseekV41ForCausalLM) -> Tensor:
    return model(IDS).logits


def require_equal(ours: DeepseekV41ForCausalLM, theirs: DeepseekV41ForCausalLM) -> None:
    """Every parameter and buffer, those that are not saved included, in value and dtype."""
    for part in ("named_parameters", "named_buffers"):
        expected = dict(getattr(theirs, part)())
        found = dict(getattr(ours, part)())
        assert set(found) == set(expected)
        for name, value in found.items():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---------------------------------------------------------------- there and back


def test_a_saved_model_comes_back_whole_and_ready_to_evaluate(model: DeepseekV41ForCausalLM, folder: Path) -> None:
    again = DeepseekV41ForCausalLM.from_pretrained(folder)
    require_equal(again, model)
    assert torch.equal(logits(again), logits(model))
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert again.model.embed_tokens.weight.data_ptr() != again.lm_head.weight.data_ptr()
    assert any(buffer.abs().max() > 0.05 for name, buffer in again.named_buffers() if name.endswith(".bias"))
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert is_complete(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_that_transformers_itself_saved_in_shards_loads(
    model: DeepseekV41ForCausalLM, golden_tokenizer: Tokenizer, tmp_path: Path, dtype: torch.dtype
) -> None:
    model.cast_parameters(dtype)
    PreTrainedModel.save_pretrained(model, tmp_path, max_shard_size="500KB")
    PreTrainedTokenizerFast(tokenizer_object=golden_tokenizer).save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = DeepseekV41ForCausalLM.from_pretrained(tmp_path)
    require_equal(again, model)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
        ({"dtype": "float64"}, torch.float64),
        ({"dtype": "auto"}, torch.float32),
        ({}, torch.float32),
        ({"dtype": torch.bfloat16, "torch_dtype": torch.float64}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_dtype_is_the_one_asked_for_and_what_stays_fp32_does(
    folder: Path, asked: dict[str, Any], expected: torch.dtype
) -> None:
    model = DeepseekV41ForCausalLM.from_pretrained(folder, **asked)
    assert model.dtype == model.config.dtype == model.config.text_config.dtype == expected
    kept = 0
    for name, parameter in model.named_parameters():
        stays = model.stays_fp32(name) and expected != torch.float64
        assert parameter.dtype == (torch.float32 if stays else expected), name
        kept += stays
    assert kept > 20 or expected == torch.float64
    assert all(b.dtype == torch.float32 for name, b in model.named_buffers() if name.endswith(".bias"))


def test_the_dtype_of_a_file_is_that_of_the_configuration(model: DeepseekV41ForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert raw["dtype"] == raw["text_config"]["dtype"] == "bfloat16"
    again = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "bf16")
    assert again.dtype == torch.bfloat16
    del raw["dtype"], raw["text_config"]["dtype"]
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    require_equal(DeepseekV41ForCausalLM.from_pretrained(tmp_path / "bf16"), again)


def test_nothing_stays_as_memory_was_and_nothing_is_drawn(
    model: DeepseekV41ForCausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_empty = torch.nn.Module.to_empty

    def poisoned(self: torch.nn.Module, **options: Any) -> torch.nn.Module:
        to_empty(self, **options)
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else -(2**40))
        return self

    def drawn(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a weight was drawn that is loaded afterwards")

    monkeypatch.setattr(DeepseekV41ForCausalLM, "to_empty", poisoned)
    monkeypatch.setattr(torch, "randn", drawn)
    before = torch.get_rng_state()
    again = DeepseekV41ForCausalLM.from_pretrained(folder)
    assert torch.equal(torch.get_rng_state(), before)
    require_equal(again, model)


# ---------------------------------------------------------------- tokenizer


def test_an_engram_without_its_tokenizer_is_an_error_that_names_the_file(
    model: DeepseekV41ForCausalLM, golden_tokenizer: Tokenizer, folder: Path
) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"^tokenizer: no tokenizer.json in .*saved, but layers \[1, 3\] have an Engram"
    ):
        DeepseekV41ForCausalLM.from_pretrained(folder)
    require_equal(DeepseekV41ForCausalLM.from_pretrained(folder, tokenizer=golden_tokenizer), model)


def test_a_broken_tokenizer_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^tokenizer: .*tokenizer.json cannot be read"):
        DeepseekV41ForCausalLM.from_pretrained(folder)


def test_a_model_without_engram_needs_no_tokenizer_and_keeps_one_that_is_there(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = tiny_config(engram_layer_ids=[], engram_num_embeddings=[])
    DeepseekV41ForCausalLM(config).save_pretrained(tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    bare = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "bare")
    assert bare.tokenizer is None
    bare.save_pretrained(tmp_path / "with", tokenizer=golden_tokenizer)
    kept = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "with").tokenizer
    assert kept is not None
    text = "Engram hashes n-grams."
    assert kept.encode(text, add_special_tokens=False) == golden_tokenizer.encode(text, add_special_tokens=False).ids


# ---------------------------------------------------------------- configuration


def test_another_configuration_takes_the_place_of_the_folders(model: DeepseekV41ForCausalLM, folder: Path) -> None:
    changed = DeepseekV41Config.from_pretrained(folder, text_config={"swiglu_limit": 0.01})
    one = DeepseekV41ForCausalLM.from_pretrained(folder, config=changed)
    other = AutoModelForCausalLM.from_pretrained(folder, text_config={"swiglu_limit": 0.01})
    require_equal(one, model)
    assert torch.equal(logits(one), logits(other))
    assert not torch.allclose(logits(one), logits(model))
    with pytest.raises(TypeError, match="config: must be a DeepseekV41Config, got DeepseekV41TextConfig"):
        DeepseekV41ForCausalLM.from_pretrained(folder, config=changed.text_config)  # type: ignore[arg-type]
    before = changed.to_dict()
    DeepseekV41ForCausalLM.from_pretrained(folder, config=changed, dtype=torch.bfloat16)
    assert changed.to_dict() == before, "the caller's configuration is not touched"


def test_what_a_file_says_of_its_weights_does_not_outlive_them(model: DeepseekV41ForCausalLM, tmp_path: Path) -> None:
    save_released(model, tmp_path / "fp8", quantized=True)
    assert "quantization_config" in json.loads((tmp_path / "fp8" / "config.json").read_text())
    again = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "fp8")
    assert not hasattr(again.config, "quantization_config")
    for save in (DeepseekV41ForCausalLM.save_pretrained, PreTrainedModel.save_pretrained):
        out = tmp_path / save.__qualname__
        save(again, out)
        assert "quantization_config" not in (out / "config.json").read_text()
    # Nor where somebody builds the model from the file's configuration.
    config = DeepseekV41Config.from_pretrained(tmp_path / "fp8")
    DeepseekV41ForCausalLM(config, tokenizer=model.tokenizer).save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert "quantization_config" in config.to_dict()


def test_a_vision_tower_is_configured_and_its_weights_are_passed_over(
    model: DeepseekV41ForCausalLM, folder: Path
) -> None:
    edit_config(folder, vision_config={"model_type": "deepseek_v41_vision", "num_hidden_layers": 2, "hidden_size": 32})
    (folder / "complete.json").unlink()
    (folder / "model.safetensors.index.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"vision.blocks.0.norm1.weight": torch.ones(32)}, folder / "model.safetensors")
    again = DeepseekV41ForCausalLM.from_pretrained(folder)
    assert again.config.vision_config.num_hidden_layers == 2
    require_equal(again, model)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_loading_info": True}, TypeError, "no option output_loading_info here; there are config, backend"),
        ({"quantization_config": {"load_in_8bit": True}}, TypeError, "no option quantization_config"),
        ({"use_safetensors": False}, TypeError, "use_safetensors=False is not possible"),
        ({"dtype": "int8"}, ValueError, "dtype: must be one of float32, bfloat16, .*'int8'"),
        ({"dtype": "float77"}, ValueError, "dtype: .*'float77'"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, ValueError, "device_map: must be one device"),
        ({"device_map": "balanced"}, ValueError, "device_map: must be one device, .*'balanced'"),
        ({"attn_implementation": "sdpa"}, ValueError, r"attn_implementation: .*BackendConfig\(attn=...\).*'sdpa'"),
        ({"experts_implementation": "grouped_mm"}, ValueError, "experts_implementation: .*'grouped_mm'"),
        ({"num_hidden_layers": 2}, ValueError, r"num_hidden_layers: .*text_config={'num_hidden_layers': 2}"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(folder, **options)


def test_options_that_ask_for_nothing_are_taken(model: DeepseekV41ForCausalLM, folder: Path) -> None:
    nothing: dict[str, Any] = {
        "use_safetensors": True,
        "low_cpu_mem_usage": True,
        "trust_remote_code": True,
        "output_loading_info": False,
        "ignore_mismatched_sizes": False,
        "quantization_config": None,
        "attn_implementation": "eager",
        "revision": "main",
        "token": "secret",
        "local_files_only": True,
        "verify": False,
    }
    require_equal(AutoModelForCausalLM.from_pretrained(folder, **nothing), model)
    for device in ("cpu", torch.device("cpu"), {"": "cpu"}, None):
        assert AutoModelForCausalLM.from_pretrained(folder, device_map=device).device.type == "cpu"
    chosen = model_folder.chosen_device("auto")
    assert chosen == (torch.accelerator.current_accelerator() or torch.device("cpu"))


def test_places_without_a_model_are_told_apart(folder: Path, tmp_path: Path) -> None:
    def refused(place: Path, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            DeepseekV41ForCausalLM.from_pretrained(place)

    assert DeepseekV41ForCausalLM.from_pretrained(tmp_path, subfolder=folder.name).dtype == torch.float32
    with pytest.raises(FileNotFoundError, match=r"subfolder: .*other is not a directory"):
        DeepseekV41ForCausalLM.from_pretrained(tmp_path, subfolder="other")
    refused(tmp_path / "nowhere", FileNotFoundError, "folder: .*nowhere is not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", FileNotFoundError, "folder: no config.json in .*empty")
    edit_config(folder, model_type="deepseek_v4")
    refused(folder, ValueError, "model_type: must be 'deepseek_v41', got 'deepseek_v4'")
    edit_config(folder, model_type="deepseek_v41")
    for path in folder.glob("model.safetensors*"):
        path.unlink()
    refused(folder, FileNotFoundError, "no .*safetensors")


# ---------------------------------------------------------------- repositories


def test_a_name_that_is_no_folder_is_downloaded(
    model: DeepseekV41ForCausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append((repository, options))
        return str(folder.parent if options["allow_patterns"][0].startswith("saved/") else folder)

    monkeypatch.setattr(model_folder, "snapshot_download", snapshot)
    require_equal(DeepseekV41ForCausalLM.from_pretrained("someone/model", revision="v2", token="secret"), model)
    require_equal(DeepseekV41ForCausalLM.from_pretrained("someone/model", subfolder="saved"), model)
    files = ["*.safetensors", "*.json", "*.jinja"]
    assert asked == [
        (
            "someone/model",
            {"allow_patterns": files, "ignore_patterns": ["*/*"], "revision": "v2", "token": "secret"},
        ),
        ("someone/model", {"allow_patterns": [f"saved/{name}" for name in files], "ignore_patterns": []}),
    ]


def test_a_name_that_is_neither_folder_nor_repository_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*args: Any, **options: Any) -> str:
        raise OSError("404")

    monkeypatch.setattr(model_folder, "snapshot_download", snapshot)
    with pytest.raises(OSError, match="runs/typo is not a directory, and no repository to be had: 404"):
        DeepseekV41ForCausalLM.from_pretrained("runs/typo")


# ---------------------------------------------------------------- saving


def test_saving_takes_what_people_pass_and_refuses_what_it_cannot_do(
    model: DeepseekV41ForCausalLM, tmp_path: Path
) -> None:
    audit = model.save_pretrained(
        save_directory=str(tmp_path / "out"),
        is_main_process=True,
        state_dict=None,
        push_to_hub=False,
        safe_serialization=True,
        variant=None,
        token="secret",
        max_shard_size="1MB",
    )
    assert audit is not None
    assert len(audit.files) > 2
    require_equal(DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out"), model)
    assert model.save_pretrained(tmp_path / "other", is_main_process=False) is None
    for options, message in (
        ({"state_dict": model.state_dict()}, "state_dict must be None: the model's own tensors"),
        ({"push_to_hub": True}, "push_to_hub must be False: call model.push_to_hub"),
        ({"safe_serialization": False}, "safe_serialization must be True"),
        ({"variant": "fp16"}, "variant must be None"),
        ({"distributed_checkpoint": True}, "distributed_checkpoint must be False"),
        ({"save_function": torch.save}, "no option save_function here; there are is_main_process"),
    ):
        with pytest.raises(TypeError, match=message):
            model.save_pretrained(tmp_path / "other", **options)
    with pytest.raises(FileExistsError, match="an export overwrites nothing"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "other").exists()


def test_push_to_hub_uploads_such_a_folder(model: DeepseekV41ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import ModelCard
    from transformers.utils import hub

    class Api:
        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Repository", (), {"repo_id": repo_id})

    uploaded: list[str] = []

    def upload(folder: str, repo_id: str, **options: Any) -> str:
        require_equal(DeepseekV41ForCausalLM.from_pretrained(folder), model)
        uploaded.extend(os.listdir(folder))
        return repo_id

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *a, **k: ModelCard("---\nlibrary_name: x\n---\n"))
    monkeypatch.setattr(model, "_upload_modified_files", upload)
    assert model.push_to_hub("someone/model") == "someone/model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(uploaded)


# ---------------------------------------------------------------- transformers' automatic classes


def test_from_config_draws_the_model_that_the_constructor_draws(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Tokenizer
) -> None:
    torch.manual_seed(4)
    plain = DeepseekV41ForCausalLM(tiny_config(), tokenizer=golden_tokenizer)
    backend = BackendConfig(attn="eager")
    made = AutoModelForCausalLM.from_config(tiny_config(), tokenizer=golden_tokenizer, backend=backend)
    require_equal(made, plain)
    assert made.backend == backend
    half = AutoModelForCausalLM.from_config(tiny_config(), tokenizer=golden_tokenizer, dtype="bfloat16")
    plain.cast_parameters(torch.bfloat16)
    require_equal(half, plain)
    assert half.lm_head.weight.dtype == torch.float32
    assert half.config.dtype == torch.bfloat16


def test_a_model_of_this_type_in_transformers_itself_would_not_clash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIG_MAPPING._mapping, "deepseek_v41", "LlamaConfig")
    importlib.reload(dsv41)
    assert type(AutoConfig.from_pretrained(folder)) is DeepseekV41Config
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is DeepseekV41ForCausalLM


FRESH = """
import sys
import warnings

import dsv41

heavy = {"lightning", "datasets", "tensorboard", "torchmetrics"} & set(sys.modules)
assert not heavy, f"importing the architecture imports {heavy}"

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

warnings.simplefilter("error")
for folder, dtype in zip(sys.argv[2:], (torch.float32, torch.bfloat16, torch.bfloat16)):
    expected = load_file(sys.argv[1])
    assert AutoConfig.from_pretrained(folder).model_type == "deepseek_v41"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is dsv41.DeepseekV41ForCausalLM
    assert model.dtype == dtype, model.dtype
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("compressed sparse attention") == expected["text"].tolist()
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected[str(dtype)]), folder
print("done")
"""


def test_folders_load_in_a_fresh_process_without_a_word(
    model: DeepseekV41ForCausalLM, golden_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Ours, transformers' own in shards, and the released layout in bf16, by the automatic classes."""
    expected = {"ids": IDS, "text": torch.tensor(golden_tokenizer.encode("compressed sparse attention").ids)}
    expected["torch.float32"] = logits(model)
    model.save_pretrained(tmp_path / "ours")
    model.cast_parameters(torch.bfloat16)
    expected["torch.bfloat16"] = logits(model)
    PreTrainedModel.save_pretrained(model, tmp_path / "theirs", max_shard_size="500KB")
    PreTrainedTokenizerFast(tokenizer_object=golden_tokenizer).save_pretrained(tmp_path / "theirs")
    save_released(model, tmp_path / "released")
    save_file(expected, tmp_path / "expected.safetensors")
    places = [str(tmp_path / name) for name in ("expected.safetensors", "ours", "theirs", "released")]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *places],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""


def test_the_automatic_tokenizer_is_the_models_own(folder: Path, golden_tokenizer: Tokenizer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.padding_side == "right", "the model takes padding on the right alone"
    for text in ("def main():", "Äpfel, 12 + 3", "<|endoftext|>"):
        assert tokenizer.encode(text) == golden_tokenizer.encode(text).ids
