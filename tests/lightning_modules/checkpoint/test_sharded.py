"""A folder gives back the checkpoint that was saved, or nothing at all; on one rank (more in `tests/distributed`)."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import AdamW

from dsv41.files import MARKER, DamagedFileError, begin_folder, checksums_of, is_complete, publish_folder, sha256_of
from lightning_modules.checkpoint.sharded import (
    META,
    IncompleteCheckpointError,
    checksums_of_rank,
    model_shapes,
    read_meta,
    read_model,
    read_optimizer,
    read_whole,
    require_intact_share,
    require_same_tensors,
    split_tensors,
    write_meta,
    write_tensors,
)
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.optim.state import named_state, numbered_state

# Without a process group torch says that it takes this process for the only one. It is.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*assuming the intent is to (save|load) in a single process:UserWarning"
)


class Net(nn.Module):
    """Parameters and a buffer of several types and shapes; `idle` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.idle = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rough = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor([3, 2**40]))

    def loss(self) -> Tensor:
        return self.linear(torch.tensor([[1.0, 2.0, 3.0]])).square().sum() * self.scale + self.rough.sum()


def trained(steps: int, seed: int = 0) -> tuple[Net, AdamW]:
    """A net after some steps of an optimizer with two groups."""
    torch.manual_seed(seed)
    net = Net()
    matrices = [net.linear.weight, net.idle.weight]
    optimizer = AdamW([{"name": "decay", "params": matrices}, {"params": [net.scale, net.rough, net.linear.bias]}])
    for _ in range(steps):
        optimizer.zero_grad()
        net.loss().backward()
        optimizer.step()
    return net, optimizer


def checkpoint_of(net: Net, *states: dict[str, Any]) -> dict[str, Any]:
    return {
        "state_dict": net.state_dict(),
        "optimizer_states": list(states),
        "global_step": 2,
        "loops": {"fit_loop": {"batches": [1, 2], "rate": 0.5}},
        "lr_schedulers": [{"last_epoch": 2}],
        "generator": torch.arange(4, dtype=torch.uint8),
    }


def write(path: Path, checkpoint: dict[str, Any]) -> Path:
    """What the strategy does on one rank."""
    tensors, meta = split_tensors(checkpoint)
    partial = begin_folder(path)
    write_tensors(partial, tensors)
    write_meta(partial, meta)
    about = {"global_step": checkpoint.get("global_step")}
    publish_folder(partial, path, about, checksums_of_rank(partial, 0))
    return path


def load_model(folder: Path, state_dict: dict[str, Tensor], strict: bool = True) -> None:
    """What the strategy does on one rank."""
    require_intact_share(folder)
    stored = model_shapes(folder)
    require_same_tensors(folder, stored, state_dict, strict)
    read_model(folder, {name: tensor for name, tensor in state_dict.items() if name in stored})


def require_equal(left: Any, right: Any) -> None:
    """The same containers, keys, types and values."""
    assert type(left) is type(right) or (isinstance(left, dict) and isinstance(right, dict))
    if isinstance(left, Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            require_equal(value, right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            require_equal(one, other)
    else:
        assert left == right


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a net after two steps."""
    net, optimizer = trained(2)
    return write(tmp_path / "step-00000002.ckpt", checkpoint_of(net, named_state(net, optimizer)))


def test_the_folder_holds_the_files_that_its_description_names(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [".metadata", "__0_0.distcp", "complete.json", "meta.pt"]
    assert is_complete(saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_everything_but_the_tensors_of_model_and_optimizer_is_in_meta(saved: Path) -> None:
    net, optimizer = trained(2)
    expected = checkpoint_of(net, named_state(net, optimizer) | {"state": {}})
    del expected["state_dict"]
    require_equal(read_meta(saved), expected)


def test_the_model_is_read_into_the_memory_that_it_has(saved: Path) -> None:
    net, _ = trained(2)
    other, _ = trained(0, seed=1)
    assert not torch.equal(net.linear.weight, other.linear.weight)
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    load_model(saved, other.state_dict())
    require_equal(dict(other.state_dict()), dict(net.state_dict()))
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == places


def test_training_goes_on_alike_from_the_folder(saved: Path) -> None:
    net, optimizer = trained(0, seed=1)
    load_model(saved, net.state_dict())
    plain = read_meta(saved)["optimizer_states"][0]
    named = read_optimizer(saved, 0, dict(net.named_parameters()), plain)
    optimizer.load_state_dict(numbered_state(named))
    net.loss().backward()
    optimizer.step()
    expected, expected_optimizer = trained(3)
    require_equal(dict(net.state_dict()), dict(expected.state_dict()))
    require_equal(optimizer.state_dict(), expected_optimizer.state_dict())


def test_a_parameter_without_optimizer_state_stays_without(saved: Path) -> None:
    net, optimizer = trained(0)
    named = read_optimizer(saved, 0, dict(net.named_parameters()), read_meta(saved)["optimizer_states"][0])
    assert named["state"].keys() == {"linear.weight", "linear.bias", "scale", "rough"}
    assert named["param_groups"][0]["params"] == ["linear.weight", "idle.weight"]
    optimizer.load_state_dict(numbered_state(named))
    assert net.idle.weight not in optimizer.state
    assert 1 not in read_whole(saved)["optimizer_states"][0]["state"]


def test_optimizer_state_has_the_shape_and_type_that_it_had(saved: Path) -> None:
    net, optimizer = trained(2)
    named = read_optimizer(saved, 0, dict(net.named_parameters()), read_meta(saved)["optimizer_states"][0])
    require_equal(named, named_state(net, optimizer))
    assert named["state"]["rough"]["exp_avg"].dtype == torch.bfloat16
    assert named["state"]["linear.weight"]["step"].shape == ()
    assert not any(tensor.requires_grad for entries in named["state"].values() for tensor in entries.values())


@pytest.mark.parametrize("read", [read_whole, AtomicCheckpointIO().load_checkpoint], ids=["folder", "checkpoint_io"])
def test_the_whole_checkpoint_is_the_one_that_lightning_would_have_saved(
    saved: Path, read: Callable[[Path], dict[str, Any]]
) -> None:
    """Without a warning: whoever opens a folder on one device knows that this is one process."""
    net, optimizer = trained(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = read(saved)
    require_equal(whole, checkpoint_of(net, optimizer.state_dict()))
    fresh, fresh_optimizer = trained(0, seed=1)
    fresh.load_state_dict(whole["state_dict"])
    fresh_optimizer.load_state_dict(whole["optimizer_states"][0])
    require_equal(fresh_optimizer.state_dict(), optimizer.state_dict())


def test_optimizers_keep_to_themselves_and_values_that_are_no_tensors_survive(tmp_path: Path) -> None:
    """Two optimizers with state for parameters of the same name; a parameter with plain values only; one without."""
    net, optimizer = trained(2)
    first = named_state(net, optimizer)
    second = copy.deepcopy(first)
    second["state"] = {
        "linear.bias": {"step": torch.tensor(7.0), "calls": 5, "history": [0.5, 0.25], "on": True, "nothing": None},
        "idle.weight": {"calls": 3},
    }
    folder = write(tmp_path / "a.ckpt", checkpoint_of(net, first, second))
    plain = read_meta(folder)["optimizer_states"]
    for index, expected in enumerate((first, second)):
        require_equal(read_optimizer(folder, index, dict(net.named_parameters()), plain[index]), expected)
    whole = read_whole(folder)["optimizer_states"]
    require_equal(whole, [numbered_state(first), numbered_state(second)])


def test_an_optimizer_that_has_made_no_step_has_no_state_afterwards(tmp_path: Path) -> None:
    net, optimizer = trained(0)
    folder = write(tmp_path / "a.ckpt", checkpoint_of(net, named_state(net, optimizer)))
    plain = read_meta(folder)["optimizer_states"][0]
    require_equal(read_optimizer(folder, 0, dict(net.named_parameters()), plain), named_state(net, optimizer))
    require_equal(read_whole(folder)["optimizer_states"], [optimizer.state_dict()])


def test_a_checkpoint_of_weights_only_has_no_optimizers(tmp_path: Path) -> None:
    net, _ = trained(0)
    checkpoint = {"state_dict": net.state_dict(), "global_step": 0}
    folder = write(tmp_path / "a.ckpt", checkpoint)
    require_equal(read_whole(folder), checkpoint)


def test_splitting_copies_no_tensor_and_leaves_the_checkpoint_as_it_is() -> None:
    net, optimizer = trained(1)
    checkpoint = checkpoint_of(net, named_state(net, optimizer))
    before = copy.deepcopy(checkpoint)
    tensors, _ = split_tensors(checkpoint)
    require_equal(checkpoint, before)
    state = tensors["optimizer_0"]["state"]["scale"]["exp_avg"]
    assert state is optimizer.state[net.scale]["exp_avg"]


def without(state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state_dict.items() if key != name}


OTHER_MODELS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing there": (lambda own: own | {"new.weight": torch.zeros(2)}, r"missing there: new\.weight"),
    "unknown here": (lambda own: without(own, "idle.weight"), r"unknown here: idle\.weight"),
    "another shape": (
        lambda own: own | {"linear.weight": torch.zeros(2, 4)},
        r"linear\.weight is \(2, 3\) there, \(2, 4\) here",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_tensors_of_another_model_are_refused_before_any_is_overwritten(saved: Path, case: str) -> None:
    change, message = OTHER_MODELS[case]
    net, _ = trained(0, seed=1)
    own = change(dict(net.state_dict()))
    before = copy.deepcopy(own)
    with pytest.raises(ValueError, match=rf"^ckpt_path: the tensors of .*{saved.name} are not the model's: {message}$"):
        load_model(saved, own)
    require_equal(own, before)


def test_all_differences_are_told_at_once(saved: Path) -> None:
    net, _ = trained(0)
    own = dict(net.state_dict())
    for change, _ in OTHER_MODELS.values():
        own = change(own)
    with pytest.raises(ValueError, match="ckpt_path") as error:
        load_model(saved, own)
    for text in ("linear.weight is (2, 3)", "missing there: new.weight", "unknown here: idle.weight"):
        assert text in str(error.value)


def test_many_names_are_abbreviated() -> None:
    own = {f"layer.{index}": torch.zeros(1) for index in range(8)}
    with pytest.raises(ValueError, match=r"missing there: layer\.0, layer\.1, .* layer\.4 and 3 more$"):
        require_same_tensors(Path("a.ckpt"), {}, own, strict=True)


def test_what_is_missing_or_unknown_is_left_alone_if_not_strict(saved: Path) -> None:
    net, _ = trained(2)
    other, _ = trained(0, seed=1)
    own = without(dict(other.state_dict()), "idle.weight") | {"new.weight": torch.full((2,), 7.0)}
    load_model(saved, own, strict=False)
    assert torch.equal(own.pop("new.weight"), torch.full((2,), 7.0))
    require_equal(own, without(dict(net.state_dict()), "idle.weight"))


def test_another_shape_is_refused_if_not_strict_too(saved: Path) -> None:
    net, _ = trained(0, seed=1)
    own = dict(net.state_dict()) | {"linear.weight": torch.zeros(2, 4)}
    before = copy.deepcopy(own)
    with pytest.raises(ValueError, match=r"linear\.weight is \(2, 3\) there"):
        load_model(saved, own, strict=False)
    require_equal(own, before)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no marker": lambda folder: (folder / MARKER).unlink(),
    "tensors cut": lambda folder: os.truncate(folder / "__0_0.distcp", 100),
    "no meta": lambda folder: (folder / META).unlink(),
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_folder_is_refused(saved: Path, damage: str) -> None:
    DAMAGES[damage](saved)
    for read in (read_meta, read_whole, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(IncompleteCheckpointError, match=rf"^ckpt_path: .*{saved.name} is not a complete sharded"):
            read(saved)


def test_a_folder_can_be_copied_and_renamed(saved: Path) -> None:
    net, optimizer = trained(2)
    moved = saved.parent / "elsewhere" / "best.ckpt"
    shutil.copytree(saved, moved)
    shutil.rmtree(saved)
    require_equal(read_whole(moved), checkpoint_of(net, optimizer.state_dict()))


def test_a_failure_to_write_tells_the_rank_and_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    net, _ = trained(0)
    partial = begin_folder(tmp_path / "a.ckpt")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.ckpt could not be written: rank 0: .*No space left on device"):
        write_tensors(partial, {"state_dict": net.state_dict()})
    monkeypatch.undo()
    assert not is_complete(partial)


def test_tensors_and_meta_are_on_the_disk_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`publish_folder` flushes only the marker and the names; sizes that agree say nothing about what a disk holds."""
    net, optimizer = trained(1)
    partial = begin_folder(tmp_path / "a.ckpt")
    flushed = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    tensors, meta = split_tensors(checkpoint_of(net, named_state(net, optimizer)))
    write_tensors(partial, tensors)
    write_meta(partial, meta)
    files = [path.stat() for path in partial.iterdir()]
    assert len(files) == 3
    assert sorted(flushed) == sorted((file.st_ino, file.st_size) for file in files)


FILES = [".metadata", "__0_0.distcp", META]


def wrong_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_marker_has_the_checksum_of_every_file(saved: Path) -> None:
    assert checksums_of(saved) == {name: sha256_of(saved / name) for name in FILES}
    assert checksums_of_rank(saved, 0).keys() == {"__0_0.distcp"}
    assert checksums_of_rank(saved, 1) == {}


def test_shares_of_the_ranks_are_all_files(saved: Path) -> None:
    """A rank finds the damage of its own share, and of no other."""
    for name in FILES:
        wrong_bit(saved / name)
        found = []
        for rank in range(2):
            try:
                require_intact_share(saved, rank, 2)
            except DamagedFileError as error:
                found.append((rank, name in str(error)))
        assert found == [(FILES.index(name) % 2, True)]
        wrong_bit(saved / name)
    require_intact_share(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_bit_is_found_before_any_tensor_is_overwritten(saved: Path, name: str) -> None:
    shutil.copytree(saved, saved.with_name("step-00000001.ckpt"))
    wrong_bit(saved / name)
    net, _ = trained(0, seed=1)
    before = copy.deepcopy(dict(net.state_dict()))
    message = rf"^ckpt_path: .*/{saved.name}/{name}: its content is not .*; complete beside it: step-00000001\.ckpt$"
    readers: list[Callable[[], Any]] = [
        lambda: load_model(saved, net.state_dict()),
        lambda: read_model(saved, dict(net.state_dict()), no_dist=True),
        lambda: read_whole(saved),
        lambda: AtomicCheckpointIO().load_checkpoint(saved),
    ]
    for read in readers:
        with pytest.raises(DamagedFileError, match=message):
            read()
    require_equal(dict(net.state_dict()), before)


def test_what_reads_one_file_checks_that_file(saved: Path) -> None:
    wrong_bit(saved / "__0_0.distcp")
    assert read_meta(saved)["global_step"] == 2
    assert model_shapes(saved)["linear.weight"] == (2, 3)
    for name, read in ((META, read_meta), (".metadata", model_shapes)):
        wrong_bit(saved / name)
        with pytest.raises(DamagedFileError, match=f"{name}: its content"):
            read(saved)


def test_a_folder_from_before_there_were_checksums_opens(saved: Path) -> None:
    marker = json.loads((saved / MARKER).read_text())
    del marker["sha256"]
    (saved / MARKER).write_text(json.dumps(marker))
    net, optimizer = trained(2)
    require_equal(read_whole(saved), checkpoint_of(net, optimizer.state_dict()))
    other, _ = trained(0, seed=1)
    load_model(saved, other.state_dict())
    require_equal(dict(other.state_dict()), dict(net.state_dict()))


def test_one_process_reads_a_part_of_the_model_in_another_type(saved: Path) -> None:
    """Without a warning, as a tool that writes another layout does."""
    net, _ = trained(2)
    targets = {"linear.weight": torch.zeros(2, 3, dtype=torch.float64), "count": torch.zeros(2, dtype=torch.int64)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_shapes(saved).keys() == net.state_dict().keys()
        read_model(saved, targets, no_dist=True)
    assert torch.equal(targets["linear.weight"], net.linear.weight.double())
    assert torch.equal(targets["count"], torch.tensor([3, 2**40]))


def test_states_of_optimizers_are_left_out_where_nobody_needs_them(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = trained(2)
    read: list[set[str]] = []
    real = dcp.load

    def load(tensors: dict[str, Any], **options: Any) -> None:
        read.append(set(tensors))
        real(tensors, **options)

    monkeypatch.setattr(dcp, "load", load)
    whole = AtomicCheckpointIO(optimizers=False).load_checkpoint(saved)
    expected = checkpoint_of(net)
    del expected["optimizer_states"]
    require_equal(whole, expected)
    assert read == [{"state_dict"}]
