"""Equal numbers of batches on all ranks, compared before an epoch or, for loaders of unknown length, at each batch.

Ranks run every forward and backward together: one with a batch more would wait for the others until a collective times
out. The data module of this project gives all ranks the same number; these are checks of other people's loaders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from lightning_modules.data.sampler import SharedLoader

_END = object()


def require_even(name: str, counts: list[str]) -> None:
    """Raise ValueError unless the numbers of batches, in words by rank, are the same."""
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
        raise ValueError(
            f"{name}: must give every rank the same number of batches, since all ranks take every step together; {told}"
        )


def _gathered(value: str) -> list[str]:
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [text or "" for text in values]


def batches_wanted(loader: object, limit: int | float) -> int | None:
    """Batches of a loader that Lightning takes with ``limit_*_batches``, or None where it does not know its length."""
    length = sized_len(loader)
    if length is None:
        return None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


class EvenLoader:
    """Loader that checks at every batch that all ranks have one.

    Everything but the iteration is that of the loader inside.

    Args:
        loader: Any iterable of batches.
        name: Of the loader, for the error.
        device: Where ranks reduce: that of the process group's backend.
    """

    def __init__(self, loader: Any, name: str, device: torch.device) -> None:
        self.loader, self._name, self._device = loader, name, device

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet there
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches, taken = iter(self.loader), 0
        while True:
            batch = next(batches, _END)
            self._compare(taken, batch is not _END)
            if batch is _END:
                return
            taken += 1
            yield batch

    def _compare(self, taken: int, more: bool) -> None:
        """Raise ValueError on all ranks if some have a batch after `taken` and others have none."""
        having = torch.tensor(int(more), device=self._device)
        dist.all_reduce(having)
        if int(having) not in (0, dist.get_world_size()):
            require_even(self._name, _gathered(f"more than {taken}" if more else f"{taken}"))


class StatefulEvenLoader(EvenLoader):
    """Resumable `EvenLoader`: Lightning looks for these methods in the class."""

    def state_dict(self) -> Any:
        """State of the loader inside."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Give the loader inside its state."""
        self.loader.load_state_dict(state)


def even_loader(loader: Any, limit: int | float, name: str, device: torch.device) -> Any:
    """Loader that gives all ranks as many batches, or raises on all. Called by all ranks.

    Args:
        loader: Any iterable of batches.
        limit: Lightning's ``limit_*_batches`` for it: int is a number, float a share.
        name: Of the loader, for the error.
        device: That of the process group's backend.

    Returns:
        `loader`, or, where its length is unknown or only asserted, a wrapper that compares ranks at each batch.

    Raises:
        ValueError: The lengths differ.
    """
    wanted = batches_wanted(loader, limit)
    require_even(name, _gathered("an unknown number" if wanted is None else f"{wanted}"))
    counted = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if isinstance(loader, SharedLoader) or (wanted is not None and counted):
        return loader
    stateful = all(hasattr(loader, method) for method in ("state_dict", "load_state_dict"))
    return (StatefulEvenLoader if stateful else EvenLoader)(loader, name, device)
