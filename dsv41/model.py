"""The decoder (ARCHITECTURE 2): embedding, blocks with single-pass mHC, final norm, fp32 head, loss.

Differs from a textbook decoder:
- C residual streams per token; each site reads a mixture of them and writes to all of them.
- The mixture that a site reads with was predicted by the site BEFORE it (`pre_mix` is carried, one-hot at the start).
- Engram layers write hashed n-gram memory into the streams before their block's attention.
- Attention layers share compressed keys and selections through an immutable state (see `attention.py`).
- Embedding and head are separate; head weights and logits are fp32.

Parallelism is not in here.

Shapes: B batch, S sequence, C streams, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from dsv41.attention import AttentionState, DeepseekV41Attention, build_attention
from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41Config, DeepseekV41TextConfig
from dsv41.engram import build_engram
from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.engram.table import EngramTable
from dsv41.engram.token_map import fast_backend
from dsv41.hyper_connections import build_residual
from dsv41.inherited import InheritedMethods, check_forward_options, for_inference_when_exported
from dsv41.initialization import initialize_parameters
from dsv41.inputs import TokenInputs, check_inputs, check_labels, select_positions
from dsv41.moe import DeepseekV41MoE, RouterReport
from dsv41.ops import cross_entropy
from dsv41.ops.mixing import collapse
from dsv41.ops.norm import RMSNorm
from dsv41.ops.precision import full_precision, widen

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer

# Parameters that stay fp32 in a bf16 model, by the end of their names (ARCHITECTURE 9).
FP32_SUFFIXES = ("attn_sink", "_hc.fn", "_hc.base", "_hc.scale", "lm_head.weight")


class DeepseekV41Block(nn.Module):
    """Engram (where the layer has one), attention site, MoE site.

    Args:
        config: Text configuration.
        layer_idx: Zero-based layer.
        backend: Implementation choices.
        engram_process_group: Ranks that share the rows of an Engram table; None holds it whole.
    """

    def __init__(
        self,
        config: DeepseekV41TextConfig,
        layer_idx: int,
        backend: BackendConfig,
        engram_process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.engram = (
            build_engram(config, layer_idx, backend, engram_process_group)
            if layer_idx in config.active_engram_layer_ids
            else None
        )
        self.attn_hc = build_residual(config, backend)
        self.attn_norm = RMSNorm(hidden, eps)
        self.attn = build_attention(config, layer_idx, backend)
        self.ffn_hc = build_residual(config, backend)
        self.ffn_norm = RMSNorm(hidden, eps)
        self.ffn = DeepseekV41MoE(config, backend)

    def forward(
        self,
        hidden_states: Tensor,
        pre_mix: Tensor,
        state: AttentionState,
        tokens: TokenInputs,
    ) -> tuple[Tensor, Tensor, AttentionState, RouterReport]:
        """Run the block.

        Args:
            hidden_states: Streams [B, S, C, H].
            pre_mix: Carried mixture [B, S, C] of the site before, fp32 (float64 in a float64 model).
            state: What earlier layers published.
            tokens: Positions, masks and hash ids of the batch.

        Returns:
            Streams, carried mixture and state for the next block, and what the router tells.

        Raises:
            TypeError: `pre_mix` lost its precision on the way here (a mixed-precision policy cast it).
        """
        expected = torch.promote_types(hidden_states.dtype, torch.float32)
        if pre_mix.dtype != expected:
            raise TypeError(f"pre_mix: carried mixing coefficients must stay {expected}, got {pre_mix.dtype}")
        if self.engram is not None:
            assert tokens.engram_hash_ids is not None
            ids = tokens.engram_hash_ids[:, :, self.engram.layer_hash_index]
            hidden_states = self.engram(hidden_states, ids, tokens.text_mask)

        x, pre_mix, post, comb = self.attn_hc(hidden_states, pre_mix)
        y, state = self.attn(self.attn_norm(x), state, tokens.position_ids, tokens.token_mask)
        hidden_states = self.attn_hc.write(y, hidden_states, post, comb)

        x, pre_mix, post, comb = self.ffn_hc(hidden_states, pre_mix)
        y, report = self.ffn(self.ffn_norm(x), tokens.token_mask, tokens.image_mask)
        hidden_states = self.ffn_hc.write(y, hidden_states, post, comb)
        return hidden_states, pre_mix, state, report


class TrainingReport(NamedTuple):
    """What a forward tells beside its hidden states. A tuple for the same reason as `AttentionState`.

    Attributes:
        expert_load: Tokens per expert, int64 [layers, 2, experts]: text, image.
        indexer_loss: What learned indexers learn from, in nats, summed over layers and live tokens: a scalar. None
            unless the forward is one of training.
        balance_loss: Sequence-wise balance loss of the routers, summed over layers and live tokens: a scalar, or None.
        nats: Cross-entropy summed over the predicted tokens, in nats: a scalar. None without labels.
        tokens: Number of predicted tokens, int64 scalar. None without labels.
    """

    expert_load: Tensor
    indexer_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    nats: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class DeepseekV41Output(CausalLMOutputWithPast):
    """Results of `DeepseekV41ForCausalLM.forward`.

    Attributes:
        loss: Mean cross-entropy in nats over predicted tokens; the language model's alone.
        report: Sums for training: loss and count, expert load, losses of indexers and routers.
    """

    report: TrainingReport | None = None


class DeepseekV41Model(nn.Module):
    """Embedding, blocks, final norm.

    Args:
        config: Text configuration, copied; sizes that it leaves open are taken from the tokenizer.
        backend: Implementation choices.
        tokenizer: Fast tokenizer that makes the ids; needed if an Engram layer exists.
        engram_process_group: Ranks that share the rows of the Engram tables; None holds them whole.

    Raises:
        ValueError: An Engram without a tokenizer, a tokenizer that contradicts the configuration, or `vocab_size`
            unset.

    Attributes:
        config: The configuration, sizes filled in.
    """

    def __init__(
        self,
        config: DeepseekV41TextConfig,
        backend: BackendConfig,
        tokenizer: AnyTokenizer | None = None,
        engram_process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.engram_hash: DeepseekV41NgramHash | None = None
        if config.active_engram_layer_ids:
            if tokenizer is None:
                raise ValueError(
                    f"tokenizer: layers {config.active_engram_layer_ids} have an Engram, which hashes the tokenizer's "
                    "texts; pass the tokenizer or set engram_layer_ids to []"
                )
            self.engram_hash = DeepseekV41NgramHash(config, tokenizer, backend.strict_validation)
            config = self.engram_hash.config
        elif tokenizer is not None:
            config = config.for_tokenizer(fast_backend(tokenizer).get_vocab_size(with_added_tokens=True))
        else:
            config = copy.deepcopy(config)  # the other branches have copied it
        if config.vocab_size is None:
            raise ValueError("vocab_size: unset; give a number, or a tokenizer to take it from")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekV41Block(config, layer, backend, engram_process_group) for layer in config.layers
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, TrainingReport]:
        """Run all positions.

        Args:
            input_ids: int32 or int64 token ids [B, S].
            position_ids: None or 0 to S - 1 in every row.
            attention_mask: 0/1 [B, S] with padding on the right, or None.
            image_mask: Bool [B, S], true at image tokens, or None.
            output_hidden_states: Also return the streams before each block and after the last.

        Returns:
            Final normed hidden states [B, S, H] (meaningless at padding), the streams or None, and the report.

        Raises:
            ValueError: Wrong shape, dtype or range; the message names the argument and what is valid.
        """
        vocabulary = self.embed_tokens.num_embeddings
        tokens = check_inputs(
            input_ids,
            attention_mask,
            position_ids,
            image_mask,
            # With an Engram, ids of the tokenizer: the vocabulary may be padded beyond it.
            limit=vocabulary if self.engram_hash is None else min(vocabulary, len(self.engram_hash.token_map)),
            longest=self.config.max_position_embeddings,
            strict=self.backend.strict_validation,
        )
        if self.engram_hash is not None:
            hash_ids = self.engram_hash(input_ids, tokens.text_mask, checked=True)
            tokens = tokens._replace(engram_hash_ids=hash_ids)
        embedded = self.embed_tokens(input_ids)
        streams = embedded.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        pre_mix = torch.zeros(
            *streams.shape[:3], dtype=torch.promote_types(streams.dtype, torch.float32), device=streams.device
        )
        pre_mix[..., 0] = 1.0
        state = AttentionState()
        kept = [streams]
        reports: list[RouterReport] = []
        recompute = self.backend.gradient_checkpointing and torch.is_grad_enabled()
        for block in self.layers:
            arguments = (streams, pre_mix, state, tokens)
            if recompute:
                streams, pre_mix, state, report = checkpoint(block, *arguments, use_reentrant=False)
            else:
                streams, pre_mix, state, report = block(*arguments)
            reports.append(report)
            if output_hidden_states:
                kept.append(streams)
        hidden = self.norm(collapse(streams, pre_mix))
        balance = [report.balance_loss for report in reports if report.balance_loss is not None]
        told = TrainingReport(
            torch.stack([report.load for report in reports]),
            state.indexer_loss,
            torch.stack(balance).sum() if balance else None,
        )
        return hidden, tuple(kept) if output_hidden_states else None, told


class DeepseekV41ForCausalLM(InheritedMethods):
    """DeepSeek-V4.1 with its language-model head.

    Args:
        config: Nested configuration, copied.
        backend: Implementation choices; None takes the defaults.
        tokenizer: Fast tokenizer that makes the ids; needed if an Engram layer exists. Sizes that the configuration
            leaves open (`vocab_size`, `engram_compressed_vocab_size`) are taken from it.
        engram_process_group: Ranks that share the rows of the Engram tables, each holding its own alone; every rank
            has to run every forward and backward. None holds the tables whole.

    Raises:
        ValueError: The tokenizer contradicts the configuration, or an Engram lacks one.

    Example:
        >>> model = DeepseekV41ForCausalLM(DeepseekV41Config(text_config=text), tokenizer=tokenizer)
        >>> model(input_ids, labels=input_ids).loss.backward()
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        backend: BackendConfig | None = None,
        tokenizer: AnyTokenizer | None = None,
        engram_process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(copy.deepcopy(config))
        self.backend = backend or BackendConfig()
        self.tokenizer = tokenizer  # to be saved beside the weights: with an Engram they are worth little without it
        self.model = DeepseekV41Model(config.text_config, self.backend, tokenizer, engram_process_group)
        text = self.config.text_config = self.model.config
        assert text.vocab_size is not None  # checked by the decoder
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self._draw_parameters()

    def _draw_parameters(self) -> None:
        initialize_parameters(self, self.config.text_config.initializer_range)

    def prepare_model_owned_dtensors(self, fsdp_mesh: DeviceMesh) -> set[nn.Parameter]:
        """Register the Engram tables as DTensors over `fsdp_mesh`, before ``fully_shard`` records what it ignores.

        Tables that are still whole are cut; each rank keeps its rows.

        Args:
            fsdp_mesh: One-dimensional; ranks and order are those of the tables' process group, if they have one.

        Returns:
            The registered parameters, for ``ignored_params`` of every ``fully_shard`` call.

        Raises:
            ValueError: The mesh has other ranks, another order or another number of dimensions.
        """
        tables = [module for module in self.modules() if isinstance(module, EngramTable)]
        return {table.shard(fsdp_mesh) for table in tables}

    def initialize_weights(
        self, buffer_device: torch.device | str | None = None, dtype: torch.dtype | None = torch.bfloat16
    ) -> None:
        """Draw all parameters and restore all derived buffers, for example after ``to_empty`` from the meta device.

        Args:
            buffer_device: Where derived buffers go; None leaves them where they are.
            dtype: Of the parameters, except those that stay fp32: mHC, sinks, pooling weights, head. A float64 model
                is float64 throughout; None leaves dtypes as they are. Integer buffers are never cast.

        Values depend on ``torch.initial_seed()`` and the parameter's name only (see `initialization.py`): sharded
        parameters get the rows of the unsharded ones, without communication.
        """
        if buffer_device is not None:
            for module in self.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(buffer_device))
        self._draw_parameters()
        if dtype is not None:
            self.cast_parameters(dtype)

    def cast_parameters(self, dtype: torch.dtype) -> None:
        """Cast parameters to `dtype`, leaving those in fp32 that must stay so; buffers are not touched."""
        for name, parameter in self.named_parameters():
            keep = self.stays_fp32(name) and dtype != torch.float64
            parameter.data = parameter.data.to(torch.float32 if keep else dtype)

    def stays_fp32(self, name: str) -> bool:
        """Whether a parameter is fp32 in a model of a narrower dtype (ARCHITECTURE 9)."""
        if name.endswith(FP32_SUFFIXES):
            return True
        owner, _, leaf = name.rpartition(".compressor.")
        # A ratio-1 compressor has no gate and computes in the dtype of its input.
        if not owner or not leaf.startswith(("wkv", "wgate")):
            return False
        attention = self.get_submodule(owner)
        return isinstance(attention, DeepseekV41Attention) and attention.ratio > 1

    @property
    def map_fingerprint(self) -> str | None:
        """Of the tokenizer's compressed map, which says whether two models hash alike; None without an Engram."""
        hashing = self.model.engram_hash
        return None if hashing is None else hashing.map_fingerprint

    @for_inference_when_exported
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_hidden_states: bool = False,
        output_hidden_states: bool | None = False,
        **others: Any,
    ) -> DeepseekV41Output:
        """Logits and loss.

        Args:
            input_ids: int32 or int64 token ids [B, S].
            attention_mask: 0/1 [B, S] with padding on the right, or None.
            position_ids: None or 0 to S - 1 in every row.
            labels: Token ids [B, S] (NOT shifted; the loss shifts them) with -100 where ignored, or None.
            logits_to_keep: Number of last positions to project (0 is all), or int64 positions [kept].
            return_hidden_states: Append the final normed hidden states [B, S, H] to `hidden_states`.
            output_hidden_states: Put the streams [B, S, C, H] before each block and after the last into
                `hidden_states`.
            **others: Arguments of other models of transformers, with values that ask for nothing (``use_cache=False``).

        Returns:
            `loss`: mean cross-entropy in nats over live shifted labels (0 if there are none), or None.
            `logits`: at least fp32 [B, kept, V]; None with labels and ``BackendConfig(loss="chunked")``.
            `hidden_states`: tuple as asked for, or None.
            `report`: expert load and, in training, the losses of indexers and routers, which `loss` does not contain.

        Raises:
            ValueError: Wrong shape, dtype or range, `labels` together with `logits_to_keep`, or an argument of other
                models that asks for something.
            TypeError: There is no such argument.
        """
        check_forward_options(others, type(self).forward)
        if input_ids is None:
            raise ValueError("input_ids: missing; int32 or int64 token ids [batch, sequence] are needed")
        if labels is not None:
            check_labels(labels, input_ids, self.lm_head.out_features)
            if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
                raise ValueError("logits_to_keep: must be 0 when labels are given, since the loss needs every position")
        hidden, streams, report = self.model(input_ids, position_ids, attention_mask, None, bool(output_hidden_states))
        loss, logits = None, None
        if labels is None:
            logits = self.project(select_positions(hidden, logits_to_keep))
        else:
            loss, logits = cross_entropy.IMPLEMENTATIONS[self.backend.loss](hidden, self.lm_head.weight, labels)
            report = report._replace(nats=loss.nats, tokens=loss.tokens)
        states = (streams or ()) + ((hidden,) if return_hidden_states else ())
        return DeepseekV41Output(
            loss=None if loss is None else loss.mean, logits=logits, hidden_states=states or None, report=report
        )

    def project(self, hidden: Tensor) -> Tensor:
        """The head: [..., H] to logits [..., V], at least fp32 whatever the model's dtype."""
        with full_precision(hidden):
            wide = widen(hidden)
            return F.linear(wide, self.lm_head.weight.to(wide.dtype))
