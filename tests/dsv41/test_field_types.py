"""Every field of a released ``config.json`` has a type and a range; an error is one line that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv41 import DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig
from dsv41.config import TEXT_FIELDS, VISION_FIELDS
from dsv41.config.fields import BASE_RULES, TEXT_RULES

CLASS = {"class_path": "os.system", "init_args": {"command": "false"}}
# No field of any kind has one of these.
NOWHERE: list[Any] = [CLASS, [CLASS], [[1]], {"a": 1}, 2**63, -(2**63), 10**400, float("inf"), float("nan")]
TEXTS = {"hidden_act", "topk_method"}
ROPE = {"rope_scaling", "rope_parameters"}
YARN = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
SIZES = sorted(
    name
    for name in TEXT_FIELDS - {"num_key_value_heads"}
    if isinstance(getattr(DeepseekV41TextConfig(), name, None), int) and not name.startswith("dspark")
)


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize("field", sorted(TEXT_FIELDS))
def test_no_text_field_takes_another_kind_of_value(text_fields: Callable[..., dict[str, Any]], field: str) -> None:
    values = NOWHERE + ([5] if field in TEXTS else ["flase"])
    if field not in ("vocab_size", "rope_theta", *ROPE) and not (field.endswith("_id") or field.startswith("engram")):
        values = [*values, None]
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}: ") as error:
            DeepseekV41TextConfig(**text_fields(**{field: value}))
        one_line(error)


@pytest.mark.parametrize("field", sorted(VISION_FIELDS))
def test_no_vision_field_takes_another_kind_of_value(field: str) -> None:
    for value in [*NOWHERE, "flase", True, *([] if field == "max_wh_ratio" else [None])]:
        with pytest.raises(ValueError, match=f"^{field}: ") as error:
            DeepseekV41VisionConfig(**{field: value})
        one_line(error)


@pytest.mark.parametrize("kind", [DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig])
@pytest.mark.parametrize("key", sorted({*BASE_RULES, "dtype", "torch_dtype", "per_layer_config"} - TEXT_RULES.keys()))
def test_no_key_of_transformers_takes_another_kind_of_value(kind: Any, key: str) -> None:
    groups = {"auto_map", "label2id", "quantization_config"}
    for value in [[[1]], 2**63, 1.5] if key in groups else [CLASS, [CLASS], 2**63, 1.5]:
        with pytest.raises(ValueError, match=f"^{key}: ") as error:
            kind(**{key: value})
        one_line(error)


@pytest.mark.parametrize("key", ["validate_fields", "fields", "to_dict", "layers", "__class__", "save_pretrained"])
def test_a_key_that_would_replace_a_method_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        DeepseekV41TextConfig(**{key: "x"})


@pytest.mark.parametrize("field", SIZES)
def test_sizes_beyond_any_model_are_refused_before_anything_is_allocated(
    text_fields: Callable[..., dict[str, Any]], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .*"):
        DeepseekV41TextConfig(**text_fields(**{field: 2**31}))


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "n_routed_experts", "num_hidden_layers"])
def test_the_range_is_named(text_fields: Callable[..., dict[str, Any]], field: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{field}: must be an integer of at least 1 and at most \d+.*got 1000000000"
    ):
        DeepseekV41TextConfig(**text_fields(**{field: 10**9}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 1e308), ("hc_eps", 2), ("compress_rope_theta", 1), ("rope_theta", 1), ("swiglu_limit", 1e300)],
)
def test_numbers_beyond_their_range_are_refused(
    text_fields: Callable[..., dict[str, Any]], field: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be a number .* and at most"):
        DeepseekV41TextConfig(**text_fields(**{field: value}))


def test_more_hash_columns_than_primes_are_found_for_in_seconds_are_refused(
    text_fields: Callable[..., dict[str, Any]],
) -> None:
    with pytest.raises(ValueError, match=r"^engram_n_heads: at most 8192 hash columns"):
        DeepseekV41TextConfig(**text_fields(engram_n_heads=1024, engram_max_ngram_size=1024))


# ---------------------------------------------------------------- rotary settings


@pytest.mark.parametrize("field", sorted(ROPE))
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 16}, "rope_type is missing"),
        ({}, "rope_type is missing"),
        (YARN | {"rope_type": "yarm"}, "'yarm'; did you mean 'yarn'"),
        (YARN | {"rope_typ": "yarn"}, "'rope_typ'; did you mean 'rope_type'"),
        (YARN | {"beta_fats": 3}, "'beta_fats'; did you mean 'beta_fast'"),
        (YARN | {"mscale": 1.0}, "'mscale'; the settings are"),
        (YARN | {"factor": "16"}, "factor: must be a number"),
        (YARN | {"factor": 1e300}, "factor: must be a number of at least 1"),
        (YARN | {"type": "default"}, "contradicts rope_type='yarn'"),
        (YARN | {"rope_theta": [1]}, "rope_theta: must be a number"),
        ({"rope_type": "default", "factor": 16}, "factor has no effect with rope_type 'default'"),
        ({"main": YARN, "compress": YARN}, "'main' holds a group"),
        ({"full_attention": YARN}, "'full_attention' holds a group"),
        ("yarn", "must be a group of settings or null, got 'yarn'"),
        ([YARN], "must be a group of settings or null"),
    ],
    ids=str,
)
def test_rotary_settings_that_would_be_ignored_are_named(
    text_fields: Callable[..., dict[str, Any]], field: str, settings: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: .*{message}") as error:
        DeepseekV41TextConfig(**(text_fields(rope_scaling=None) | {field: settings}))
    one_line(error)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply|not a valid JSON"),
        ("{" + '"a":{' * 100_000, "nested too deeply|not a valid JSON"),
        ('{"model_type": "deepseek_v41", "a": ' + "[" * 200 + "]" * 200 + "}", "a: nested deeper than 32 levels"),
        ("[]", "config.json"),
        ("3", "config.json"),
        ('"abc"', "config.json"),
        ("null", "config.json"),
        ("", "not a valid JSON"),
        ('{"model_type": "deepseek_v41"', "not a valid JSON"),
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_holds_no_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ValueError, OSError), match=message) as error:
        DeepseekV41Config.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": "abc"}, "^text_config: must be a group of fields or null, got 'abc'"),
        ({"text_config": []}, r"^text_config: must be a group of fields or null, got \[\]"),
        ({"text_config": 0}, "^text_config: must be a group"),
        ({"vision_config": "abc"}, "^vision_config: must be a group"),
        ({"text_config": {"self": 1}}, "^self: "),
        ({"self": 1}, "self"),
        ({"image_token_id": 2**63}, "^image_token_id: must be an integer"),
        ({"text_config": {"hidden_size": None}}, "^hidden_size: "),
        ({"text_config": {"norm_topk_prob": "flase"}}, "^norm_topk_prob: must be true or false, got 'flase'"),
        ({"text_config": {"dspark_block_size": CLASS}}, "^dspark_block_size: must be an integer"),
        ({"rope_scaling": "abc"}, "^rope_scaling: must be a group"),
        ({"num_labels": 10**9}, "^num_labels: "),
        ({"id2label": {"a": "b"}}, "^id2label: keys must be integers"),
        ({"architectures": CLASS}, "^architectures: must be a list of texts"),
    ],
    ids=str,
)
def test_a_field_of_a_file_is_named_with_the_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41"} | change))
    with pytest.raises(ValueError, match=message) as error:
        DeepseekV41Config.from_pretrained(tmp_path)
    assert one_line(error).endswith(f"(config.json of {tmp_path})")
