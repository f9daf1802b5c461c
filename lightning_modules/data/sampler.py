"""Order of rows, their distribution over processes, and a loader that resumes inside an epoch.

A batch is a batch of all processes together, so that the same rows are trained on in the same steps whatever their
number: the order is cut into batches, and rank r of W takes every W-th row of each, from the r-th. Where a batch is not
divisible by W, ranks without a row get one of padding alone (``NO_ROW``), so that all have the same shapes and make the
same number of steps.

Lightning goes on counting at batch N when it resumes from a checkpoint written inside an epoch, but it asks the loader
for a new iterator, and an ordinary loader would begin again at batch 0. The sampler here is told where to begin: each
time it is iterated it asks a callable for the position, and the data module answers from the trainer's own counters.
The loader asks as late as it can, when its first batch is needed, because Lightning may create the iterator before it
has restored its counters (it does when ``trainer.estimated_stepping_batches`` is read in ``configure_optimizers``),
and a loader with workers reads its sampler at once. The counters move when a batch has been trained on, so batches
that workers have prefetched do not count.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
from torch.utils.data import DataLoader, Sampler

from lightning_modules.data.rows import NO_ROW


class Position(NamedTuple):
    """Position of training when an epoch begins or is resumed.

    Attributes:
        epoch: Number of the epoch, from 0. It selects the order of the rows.
        batches: Batches of that epoch that have been trained on.
    """

    epoch: int
    batches: int


def trainer_position(trainer: L.Trainer) -> Position | None:
    """Position of training, from the trainer's counters.

    Args:
        trainer: A trainer whose training loop asks for the first batch of an epoch, new or resumed.

    Returns:
        The position. ``batches`` is the trainer's own count, so it agrees with where the trainer expects the epoch to
        end. None when the epoch's batches are all done and the trainer only has to close it, as happens after a resume
        with ``max_steps`` from a checkpoint written at the end of an epoch.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.completed >= trainer.num_training_batches:
        return None
    if getattr(trainer, "overfit_batches", 0) > 0:
        return Position(0, progress.current.completed)  # The same few batches are wanted in each epoch.
    # Not the trainer's count of epochs: in the case named above Lightning 2.6 counts the closed epoch twice, and the
    # order of the next one would be left out.
    earlier = progress.total.completed - progress.current.completed
    return Position(math.ceil(earlier / trainer.num_training_batches), progress.current.completed)


def share_of(batch: list[int], rank: int, world_size: int) -> list[int]:
    """Part of a batch that a rank takes.

    Args:
        batch: Row numbers, at least one.
        rank: This process's number among the data-parallel ones, from 0.
        world_size: Number of data-parallel processes.

    Returns:
        Every ``world_size``-th row from the ``rank``-th, filled up with ``NO_ROW`` to the length that rank 0 has.
    """
    mine = batch[rank::world_size]
    return mine + [NO_ROW] * (-(-len(batch) // world_size) - len(mine))


class OrderedBatchSampler(Sampler[list[int]]):
    """Batches of row numbers in their order, for validation and test; the last may be smaller.

    Args:
        rows: Number of rows, at least 1.
        batch_size: Rows in a batch of all processes, at least one for each.
        rank: This process's number among the data-parallel ones, from 0.
        world_size: Number of data-parallel processes.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        for name, value in (("rows", rows), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        if batch_size < world_size:
            raise ValueError(f"batch_size must be at least the number of processes, {world_size}, got {batch_size}")
        self.rows = rows
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Batches in a whole epoch, the same number for every rank, also when the next iteration begins inside one.

        Lightning compares this number with its own counter of the epoch's batches to find the end of the epoch.
        """
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._shares(np.arange(self.rows), 0)

    def _shares(self, order: np.ndarray, first: int) -> Iterator[list[int]]:
        """This rank's part of the batches of an order, from batch number `first` on."""
        for number in range(first, len(self)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size].tolist()
            yield share_of(batch, self.rank, self.world_size)


class ResumableBatchSampler(OrderedBatchSampler):
    """Batches of row numbers, in an order that depends on the seed and the epoch only; the last may be smaller.

    Args:
        rows: Number of rows, at least 1.
        batch_size: Rows in a batch of all processes, at least one for each.
        seed: Seed of the order, at least 0.
        position: Returns the position to begin at, or None if nothing is left of the epoch. Called at the start of each
            iteration, never earlier.
        rank: This process's number among the data-parallel ones, from 0.
        world_size: Number of data-parallel processes.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        seed: int,
        position: Callable[[], Position | None],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(rows, batch_size, rank, world_size)
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.seed = seed
        self.position = position

    def order(self, epoch: int) -> np.ndarray:
        """The rows of one epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Returns:
            int64 ``[rows]``, a permutation of 0 to ``rows - 1``.
        """
        return np.random.default_rng((self.seed, epoch)).permutation(self.rows)

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position()
        if position is None:
            return
        epoch, batches = position
        order = self.order(epoch)
        yield from self._shares(order, batches)


class SharedLoader:
    """Loader whose batch sampler distributes rows over ranks.

    It wraps a ``DataLoader`` instead of being one so that Lightning leaves it as it is: Lightning would replace the
    sampler of a ``DataLoader`` by its own when there are several ranks.

    Args:
        loader: The loader to iterate. Its batch sampler takes a rank's part of each batch.
    """

    def __init__(self, loader: DataLoader[dict[str, Any]]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_sampler = loader.batch_sampler
        self.num_workers = loader.num_workers

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator: nothing below runs before the first batch is asked for. See the note at the top of the file.
        yield from self.loader


class ResumableLoader(SharedLoader):
    """Training loader that starts at the sampler's position when its first batch is requested."""

    def state_dict(self) -> dict[str, Any]:
        """Empty state, by which Lightning recognises a resumable loader and does not warn."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state: the position is the trainer's, not the loader's.

        Lightning does not call this at all when the loader was set up before the checkpoint was read, which is why
        the position is not kept here.

        Args:
            state: The empty state.
        """
