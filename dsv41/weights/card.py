"""Model card of an export: facts of the model and of its run, in the words of ``card.md.jinja``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

from dsv41.config import SWITCHES, DeepseekV41TextConfig
from dsv41.cost import parameters_by_part
from dsv41.engram.token_map import fast_backend
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.schedule import layer_plans
from dsv41.weights.run_numbers import RunNumbers

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer

__all__ = ["RunNumbers", "model_card"]

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    model: DeepseekV41ForCausalLM,
    run: RunNumbers | None = None,
    tokenizer: AnyTokenizer | None = None,
    license: str = "unknown",
) -> str:
    """Text of README.md, metadata included.

    Args:
        model: Its sizes are listed; no weight is read.
        run: Numbers of its training; None says that none are on record.
        tokenizer: That lies beside the weights; None takes the one that the model was built with.
        license: Of the weights, an identifier of Hugging Face.
    """
    tokenizer = tokenizer or model.tokenizer
    backend = None if tokenizer is None else fast_backend(tokenizer)
    config = model.config.text_config
    run = run or RunNumbers()
    parts = parameters_by_part(model)
    total = sum(parts.values())
    name = f"DeepSeek-V4.1 architecture, {_short(total)} parameters"
    engram = bool(config.active_engram_layer_ids)
    data = ModelCardData(
        library_name="dsv41",
        license=license,
        tags=["deepseek_v41", "causal-lm", "mixture-of-experts", "sparse-attention", "hyper-connections"]
        + (["engram"] if engram else []),
        datasets=run.hub_datasets or None,
        model_name=name,
        eval_results=run.metadata_results or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        config=config,
        engram=engram,
        tokenizer_kind=None if backend is None else type(backend.model).__name__,
        tokenizer_size=None if backend is None else f"{backend.get_vocab_size(with_added_tokens=True):,}",
        architecture=_architecture(config),
        parameters=[(part, f"{count:,}", f"{count / total:.1%}") for part, count in parts.items()]
        + [("all", f"{total:,}", "100.0%")],
        training=_training(run),
        measured=_measured(run),
        unigram_loss=run.unigram_loss,
    )
    return str(card)


def _architecture(config: DeepseekV41TextConfig) -> list[tuple[str, str]]:
    plans = layer_plans(config)
    ratios = [plan.ratio for plan in plans] if config.attention == "csa2" else []
    streams = "one residual stream" if config.hc_mult == 1 else f"{config.hc_mult} residual streams"
    rows = [
        ("layers", f"{config.num_hidden_layers}"),
        ("hidden size", f"{config.hidden_size:,}, in {streams}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest sequence", f"{config.max_position_embeddings:,} tokens"),
        ("attention heads", f"{config.num_attention_heads} of width {config.head_dim}, one key-value head"),
        ("attention window", "all tokens" if config.attention == "full" else f"{config.sliding_window:,} tokens"),
    ]
    turned = [f"{field} {getattr(config, field)}" for field in SWITCHES if getattr(config, field) != SWITCHES[field][0]]
    turned += [] if config.quantized_caches else ["caches not rounded"]
    if turned:
        rows.append(("other than in the release", ", ".join(turned)))
    for ratio in sorted(set(ratios)):
        layers = _ranges([layer for layer, own in enumerate(ratios) if own == ratio])
        if ratio == 0:
            rows.append(("window alone", f"layers {layers}"))
        else:
            what = "every position" if ratio == 1 else f"one compressed position per {ratio} tokens"
            rows.append((f"compression {ratio}", f"layers {layers}: {what}, {config.index_topk:,} selected per query"))
    if any(ratios):
        rows.append(("compressed keys made in", f"layers {_ranges([plan.layer for plan in plans if plan.makes_keys])}"))
        rows.append(("selections made in", f"layers {_ranges([plan.layer for plan in plans if plan.selects])}"))
    rows.append(
        (
            "experts",
            f"{config.n_routed_experts} routed, {config.num_experts_per_tok} per token, and {config.n_shared_experts} "
            f"shared, of width {config.moe_intermediate_size:,}",
        )
    )
    for layer, table in zip(config.engram_layer_ids, config.engram_num_embeddings or [], strict=True):
        if layer in config.active_engram_layer_ids:
            rows.append(
                (
                    f"Engram in layer {layer}",
                    f"{table:,} rows of width {config.engram_head_dim}, n-grams of 2 to {config.engram_max_ngram_size} "
                    f"tokens, {config.engram_n_heads} hashes each",
                )
            )
    return rows


def _training(run: RunNumbers) -> list[tuple[str, str]]:
    known = [
        ("text", run.plain_data),
        ("optimizer steps", _count(run.steps)),
        ("tokens seen", _count(run.tokens)),
        ("rows per step", _count(run.batch_size)),
        ("tokens per row", _count(run.sequence_length)),
        ("optimizer", run.optimizer),
        ("peak learning rate", None if run.learning_rate is None else f"{run.learning_rate:g}"),
        ("weight decay", None if run.weight_decay is None else f"{run.weight_decay:g}"),
        ("precision", run.precision),
        ("seed", None if run.seed is None else str(run.seed)),
        ("machine", run.machine),
        ("software", run.software),
        ("wall time", None if run.seconds is None else _duration(run.seconds)),
        ("date", run.date),
    ]
    return [(title, value.replace("|", "\\|")) for title, value in known if value is not None]


def _measured(run: RunNumbers) -> list[tuple[str, ...]]:
    """Head and rows of the evaluations, without columns that no row has; empty without an evaluation."""
    rows = [
        (split, f"{loss:.3f}", _perplexity(loss), "" if per_byte is None else f"{per_byte:.3f}")
        for split, loss, per_byte in run.evaluations
    ]
    head = ("split", "loss (nats per token)", "perplexity", "bits per byte")
    filled = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return [tuple(row[column] for column in filled) for row in (head, *rows)] if rows else []


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, neighbours joined: [0, 1, 2, 5] is "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return str(count)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 20 else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"
