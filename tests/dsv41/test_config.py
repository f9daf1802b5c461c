"""The configuration refuses what no model can be built from, names the field, and means what its docstring says.

Also here: YaRN settings under both of their names, and prefixes of a schedule. `test_config_effects.py` shows that each
field has an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig, DeepseekV41VisionConfig
from dsv41.config import SWITCHES
from dsv41.ops.rope import layer_frequencies

NAN, INF = float("nan"), float("inf")
YARN = {"factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}

COUNTS = (
    *("hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_lora_rank", "o_groups", "max_position_embeddings", "n_routed_experts", "n_shared_experts", "index_topk"),
    *("num_experts_per_tok", "sliding_window", "index_n_heads", "index_head_dim", "candidate_topk_blocks", "hc_mult"),
    *("candidate_block_size", "hc_sinkhorn_iters", "engram_vocab_size", "engram_n_heads", "engram_head_dim"),
)


def refused(fields: dict[str, Any], field: str, message: str = "") -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .*{message}"):
        DeepseekV41TextConfig(**fields)


# ---------------------------------------------------------------- single fields


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None], ids=repr)
@pytest.mark.parametrize("field", COUNTS)
def test_counts_are_integers_of_at_least_one(
    text_fields: Callable[..., dict[str, Any]], field: str, value: Any
) -> None:
    refused(text_fields(**{field: value}), field, "at least 1")


@pytest.mark.parametrize("value", [0, -1, True, 2.0], ids=repr)
@pytest.mark.parametrize("field", ["vocab_size", "engram_compressed_vocab_size"])
def test_vocabulary_sizes_are_positive_or_open(
    text_fields: Callable[..., dict[str, Any]], field: str, value: Any
) -> None:
    refused(text_fields(**{field: value}), field, "null")
    assert getattr(DeepseekV41TextConfig(**text_fields(**{field: None})), field) is None


@pytest.mark.parametrize("value", [-1e-3, NAN, INF, True, "1", None], ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "swiglu_limit",
        "rms_norm_eps",
        "initializer_range",
        "hc_eps",
        "router_bias_update_rate",
        "router_balance_loss_weight",
    ],
)
def test_limits_and_epsilons_are_finite_and_not_negative(
    text_fields: Callable[..., dict[str, Any]], field: str, value: Any
) -> None:
    refused(text_fields(**{field: value}), field, "at least 0")
    assert getattr(DeepseekV41TextConfig(**text_fields(**{field: 0})), field) == 0


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF, True], ids=repr)
@pytest.mark.parametrize("field", ["rope_theta", "compress_rope_theta", "routed_scaling_factor"])
def test_bases_and_factors_are_finite_and_positive(
    text_fields: Callable[..., dict[str, Any]], field: str, value: Any
) -> None:
    refused(text_fields(**{field: value}), field)


# ---------------------------------------------------------------- rules between fields

BAD_SCHEDULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "two kv heads": ("num_key_value_heads", {"num_key_value_heads": 2}, "must be 1"),
    "tied head": ("tie_word_embeddings", {"tie_word_embeddings": True}, "false"),
    "softmax router": ("scoring_func", {"scoring_func": "softmax"}, "sqrtsoftplus"),
    "more experts per token than experts": ("num_experts_per_tok", {"num_experts_per_tok": 9}, "n_routed_experts=8"),
    "heads not divisible": ("o_groups", {"o_groups": 3}, "num_attention_heads=4"),
    "more groups than heads": ("o_groups", {"o_groups": 8}, "num_attention_heads=4"),
    "odd rope": ("qk_rope_head_dim", {"qk_rope_head_dim": 15}, "even"),
    "no rope": ("qk_rope_head_dim", {"qk_rope_head_dim": 0}, "at least 2"),
    "bool rope": ("qk_rope_head_dim", {"qk_rope_head_dim": True}, "even"),
    "rope wider than a head": ("qk_rope_head_dim", {"qk_rope_head_dim": 34, "index_head_dim": 64}, "at most 32"),
    "rope wider than an index head": ("qk_rope_head_dim", {"index_head_dim": 14}, "at most 14"),
    "unknown rope type": ("rope_scaling", {"rope_scaling": YARN | {"rope_type": "linear"}}, "'linear'"),
    "yarn without factor": ("rope_scaling", {"rope_scaling": {"rope_type": "yarn"}}, "'factor'"),
    "yarn with factor below 1": ("rope_scaling", {"rope_scaling": YARN | {"rope_type": "yarn", "factor": 0.5}}, "0.5"),
    "yarn with zero beta": ("rope_scaling", {"rope_scaling": YARN | {"type": "yarn", "beta_slow": 0}}, "beta_slow"),
    "fewer ratios than layers": ("compress_ratios", {"compress_ratios": [0, 2, 2, 2, 1]}, "6 layers, got 5"),
    "negative ratio": ("compress_ratios", {"compress_ratios": [-1, 2, 2, 2, 1, 1]}, "-1"),
    "fractional ratio": ("compress_ratios", {"compress_ratios": [0, 2.0, 2, 2, 1, 1]}, "2.0"),
    "bool ratio": ("compress_ratios", {"compress_ratios": [0, 2, 2, 2, True, 1]}, "True"),
    "kv sources unsorted": ("kv_source_layer_ids", {"kv_source_layer_ids": [4, 1]}, "ascend"),
    "kv source repeated": ("kv_source_layer_ids", {"kv_source_layer_ids": [1, 1, 4]}, "ascend"),
    "kv source too high": ("kv_source_layer_ids", {"kv_source_layer_ids": [1, 4, 6]}, r"0\.\.5, got 6"),
    "kv source negative": ("kv_source_layer_ids", {"kv_source_layer_ids": [-1, 1, 4]}, r"0\.\.5, got -1"),
    "kv source bool": ("kv_source_layer_ids", {"kv_source_layer_ids": [True, 4]}, "got True"),
    "kv source with ratio 0": (
        "kv_source_layer_ids",
        {"kv_source_layer_ids": [0, 1, 4], "index_source_layer_ids": [0, 1, 3, 4, 5]},
        "layer 0 has compress_ratios 0",
    ),
    "index sources unsorted": ("index_source_layer_ids", {"index_source_layer_ids": [3, 1, 4, 5]}, "ascend"),
    "index source repeated": ("index_source_layer_ids", {"index_source_layer_ids": [1, 4, 4]}, "ascend"),
    "index source too high": ("index_source_layer_ids", {"index_source_layer_ids": [1, 4, 9]}, r"0\.\.5, got 9"),
    "index source with ratio 0": (
        "index_source_layer_ids",
        {"index_source_layer_ids": [0, 1, 3, 4, 5]},
        "layer 0 has compress_ratios 0",
    ),
    "kv source selects nothing": ("index_source_layer_ids", {"index_source_layer_ids": [1, 3, 5]}, r"\[4\]"),
    "compressed layer before any source": (
        "kv_source_layer_ids",
        {"kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 3, 4, 5]},
        "layer 1 with compression ratio 2 .*none",
    ),
    "compressed layer after a source of another ratio": (
        "kv_source_layer_ids",
        {"kv_source_layer_ids": [1], "candidate_source_layer_id": -1},
        "layer 4 with compression ratio 1 .*source: 1",
    ),
    "no source at all": (
        "kv_source_layer_ids",
        {"kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": -1},
        "layer 1",
    ),
    "candidate source that only reindexes": (
        "candidate_source_layer_id",
        {"candidate_source_layer_id": 5},
        r"5 is no KV source; those are \[1, 4\]",
    ),
    "candidate source without compression": ("candidate_source_layer_id", {"candidate_source_layer_id": 0}, "0 is no"),
    "candidate source that does not exist": ("candidate_source_layer_id", {"candidate_source_layer_id": 6}, "6 is no"),
    "candidate source below -1": ("candidate_source_layer_id", {"candidate_source_layer_id": -2}, "-2"),
    "bool candidate source": ("candidate_source_layer_id", {"candidate_source_layer_id": True}, "True"),
    "candidates for another ratio": (
        "candidate_source_layer_id",
        {"candidate_source_layer_id": 1},
        r"layer 1 \(ratio 2\).*source 4 \(ratio 1\)",
    ),
    "engram layers unsorted": ("engram_layer_ids", {"engram_layer_ids": [3, 1]}, "ascend"),
    "engram layer repeated": ("engram_layer_ids", {"engram_layer_ids": [1, 1]}, "ascend"),
    "engram layer too high": ("engram_layer_ids", {"engram_layer_ids": [1, 6]}, r"0\.\.5, got 6"),
    "engram layer negative": ("engram_layer_ids", {"engram_layer_ids": [-1, 3]}, r"0\.\.5, got -1"),
    "unigrams": ("engram_max_ngram_size", {"engram_max_ngram_size": 1}, "2, got 1"),
    "bool n-gram size": ("engram_max_ngram_size", {"engram_max_ngram_size": True}, "True"),
    "negative engram pad": ("engram_pad_token_id", {"engram_pad_token_id": -1}, r"0\.\.511, got -1"),
    "engram pad beyond the vocabulary": ("engram_pad_token_id", {"engram_pad_token_id": 512}, r"0\.\.511, got 512"),
    "one table for two layers": ("engram_num_embeddings", {"engram_num_embeddings": [408]}, "one entry per"),
    "three tables for two layers": ("engram_num_embeddings", {"engram_num_embeddings": [408, 484, 600]}, "one entry"),
    "first table too small": ("engram_num_embeddings", {"engram_num_embeddings": [407, 484]}, "layer 1 .*408 .*407"),
    "second table too small": ("engram_num_embeddings", {"engram_num_embeddings": [408, 479]}, "layer 3 .*480 .*479"),
    "fractional table": ("engram_num_embeddings", {"engram_num_embeddings": [408.0, 484]}, "408.0"),
}


@pytest.mark.parametrize("case", BAD_SCHEDULES)
def test_rules_between_fields_are_enforced_by_name(text_fields: Callable[..., dict[str, Any]], case: str) -> None:
    field, overrides, message = BAD_SCHEDULES[case]
    refused(text_fields(**overrides), field, message)


WITHOUT_COMPRESSION = {
    "compress_ratios": [0] * 6,
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {"qk_rope_head_dim": 32},
        {"qk_rope_head_dim": 2},
        {"num_experts_per_tok": 8},
        {"o_groups": 4},
        {"candidate_source_layer_id": -1},
        {"kv_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 4},
        {"kv_source_layer_ids": [1, 3, 4], "num_hidden_layers": 4, "candidate_source_layer_id": 1},
        {"compress_ratios": [0, 2, 2, 2, 1, 1, 0, 0, 0]},
        WITHOUT_COMPRESSION,
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"engram_layer_ids": [], "engram_num_embeddings": None, "engram_pad_token_id": 10_000},
        {"engram_num_embeddings": [408, 480]},
        {"engram_pad_token_id": 511},
        {"rope_scaling": None},
        {"rope_scaling": YARN | {"rope_type": "yarn", "factor": 1}},
    ],
    ids=str,
)
def test_the_edges_of_the_rules_are_allowed(
    text_fields: Callable[..., dict[str, Any]], overrides: dict[str, Any]
) -> None:
    config = DeepseekV41TextConfig(**text_fields(**overrides))
    for name, value in overrides.items():
        if value is not None and name != "rope_scaling":
            assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("hidden_sizes", "hidden_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("engram_layers_ids", "engram_layer_ids"),
        ("moe_intermediat_size", "moe_intermediate_size"),
        ("rope_scalings", "rope_scaling"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_right_name(
    text_fields: Callable[..., dict[str, Any]], wrong: str, right: str
) -> None:
    refused(text_fields(**{wrong: 1}), wrong, f"did you mean '{right}'")


def test_the_outer_and_the_vision_configuration_check_their_fields() -> None:
    for value in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"^image_token_id: "):
            DeepseekV41Config(text_config=DeepseekV41TextConfig(), image_token_id=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^text_confg: .*did you mean 'text_config'"):
        DeepseekV41Config(text_confg={})
    with pytest.raises(ValueError, match=r"^hidden_size: "):
        DeepseekV41Config(text_config={"hidden_size": 0})
    for field in ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio"):
        for value in (0, True, 1.0):
            with pytest.raises(ValueError, match=rf"^{field}: "):
                DeepseekV41Config(vision_config={field: value})
    with pytest.raises(ValueError, match=r"^num_hidden_layers: "):
        DeepseekV41VisionConfig(num_hidden_layers=-1)


# ---------------------------------------------------------------- YaRN settings


def test_yarn_may_stand_under_either_name_and_either_key(text_fields: Callable[..., dict[str, Any]]) -> None:
    yarn = YARN | {"factor": 7}
    reference: Tensor | None = None
    for names in (("rope_scaling",), ("rope_parameters",), ("rope_scaling", "rope_parameters")):
        for key in ("type", "rope_type"):
            fields = text_fields(rope_scaling=None) | dict.fromkeys(names, yarn | {key: "yarn"})
            config = DeepseekV41TextConfig(**fields)
            frequencies = layer_frequencies(config, compressed=True)
            assert reference is None or torch.equal(frequencies, reference)
            reference = frequencies
            assert config.rope_parameters["factor"] == 7
    assert reference is not None
    plain = layer_frequencies(DeepseekV41TextConfig(**text_fields(rope_scaling=None)), compressed=True)
    expected = torch.tensor([160000.0 ** (-pair / 8) for pair in range(8)])
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(reference[-1], expected[-1] / 7)  # the slowest pair is slowed by the whole factor
    assert not torch.allclose(reference, plain)


def test_parameters_alone_replace_the_released_default() -> None:
    config = DeepseekV41TextConfig(rope_parameters=YARN | {"rope_type": "yarn"})
    assert config.rope_parameters["factor"] == 4
    assert config.rope_parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "rope_type"])
def test_contradicting_yarn_settings_are_refused(text_fields: Callable[..., dict[str, Any]], key: str) -> None:
    yarn = YARN | {"rope_type": "yarn"}
    other = yarn | {key: "default" if key == "rope_type" else 50}
    refused(text_fields(rope_scaling=yarn, rope_parameters=other), "rope_scaling", f"{key}=.*contradicts")


def test_a_rotary_base_may_stand_in_the_parameters_but_not_contradict(
    text_fields: Callable[..., dict[str, Any]],
) -> None:
    parameters = YARN | {"rope_type": "yarn", "rope_theta": 700.0}
    fields = text_fields(rope_parameters=parameters)
    refused(fields, "rope_theta", "10000.0 contradicts .*700.0")
    for theta in (None, 700.0):
        assert DeepseekV41TextConfig(**(fields | {"rope_theta": theta})).rope_theta == 700.0
    bare = text_fields(rope_theta=None)
    assert DeepseekV41TextConfig(**bare).rope_theta == 10000.0
    assert DeepseekV41TextConfig(**(bare | {"rope_theta": 300.0})).rope_theta == 300.0


# ---------------------------------------------------------------- sizes of a tokenizer, prefixes


def test_for_tokenizer_fills_open_sizes_of_a_copy(text_fields: Callable[..., dict[str, Any]]) -> None:
    config = DeepseekV41TextConfig(**text_fields(vocab_size=None, engram_compressed_vocab_size=None))
    filled = config.for_tokenizer(512, 403)
    assert (filled.vocab_size, filled.engram_compressed_vocab_size) == (512, 403)
    assert (config.vocab_size, config.engram_compressed_vocab_size) == (None, None)
    assert config.for_tokenizer(512).engram_compressed_vocab_size is None
    fixed = DeepseekV41TextConfig(**text_fields())
    assert fixed.for_tokenizer(500, 403).vocab_size == 512
    with pytest.raises(ValueError, match=r"^vocab_size: 512 .*513"):
        fixed.for_tokenizer(513, 403)
    with pytest.raises(ValueError, match=r"^engram_compressed_vocab_size: 403 .*404"):
        fixed.for_tokenizer(512, 404)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_a_shorter_model_is_a_prefix_of_the_longer_one(
    tiny_model: Callable[..., DeepseekV41ForCausalLM], golden: dict[str, Tensor], layers: int
) -> None:
    long, short = tiny_model(seed=3), tiny_model(seed=3, num_hidden_layers=layers)
    assert short.config.text_config.compress_ratios == [0, 2, 2, 2, 1, 1]
    state = long.state_dict()
    for name, tensor in short.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with torch.no_grad():
        streams = [
            model(golden["input_ids"], golden["attention_mask"], output_hidden_states=True).hidden_states
            for model in (short, long)
        ]
    assert len(streams[0]) == layers + 1
    for ours, theirs in zip(streams[0], streams[1], strict=False):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- switches


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_has_the_choices_that_its_error_names(text_fields: Callable[..., dict[str, Any]], field: str) -> None:
    refused(text_fields(**{field: "off"}), field, f"must be one of .*{SWITCHES[field][0]}.*, got 'off'")
    assert getattr(DeepseekV41TextConfig(), field) == SWITCHES[field][0]


def test_one_stream_is_what_a_plain_residual_has(text_fields: Callable[..., dict[str, Any]]) -> None:
    refused(text_fields(residual="plain"), "hc_mult", "must be 1 with residual 'plain'")
    refused(text_fields(quantized_caches="no"), "quantized_caches", "true or false")
