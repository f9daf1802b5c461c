"""Buckets of the Engram tables: how n-grams of a text share them, and which of their rows training has reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.model import DeepseekV41Block
from dsv41.ranks import local_rows
from lightning_modules.insight.drawing import show_constant
from lightning_modules.insight.hooks import ValidationObserver, log, log_details, over_ranks
from lightning_modules.text import markdown_table


class Buckets(NamedTuple):
    """Distinct n-grams in the buckets of one column.

    Attributes:
        distinct: Different n-grams.
        fullest: Most of them in one bucket.
        colliding: Those that share their bucket with another.
    """

    distinct: int
    fullest: int
    colliding: int


class Column(NamedTuple):
    """A column of a layer's table.

    Attributes:
        name: ``layer_N_2gram_head_H``.
        size: Of the n-grams that it holds.
        buckets: Its rows.
    """

    name: str
    size: int
    buckets: int


def columns_of(hashing: DeepseekV41NgramHash) -> list[Column]:
    """Every column, layer by layer in the order of the rows."""
    return [
        Column(f"layer_{layer}_{back + 2}gram_head_{head}", back + 2, buckets)
        for layer, sizes in zip(hashing.layer_ids, hashing.primes.tolist(), strict=True)
        for back, heads in enumerate(sizes)
        for head, buckets in enumerate(heads)
    ]


def numbered(ngrams: Tensor) -> list[Tensor]:
    """Numbers for the n-grams of every size: the same for the same n-gram, 0 up to the number of different ones.

    Args:
        ngrams: Compressed ids int64 [T, N], the newest first.

    Returns:
        int64 [T] for the sizes 2 to N.
    """
    number = ngrams[:, 0]
    numbers = []
    for column in ngrams[:, 1:].t():
        # Renumbered at every size, so that the pair fits an integer however long the n-gram is.
        number = (number * (int(column.max()) + 1) + column).unique(return_inverse=True)[1]
        numbers.append(number)
    return numbers


def fill_of(number: Tensor, rows: Tensor) -> Buckets:
    """Count buckets of a column.

    Args:
        number: Which n-gram each token has, int64 [T], T > 0, as in `numbered`.
        rows: Where the column puts it, int64 [T].
    """
    bucket = rows.new_zeros(int(number.max()) + 1).scatter_(0, number, rows)  # equal n-grams have equal rows
    load = bucket.unique(return_counts=True)[1]
    return Buckets(len(bucket), int(load.max()), int(load[load > 1].sum()))


def fills_of(hashing: DeepseekV41NgramHash, ngrams: Tensor, rows: Tensor) -> list[tuple[Column, Buckets]]:
    """`fill_of` every column.

    Args:
        hashing: Gives the columns.
        ngrams: Compressed ids int64 [T, N] of T > 0 tokens, the newest first.
        rows: Where they are hashed to, int64 [T, layers, columns].
    """
    numbers = numbered(ngrams)
    columns = columns_of(hashing)
    return [
        (column, fill_of(numbers[column.size - 2], where))
        for column, where in zip(columns, rows.flatten(1).unbind(1), strict=True)
    ]


def chance_of_collision(distinct: int, buckets: int) -> float:
    """The share of `distinct` n-grams that would collide if each chose its bucket at random."""
    return -torch.expm1((distinct - 1) * torch.log1p(torch.tensor(-1.0 / buckets, dtype=torch.float64))).item()


def fills_of_batches(
    hashing: DeepseekV41NgramHash, batches: Iterable[Mapping[str, Tensor]]
) -> list[tuple[Column, Buckets]]:
    """`fills_of` the live tokens of batches.

    Args:
        hashing: Gives the columns.
        batches: At least one with a live token; `input_ids` and `attention_mask`, int64 [B, S].

    Raises:
        ValueError: There is no batch.
    """
    ngrams, rows = [], []
    for batch in batches:
        ids = batch["input_ids"].to(hashing.token_map.device)
        live = batch["attention_mask"].to(ids.device).bool()
        ngrams.append(hashing.ngrams(ids, live)[live])
        rows.append(hashing(ids, live)[live])
    if not ngrams:
        raise ValueError("batches: must be at least 1, got 0")
    return fills_of(hashing, torch.cat(ngrams), torch.cat(rows))


def fill_table(fills: Sequence[tuple[Column, Buckets]]) -> str:
    """Markdown of `fills_of`: a line per column."""
    titles = ("column", "buckets", "different n-grams", "per bucket", "in the fullest", "colliding", "by chance")
    rows = [
        (
            column.name.replace("_", " "),
            column.buckets,
            found.distinct,
            f"{found.distinct / column.buckets:.3f}",
            found.fullest,
            f"{found.colliding / found.distinct:.1%}",
            f"{chance_of_collision(found.distinct, column.buckets):.1%}",
        )
        for column, found in fills
    ]
    return markdown_table(titles, rows)


class EngramMemory(ValidationObserver):
    """Logs how n-grams share the rows of Engram tables, and how many rows training has reached.

    Over the tokens of the first validation batches, each n-gram of compressed ids counts once. Text and hash stay the
    same in a run, so they are counted once: the text ``within/constants/engram_buckets`` in TensorBoard has the table
    `fill_table`, a line per column (layer, size of n-grams, head). ``within/engram_collisions`` is the mean share of
    n-grams that are not alone in their bucket, ``within/engram_collisions_chance`` that of a perfect hash; both are
    shown by ``dsv41 validate``, and no curves of fit. The more tokens are looked at, the more n-grams there are, so
    that two runs compare only over the same `batches` of the same text.

    ``within/engram_rows_used/layer_N_2gram_head_H`` is the share of a column's rows that a step of training has updated
    so far, and ``within/engram_rows_used`` that of all rows. It is read from what the optimizer counts for each row
    (`RowAdam`, so it needs ``optimizer.tables: rows``), is saved and resumed with it on any number of ranks, and costs
    training nothing. Where nothing trains, or tables are trained otherwise, it is not logged.

    Args:
        batches: Validation batches that are looked at; 0 switches all of it off.
    """

    def __init__(self, batches: int = 4) -> None:
        super().__init__(batches)
        self._hash: DeepseekV41NgramHash | None = None
        self._given: list[tuple[Tensor, Tensor]] = []
        self._counted = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count anew: it may be another text."""
        self._counted = False

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the arguments of the hash, until its buckets are counted."""
        self._hash, self._given = None, []
        for module in pl_module.modules():
            if isinstance(module, DeepseekV41NgramHash):
                self._hash = module
                if not self._counted:
                    self.before(module, lambda arguments: self._given.append((arguments[0], arguments[1])))

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks, which each of them counts: n-grams can only be told apart together."""
        if self._hash is None:
            return
        if not self._counted:
            ngrams, rows = self._of_all_ranks(trainer, self._hash)
            if len(ngrams):
                self._report_buckets(trainer, pl_module, fills_of(self._hash, ngrams, rows))
                self._counted = True
        if trainer.state.fn == TrainerFn.FITTING:
            self._report_rows(trainer, pl_module, self._hash)

    def _of_all_ranks(self, trainer: L.Trainer, hashing: DeepseekV41NgramHash) -> tuple[Tensor, Tensor]:
        """N-grams [T, N] and rows [T, layers, columns] of the live tokens that were seen."""
        ngrams, rows = [], []
        for input_ids, token_mask in self._given:
            # Ranks have as many batches, of the same shape; they differ in how much of it is padding.
            whole = input_ids.new_zeros(trainer.world_size, 2, *input_ids.shape)
            whole[trainer.global_rank] = torch.stack((input_ids, token_mask.to(input_ids.dtype)))
            whole = over_ranks(trainer, whole)
            input_ids, token_mask = whole[:, 0].flatten(0, 1), whole[:, 1].flatten(0, 1).bool()
            ngrams.append(hashing.ngrams(input_ids, token_mask)[token_mask])
            rows.append(hashing(input_ids, token_mask)[token_mask])
        self._given = []
        return torch.cat(ngrams), torch.cat(rows)

    def _report_buckets(
        self, trainer: L.Trainer, pl_module: L.LightningModule, fills: list[tuple[Column, Buckets]]
    ) -> None:
        shares = [found.colliding / found.distinct for _, found in fills]
        chances = [chance_of_collision(found.distinct, column.buckets) for column, found in fills]
        log(pl_module, "engram_collisions", sum(shares) / len(shares), constant=True)
        log(pl_module, "engram_collisions_chance", sum(chances) / len(chances), constant=True)
        show_constant(trainer, "engram_buckets", fill_table(fills))

    def _report_rows(self, trainer: L.Trainer, pl_module: L.LightningModule, hashing: DeepseekV41NgramHash) -> None:
        columns = columns_of(hashing)
        used = torch.zeros(len(columns) + 1, dtype=torch.float64, device=pl_module.device)
        counted = used[-1]  # tables whose rows are counted
        engrams = [m.engram for m in pl_module.modules() if isinstance(m, DeepseekV41Block) and m.engram is not None]
        begins = hashing.offsets.flatten(1).tolist()
        for layer, engram in enumerate(engrams):
            for optimizer in trainer.optimizers:
                hits = optimizer.state.get(engram.embed.weight, {}).get("hits")
                if hits is None:
                    continue
                counted += 1
                local, first = local_rows(hits)
                hit = local[:, 0] > 0
                for column, begin in enumerate(begins[layer]):
                    index = layer * len(begins[layer]) + column
                    end = begin + columns[index].buckets
                    used[index] += hit[max(begin - first, 0) : max(end - first, 0)].sum()
        used = over_ranks(trainer, used)
        if used[-1] == 0:
            return
        log_details(
            trainer,
            {f"engram_rows_used/{name}": used[i] / buckets for i, (name, _, buckets) in enumerate(columns)},
        )
        log(pl_module, "engram_rows_used", used[:-1].sum() / sum(buckets for _, _, buckets in columns))
