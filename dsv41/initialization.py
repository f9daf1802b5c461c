"""Random initial values that depend on seed and parameter name only.

Each parameter is drawn from a separate generator, seeded by the run's seed and the parameter's full name. So two
models that share a parameter share its initial value (whatever else an ablation adds or removes), a model built on
the meta device equals one built directly, and the order of construction does not matter. Draws are made in fp32 and
cast afterwards, so that a bf16 model starts from the rounded fp32 one. Sharded parameters start from the same numbers
on any number of ranks, without communication: each rank draws a parameter whole and keeps its rows. Tables and stacked
experts are drawn in pieces (blocks of rows, single experts), each with a separate generator, so that a rank draws only
those that it holds.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from dsv41.ranks import copy_rows_, local_rows

ROWS_PER_BLOCK = 4096


class NamedDraws:
    """Generators of the initial values of one module's parameters.

    Args:
        prefix: Full name of the module, "" for a root.
        seed: The run's seed; None takes `torch.initial_seed`, which `seed_everything` sets.
    """

    def __init__(self, prefix: str = "", seed: int | None = None) -> None:
        self.prefix = prefix
        self.seed = torch.initial_seed() if seed is None else seed

    def _generator(self, name: str) -> torch.Generator:
        full = f"{self.prefix}.{name}" if self.prefix else name
        digest = hashlib.sha256(f"{self.seed}:{full}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    @torch.no_grad()
    def normal_(self, parameter: Tensor, name: str, std: float) -> None:
        """Fill `parameter`, which may be sharded, with N(0, std^2); no effect on the meta device."""
        if parameter.is_meta:
            return
        values = torch.randn(parameter.shape, generator=self._generator(name), dtype=torch.float32, device="cpu")
        copy_rows_(parameter, values.mul_(std))

    def normal_stack_(self, parameter: Tensor, name: str, std: float) -> None:
        """Like `normal_` for each matrix of a stack [count, ...], drawn by its own index under ``INDEX.name``.

        More matrices leave the first ones as they are, and a rank draws only those that it holds.
        """
        local, first = local_rows(parameter.detach())
        for index, matrix in enumerate(local.unbind(0), start=first):
            self.normal_(matrix, f"{index}.{name}", std)

    @torch.no_grad()
    def normal_rows_(self, parameter: Tensor, name: str, std: float, first_row: int = 0) -> None:
        """Like `normal_`, for rows `first_row`, `first_row` + 1, ... of a table [rows, width].

        Row i of the table gets the same value whatever part of the table `parameter` is.
        """
        if parameter.is_meta or len(parameter) == 0:
            return
        last_row = first_row + len(parameter)
        for block in range(first_row // ROWS_PER_BLOCK, (last_row - 1) // ROWS_PER_BLOCK + 1):
            start = block * ROWS_PER_BLOCK
            generator = self._generator(f"{name}.{block}")
            shape = (ROWS_PER_BLOCK, parameter.shape[1])
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(std)
            low, high = max(start, first_row), min(start + ROWS_PER_BLOCK, last_row)
            parameter[low - first_row : high - first_row].copy_(values[low - start : high - start])


class NoDraws(NamedDraws):
    """Draws without effect, for models whose weights are about to be loaded."""

    def normal_(self, parameter: Tensor, name: str, std: float) -> None:
        """Leave `parameter` unchanged."""

    def normal_rows_(self, parameter: Tensor, name: str, std: float, first_row: int = 0) -> None:
        """Leave the rows unchanged."""


def initialize_parameters(
    root: nn.Module, std: float, prefix: str = "", seed: int | None = None, draw: bool = True
) -> None:
    """Draw every parameter of `root` (unless `draw` is false) and restore every derived buffer.

    Modules with an ``init_weights(draws)`` method fill themselves; linear and embedding matrices are N(0, std^2),
    norm weights one.

    Raises:
        TypeError: A module owns parameters and has no ``init_weights``.
    """
    for name, module in root.named_modules():
        draws = (NamedDraws if draw else NoDraws)(".".join(filter(None, (prefix, name))), seed)
        init = getattr(module, "init_weights", None)
        if module is not root and callable(init):
            init(draws)
        elif isinstance(module, nn.Linear | nn.Embedding):
            draws.normal_(module.weight, "weight", std)
        elif (weight := getattr(module, "weight", None)) is not None and weight.dim() == 1:
            nn.init.ones_(weight)
        elif module is not root and next(module.parameters(recurse=False), None) is not None:
            raise TypeError(f"{name}: {type(module).__name__} has parameters but no init_weights(draws) method")
