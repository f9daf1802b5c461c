"""Methods that `PreTrainedModel` and `nn.Module` give the model: adapted to it, or refused with the reason.

Every public method of both either does what its name says here, or raises an error that begins with its name; a test
goes through all of them. Casts keep fp32 what has to stay fp32 (ARCHITECTURE 9), whatever calls them.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41Config

P = ParamSpec("P")
R = TypeVar("R")

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Arguments of a forward that other models of transformers take: values that ask for nothing, and why others cannot be.
_FORWARD_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((None, False), "there is no inference cache, each call computes all positions"),
    "past_key_values": ((None,), "there is no inference cache, each call computes all positions"),
    "cache_position": ((None,), "there is no inference cache, each call computes all positions"),
    "inputs_embeds": ((None,), "the model needs token ids, which its Engram hashes; pass input_ids"),
    "token_type_ids": ((None,), "there are no token types; call the tokenizer with return_token_type_ids=False"),
    "output_attentions": ((None, False), "attention probabilities are never all in memory"),
    "output_router_logits": ((None, False), "router scores are not kept; the output's report has the experts' load"),
    "head_mask": ((None,), "heads cannot be masked"),
    "num_items_in_batch": ((None,), "the loss is a mean; the output's report has its sum and count"),
    "return_dict": ((None, True), "the result is always a DeepseekV41Output; its to_tuple() gives a tuple"),
}
_NO_GENERATION = (
    "not there yet: there is no inference cache; each call of the model computes all positions, so take the next id "
    "from logits[:, -1] and append it to input_ids"
)


def _refuse(method: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"{method}: {reason}")


def check_forward_options(options: dict[str, Any], forward: Callable[..., Any]) -> None:
    """Check keyword arguments of a forward that it does not have.

    Args:
        options: By name.
        forward: The method, whose arguments an error lists.

    Raises:
        ValueError: An argument of other models has a value that asks for something.
        TypeError: There is no such argument.
    """
    for name, value in options.items():
        if name not in _FORWARD_OPTIONS:
            parameters = inspect.signature(forward).parameters.values()
            known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
            raise TypeError(f"forward: no argument {name}; there are {', '.join(known)}")
        nothing, reason = _FORWARD_OPTIONS[name]
        if not any(value is allowed for allowed in nothing):
            raise ValueError(f"{name}: must be {' or '.join(map(str, nothing))}: {reason}")


def for_inference_when_exported(forward: Callable[P, R]) -> Callable[P, R]:
    """A forward that `torch.export` traces without gradients, and that `torch.jit.trace` gets an error from.

    The exported program is one of inference: autograd functions are traced through, and some write in place.
    """

    @functools.wraps(forward)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_exporting():
            with torch.no_grad():
                return forward(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            raise NotImplementedError(
                "torch.jit.trace: how many tokens each expert gets would be fixed to those of the example; "
                "torch.export.export(model.eval(), (input_ids,)) works"
            )
        return forward(*args, **kwargs)

    return guarded


class InheritedMethods(PreTrainedModel):
    """Base class of the language model, with the methods of `PreTrainedModel` that need another meaning."""

    config_class = DeepseekV41Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # transformers' Trainer: `forward` takes keyword arguments, but none that a loss is divided by.
    accepts_loss_kwargs = False
    config: DeepseekV41Config
    backend: BackendConfig
    model: Any  # DeepseekV41Model, which stands above this file
    lm_head: nn.Linear

    # ------------------------------------------------------------------ folders and hubs

    # They stand above the model (`dsv41.weights`), so these import them when they are called.

    @classmethod
    def _from_config(cls, config: DeepseekV41Config, **options: Any) -> Self:
        """Freshly drawn model; see `dsv41.weights.pretrained.from_config`."""
        from dsv41.weights.pretrained import from_config

        made: Self = from_config(cast(Any, cls), config, **options)
        return made

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any
    ) -> Self:
        """Model with the weights of a folder; see `dsv41.weights.pretrained.from_pretrained` for options and errors."""
        from dsv41.weights.pretrained import from_pretrained

        loaded: Self = from_pretrained(cast(Any, cls), pretrained_model_name_or_path, **options)
        return loaded

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **options: Any
    ) -> Any:
        """Write weights, configuration, tokenizer and card; see `dsv41.weights.pretrained.save_pretrained`."""
        from dsv41.weights.pretrained import save_pretrained

        return save_pretrained(cast(Any, self), save_directory, **options)

    def save_distributed_checkpoint(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: the ranks of a sharded model write one folder together."""
        _refuse("save_distributed_checkpoint", "call save_pretrained on all ranks, which write one folder together")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: importing `dsv41` registers the class, and exports bring the module that imports it."""

    # ------------------------------------------------------------------ dtypes

    def stays_fp32(self, name: str) -> bool:
        """Whether a parameter is fp32 in a model of a narrower dtype."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Every cast and move of `nn.Module`, also one that starts at a module around this one, passes through here.

        Raises:
            TypeError: A cast of parameters to a dtype that they cannot have.
        """
        kept = set()
        for name, parameter in self.named_parameters():
            if self.stays_fp32(name):
                kept |= {id(parameter), id(parameter.grad)}
        buffers = {id(buffer) for buffer in self.buffers()}

        def converted(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.dtype == tensor.dtype:
                return out
            if not tensor.is_floating_point():
                return tensor.to(out.device)
            if id(tensor) in buffers:
                # Router biases: a float64 model has them wide, no cast makes them narrower than fp32.
                return out if out.dtype in (torch.float32, torch.float64) else tensor.to(out.device, torch.float32)
            if out.dtype not in PARAMETER_DTYPES:
                valid = ", ".join(str(kind).removeprefix("torch.") for kind in PARAMETER_DTYPES)
                raise TypeError(f"dtype: parameters can be {valid}, not {str(out.dtype).removeprefix('torch.')}")
            if id(tensor) in kept and out.dtype != torch.float64:
                return tensor.to(out.device, torch.float32)
            return out

        applied: Self = super()._apply(converted, recurse)
        return applied

    def initialize_weights(
        self, buffer_device: torch.device | str | None = None, dtype: torch.dtype | None = torch.bfloat16
    ) -> None:
        """Draw all parameters; the model has it."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """Draw all parameters anew, in the dtypes that they have; `post_init` of transformers calls it."""
        self.initialize_weights(dtype=None)

    def dequantize(self, dtype: torch.dtype | None = None) -> NoReturn:
        """Refused: weights are plain floats from the moment they are read."""
        _refuse("dequantize", "weights are plain floats in memory, whatever format they were read from")

    # ------------------------------------------------------------------ embeddings

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary projection."""
        return self.lm_head

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding.

        Raises:
            ValueError: It is not an `nn.Embedding` of the same shape.
        """
        own = self.model.embed_tokens
        if not isinstance(value, nn.Embedding) or value.weight.shape != own.weight.shape:
            raise ValueError(f"set_input_embeddings: must be an nn.Embedding{tuple(own.weight.shape)}, got {value}")
        self.model.embed_tokens = value

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the vocabulary projection.

        Raises:
            ValueError: It is not an `nn.Linear` of the same shape without bias, or is narrower than fp32.
        """
        own = self.lm_head
        fits = (
            isinstance(new_embeddings, nn.Linear)
            and new_embeddings.weight.shape == own.weight.shape
            and new_embeddings.bias is None
            and new_embeddings.weight.dtype in (torch.float32, torch.float64)
        )
        if not fits:
            raise ValueError(
                f"set_output_embeddings: must be an nn.Linear({own.in_features}, {own.out_features}, bias=False) in "
                f"fp32, got {new_embeddings}"
            )
        assert isinstance(new_embeddings, nn.Linear)
        self.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """The token embedding, if the size asked for is the one that it has; any other is refused."""
        size = self.model.embed_tokens.num_embeddings
        wanted = size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != size:
            _refuse(
                "resize_token_embeddings",
                f"the vocabulary stays at {size} ids, since the Engram hashes the ids of one tokenizer; build a model "
                "with another text_config.vocab_size instead (a tokenizer may have fewer ids)",
            )
        return self.model.embed_tokens

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> NoReturn:
        """Refused: positions are rotations."""
        _refuse("resize_position_embeddings", "positions are rotations; set text_config.max_position_embeddings")

    def get_position_embeddings(self) -> NoReturn:
        """Refused likewise."""
        _refuse("get_position_embeddings", "positions are rotations, there is no table of them")

    def tie_weights(self, *args: Any, **options: Any) -> None:
        """Nothing to do: embedding and head are separate matrices."""

    def get_decoder(self) -> nn.Module:
        """The decoder without its head."""
        return self.model

    def set_decoder(self, decoder: nn.Module) -> NoReturn:
        """Refused: the decoder carries configuration and hash tables."""
        _refuse("set_decoder", "the decoder belongs to the configuration and tokenizer; build another model instead")

    def set_encoder(self, encoder: nn.Module, modality: str | None = None) -> NoReturn:
        """Refused: there is none."""
        _refuse("set_encoder", "the model is a decoder without an encoder")

    # ------------------------------------------------------------------ implementation choices

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **options: Any) -> None:
        """Refused except for "eager", which transformers writes into every configuration and which changes nothing."""
        if attn_implementation != "eager":
            _refuse("set_attn_implementation", "choose by backend=BackendConfig(attn=...) when it is built")

    def set_experts_implementation(self, experts_implementation: Any, *args: Any, **options: Any) -> None:
        """Refused except for "eager", likewise."""
        if experts_implementation != "eager":
            _refuse(
                "set_experts_implementation", "choose by backend=BackendConfig(experts=...) when the model is built"
            )

    def set_use_kernels(self, use_kernels: bool, *args: Any, **options: Any) -> None:
        """Refused except for False: implementations are those of `BackendConfig`."""
        if use_kernels:
            _refuse("set_use_kernels", "no kernels of the hub fit; choose by BackendConfig(attn=..., experts=...)")

    @property
    def supports_tp_plan(self) -> bool:
        """False: models are sharded by the training strategies."""
        return False

    @property
    def supports_pp_plan(self) -> bool:
        """False, likewise."""
        return False

    def _checkpoint_blocks(self, enabled: bool) -> None:
        self.backend = self.model.backend = replace(self.backend, gradient_checkpointing=enabled)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Recompute blocks in the backward pass, like ``BackendConfig(gradient_checkpointing=True)``.

        Args:
            gradient_checkpointing_kwargs: None or ``{"use_reentrant": False}``.
            **options: `every_n_layers` and `offload` with values that ask for nothing.

        Raises:
            ValueError: Another way of recomputing is asked for.
        """
        chosen = (gradient_checkpointing_kwargs or {}) | options
        nothing: dict[str, Any] = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
        for name, value in chosen.items():
            if name not in nothing or value != nothing[name]:
                valid = ", ".join(f"{key}={only}" for key, only in nothing.items())
                raise ValueError(f"gradient_checkpointing_enable: {name}={value!r} is not possible, only {valid}")
        self._checkpoint_blocks(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of all blocks, like ``BackendConfig(gradient_checkpointing=False)``."""
        self._checkpoint_blocks(False)

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass."""
        return self.backend.gradient_checkpointing

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Older name of `is_activation_checkpointing`."""
        return self.backend.gradient_checkpointing

    # ------------------------------------------------------------------ generation

    @classmethod
    def can_generate(cls) -> bool:
        """False: see `generate`."""
        return False

    def generate(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: generation is not there yet."""
        _refuse("generate", _NO_GENERATION)

    def prepare_inputs_for_generation(self, *args: Any, **options: Any) -> NoReturn:
        """Refused likewise; the attribute is what adapters of type CAUSAL_LM keep hold of when they wrap the model."""
        _refuse("prepare_inputs_for_generation", _NO_GENERATION)

    def get_compiled_call(self, *args: Any, **options: Any) -> NoReturn:
        """Refused likewise."""
        _refuse("get_compiled_call", _NO_GENERATION)
