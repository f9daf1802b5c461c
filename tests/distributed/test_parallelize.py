"""Values, gradients and training of sharded models against one process that holds everything.

Bounds of 0 mean bit-equal. What a factor or a missing term would do lies far above the bounds of float64, which
`test_a_factor_would_show` asserts; 20 steps of training multiply rounding (see SEED in `golden_tiny.py`). What does not
depend on how many rows a rank has runs on 2 ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from golden_tiny import (
    CASES,
    CPU,
    DEFAULT,
    PARAMETERS,
    RECOMPUTING,
    UNTRAINED,
    Parent,
    Tensors,
    backward,
    build,
    deviations,
    differing,
    gradients,
    own_backward,
    own_batch,
    sharded,
    values,
    worst,
)
from ranks import ranks, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from dsv41 import DeepseekV41ForCausalLM
from dsv41.engram.table import EngramTable
from dsv41.ranks import owned_rows
from lightning_modules.parallel.fsdp import ParallelOptions, parallelize

OFFLOADING = ParallelOptions(cpu_offload=True)


@pytest.mark.parametrize("value", ["fp16", "bf16-mixed", None])
def test_unknown_precisions_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^mixed_precision: must be one of .*, got {re.escape(repr(value))}$"):
        ParallelOptions(mixed_precision=value)


# ---------------------------------------------------------------------- one process that holds everything


def compute_gradient(case: str, number: int, micros: Iterable[int] = (0,)) -> Tensors:
    """The gradient of all batches of so many ranks, by a plain model."""
    model = build()
    backward(model, case, number, micros)
    return gradients(model)


@cache
def whole_gradient(case: str, number: int, micros: int = 1) -> Tensors:
    """`compute_gradient` by a process of its own."""
    (found,) = run(compute_gradient, None, case=case, number=number, micros=range(micros))
    assert len(found) == PARAMETERS
    assert sum(g is None for g in found.values()) == UNTRAINED
    assert all("indexer" in name for name, g in found.items() if g is None)
    return found


@pytest.fixture
def expected(world_size: int) -> Tensors:
    """The whole gradient of the case "unequal"."""
    return whole_gradient("unequal", world_size)


# ---------------------------------------------------------------------- values


@ranks(2, 3)
@pytest.mark.parametrize(
    ("dtype", "knows_owners"),
    [(torch.float64, False), (torch.float64, True), (torch.float32, False)],
    ids=["float64", "float64 with owners", "float32"],
)
def test_initial_values(mesh: DeviceMesh, dtype: torch.dtype, knows_owners: bool) -> None:
    """Bit-equal to those of a model built by one process, also where the model was built knowing the table's owners."""
    model = build(dtype, "meta", group=dist.group.WORLD if knows_owners else None)
    parallelize(Parent(model=model), mesh, DEFAULT, CPU)
    assert differing(model, build(dtype)) == 0


@ranks(2, 3)
def test_existing_values(mesh: DeviceMesh) -> None:
    """What is not on the meta device keeps its values (loaded weights, say): nothing is drawn again."""
    model = build(seed=5)
    torch.manual_seed(6)
    parallelize(Parent(model=model), mesh, DEFAULT, CPU)
    assert differing(model, build(seed=5)) == 0


@ranks(2, 3)
@pytest.mark.parametrize("options", [DEFAULT, OFFLOADING], ids=["default", "offload"])
def test_tables(mesh: DeviceMesh, rank: int, world_size: int, options: ParallelOptions) -> None:
    """Each rank holds its own rows of a table and no padding; names in checkpoints are those of the plain model."""
    model = sharded(mesh, options)
    tables = [module for module in model.modules() if isinstance(module, EngramTable)]
    assert [table.rows for table in tables] == [408, 484]
    for table in tables:
        assert isinstance(table.weight, DTensor)
        local = table.weight.to_local()
        owned = owned_rows(table.rows, world_size, rank)
        assert table.owned == owned
        assert local.untyped_storage().nbytes() == local.nbytes
        assert len(local) == len(owned)
    assert list(model.state_dict()) == list(build().state_dict())


# ---------------------------------------------------------------------- gradients


@pytest.fixture
def expected_by_case(world_size: int) -> dict[str, Tensors]:
    """Whole gradients of all cases."""
    return {case: whole_gradient(case, world_size) for case in CASES}


@ranks(2, 3)
def test_gradients(mesh: DeviceMesh, expected_by_case: dict[str, Tensors]) -> None:
    """Every parameter, with unequal live tokens, with another batch shape on one rank, with nothing to do on one."""
    model = sharded(mesh)
    for case, expected in expected_by_case.items():
        assert worst(own_backward(model, case), expected) <= 1e-12, case


@ranks(2)
def test_gradients_activation_checkpointing(mesh: DeviceMesh, expected_by_case: dict[str, Tensors]) -> None:
    """The same when blocks, and with them the exchanges of rows, run again in backward."""
    model = sharded(mesh, RECOMPUTING)
    for case in CASES[1:]:
        assert worst(own_backward(model, case), expected_by_case[case]) <= 1e-12, case


@ranks(2)
@pytest.mark.parametrize(
    "options", [ParallelOptions(reshard_after_forward=False), OFFLOADING], ids=["without resharding", "cpu offload"]
)
def test_gradients_with_other_options(
    mesh: DeviceMesh, options: ParallelOptions, expected_by_case: dict[str, Tensors]
) -> None:
    """The same when blocks keep what they gathered, and with parameters that live in host memory."""
    case = "other shape"
    assert worst(own_backward(sharded(mesh, options), case), expected_by_case[case]) <= 1e-12


@pytest.fixture
def expected_of_four(world_size: int) -> Tensors:
    """The whole gradient of four micro-batches."""
    return whole_gradient("unequal", world_size, 4)


@ranks(2)
def test_accumulation(mesh: DeviceMesh, expected: Tensors, expected_of_four: Tensors) -> None:
    """Four micro-batches, of which the last alone reduces gradients, sum up; a second step starts afresh."""
    model = sharded(mesh)
    assert worst(own_backward(model, "unequal", range(4)), expected_of_four) <= 1e-12
    assert worst(own_backward(model, "unequal"), expected) <= 1e-12


@ranks(2, 3)
def test_gradient_norm(mesh: DeviceMesh, expected: Tensors) -> None:
    """The norm over all parameters, sharded by FSDP2 or by owners, is that of the whole gradient."""
    norm = get_total_norm([g for g in own_backward(sharded(mesh), "unequal").values() if g is not None])
    assert isinstance(norm, DTensor)
    whole = get_total_norm([g for g in expected.values() if g is not None])
    assert abs(norm.full_tensor() - whole) / whole <= 1e-12


@ranks(2)
def test_evaluation(mesh: DeviceMesh, world_size: int, expected: Tensors) -> None:
    """Logits without gradients, before any training step too; then training still works."""
    own = own_batch("other shape")
    dense = build().eval()
    with torch.no_grad():
        whole = dense(own.ids, attention_mask=own.mask).logits
    model = sharded(mesh)
    # Evaluation leaves some parameters gathered in the model's own lists; an optimizer knows the sharded ones.
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            logits = model(own.ids, attention_mask=own.mask).logits
        assert not logits.requires_grad
        live = own.mask.bool()
        assert (logits - whole)[live].norm() / whole[live].norm() <= 1e-12
        model.train()
        optimizer.zero_grad()
        backward(model, "unequal", world_size)
        assert worst(gradients(model), expected) <= 1e-12


# ---------------------------------------------------------------------- training


def bare_sgd(parameters: list[nn.Parameter], number: int) -> list[Optimizer]:
    return [SGD(parameters, lr=0.1)]


def sgd(parameters: list[nn.Parameter], number: int) -> list[Optimizer]:
    return [SGD(parameters, lr=0.1, momentum=0.9)]


def sgd_and_adamw(parameters: list[nn.Parameter], number: int) -> list[Optimizer]:
    """Every second parameter by either; with another number of ranks the other way round, so that none is left out.

    One run for both, because a step takes long when ranks share cores. Each gets one of the two tables.
    """
    first = number % 2
    return [
        SGD(parameters[first::2], lr=0.1, momentum=0.9),
        AdamW(parameters[1 - first :: 2], lr=1e-3, eps=1e-8, fused=True),
    ]


@dataclass(frozen=True)
class Plan:
    """Some optimizer steps. Thresholds are such that clipping changes every step."""

    optimizers: Callable[[list[nn.Parameter], int], list[Optimizer]]
    steps: int
    max_norm: float | None = None
    max_value: float | None = None


# On 3 ranks for uneven rows and the other assignment of optimizers, which show in the first steps.
CLIPPED_BY_NORM = {2: Plan(sgd_and_adamw, steps=20, max_norm=0.2), 3: Plan(sgd_and_adamw, steps=6, max_norm=0.2)}
CLIPPED_BY_VALUE = Plan(sgd, steps=3, max_value=1e-3)
# A factor on all gradients is invisible after clipping by norm, and to AdamW; this one shows it.
BARE = Plan(bare_sgd, steps=1)


def train(model: DeepseekV41ForCausalLM, plan: Plan, number: int, spoiled: Iterable[str] = ()) -> list[float]:
    """Train in place; gradient norms before clipping. `spoiled` names parameters whose gradients count W times."""
    optimizers = plan.optimizers(list(model.parameters()), number)
    norms: list[float] = []
    for step in range(plan.steps):
        model.zero_grad()
        backward(model, "unequal", number, micros=[step % 5])
        found = {name: g for name, g in gradients(model).items() if g is not None}
        for name in spoiled:
            found[name].mul_(number)
        if plan.max_norm is not None:
            norm = clip_grad_norm_(model.parameters(), plan.max_norm)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            assert norms[-1] > 1.5 * plan.max_norm, f"clipping does not bite in step {step}: {norms}"
        if plan.max_value is not None:
            if not isinstance(model, FSDPModule):
                bitten = sum(int((g.abs() > plan.max_value).sum()) for g in found.values())
                assert bitten > 1000, f"clipping does not bite in step {step}: {bitten} elements"
            clip_grad_value_(model.parameters(), plan.max_value)
        for optimizer in optimizers:
            optimizer.step()
    return norms


Trained = tuple[list[float], Tensors]


def compute_run(plan: Plan, number: int) -> Trained:
    """Gradient norms and parameters of a plain model that trains on the batches of so many ranks."""
    model = build()
    norms = train(model, plan, number)
    return norms, values(model)


def whole_run(plan: Plan, number: int) -> Trained:
    """`compute_run` by a process of its own."""
    (found,) = run(compute_run, None, plan=plan, number=number)
    return found


def error_of_run(mesh: DeviceMesh, plan: Plan, expected: Trained, options: ParallelOptions = DEFAULT) -> float:
    """Worst deviation of parameters and norms of a sharded model that trains likewise."""
    expected_norms, expected_values = expected
    model = sharded(mesh, options)
    norms = train(model, plan, mesh.size())
    off = [abs(ours - whole) / whole for ours, whole in zip(norms, expected_norms, strict=True)]
    return max([worst(values(model), expected_values), *off])


@pytest.fixture
def clipped_by_norm(world_size: int) -> Trained:
    return whole_run(CLIPPED_BY_NORM[world_size], world_size)


@ranks(2, 3)
def test_training(mesh: DeviceMesh, clipped_by_norm: Trained) -> None:
    """All parameters after steps of SGD with momentum, or AdamW, with clipping by norm."""
    assert error_of_run(mesh, CLIPPED_BY_NORM[mesh.size()], clipped_by_norm) <= 1e-9


@pytest.fixture
def clipped_by_value(world_size: int) -> Trained:
    return whole_run(CLIPPED_BY_VALUE, world_size)


@ranks(2)
def test_training_clipped_by_value(mesh: DeviceMesh, clipped_by_value: Trained) -> None:
    """Clipping by value acts on reduced gradients."""
    assert error_of_run(mesh, CLIPPED_BY_VALUE, clipped_by_value, OFFLOADING) <= 1e-9


@pytest.fixture
def bare(world_size: int) -> Trained:
    return whole_run(BARE, world_size)


@ranks(2)
def test_a_factor_would_show(mesh: DeviceMesh, world_size: int, expected: Tensors, bare: Trained) -> None:
    """Control: one plain step agrees, and where the gradient of a parameter counts W times it no longer does."""
    for name, g in expected.items():
        assert g is None or g.norm() > 1e-9, f"{name}: too little gradient for a comparison"
    spoiled = ("model.layers.2.attn.wq_a.weight", "model.layers.3.engram.embed.weight")
    model = sharded(mesh)
    train(model, BARE, world_size, spoiled)
    for ours, theirs, factor in ((gradients(model), expected, world_size - 1.0), (values(model), bare[1], 1e-4)):
        seen = deviations(ours, theirs)
        assert min(seen.pop(name) for name in spoiled) > 0.999 * factor
        assert max(seen.values()) < 1e-12
    assert error_of_run(mesh, BARE, bare) <= 1e-12
