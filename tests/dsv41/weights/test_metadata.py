"""Metadata of an export is that of the model and tokenizer that it was made from, and brings its own classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import save_released
from dsv41.weights.metadata import REMOTE_CODE_NAME

Make = Callable[..., DeepseekV41ForCausalLM]
Save = Callable[[DeepseekV41ForCausalLM, Path], Any]
IDS = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(0))
LAYOUTS: dict[str, Save] = {"released": save_released, "hf": lambda model, folder: model.save_pretrained(folder)}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def named(golden_tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The golden tokenizer with roles for some ids, a chat template and a greatest length."""
    roles = {"bos_token": golden_tokenizer.id_to_token(7), "eos_token": golden_tokenizer.id_to_token(9)}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(golden_tokenizer.to_str()),
        chat_template=TEMPLATE,
        model_max_length=99,
        extra_special_tokens=[golden_tokenizer.id_to_token(11)],
        **roles,
    )


@pytest.fixture
def model(tiny_config: Callable[..., DeepseekV41Config], named: PreTrainedTokenizerFast) -> DeepseekV41ForCausalLM:
    """A shortened model whose configuration claims what the release has."""
    torch.manual_seed(0)
    released = {"num_nextn_predict_layers": 3, "dspark_target_layer_ids": [37, 38, 39], "engram_pad_token_id": 5}
    config = tiny_config(num_hidden_layers=4, engram_compressed_vocab_size=None, **released)
    return DeepseekV41ForCausalLM(config, tokenizer=named).eval()


def text_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return values


@torch.no_grad()
def logits(model: DeepseekV41ForCausalLM) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_is_that_of_the_live_model_and_tokenizer(
    model: DeepseekV41ForCausalLM, named: PreTrainedTokenizerFast, tmp_path: Path, layout: str
) -> None:
    folder = tmp_path / "out"
    LAYOUTS[layout](model, folder)
    text = text_values(folder)
    assert [text[f"{role}_token_id"] for role in ("bos", "eos", "pad")] == [7, 9, None]
    assert text["engram_pad_token_id"] == 5
    assert (text["num_nextn_predict_layers"], text["dspark_target_layer_ids"]) == (0, [])
    assert text["rope_parameters"] == model.config.text_config.rope_parameters
    assert text["rope_scaling"] == {key: text["rope_parameters"][key] for key in text["rope_scaling"]}
    assert set(text["rope_parameters"]) - set(text["rope_scaling"]) == {"rope_theta"}
    changed = {"num_nextn_predict_layers", "dspark_target_layer_ids", "bos_token_id", "eos_token_id", "pad_token_id"}
    for name, value in model.config.text_config.fields().items():
        assert name in changed or text[name] == value, name

    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (7, 9, None)

    saved = AutoTokenizer.from_pretrained(folder)
    assert saved.chat_template == TEMPLATE
    assert saved.model_max_length == 99
    assert saved.all_special_tokens == named.all_special_tokens
    assert saved.get_vocab() == named.get_vocab()
    message = [{"role": "user", "content": "sparse"}]
    assert saved.apply_chat_template(message, tokenize=False) == named.apply_chat_template(message, tokenize=False)
    assert "token_type_ids" not in saved("sparse")

    again = DeepseekV41ForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(again), logits(model))
    assert again.map_fingerprint == model.map_fingerprint
    LAYOUTS[layout](again, tmp_path / "again")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    assert model.config.text_config.num_nextn_predict_layers == 3, "the live model's configuration is not touched"


def test_plain_rotations_have_no_scaling(tiny_model: Make, tmp_path: Path) -> None:
    plain = tiny_model(num_hidden_layers=2, rope_scaling={"rope_type": "default"})
    plain.save_pretrained(tmp_path / "out")
    assert text_values(tmp_path / "out")["rope_scaling"] is None
    again = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.text_config.rope_parameters == plain.config.text_config.rope_parameters
    assert torch.equal(logits(again), logits(plain.eval()))


def test_without_a_tokenizer_the_configurations_ids_stand(
    tiny_config: Callable[..., DeepseekV41Config], tmp_path: Path
) -> None:
    config = tiny_config(engram_layer_ids=[], engram_num_embeddings=[], bos_token_id=3, eos_token_id=4)
    DeepseekV41ForCausalLM(config).save_pretrained(tmp_path / "out")
    assert (text_values(tmp_path / "out")["bos_token_id"], text_values(tmp_path / "out")["eos_token_id"]) == (3, 4)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 4


def test_an_export_from_before_these_fields_loads(model: DeepseekV41ForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "out")
    for name in (REMOTE_CODE_NAME, "generation_config.json", "complete.json"):
        (tmp_path / "out" / name).unlink()
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    del values["auto_map"], values["text_config"]["rope_scaling"]
    values["text_config"] |= {"bos_token_id": 0, "num_nextn_predict_layers": 3, "dspark_target_layer_ids": [37, 38, 39]}
    path.write_text(json.dumps(values))
    assert torch.equal(logits(DeepseekV41ForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_folders_code_does_not_run_where_the_package_is_imported(
    model: DeepseekV41ForCausalLM, tmp_path: Path
) -> None:
    folder, ran = tmp_path / "out", tmp_path / "ran"
    model.save_pretrained(folder)
    (folder / "complete.json").unlink()
    (folder / REMOTE_CODE_NAME).write_text(f"open({str(ran)!r}, 'w')\n")
    again = DeepseekV41ForCausalLM.from_pretrained(folder)
    assert not hasattr(again.config, "auto_map"), "it would name a file that another export lacks"
    assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is DeepseekV41Config
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)), logits(model))
    assert not ran.exists()


FRESH = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
import torch
from safetensors.torch import load_file

expected = load_file(sys.argv[1])
for folder in sys.argv[2:]:
    assert "dsv41" not in sys.modules or folder != sys.argv[2]
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "deepseek_v41"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"])
    assert type(model) is sys.modules["dsv41"].DeepseekV41ForCausalLM
for name in [name for name in sys.modules if name.split(".")[0] in ("dsv41", "transformers_modules")]:
    del sys.modules[name]
sys.modules["dsv41"] = None  # as if it were not installed
code = compile(open(sys.argv[2] + "/modeling_dsv41.py").read(), "modeling_dsv41.py", "exec")
try:
    exec(code)
except ImportError as error:
    print(error)
"""


def test_trusted_code_loads_an_export_in_a_process_without_the_import(
    model: DeepseekV41ForCausalLM, tmp_path: Path
) -> None:
    for layout, save in LAYOUTS.items():
        save(model, tmp_path / layout)
    save_file({"ids": IDS, "logits": logits(model)}, tmp_path / "expected.safetensors")
    places = [str(tmp_path / name) for name in ("expected.safetensors", *LAYOUTS)]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *places],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "this model needs the package dsv41: pip install dsv41-lightning\n"
