"""Model card of an export, by huggingface_hub: what the model is, and the numbers of the run that made it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dsv41.config import SWITCHES, DeepseekV41TextConfig
from dsv41.cost import parameters_by_part
from dsv41.engram.token_map import fast_backend
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.schedule import layer_plans

if TYPE_CHECKING:
    from dsv41.engram.token_map import AnyTokenizer


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """What is known of the run that trained a model. None is unknown, and not in the card.

    Attributes:
        data: Name of the text; "hf:NAME" or "hf:NAME:CONFIG" is a dataset of Hugging Face.
        steps: Optimizer steps.
        tokens: Tokens seen, repetitions counted.
        batch_size: Rows of a step, of all processes together.
        sequence_length: Tokens of a row.
        validation_loss: Nats per predicted token.
        validation_bits_per_byte: The same per byte of text.
        test_loss: Nats per predicted token.
        test_bits_per_byte: The same per byte of text.
        unigram_loss: Entropy of the validation tokens without context, in nats per token, to compare with.
        seed: Of the initial values and the order of the data.
        precision: As the trainer names it, such as "32-true" or "bf16-mixed".
        optimizer: Its name, such as "AdamW".
        learning_rate: The peak.
        weight_decay: Of the optimizer.
        machine: What it ran on, such as "2 cores of an AMD EPYC".
        software: Versions, such as "torch 2.13.0, lightning 2.6.6".
        seconds: Wall time of the training.
        date: Of its end, "2026-01-31".

    Raises:
        ValueError: A number is not finite or below 0, or a text is empty; the field is named.
    """

    data: str | None = None
    steps: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    test_loss: float | None = None
    test_bits_per_byte: float | None = None
    unigram_loss: float | None = None
    seed: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    machine: str | None = None
    software: str | None = None
    seconds: float | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, str) and not value.strip():
                raise ValueError(f"{field.name}: must not be empty; None leaves it out")
            if not isinstance(value, str) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}: must be finite and at least 0, got {value!r}; None leaves it out")


def model_card(
    model: DeepseekV41ForCausalLM, run: RunNumbers | None = None, tokenizer: AnyTokenizer | None = None
) -> str:
    """Text of README.md, metadata included.

    Args:
        model: Its sizes are told; no weight is read.
        run: Numbers of its training; None says that none are on record.
        tokenizer: That lies beside the weights; None takes the one that the model was built with.
    """
    tokenizer = tokenizer or model.tokenizer
    config = model.config.text_config
    parts = parameters_by_part(model)
    total = sum(parts.values())
    name = f"DeepSeek-V4.1 architecture, {_short(total)} parameters"
    sections = [
        f"# {name}",
        "A causal language model: single-pass hyper-connections (mHC), compressed sparse attention with shared keys "
        "and selections (CSA2), mixture of experts"
        + (", hashed n-gram memory (Engram)." if config.active_engram_layer_ids else "; without Engram memory."),
        "## Use",
        _use(config, tokenizer is not None),
        "## Architecture",
        _table(("", ""), _architecture(config)),
        "## Parameters",
        _table(
            ("part", "parameters", "share"),
            [(part, f"{count:,}", f"{count / total:.1%}") for part, count in parts.items()]
            + [("all", f"{total:,}", "100.0%")],
        ),
        "## Tokenizer",
        _about_tokenizer(config, tokenizer),
        "## Training",
        *_training(run),
        "## Limits",
        _limits(model, run),
    ]
    data = ModelCardData(
        library_name="dsv41",
        tags=["deepseek_v41", "causal-lm", "mixture-of-experts", "sparse-attention", "hyper-connections"]
        + (["engram"] if config.active_engram_layer_ids else []),
        datasets=(run and _hub_datasets(run.data)) or None,
        model_name=name,
        eval_results=_metadata_results(run) or None,
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


# ------------------------------------------------------------------ sections


def _use(config: DeepseekV41TextConfig, has_tokenizer: bool) -> str:
    lines = [
        "import torch",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        "import dsv41  # tells transformers of the architecture",
        "",
        'folder = "."  # where this file is, or the name of its repository',
        "model = AutoModelForCausalLM.from_pretrained(folder)",
    ]
    if has_tokenizer:
        lines += [
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            'input_ids = torch.tensor([tokenizer.encode("for i in range")])',
        ]
    else:
        lines.append(f"input_ids = torch.arange({min(8, config.vocab_size or 1)})[None]")
    lines += [
        "with torch.no_grad():",
        f"    logits = model(input_ids).logits  # float32 [1, tokens, {config.vocab_size}]",
        "next_id = int(logits[0, -1].argmax())",
    ]
    if has_tokenizer:
        lines.append("print(tokenizer.decode([next_id]))")
    return "With the package `dsv41` (dsv41-lightning) installed:\n\n```python\n" + "\n".join(lines) + "\n```"


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


def _about_tokenizer(config: DeepseekV41TextConfig, tokenizer: AnyTokenizer | None) -> str:
    if tokenizer is None:
        return "None is saved with the weights: the model takes and gives token ids."
    backend = fast_backend(tokenizer)
    kind = type(backend.model).__name__
    text = f"{kind}, {backend.get_vocab_size(with_added_tokens=True):,} ids, in `tokenizer.json`."
    if config.active_engram_layer_ids:
        text += (
            f" The Engram hashes its texts, which compress to {config.engram_compressed_vocab_size:,} ids: with "
            "another tokenizer the memory is meaningless."
        )
    return text


def _training(run: RunNumbers | None) -> list[str]:
    if run is None:
        return ["No training is on record for these weights."]
    told = [
        ("text", _plain_name(run.data)),
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
    facts = [(what, value) for what, value in told if value is not None]
    sections = [_table(("", ""), facts)] if facts else []
    measured = [
        (split, f"{loss:.3f}", _perplexity(loss), "" if per_byte is None else f"{per_byte:.3f}")
        for split, loss, per_byte in _evaluations(run)
    ]
    if measured:
        head = ("split", "loss (nats per token)", "perplexity", "bits per byte")
        known = [column for column in range(len(head)) if any(row[column] for row in measured)]
        first, *others = (tuple(row[column] for column in known) for row in (head, *measured))
        sections.append(_table(first, others))
    if run.unigram_loss is not None:
        sections.append(
            f"The unigram entropy of the validation tokens, the best that a model without context could do, is "
            f"{run.unigram_loss:.3f} nats per token."
        )
    return sections or ["No training is on record for these weights."]


def _limits(model: DeepseekV41ForCausalLM, run: RunNumbers | None) -> str:
    limits = [
        f"Sequences of up to {model.config.text_config.max_position_embeddings:,} tokens, padded on the right. There "
        "is no inference cache and no `generate`: each call computes all positions.",
        "Text alone; no images.",
        "A model of text as it was found: not aligned to instructions, and its output may be wrong or harmful.",
    ]
    if run is None or not _evaluations(run):
        limits.append("No evaluation is on record.")
    else:
        limits.append("Measured on held-out text of the training source alone, on no benchmark.")
    return "\n".join(f"- {limit}" for limit in limits)


# ------------------------------------------------------------------ metadata


def _evaluations(run: RunNumbers) -> list[tuple[str, float, float | None]]:
    """Split, loss, bits per byte of what was measured."""
    both = (
        ("validation", run.validation_loss, run.validation_bits_per_byte),
        ("test", run.test_loss, run.test_bits_per_byte),
    )
    return [(split, loss, per_byte) for split, loss, per_byte in both if loss is not None]


def _metadata_results(run: RunNumbers | None) -> list[EvalResult]:
    name = _plain_name(run.data) if run is not None else None
    if run is None or name is None:  # a result without the name of its data says nothing
        return []
    hub = _hub_datasets(run.data)
    results = []
    for split, loss, per_byte in _evaluations(run):
        for metric, title, value in (
            ("loss", "loss, nats per token", loss),
            ("bits_per_byte", "bits per byte", per_byte),
        ):
            if value is not None:
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=hub[0] if hub else name,
                        dataset_name=name,
                        dataset_split=split,
                        metric_type=metric,
                        metric_name=title,
                        metric_value=round(value, 4),
                    )
                )
    return results


def _sources(data: str | None) -> list[str]:
    return [] if data is None else [source.strip() for source in data.split(",") if source.strip()]


def _hub_datasets(data: str | None) -> list[str]:
    """Names of the datasets of Hugging Face among the sources."""
    return [source.split(":")[1] for source in _sources(data) if source.startswith("hf:")]


def _plain_name(data: str | None) -> str | None:
    """The sources without the folders that they were in, which concern nobody else."""
    names = [
        source.removeprefix("hf:").replace(":", ", ") if source.startswith("hf:") else Path(source).name
        for source in _sources(data)
    ]
    return ", ".join(names) or None


# ------------------------------------------------------------------ text


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


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
