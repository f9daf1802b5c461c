"""Run by `test_released.py` under torchrun: the released layout into and out of sharded models.

Each check returns how far this rank is off; the model has tables of 408 and 484 rows and 8 experts, which three ranks
do not divide, and parameters with fewer rows than ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launched import run
from safetensors.torch import load_file
from tokenizers import Tokenizer
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
from lightning_modules.parallel.fsdp import ParallelOptions, parallelize

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def golden_model(seed: int = 0, group: dist.ProcessGroup | None = None) -> DeepseekV41ForCausalLM:
    torch.manual_seed(seed)
    config = DeepseekV41Config.from_pretrained(GOLDEN)
    tokenizer = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    return DeepseekV41ForCausalLM(config, tokenizer=tokenizer, engram_process_group=group)


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


def sharded_model(seed: int = 0) -> DeepseekV41ForCausalLM:
    """As the strategy shards it, fp32, with values of its own."""
    parent = nn.Module()
    parent.model = golden_model(seed)
    parallelize(parent, mesh(), ParallelOptions(), torch.device("cpu"))
    model = parent.model
    assert isinstance(model, DeepseekV41ForCausalLM)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every entry of the state dict, collected."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Number of tensors that are not equal bit for bit."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    different = [
        name
        for name, value in theirs.items()
        if ours[name].dtype != value.dtype or not torch.equal(as_bytes(ours[name]), as_bytes(value))
    ]
    return float(len(different))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def shared(name: str) -> Path:
    """A path that all ranks agree on."""
    return Path(sys.argv[1]).parent / name


def written_by_one(name: str, **options: Any) -> Path:
    """A folder exported by rank 0 from a whole model."""
    folder = shared(name)
    if dist.get_rank() == 0 and not folder.exists():
        model = golden_model()
        load_released(model, GOLDEN / "weights")
        save_released(model, folder, **options)
    dist.barrier()
    return folder


# ---------------------------------------------------------------- reading


def loaded_alike(folder: Path) -> float:
    """A sharded and a whole model of other values read the same."""
    sharded, dense = sharded_model(seed=3), golden_model(seed=4)
    audit = load_released(sharded, folder)
    expected = load_released(dense, folder)
    assert sorted(audit.loaded) == sorted(expected.loaded)
    return off(whole(sharded), whole(dense))


def check_loading() -> float:
    return loaded_alike(GOLDEN / "weights")


def check_loading_quantised() -> float:
    """On three ranks, one begins in the middle of a block of 32 rows that share their scales."""
    return loaded_alike(written_by_one("quantised", quantized=True, max_shard_size="100KB"))


def check_loading_tables_owned_by_a_group() -> float:
    """Tables that are plain tensors with this rank's rows, before any DTensor exists."""
    wrong = 0.0
    for folder in (GOLDEN / "weights", written_by_one("quantised", quantized=True)):
        model, dense = golden_model(3, dist.group.WORLD), golden_model(4)
        load_released(model, folder)
        load_released(dense, folder)
        expected = whole(dense)
        for name, part in held_tensors(model).items():
            mine = expected[name][part.first : part.first + len(part.local)]
            wrong += float(not torch.equal(part.local, mine))
    return wrong


def check_reading_its_share() -> float:
    """All ranks together read the files once, but for what every rank holds whole, and scales at the seams."""
    folder = GOLDEN / "weights"
    model = sharded_model()
    read: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(read, load_released(model, folder).bytes_read)
    total = sum(tensor.nbytes for tensor in find_tensors(folder).values())
    everywhere = sum(part.local.nbytes for part in held_tensors(model).values() if part.group is None)
    assert max(read) < 0.6 * total if len(read) == 2 else max(read) < 0.45 * total, (read, total)
    return float(not total <= sum(read) <= total + len(read) * everywhere)


# ---------------------------------------------------------------- writing


def content(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def check_saving() -> float:
    """Every format, in files of many sizes, is bit for bit what one process writes."""
    model, dense = sharded_model(), golden_model()
    for each in (model, dense):
        load_released(each, GOLDEN / "weights")
    wrong = 0.0
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": torch.bfloat16, "max_shard_size": "50KB"},
        {"quantized": True, "max_shard_size": "100KB"},
        {"quantized": True, "dtype": torch.float32},
    ]
    for number, options in enumerate(kinds):
        folder = shared(f"saved{number}")
        audit = save_released(model, folder, **options)
        if dist.get_rank() == 0:
            save_released(dense, shared(f"dense{number}"), **options)
            wrong += off(content(folder), content(shared(f"dense{number}")))
            wrong += float(not is_complete(folder))
            assert len(audit.files) >= dist.get_world_size(), "every rank writes"
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"]) == set(audit.tensors)
            config = (folder / "config.json").read_text()
            assert config == (shared(f"dense{number}") / "config.json").read_text()
        dist.barrier()
    # What has been written is read again.
    again = sharded_model(seed=9)
    load_released(again, shared("saved0"))
    return wrong + off(whole(again), whole(model))


def check_saving_for_transformers() -> float:
    model = sharded_model()
    load_released(model, GOLDEN / "weights")
    folder = shared("hf")
    save_for_transformers(model, folder)
    loaded = DeepseekV41ForCausalLM.from_pretrained(folder)
    return off(whole(loaded), whole(model))


# ---------------------------------------------------------------- failures


def raises_everywhere(action: Callable[[], Any], error: type[Exception], here: str, elsewhere: str) -> None:
    """The last rank says what is wrong, the others that another rank says so."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(error, match=here if last else elsewhere):
        action()
    dist.barrier()


def check_one_rank_cannot_read() -> float:
    """A file that is missing on one node: nobody's model changes."""
    model = sharded_model(seed=5)
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
            rf"^rank {dist.get_world_size() - 1}: checkpoint does not fit",
        )
    return off(whole(model), before)


def check_damage() -> float:
    """A flipped bit in a file that one rank checks."""
    source = written_by_one("plain", max_shard_size="200KB")
    folder = shared("damaged")
    if dist.get_rank() == 0:
        shutil.copytree(source, folder)
        victim = sorted(folder.glob("*.safetensors"))[3]
        data = bytearray(victim.read_bytes())
        data[-5] ^= 4
        victim.write_bytes(data)
    dist.barrier()
    model = sharded_model(seed=5)
    before = whole(model)
    with pytest.raises(ValueError, match=r"model-00004-of-\d+\.safetensors: its content is not what was written"):
        load_released(model, folder)
    dist.barrier()
    return off(whole(model), before)


def check_one_rank_cannot_write() -> float:
    """A full disk on one node: all end, and nothing is left."""
    model = sharded_model()
    real = TensorWriter.write

    def write(self: TensorWriter, name: str, first: int, rows: Tensor) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and first > 0:
            raise OSError(28, "No space left on device")
        real(self, name, first, rows)

    folder = shared("full")
    with patch.object(TensorWriter, "write", write), patch.object(checkpoint_writing, "SLICE_BYTES", 1 << 12):
        raises_everywhere(
            lambda: save_released(model, folder),
            Exception,
            "could not be written.*No space left",
            rf"^rank {dist.get_world_size() - 1}: .*No space left",
        )
    return float(len([path for path in folder.parent.iterdir() if path.name.startswith("full")]))


def check_a_value_that_cannot_be_stored() -> float:
    model = sharded_model()
    weight = model.model.layers[0].attn.wkv.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().view(-1)[:1] = torch.inf
    folder = shared("infinite")
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wkv\.weight: values: must be finite"):
        save_released(model, folder, quantized=True)
    dist.barrier()
    return float(folder.exists())


def check_nothing_is_overwritten() -> float:
    folder = shared("mine")
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(Exception, match="is not an empty directory"):
        save_released(sharded_model(), folder)
    dist.barrier()
    return float([path.name for path in folder.iterdir()] != ["notes.txt"])


CHECKS: list[Callable[[], float]] = [
    check_loading,
    check_loading_quantised,
    check_loading_tables_owned_by_a_group,
    check_reading_its_share,
    check_saving,
    check_saving_for_transformers,
    check_one_rank_cannot_read,
    check_damage,
    check_one_rank_cannot_write,
    check_a_value_that_cannot_be_stored,
    check_nothing_is_overwritten,
]


if __name__ == "__main__":
    run(CHECKS)
