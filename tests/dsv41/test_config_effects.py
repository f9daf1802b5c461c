"""Every field of the configuration has an effect, is declared metadata, or takes one value alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.checkpoint import load_released
from dsv41.config import METADATA_FIELDS, TRAINING_FIELDS

YARN = {"factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}

Outcome = tuple[str, dict[str, Any]]


def output(**overrides: Any) -> Outcome:
    """Same parameters, other logits."""
    return "output", overrides


def shape(**overrides: Any) -> Outcome:
    """Other parameters."""
    return "shape", overrides


def metadata(value: Any) -> Outcome:
    """Kept in the configuration, without influence."""
    return "metadata", {"value": value}


def other(how: str, **overrides: Any) -> Outcome:
    """A documented effect with a test of its own below."""
    return how, overrides


EFFECTS: dict[str, Outcome] = {
    "vocab_size": shape(vocab_size=600),
    "hidden_size": shape(hidden_size=32),
    "moe_intermediate_size": shape(moe_intermediate_size=24),
    "num_hidden_layers": shape(num_hidden_layers=5),
    "num_attention_heads": shape(num_attention_heads=8),
    "num_key_value_heads": other("refused", num_key_value_heads=2),
    "head_dim": shape(head_dim=48),
    "qk_rope_head_dim": output(qk_rope_head_dim=8),
    "q_lora_rank": shape(q_lora_rank=16),
    "o_lora_rank": shape(o_lora_rank=8),
    "o_groups": shape(o_groups=4),
    "hidden_act": metadata("gelu"),
    "swiglu_limit": output(swiglu_limit=0.5),
    "rms_norm_eps": output(rms_norm_eps=1e-2),
    "attention_bias": metadata(True),
    "attention_dropout": metadata(0.5),
    "initializer_range": other("initial values", initializer_range=0.05),
    "use_cache": metadata(False),
    "max_position_embeddings": other("longest input", max_position_embeddings=39),
    "rope_theta": output(rope_theta=500.0),
    "compress_rope_theta": output(compress_rope_theta=500.0),
    "rope_scaling": output(rope_scaling=YARN | {"rope_type": "yarn", "factor": 16}),
    "rope_parameters": output(rope_parameters=YARN | {"rope_type": "yarn", "factor": 16}, rope_scaling=None),
    "n_routed_experts": shape(n_routed_experts=12),
    "n_shared_experts": shape(n_shared_experts=2),
    "num_experts_per_tok": output(num_experts_per_tok=3),
    "scoring_func": other("refused", scoring_func="softmax"),
    "topk_method": metadata("greedy"),
    "norm_topk_prob": output(norm_topk_prob=False),
    "routed_scaling_factor": output(routed_scaling_factor=2.5),
    "router_bias_update_rate": other("training", router_bias_update_rate=0.01),
    "router_balance_loss_weight": other("training", router_balance_loss_weight=0.01),
    "attention": shape(attention="window"),
    "quantized_caches": output(quantized_caches=False),
    "sliding_window": output(sliding_window=5),
    "compress_ratios": output(compress_ratios=[0, 3, 3, 3, 1, 1]),
    "kv_source_layer_ids": shape(kv_source_layer_ids=[1, 3, 4]),
    "index_source_layer_ids": shape(index_source_layer_ids=[1, 2, 3, 4, 5]),
    "index_n_heads": shape(index_n_heads=2),
    "index_head_dim": shape(index_head_dim=16),
    "index_topk": output(index_topk=3),
    "indexer": other("training", indexer="learned"),
    "candidate_source_layer_id": output(candidate_source_layer_id=-1),
    "candidate_topk_blocks": output(candidate_topk_blocks=2),
    "candidate_block_size": output(candidate_block_size=3),
    "residual": output(residual="hyper_connections"),
    "hc_mult": shape(hc_mult=2),
    "hc_sinkhorn_iters": output(hc_sinkhorn_iters=1),
    "hc_eps": output(hc_eps=1e-2),
    "engram_layer_ids": shape(engram_layer_ids=[1], engram_num_embeddings=[408]),
    "engram_num_embeddings": shape(engram_num_embeddings=[408, 490]),
    "engram_max_ngram_size": shape(engram_max_ngram_size=4, engram_num_embeddings=None),
    "engram_vocab_size": shape(engram_vocab_size=89, engram_num_embeddings=None),
    "engram_n_heads": shape(engram_n_heads=1, engram_num_embeddings=None),
    "engram_head_dim": shape(engram_head_dim=8),
    "engram_gate": shape(engram_gate="open"),
    "engram_token_map": output(engram_token_map="raw", engram_compressed_vocab_size=None),
    "engram_pad_token_id": output(engram_pad_token_id=100),
    "engram_compressed_vocab_size": other("contradicts the tokenizer", engram_compressed_vocab_size=402),
    "num_nextn_predict_layers": metadata(1),
    "dspark_block_size": metadata(3),
    "dspark_noise_token_id": metadata(7),
    "dspark_target_layer_ids": metadata([4, 5]),
    "dspark_markov_rank": metadata(8),
    "dspark_n_routed_experts": metadata(4),
    "dspark_num_experts_per_tok": metadata(2),
    "bos_token_id": metadata(10),
    "eos_token_id": metadata(11),
    "pad_token_id": metadata(12),
    "tie_word_embeddings": other("refused", tie_word_embeddings=True),
}


def fields_with(kind: str) -> list[str]:
    return [name for name, (how, _) in EFFECTS.items() if how == kind]


@pytest.fixture
def build(
    text_fields: Callable[..., dict[str, Any]], golden_tokenizer: Tokenizer
) -> Callable[..., DeepseekV41ForCausalLM]:
    """Tiny model with the given text fields, seed 0."""

    def make(**overrides: Any) -> DeepseekV41ForCausalLM:
        torch.manual_seed(0)
        config = DeepseekV41Config(text_config=DeepseekV41TextConfig(**text_fields(**overrides)))
        return DeepseekV41ForCausalLM(config, tokenizer=golden_tokenizer)

    return make


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def golden_logits(model: DeepseekV41ForCausalLM, folder: Path, golden: dict[str, Tensor]) -> Tensor:
    load_released(model, folder / "weights")
    return model(golden["input_ids"], golden["attention_mask"]).logits[golden["attention_mask"].bool()]


def test_every_parameter_of_the_constructor_is_in_the_table_and_in_the_docstring() -> None:
    parameters = inspect.signature(DeepseekV41TextConfig.__init__).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    assert set(EFFECTS) == names, "a new field needs an entry that shows its effect"
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(DeepseekV41TextConfig) or "", re.MULTILINE)
    assert set(documented) >= names


def test_the_table_agrees_with_the_declared_metadata() -> None:
    only_one_value = {"num_key_value_heads", "tie_word_embeddings"}
    assert set(fields_with("metadata")) | only_one_value == set(METADATA_FIELDS)
    assert len(METADATA_FIELDS) == len(set(METADATA_FIELDS))


@pytest.mark.parametrize("field", fields_with("output"))
def test_function_fields_move_the_outputs(
    build: Callable[..., DeepseekV41ForCausalLM], golden_dir: Path, golden: dict[str, Tensor], field: str
) -> None:
    reference = golden["logits"][golden["attention_mask"].bool()]
    moved = golden_logits(build(**EFFECTS[field][1]), golden_dir, golden)
    assert moved.isfinite().all()
    # Far beyond the rounding difference of 1e-4 that an unchanged model may have.
    assert float((moved - reference).abs().max()) > 1e-2


@pytest.mark.parametrize("field", fields_with("shape"))
def test_size_fields_move_the_parameters(build: Callable[..., DeepseekV41ForCausalLM], field: str) -> None:
    model = build(**EFFECTS[field][1])
    assert shapes(model) != shapes(build())
    ids = torch.randint(512, (1, 20), generator=torch.Generator().manual_seed(0))
    assert model(ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("field", fields_with("metadata"))
def test_metadata_fields_are_kept_and_change_nothing(
    build: Callable[..., DeepseekV41ForCausalLM], golden_dir: Path, golden: dict[str, Tensor], field: str
) -> None:
    plain, model = build(), build(**{field: EFFECTS[field][1]["value"]})
    assert getattr(plain.config.text_config, field) != EFFECTS[field][1]["value"]
    assert getattr(model.config.text_config, field) == EFFECTS[field][1]["value"]
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(golden_logits(model, golden_dir, golden), golden_logits(plain, golden_dir, golden))


def test_the_table_agrees_with_the_declared_training_fields() -> None:
    assert set(fields_with("training")) == set(TRAINING_FIELDS)


@pytest.mark.parametrize("field", fields_with("training"))
def test_training_fields_move_neither_outputs_nor_the_gradients_of_the_language_model(
    build: Callable[..., DeepseekV41ForCausalLM], golden_dir: Path, golden: dict[str, Tensor], field: str
) -> None:
    found = []
    for model in (build(), build(**EFFECTS[field][1])):
        logits = golden_logits(model, golden_dir, golden)
        model.train()
        model(golden["input_ids"], golden["attention_mask"], labels=golden["labels"]).loss.backward()
        found.append((logits, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (plain_logits, plain), (logits, gradients) = found
    assert torch.equal(logits, plain_logits)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        theirs = plain[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or torch.equal(gradient, theirs), name


@pytest.mark.parametrize("field", fields_with("refused"))
def test_fields_with_one_possible_value_refuse_others(text_fields: Callable[..., dict[str, Any]], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        DeepseekV41TextConfig(**text_fields(**EFFECTS[field][1]))


def test_initializer_range_is_the_deviation_of_fresh_weights(build: Callable[..., DeepseekV41ForCausalLM]) -> None:
    for std in (0.02, 0.05):
        matrices = [p.detach() for p in build(initializer_range=std).parameters() if p.dim() > 1 and p.numel() > 2000]
        assert len(matrices) > 50
        for matrix in matrices:
            assert float(matrix.std()) == pytest.approx(std, rel=0.1)


def test_max_position_embeddings_is_the_longest_input(build: Callable[..., DeepseekV41ForCausalLM]) -> None:
    model = build(**EFFECTS["max_position_embeddings"][1])
    ids = torch.ones(1, 40, dtype=torch.int64)
    assert model(ids[:, :39]).logits.shape == (1, 39, 512)
    with pytest.raises(ValueError, match=r"^input_ids: .*40 exceeds max_position_embeddings=39"):
        model(ids)


def test_a_compressed_size_that_contradicts_the_tokenizer_builds_no_model(
    build: Callable[..., DeepseekV41ForCausalLM],
) -> None:
    with pytest.raises(ValueError, match=r"^engram_compressed_vocab_size: 402 .*403"):
        build(**EFFECTS["engram_compressed_vocab_size"][1])
