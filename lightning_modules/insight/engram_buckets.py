"""How well do hashing and tables serve the text? Collisions in validation, rows that training has reached."""

from __future__ import annotations

from typing import NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.model import DeepseekV41Block
from dsv41.ranks import local_rows
from lightning_modules.insight.hooks import ValidationObserver, log, log_details, over_ranks


class Buckets(NamedTuple):
    """How distinct n-grams lie in the buckets of one column.

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


class EngramMemory(ValidationObserver):
    """Logs how n-grams share the rows of Engram tables, and how many rows training has reached.

    For each column (layer, size of n-grams, head), over the tokens of the first validation batches, counting each
    n-gram of compressed ids once: ``engram_load/layer_N_2gram_head_H``, different n-grams per bucket;
    ``engram_fullest/...``, how many are in the fullest bucket; ``engram_collisions/...``, the share of n-grams that are
    not alone in theirs. ``val/engram_collisions`` is the mean, ``val/engram_collisions_chance`` what a perfect hash
    would have. The more tokens are looked at, the more n-grams there are, so that the numbers of two runs compare only
    over the same `batches` of the same text.

    ``engram_rows_used/...`` is the share of a column's rows that a step of training has updated so far, and
    ``val/engram_rows_used`` that of all rows. It is read from what the optimizer counts for each row (`RowAdam`, so it
    needs ``optimizer.tables: rows``), is saved and resumed with it on any number of ranks, and costs training nothing.
    Where nothing trains, or tables are trained otherwise, it is not logged.

    Args:
        batches: Validation batches that are looked at; 0 switches all of it off.
    """

    def __init__(self, batches: int = 4) -> None:
        super().__init__(batches)
        self._hash: DeepseekV41NgramHash | None = None
        self._given: list[tuple[Tensor, Tensor]] = []

    def listen(self, pl_module: L.LightningModule) -> None:
        """See what is hashed."""
        self._hash, self._given = None, []
        for module in pl_module.modules():
            if isinstance(module, DeepseekV41NgramHash):
                self._hash = module
                self.before(module, lambda arguments: self._given.append((arguments[0], arguments[1])))

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the numbers of all ranks, which each of them counts: n-grams can only be told apart together."""
        if self._hash is None:
            return
        ngrams, rows = self._of_all_ranks(trainer, self._hash)
        if len(ngrams):
            self._report_buckets(trainer, pl_module, fills_of(self._hash, ngrams, rows))
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
        shares, chances, details = [], [], dict[str, float]()
        for column, found in fills:
            shares.append(found.colliding / found.distinct)
            chances.append(chance_of_collision(found.distinct, column.buckets))
            details[f"engram_load/{column.name}"] = found.distinct / column.buckets
            details[f"engram_fullest/{column.name}"] = found.fullest
            details[f"engram_collisions/{column.name}"] = shares[-1]
        log_details(trainer, details)
        log(pl_module, "val/engram_collisions", sum(shares) / len(shares))
        log(pl_module, "val/engram_collisions_chance", sum(chances) / len(chances))

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
        log(pl_module, "val/engram_rows_used", used[:-1].sum() / sum(buckets for _, _, buckets in columns))
