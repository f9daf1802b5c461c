"""The released values and ``config.json``, which loads as it is; a file that means another model is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig, DeepseekV41VisionConfig

RELEASED = {
    "vocab_size": 129280,
    "num_hidden_layers": 40,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-20,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "q_lora_rank": 1280,
    "moe_intermediate_size": 2304,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "max_position_embeddings": 1048576,
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "tie_word_embeddings": False,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def test_defaults_are_the_released_values() -> None:
    config = DeepseekV41Config()
    assert {name: getattr(config.text_config, name) for name in RELEASED} == RELEASED
    expected = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
    yarn = config.text_config.rope_parameters
    assert {key: yarn[key] for key in expected} == expected
    assert yarn["rope_type"] == "yarn"
    assert config.image_token_id == 129264
    vision = {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    }
    assert {name: getattr(DeepseekV41VisionConfig(), name) for name in vision} == vision
    assert config.vision_config.num_hidden_layers == 0, "text-only unless a vision configuration is given"
    kinds = (config, config.text_config, config.vision_config)
    assert [kind.model_type for kind in kinds] == ["deepseek_v41", "deepseek_v41_text", "deepseek_v41_vision"]


def test_configurations_do_not_share_their_lists() -> None:
    first, second = DeepseekV41TextConfig(), DeepseekV41TextConfig()
    first.compress_ratios[0] = 99
    first.engram_layer_ids.append(99)
    first.rope_parameters["factor"] = 99
    fresh = DeepseekV41TextConfig()
    for config in (second, fresh):
        assert config.compress_ratios[0] == 0
        assert config.engram_layer_ids == [1, 14]
        assert config.rope_parameters["factor"] == 16


def test_the_nested_file_loads_and_survives_json(golden_dir: Path, tmp_path: Path) -> None:
    raw = json.loads((golden_dir / "config.json").read_text())
    config = DeepseekV41Config(**raw)
    for name, value in raw["text_config"].items():
        if name not in ("dtype", "rope_scaling"):
            assert getattr(config.text_config, name) == value, name
    for name in ("num_hidden_layers", "hidden_size", "max_wh_ratio"):
        assert getattr(config.vision_config, name) == raw["vision_config"][name]
    assert config.image_token_id == 511
    text = json.loads(config.to_json_string(use_diff=False))
    assert text["text_config"]["engram_num_embeddings"] == [408, 484]
    copies = [
        DeepseekV41Config.from_dict(text),
        DeepseekV41Config.from_dict(json.loads(config.to_json_string())),
        DeepseekV41Config.from_dict(config.to_dict()),
        DeepseekV41Config.from_pretrained(golden_dir),
    ]
    config.save_pretrained(tmp_path)
    copies.append(DeepseekV41Config.from_pretrained(tmp_path))
    for copy in copies:
        assert isinstance(copy.text_config, DeepseekV41TextConfig)
        assert copy.text_config.to_dict() == config.text_config.to_dict()
        assert copy.vision_config.to_dict() == config.vision_config.to_dict()
        assert copy.image_token_id == 511


# What stands around the fields in the released file and in those of other programs: formats, code, versions.
AROUND: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV41Config"},
    "transformers_version": "5.17.0",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
        "expert_dtype": "fp4",
    },
}
RELEASED_ROPE = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536}


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What transformers warns of; its logger does not propagate and keeps the stream that it was made with."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    yield messages
    logging.getLogger("transformers").removeHandler(handler)


def released_file(folder: Path, **text: Any) -> Path:
    """A file with everything that the release writes into one, and vision layers."""
    vision = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024}
    raw = AROUND | {
        "model_type": "deepseek_v41",
        "image_token_id": 129264,
        "text_config": {"model_type": "deepseek_v41_text"} | RELEASED | text,
        "vision_config": vision,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("load", [DeepseekV41Config, AutoConfig], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": RELEASED_ROPE | {"type": "yarn"}},
        {"rope_parameters": RELEASED_ROPE | {"rope_type": "yarn", "rope_theta": 10000}},
        {"rope_scaling": RELEASED_ROPE | {"rope_type": "yarn"}, "rope_parameters": RELEASED_ROPE | {"type": "yarn"}},
    ],
    ids=lambda rope: "+".join(rope),
)
def test_the_released_file_loads_as_it_is_and_comes_back_the_same(
    tmp_path: Path, warned: list[str], load: Any, rope: dict[str, Any]
) -> None:
    config = load.from_pretrained(released_file(tmp_path, **rope))
    assert type(config) is DeepseekV41Config
    assert {name: getattr(config.text_config, name) for name in RELEASED} == RELEASED
    assert config.text_config.rope_parameters["factor"] == 16
    assert config.vision_config.num_hidden_layers == 32
    assert config.dtype == torch.bfloat16
    for name in ("architectures", "auto_map", "quantization_config", "bos_token_id"):
        assert getattr(config, name) == AROUND[name]
    config.save_pretrained(tmp_path / "again")
    again = load.from_pretrained(tmp_path / "again")
    again.name_or_path = config.name_or_path  # the only thing that remembers the folder
    assert again.to_dict() == config.to_dict()
    assert str(tmp_path) not in (tmp_path / "again" / "config.json").read_text()
    assert warned == []


def test_quantisation_in_a_file_describes_its_weights_and_changes_no_model(
    tiny_config: Callable[..., DeepseekV41Config], golden_tokenizer: Tokenizer
) -> None:
    plain, config = tiny_config(), tiny_config()
    config.quantization_config = AROUND["quantization_config"]
    torch.manual_seed(0)
    expected = DeepseekV41ForCausalLM(plain, tokenizer=golden_tokenizer).state_dict()
    torch.manual_seed(0)
    for name, value in AutoModelForCausalLM.from_config(config, tokenizer=golden_tokenizer).state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v4", "V4 compresses keys and selects positions in each layer for itself"),
        ("deepseek_v3", "V3 has multi-head latent attention"),
        ("deepseek_v32", "V3.2 has multi-head latent attention with an indexer"),
        ("llama", "a configuration of another model does not describe it"),
        (None, "V4.1 shares compressed keys"),
    ],
)
def test_configurations_of_other_models_are_refused_with_a_reason(
    tmp_path: Path, warned: list[str], model_type: str | None, reason: str
) -> None:
    raw = {"model_type": model_type, "hidden_size": 4096, "num_hidden_layers": 43}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    message = rf"^model_type: must be 'deepseek_v41', got {model_type!r}.*{reason}.*"
    for attempt in (
        lambda: DeepseekV41Config.from_pretrained(tmp_path),
        lambda: DeepseekV41Config.from_dict(raw),
        lambda: DeepseekV41Config(**raw),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    with pytest.raises(ValueError, match=r"^model_type: must be 'deepseek_v41_text'"):
        DeepseekV41Config(text_config={"model_type": model_type})
    with pytest.raises(ValueError, match=r"^model_type: must be 'deepseek_v41_vision'"):
        DeepseekV41Config(vision_config={"model_type": model_type})
    assert warned == [], "nor is it loaded with a warning first"


def test_places_without_a_configuration_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        DeepseekV41Config.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json in it"):
        DeepseekV41Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"image_token_id": 5}')
    with pytest.raises(ValueError, match=r"^model_type: must be 'deepseek_v41', got None"):
        DeepseekV41Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("beside", "field"),
    [
        ({"hidden_size": 4096}, "hidden_size"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"engram_layer_ids": []}, "engram_layer_ids"),
    ],
    ids=str,
)
def test_fields_of_the_text_model_beside_it_may_not_contradict_it(beside: dict[str, Any], field: str) -> None:
    """A flat file would silently be a model of the released sizes."""
    with pytest.raises(ValueError, match=rf"^{field}: .*contradicts text_config"):
        DeepseekV41Config(**beside)


def test_fields_of_the_text_model_beside_it_may_repeat_it() -> None:
    repeated = {"hidden_size": 5120, "tie_word_embeddings": False, "rope_scaling": RELEASED_ROPE | {"type": "yarn"}}
    config = DeepseekV41Config(**repeated)
    assert config.text_config.to_dict() == DeepseekV41Config().text_config.to_dict()


def test_single_fields_change_through_the_nested_configuration(golden_dir: Path) -> None:
    changed = DeepseekV41Config.from_pretrained(golden_dir, text_config={"swiglu_limit": 7.0})
    assert changed.text_config.swiglu_limit == 7.0
    assert changed.text_config.hidden_size == 64
    with pytest.raises(ValueError, match=r"^swiglu_limit: .*text_config={'swiglu_limit': 7.0}"):
        DeepseekV41Config.from_pretrained(golden_dir, swiglu_limit=7.0)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_names_that_are_no_dtype_are_refused(name: str) -> None:
    for kind in (DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig):
        for value in ("float77", "nn"):
            with pytest.raises(ValueError, match=rf"^{name}: must be a dtype of torch, .*'{value}'"):
                kind(**{name: value})
