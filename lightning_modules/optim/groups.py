"""Parameter groups: rule and learning rate of each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from dsv41.config.fields import Real
from dsv41.cost import part_of
from dsv41.engram.table import EngramTable
from lightning_modules.optim.grouped import GroupedOptimizer, Rule

MatrixRule = Literal["adamw", "muon"]
TableRule = Literal["rows", "dense"]

_AVERAGE = Real(0, 1, below=True)
RULES = {
    "lr": Real(0, 1e3, above=True),
    "weight_decay": Real(0, 1e3),
    "beta1": _AVERAGE,
    "beta2": _AVERAGE,
    "eps": Real(0, 1, above=True),
    "table_lr_multiplier": Real(0, 1e6, above=True),
    "muon_momentum": _AVERAGE,
}
"""Ranges of the numbers of `OptimizerConfig`."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW, of Adam by rows for Engram tables, and of optional Muon for hidden matrices.

    Args:
        lr: Peak learning rate.
        weight_decay: Decoupled decay of matrices. Norms, sinks, mHC coefficients and embeddings are not decayed.
        beta1: Decay of the gradient's average.
        beta2: Decay of the squared gradient's average.
        eps: Added to the root of the squared average.
        matrices: "adamw", or "muon" for the two-dimensional matrices inside the blocks, with updates scaled to the size
            of AdamW's (see `parameter_groups`).
        tables: "rows" updates the rows of an Engram table that a step has read, and no others (see
            `row_adam.py`), in time that does not grow with the table. "dense" is AdamW over the whole table.
        table_lr_multiplier: Peak learning rate of Engram tables as a multiple of `lr` (5 in arXiv:2601.07372).
        muon_momentum: Decay of Muon's average of the gradient.

    Raises:
        ValueError: A value is out of range; names the field.
    """

    lr: float = 2e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    matrices: MatrixRule = "adamw"
    tables: TableRule = "rows"
    table_lr_multiplier: float = 5.0
    muon_momentum: float = 0.95

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            rule.check(f"optimizer.{name}", getattr(self, name))
        for name, choices in (("matrices", get_args(MatrixRule)), ("tables", get_args(TableRule))):
            if getattr(self, name) not in choices:
                raise ValueError(f"optimizer.{name}: must be one of {choices}, got {getattr(self, name)!r}")


# By the end of a parameter's name: vectors in disguise, and rows that are looked up rather than multiplied.
UNDECAYED_SUFFIXES = ("embed_tokens.weight", "engram.q_weight", "engram.k_weight")
TABLE_SUFFIX = "engram.embed.weight"
# Parts of `dsv41/cost.py` whose matrices map hidden states to hidden states; all of these have two dimensions.
MUON_PARTS = ("attention", "indexer", "shared experts", "Engram gates")


def group_settings(config: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """Settings of each group, by the group's name, in the order of the groups.

    Anything else in a group is state, a constant of its rule, or the rule itself, which a resumed run has to share.
    """
    adam = {"initial_lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    decay = {"weight_decay": config.weight_decay}
    no_decay = {"weight_decay": 0.0}
    return {
        "decay": adam | decay,
        "muon": {"initial_lr": config.lr, "momentum": config.muon_momentum} | decay,
        "no_decay": adam | no_decay,
        "tables": adam | no_decay | {"initial_lr": config.lr * config.table_lr_multiplier},
    }


def group_of(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> str:
    """Group of `group_settings` that a parameter belongs to, by its full name."""
    if name.endswith(TABLE_SUFFIX):
        return "tables"
    if parameter.dim() < 2 or name.endswith(UNDECAYED_SUFFIXES):
        return "no_decay"
    if config.matrices == "muon" and part_of(name) in MUON_PARTS:
        return "muon"
    return "decay"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Split trainable parameters into groups. All four exist, in this order, with or without members:

    - "decay", AdamW: the head, router, mixing matrices of mHC, stacks of experts, and matrices not in "muon";
    - "muon", with ``matrices: muon``: two-dimensional matrices of attention, compressors, indexers, shared experts and
      Engram projections. Stacks of experts [E, M, H] stay with AdamW: torch's Muon takes two dimensions only;
    - "no_decay", AdamW: vectors, the token embedding, norm weights of the Engram;
    - "tables": Engram tables.

    Returns:
        Groups for a `GroupedOptimizer`.
    """
    settings = group_settings(config)
    members: dict[str, list[nn.Parameter]] = {group: [] for group in settings}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            members[group_of(name, parameter, config)].append(parameter)
    tables: Rule = "rows" if config.tables == "rows" else "adamw"
    rules: dict[str, Rule] = {"decay": "adamw", "muon": "muon", "no_decay": "adamw", "tables": tables}
    return [
        {"name": group, "rule": rules[group], "params": parameters, "lr": settings[group]["initial_lr"]}
        | settings[group]
        for group, parameters in members.items()
    ]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> GroupedOptimizer:
    """Optimizer over `parameter_groups`. Engram tables of `module` are set to produce the gradients of their rule.

    Raises:
        RuntimeError: A table has a gradient of the other kind.
    """
    sparse = config.tables == "rows"
    for name, table in module.named_modules():
        if isinstance(table, EngramTable) and table.sparse_gradient != sparse:
            if table.weight.grad is not None:
                raise RuntimeError(f"{name}: has a gradient from before optimizer.tables was {config.tables!r}")
            table.sparse_gradient = sparse
    return GroupedOptimizer(parameter_groups(module.named_parameters(), config))
