"""The released layout into and out of models on 2 and 3 ranks, bit for bit as by one process.

The model has tables of 408 and 484 rows and 8 experts, which three ranks do not divide, and parameters with fewer rows
than ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from golden_tiny import CPU, DEFAULT, GOLDEN, Parent, golden_tokenizer
from ranks import ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import load_released, save_for_transformers, save_released
from dsv41.files import is_complete
from dsv41.weights import reading as checkpoint_reading
from dsv41.weights import writing as checkpoint_writing
from dsv41.weights.names import held_tensors
from dsv41.weights.tensor_files import TensorWriter, find_tensors
from lightning_modules.parallel.fsdp import parallelize

KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "max_shard_size": "50KB"},
    {"quantized": True, "max_shard_size": "100KB"},
    {"quantized": True, "dtype": torch.float32},
]


def golden_model(seed: int = 0, group: dist.ProcessGroup | None = None) -> DeepseekV41ForCausalLM:
    torch.manual_seed(seed)
    config = DeepseekV41Config.from_pretrained(GOLDEN)
    return DeepseekV41ForCausalLM(config, tokenizer=golden_tokenizer(), engram_process_group=group)


def sharded_model(mesh: DeviceMesh, seed: int = 0) -> DeepseekV41ForCausalLM:
    """As the strategy shards it, fp32, with values drawn from `seed`."""
    model = golden_model(seed)
    parallelize(Parent(model=model), mesh, DEFAULT, CPU)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every entry of the state dict, collected."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return [
        name
        for name, value in theirs.items()
        if ours[name].dtype != value.dtype or not torch.equal(as_bytes(ours[name]), as_bytes(value))
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def written_by_one(folder: Path, **options: Any) -> Path:
    """A folder exported by rank 0 from a whole model."""
    if dist.get_rank() == 0:
        model = golden_model()
        load_released(model, GOLDEN / "weights")
        save_released(model, folder, **options)
    dist.barrier()
    return folder


# ---------------------------------------------------------------- reading


def require_loaded_alike(mesh: DeviceMesh, folder: Path) -> None:
    """A sharded and a whole model of other values read the same."""
    sharded, dense = sharded_model(mesh, seed=3), golden_model(seed=4)
    audit = load_released(sharded, folder)
    expected = load_released(dense, folder)
    assert sorted(audit.loaded) == sorted(expected.loaded)
    assert differing(whole(sharded), whole(dense)) == []


@ranks(2, 3)
def test_loading(mesh: DeviceMesh) -> None:
    require_loaded_alike(mesh, GOLDEN / "weights")


@ranks(2, 3)
def test_loading_quantised(mesh: DeviceMesh, tmp_path: Path) -> None:
    """On three ranks, one begins in the middle of a block of 32 rows that share their scales."""
    require_loaded_alike(mesh, written_by_one(tmp_path / "quantised", quantized=True, max_shard_size="100KB"))


@ranks(2, 3)
def test_loading_tables_owned_by_a_group(tmp_path: Path) -> None:
    """Tables that are plain tensors with this rank's rows, before any DTensor exists."""
    quantised = written_by_one(tmp_path / "quantised", quantized=True, max_shard_size="100KB")
    for folder in (GOLDEN / "weights", quantised):
        model, dense = golden_model(3, dist.group.WORLD), golden_model(4)
        load_released(model, folder)
        load_released(dense, folder)
        expected = whole(dense)
        for name, part in held_tensors(model).items():
            assert torch.equal(part.local, expected[name][part.first : part.first + len(part.local)]), name


@ranks(2, 3)
def test_reading_its_share(mesh: DeviceMesh) -> None:
    """All ranks together read the files once, but for what every rank holds whole, and scales at the seams."""
    folder = GOLDEN / "weights"
    model = sharded_model(mesh)
    read: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(read, load_released(model, folder).bytes_read)
    total = sum(tensor.nbytes for tensor in find_tensors(folder).values())
    everywhere = sum(part.local.nbytes for part in held_tensors(model).values() if part.group is None)
    assert max(read) < 0.6 * total if len(read) == 2 else max(read) < 0.45 * total, (read, total)
    assert total <= sum(read) <= total + len(read) * everywhere


# ---------------------------------------------------------------- writing


def content(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@ranks(2, 3)
@pytest.mark.parametrize("options", KINDS, ids=["fp32", "bf16", "quantised", "quantised and fp32"])
def test_saving(mesh: DeviceMesh, rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Every format, in files of many sizes, is bit for bit what one process writes."""
    model, dense = sharded_model(mesh), golden_model()
    for each in (model, dense):
        load_released(each, GOLDEN / "weights")
    folder = tmp_path / "saved"
    audit = save_released(model, folder, **options)
    if rank == 0:
        save_released(dense, tmp_path / "dense", **options)
        assert differing(content(folder), content(tmp_path / "dense")) == []
        assert is_complete(folder)
        assert len(audit.files) >= world_size, "every rank writes"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(audit.tensors)
        assert (folder / "config.json").read_text() == (tmp_path / "dense" / "config.json").read_text()
    dist.barrier()
    if not options:
        again = sharded_model(mesh, seed=9)
        load_released(again, folder)
        assert differing(whole(again), whole(model)) == []


@ranks(2, 3)
def test_saving_for_transformers(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = sharded_model(mesh)
    load_released(model, GOLDEN / "weights")
    save_for_transformers(model, tmp_path / "hf")
    loaded = DeepseekV41ForCausalLM.from_pretrained(tmp_path / "hf")
    assert differing(whole(loaded), whole(model)) == []


# ---------------------------------------------------------------- failures


def raises_everywhere(action: Callable[[], Any], error: type[Exception], here: str, elsewhere: str) -> None:
    """The last rank says what is wrong, the others that another rank says so."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(error, match=here if last else elsewhere):
        action()
    dist.barrier()


@ranks(2, 3)
def test_one_rank_cannot_read(mesh: DeviceMesh) -> None:
    """A file that is missing on one node: no rank's model changes."""
    model = sharded_model(mesh, seed=5)
    before = whole(model)
    real = checkpoint_reading.find_tensors

    def without(folder: Path) -> Any:
        found = real(folder)
        if dist.get_rank() == dist.get_world_size() - 1:
            del found["norm.weight"]
        return found

    with patch.object(checkpoint_reading, "find_tensors", without):
        raises_everywhere(
            lambda: load_released(model, GOLDEN / "weights"),
            ValueError,
            r"^checkpoint of .* does not fit the model: 1 tensors missing \['norm.weight'\]",
            rf"^rank {dist.get_world_size() - 1}: checkpoint of .* does not fit",
        )
    assert differing(whole(model), before) == []


@ranks(2, 3)
def test_damage(mesh: DeviceMesh, rank: int, tmp_path: Path) -> None:
    """A flipped bit in a file that one rank checks."""
    folder = written_by_one(tmp_path / "damaged", max_shard_size="200KB")
    if rank == 0:
        victim = sorted(folder.glob("*.safetensors"))[3]
        data = bytearray(victim.read_bytes())
        data[-5] ^= 4
        victim.write_bytes(data)
    dist.barrier()
    model = sharded_model(mesh, seed=5)
    before = whole(model)
    with pytest.raises(ValueError, match=r"model-00004-of-\d+\.safetensors: its content is not what was written"):
        load_released(model, folder)
    dist.barrier()
    assert differing(whole(model), before) == []


@ranks(2, 3)
def test_one_rank_cannot_write(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A full disk on one node: all end, and nothing is left."""
    model = sharded_model(mesh)
    real = TensorWriter.write

    def write(self: TensorWriter, name: str, first: int, rows: Tensor) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and first > 0:
            raise OSError(28, "No space left on device")
        real(self, name, first, rows)

    folder = tmp_path / "full"
    with patch.object(TensorWriter, "write", write), patch.object(checkpoint_writing, "SLICE_BYTES", 1 << 12):
        raises_everywhere(
            lambda: save_released(model, folder),
            Exception,
            "could not be written.*No space left",
            rf"^rank {dist.get_world_size() - 1}: .*No space left",
        )
    assert list(tmp_path.iterdir()) == []


@ranks(2, 3)
def test_a_value_that_cannot_be_stored(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = sharded_model(mesh)
    weight = model.model.layers[0].attn.wkv.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().view(-1)[:1] = torch.inf
    folder = tmp_path / "infinite"
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wkv\.weight: values: must be finite"):
        save_released(model, folder, quantized=True)
    dist.barrier()
    assert not folder.exists()


@ranks(2, 3)
def test_nothing_is_overwritten(mesh: DeviceMesh, rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    if rank == 0:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(Exception, match="is not an empty directory"):
        save_released(sharded_model(mesh), folder)
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
