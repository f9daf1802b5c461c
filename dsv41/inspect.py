"""Counting: which part of the model holds how many parameters."""

from __future__ import annotations

from torch import nn

# First match wins, so a part stands before the one that contains it.
PARTS = (
    ("embedding", ".embed_tokens."),
    ("head", "lm_head."),
    ("indexer", ".indexer."),
    ("attention", ".attn."),
    ("mHC", "_hc."),
    ("router", ".ffn.gate."),
    ("routed experts", ".ffn.experts."),
    ("shared experts", ".ffn.shared_experts."),
    ("Engram tables", ".engram.embed."),
    ("Engram gates", ".engram."),
    ("norms", "norm."),
)


def part_of(name: str) -> str:
    """The part that a parameter of `DeepseekV41ForCausalLM` belongs to, by its name; "other" if to none."""
    return next((part for part, mark in PARTS if mark in name), "other")


# What curves are drawn for; all else is "rest".
WATCHED_PARTS = {"Engram tables": "engram_tables", "mHC": "mhc", "indexer": "indexer", "router": "router"}


def watched_part(name: str) -> str:
    """The part that a parameter's gradient and update are shown under: one of `WATCHED_PARTS`' values, or "rest"."""
    return WATCHED_PARTS.get(part_of(name), "rest")


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of each part that has any, in a fixed order. Works on the meta device."""
    counts = dict.fromkeys([*(part for part, _ in PARTS), "other"], 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return {part: count for part, count in counts.items() if count}
