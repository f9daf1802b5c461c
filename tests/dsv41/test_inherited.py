"""Every public method that transformers and torch give the model works as its name says, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsv41 import BackendConfig, DeepseekV41ForCausalLM

Make = Callable[..., DeepseekV41ForCausalLM]
IDS = torch.randint(512, (2, 20), generator=torch.Generator().manual_seed(0))
OTHER_IDS = torch.randint(512, (2, 20), generator=torch.Generator().manual_seed(1))

# What each method of PreTrainedModel (nn.Module's apart) is called with; where it is refused, the error beside.
WORKS: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing_disable": (),
    "activation_checkpointing_enable": (),
    "add_model_tags": ("tag",),
    "can_generate": (),
    "disable_input_require_grads": (),
    "enable_input_require_grads": (),
    "eval": (),
    "float": (),
    "get_correct_attn_implementation": ("eager",),
    "get_correct_experts_implementation": ("eager",),
    "get_decoder": (),
    "get_encoder": (),
    "get_expanded_tied_weights_keys": (),
    "get_experts_implementation": (),
    "get_input_embeddings": (),
    "get_memory_footprint": (),
    "get_output_embeddings": (),
    "get_parameter_or_buffer": ("lm_head.weight",),
    "gradient_checkpointing_disable": (),
    "gradient_checkpointing_enable": (),
    "half": (),
    "init_parallel_plans": (),
    "init_weights": (),
    "initialize_weights": (),
    "is_backend_compatible": (),
    "is_custom_code": (),
    "is_remote_code": (),
    "named_non_persistent_buffers": (),
    "num_parameters": (),
    "post_init": (),
    "register_for_auto_class": (),
    "resize_token_embeddings": (512,),
    "set_attn_implementation": ("eager",),
    "set_experts_implementation": ("eager",),
    "set_use_kernels": (False,),
    "tie_weights": (),
    "to": ("cpu",),
    "train": (),
    "warn_if_padding_and_no_attention_mask": (IDS, torch.ones_like(IDS)),
}
REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "dequantize": ((), NotImplementedError, "^dequantize: weights are plain floats"),
    "get_compiled_call": ((None,), NotImplementedError, "^get_compiled_call: not there yet"),
    "get_position_embeddings": ((), NotImplementedError, "^get_position_embeddings: positions are rotations"),
    "resize_position_embeddings": ((9,), NotImplementedError, "^resize_position_embeddings: .*max_position_embeddings"),
    "save_distributed_checkpoint": (
        ("out",),
        NotImplementedError,
        "^save_distributed_checkpoint: call save_",
    ),
    "set_decoder": ((nn.Identity(),), NotImplementedError, "^set_decoder: the decoder belongs"),
    "set_encoder": ((nn.Identity(),), NotImplementedError, "^set_encoder: .* without an encoder"),
    "set_input_embeddings": ((nn.Embedding(9, 64),), ValueError, r"^set_input_embeddings: .*Embedding\(512, 64\)"),
    "set_output_embeddings": ((nn.Linear(64, 512),), ValueError, r"^set_output_embeddings: .*64, 512, bias=False\)"),
}
PROPERTIES = {
    "base_model": DeepseekV41ForCausalLM,
    "can_record_outputs": object,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "dummy_inputs": object,
    "ep_plan": None,
    "fsdp_plan": None,
    "fsdp_size": None,
    "is_activation_checkpointing": False,
    "is_distributed_loading_by_transformers": False,
    "is_gradient_checkpointing": False,
    "loss_function": object,
    "pp_plan": object,
    "supports_context_parallel": False,
    "supports_gradient_checkpointing": True,
    "supports_pp_plan": False,
    "supports_tp_plan": False,
    "tp_plan": object,
    "tp_size": None,
    "use_kernels": False,
}
# Tested in weights/test_pretrained.py, or on a GPU alone.
ELSEWHERE = {"from_pretrained", "save_pretrained", "push_to_hub", "cuda"}
# Of the package peft, which they ask for.
ADAPTERS = {
    "active_adapters",
    "add_adapter",
    "delete_adapter",
    "disable_adapters",
    "enable_adapters",
    "enable_peft_hotswap",
    "get_adapter_state_dict",
    "load_adapter",
    "set_adapter",
}
# Steps of transformers' own loader and writer, which are not used.
LOADERS_STEPS = {
    "barrier_after_gathered_checkpoint_save",
    "gather_sharded_state_dict_for_save",
    "get_init_context",
    "mark_tied_weights_as_initialized",
    "maybe_distribute_model",
    "prepare_distribute_model",
    "retrieve_modules_from_names",
    "should_save_on_this_rank",
}
DATA = {
    "base_model_prefix",
    "config_class",
    "generation_config_class",
    "input_modalities",
    "main_input_name",
    "model_tags",
}


def public_names() -> set[str]:
    """Of `PreTrainedModel` and its mixins, without what comes from `nn.Module` unchanged."""
    return {
        name
        for owner in PreTrainedModel.__mro__
        if owner not in (nn.Module, object)
        for name in vars(owner)
        if not name.startswith("_")
    }


def call(model: DeepseekV41ForCausalLM, name: str, arguments: tuple[Any, ...]) -> Any:
    """A method called; None where the installed transformers does not have it."""
    return getattr(model, name)(*arguments) if hasattr(model, name) else None


@torch.no_grad()
def logits(model: DeepseekV41ForCausalLM, ids: Tensor = IDS) -> Tensor:
    return model.eval()(ids).logits


# ---------------------------------------------------------------- all of them


def test_no_public_method_of_transformers_is_unknown() -> None:
    """A new one of a new version has to be looked at."""
    listed = set(WORKS) | set(REFUSED) | set(PROPERTIES) | ELSEWHERE | ADAPTERS | LOADERS_STEPS | DATA
    assert public_names() - listed == set()


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")
def test_what_works_leaves_a_model_that_works(tiny_model: Make, name: str) -> None:
    model = tiny_model(num_hidden_layers=2)
    expected = logits(model)
    call(model, name, WORKS[name])
    if name not in ("half", "init_weights", "initialize_weights", "post_init"):
        assert torch.equal(logits(model), expected)
    loss = model.train()(IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name_and_changes_nothing(tiny_model: Make, name: str) -> None:
    model = tiny_model(num_hidden_layers=2)
    expected = logits(model)
    arguments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        getattr(model, name)(*arguments)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_say_what_is_so(tiny_model: Make, name: str) -> None:
    model = tiny_model(num_hidden_layers=2)
    if hasattr(PreTrainedModel, name):
        value, expected = getattr(model, name), PROPERTIES[name]
        assert expected is object or isinstance(expected, type) or value == expected


def test_numbers_about_the_model_are_true(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    held = [*model.parameters(), *model.buffers()]
    assert model.get_memory_footprint() == sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert model.bfloat16().dtype == torch.bfloat16
    assert model.base_model is model.get_decoder() is model.model


# ---------------------------------------------------------------- casts


CASTS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "to": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to_keyword": (lambda m: m.to(dtype=torch.float16), torch.float16),
    "to_both": (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
    "to_like": (lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    "double": (lambda m: m.double(), torch.float64),
    "float": (lambda m: m.double().float(), torch.float32),
    "back": (lambda m: m.double().half(), torch.float16),
    "around": (lambda m: nn.ModuleList([m]).bfloat16(), torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_keep_fp32_what_has_to_stay_so(tiny_model: Make, cast: str) -> None:
    model, expected = tiny_model(), tiny_model()
    generator = torch.Generator().manual_seed(2)
    for one, other in zip(model.buffers(), expected.buffers(), strict=True):
        if one.is_floating_point():
            one.copy_(torch.randn(one.shape, generator=generator))
            other.copy_(one)
    narrow, dtype = CASTS[cast]
    narrow(model)
    expected.cast_parameters(dtype)
    if dtype == torch.float64:  # router biases are as wide as the model, and never narrower than fp32
        for module in expected.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.double())
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(expected, kind)())
        for name, value in getattr(model, kind)():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
    assert torch.equal(logits(model), logits(expected))


def test_gradients_are_cast_like_their_parameters(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    model(IDS, labels=IDS).loss.backward()
    model.bfloat16()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_casts_to_what_no_parameter_can_be_are_refused(tiny_model: Make, dtype: torch.dtype) -> None:
    model = tiny_model(num_hidden_layers=2)
    expected = logits(model)
    with pytest.raises(TypeError, match="dtype: parameters can be float32, bfloat16, float16, float64, not "):
        model.type(dtype)
    assert torch.equal(logits(model), expected)


# ---------------------------------------------------------------- embeddings, recomputation


@pytest.mark.parametrize("arguments", [(511,), (513,), (None, 100)], ids=str)
def test_another_vocabulary_is_refused_and_the_same_is_not(tiny_model: Make, arguments: tuple[Any, ...]) -> None:
    model = tiny_model(num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match=r"^resize_token_embeddings: the vocabulary stays at 512 ids"):
        model.resize_token_embeddings(*arguments)
    for same in ((), (512,), (None, 128), (500, 512)):
        assert model.resize_token_embeddings(*same) is model.model.embed_tokens
    assert model.lm_head.out_features == model.config.text_config.vocab_size == 512


def test_embeddings_of_the_same_shape_take_the_places_of_the_models(tiny_model: Make) -> None:
    model, other = tiny_model(num_hidden_layers=2), tiny_model(num_hidden_layers=2, seed=1)
    assert not torch.equal(logits(model), logits(other))
    model.set_input_embeddings(other.get_input_embeddings())
    model.set_output_embeddings(other.get_output_embeddings())
    model.model.load_state_dict(other.model.state_dict())
    assert torch.equal(logits(model), logits(other))
    with pytest.raises(ValueError, match=r"^set_output_embeddings: .*in fp32"):
        model.set_output_embeddings(nn.Linear(64, 512, bias=False).bfloat16())


def test_recomputation_is_the_backends(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.backend == model.model.backend == BackendConfig(gradient_checkpointing=True)
    assert model.is_activation_checkpointing
    ran: list[int] = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: ran.append(1))
    model.train()(IDS, labels=IDS).loss.backward()
    assert len(ran) == 2
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    for options in ({"every_n_layers": 2}, {"offload": True}):
        with pytest.raises(ValueError, match=f"^gradient_checkpointing_enable: {next(iter(options))}="):
            model.activation_checkpointing_enable(**options)
    with pytest.raises(ValueError, match="use_reentrant=True is not possible"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.is_activation_checkpointing


def test_frozen_embeddings_pass_gradients_on_if_asked(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2).requires_grad_(False)
    model.enable_input_require_grads()
    assert model(IDS).logits.requires_grad
    model.disable_input_require_grads()
    assert not model(IDS).logits.requires_grad


@pytest.mark.parametrize(
    ("method", "value", "field"),
    [
        ("set_attn_implementation", "sdpa", "attn"),
        ("set_experts_implementation", "grouped_mm", "experts"),
        ("set_use_kernels", True, "attn"),
    ],
)
def test_implementations_are_chosen_by_the_backend(tiny_model: Make, method: str, value: Any, field: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{method}: .*BackendConfig\({field}="):
        getattr(tiny_model(num_hidden_layers=2), method)(value)


def test_drawing_anew_keeps_dtypes_and_values(tiny_model: Make) -> None:
    model, expected = tiny_model(num_hidden_layers=2), tiny_model(num_hidden_layers=2)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.post_init()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# ---------------------------------------------------------------- arguments of forward


NOTHING = {
    "use_cache": (None, False),
    "past_key_values": (None,),
    "cache_position": (None,),
    "inputs_embeds": (None,),
    "token_type_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict": (None, True),
}


def test_arguments_that_ask_for_nothing_are_taken(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    expected = logits(model)
    for index in (0, -1):
        chosen: dict[str, Any] = {name: values[index] for name, values in NOTHING.items()}
        out = model(input_ids=IDS, attention_mask=None, labels=None, **chosen)
        assert torch.equal(out.logits, expected)
        assert out.hidden_states is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"use_cache": True}, ValueError, "^use_cache: must be None or False: there is no inference cache"),
        ({"past_key_values": ()}, ValueError, "^past_key_values: must be None: there is no inference cache"),
        ({"output_attentions": True}, ValueError, "^output_attentions: must be None or False"),
        ({"inputs_embeds": torch.zeros(2, 20, 64)}, ValueError, "^inputs_embeds: must be None: .*pass input_ids"),
        ({"token_type_ids": IDS}, ValueError, "^token_type_ids: .*return_token_type_ids=False"),
        ({"return_dict": False}, ValueError, r"^return_dict: must be None or True: .*to_tuple\(\)"),
        ({"num_items_in_batch": 7}, ValueError, "^num_items_in_batch: .*the loss is a mean"),
        ({"attn_mask": IDS}, TypeError, "^forward: no argument attn_mask; there are input_ids, attention_mask, .*"),
    ],
    ids=str,
)
def test_arguments_that_ask_for_what_is_not_there_are_refused(
    tiny_model: Make, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_model(num_hidden_layers=2)(input_ids=None if "inputs_embeds" in options else IDS, **options)


def test_a_forward_needs_ids(tiny_model: Make) -> None:
    with pytest.raises(ValueError, match=r"^input_ids: missing; int32 or int64"):
        tiny_model(num_hidden_layers=2)()


def test_generation_says_that_it_is_not_there_yet(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    assert not model.can_generate()
    for method in (model.generate, model.prepare_inputs_for_generation):
        with pytest.raises(NotImplementedError, match=rf"^{method.__name__}: not there yet: .*logits\[:, -1\]"):
            method(IDS, max_new_tokens=3)


# ---------------------------------------------------------------- copies, programs


def test_copies_and_pickles_are_the_model(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    expected = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), expected)
        with torch.no_grad():
            again.model.embed_tokens.weight.zero_()
        assert torch.equal(logits(model), expected)


def test_state_dicts_that_do_not_fit_are_refused_by_name(tiny_model: Make) -> None:
    model = tiny_model(num_hidden_layers=2)
    state = model.state_dict()
    state["lm_head.weight"] = torch.zeros(3, 64)
    with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight"):
        model.load_state_dict(state)
    del state["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*lm_head.weight"):
        model.load_state_dict(state)


def test_an_exported_program_gives_the_models_logits(tiny_model: Make) -> None:
    """Of other ids than it was traced with. Experts one after another need counts, so a program has them dense."""
    sizes = {"num_hidden_layers": 2}
    model = tiny_model(**sizes).eval()
    program = torch.export.export(model, (IDS,)).module()
    dense = tiny_model(backend=BackendConfig(experts="dense"), **sizes)
    assert torch.equal(program(OTHER_IDS).logits, logits(dense, OTHER_IDS))
    assert not torch.equal(program(IDS).logits, program(OTHER_IDS).logits)
    torch.testing.assert_close(program(OTHER_IDS).logits, logits(model, OTHER_IDS), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_by_torchscript_is_refused(tiny_model: Make) -> None:
    with pytest.raises(NotImplementedError, match=r"^torch.jit.trace: .*torch.export.export"):
        torch.jit.trace(tiny_model(num_hidden_layers=2), (IDS,))
