"""A user's own loaders with different numbers of batches are refused on all ranks; even ones train to the end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dsv41 import DeepseekV41TextConfig
from lightning_modules.parallel.even_loaders import batches_wanted, require_even
from lightning_modules.strategy import EngramFSDPStrategy
from lightning_modules.task import DeepseekV41Task

Batch = dict[str, Tensor]
SOON = 20  # seconds; the process group's time limit is 60

SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    **{"qk_rope_head_dim": 4, "q_lora_rank": 8, "o_lora_rank": 4, "o_groups": 2, "moe_intermediate_size": 8},
    **{"n_routed_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 16, "compress_ratios": [0]},
    **{"rope_scaling": {"rope_type": "default"}, "kv_source_layer_ids": [], "index_source_layer_ids": []},
    **{"candidate_source_layer_id": -1, "engram_layer_ids": []},
}


def batch_of(number: int) -> Batch:
    ids = torch.randint(32, (1, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "row_id": torch.tensor([number])}


class Stream(IterableDataset[Batch]):
    """Batches that come one by one, nobody knows how many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Batch]:
        return map(batch_of, range(self.count))


class Promising(Stream):
    """Says three, whatever comes."""

    def __len__(self) -> int:
        # Lightning warns of such streams once per process.
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        return 3


class OwnLoader:
    """No DataLoader at all, with a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return map(batch_of, range(self.count))


def sized(count: int) -> Any:
    return DataLoader([batch_of(number) for number in range(count)], batch_size=None)  # type: ignore[arg-type]


def stream(count: int) -> Any:
    return DataLoader(Stream(count), batch_size=None)


def promising(count: int) -> Any:
    return DataLoader(Promising(count), batch_size=None)


def trainer_of(**options: Any) -> tuple[L.Trainer, DeepseekV41Task]:
    torch.manual_seed(0)
    task = DeepseekV41Task(DeepseekV41TextConfig(**SIZES))
    task.register_buffer("token_bytes", torch.ones(32, dtype=torch.int64), persistent=False)
    quiet: dict[str, Any] = {
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0},
    }
    strategy = EngramFSDPStrategy(process_group_backend="gloo")
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet | options), task


def refusal(work: Callable[[], Any]) -> str:
    """The ValueError that `work` ends with, soon."""
    begin = time.monotonic()
    try:
        work()
    except ValueError as error:
        assert time.monotonic() - begin < SOON
        return str(error)
    raise AssertionError("nothing was refused")


def expected(name: str, first: str, second: str) -> str:
    return (
        f"{name}_dataloader: must give every rank the same number of batches, since all ranks take every step "
        f"together; rank 0 has {first}, rank 1 has {second}"
    )


def own(counts: tuple[int, int]) -> int:
    return counts[dist.get_rank()]


@ranks(2)
def test_uneven_lengths_are_refused_before_the_first_step() -> None:
    for make in (sized, OwnLoader):
        for counts in ((3, 2), (1, 4)):
            trainer, task = trainer_of()
            said = refusal(lambda make=make, counts=counts, t=trainer, m=task: t.fit(m, make(own(counts))))
            assert said == expected("train", *map(str, counts)), said
            assert trainer.global_step == 0


@ranks(2)
def test_every_kind_of_loader_is_compared() -> None:
    for name in ("val", "test", "predict"):
        trainer, task = trainer_of()
        work = {"val": trainer.validate, "test": trainer.test, "predict": trainer.predict}[name]
        said = refusal(lambda work=work, task=task: work(task, sized(own((2, 3)))))
        assert said == expected(name, "2", "3"), said
    trainer, task = trainer_of()
    said = refusal(lambda: trainer.fit(task, sized(2), sized(own((2, 1)))))
    assert said == expected("val", "2", "1"), said
    assert trainer.global_step == 0, "told before the training that comes before the validation"


@ranks(2)
def test_streams_are_compared_batch_by_batch() -> None:
    for make in (stream, promising):
        trainer, task = trainer_of()
        said = refusal(lambda make=make, t=trainer, m=task: t.fit(m, make(own((3, 2)))))
        assert said == expected("train", "more than 2", "2"), said
        trainer, task = trainer_of()
        said = refusal(lambda make=make, t=trainer, m=task: t.validate(m, make(own((1, 2)))))
        assert said == expected("val", "1", "more than 1"), said
    trainer, task = trainer_of()
    said = refusal(lambda: trainer.fit(task, sized(3) if dist.get_rank() else stream(3)))
    assert said == expected("train", "an unknown number", "3"), said


@ranks(2)
def test_even_loaders_train_to_the_end() -> None:
    """Whatever the kind; so do those that a limit makes even."""
    weights = []
    for make in (sized, OwnLoader, stream, promising):
        trainer, task = trainer_of()
        trainer.fit(task, make(3), make(3))
        assert trainer.global_step == 3
        weights.append(task.built.lm_head.weight.full_tensor().detach())
    for make in (sized, stream):
        trainer, task = trainer_of(limit_train_batches=2, limit_val_batches=2)
        trainer.fit(task, make(own((4, 3))), make(own((2, 5))))
        assert trainer.global_step == 2
    assert all(torch.equal(other, weights[0]) for other in weights)


@ranks(2)
def test_a_loader_that_can_be_resumed_still_can() -> None:
    """Its state is asked for, and given back."""

    class Resumable(OwnLoader):
        given: Any = None

        def state_dict(self) -> dict[str, int]:
            return {"at": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            Resumable.given = state

    trainer, task = trainer_of()
    trainer.fit(task, Resumable(2))
    assert trainer.train_dataloader.count == 2, "attributes are those of the loader inside"
    loader = trainer.fit_loop._combined_loader
    assert loader is not None
    assert loader._state_dicts() == [{"at": 7}]
    loader._load_state_dicts([{"at": 7}])
    assert Resumable.given == {"at": 7}


@pytest.mark.parametrize(("limit", "wanted"), [(1.0, 7), (0.5, 3), (0, 0), (5, 5), (9, 7), (0.0, 0)], ids=str)
def test_the_limit_counts(limit: float, wanted: int) -> None:
    assert batches_wanted([torch.zeros(1)] * 7, limit) == wanted
    assert batches_wanted(iter([]), limit) is None


def test_counts_are_named_by_rank() -> None:
    require_even("x", ["2", "2", "2"])
    with pytest.raises(ValueError, match=r"^x: .*; rank 0 has 2, rank 1 has 2, rank 2 has 1$"):
        require_even("x", ["2", "2", "1"])
