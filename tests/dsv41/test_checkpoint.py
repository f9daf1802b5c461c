"""Released checkpoints: names and values survive a round trip, and a file that does not fit leaves the model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv41 import DeepseekV41ForCausalLM
from dsv41 import checkpoint as checkpoint_module
from dsv41.checkpoint import INDEX_NAME, load_released, released_state_dict, save_released

Models = Callable[..., DeepseekV41ForCausalLM]


@pytest.fixture(scope="module")
def released(golden_dir: Path) -> dict[str, Tensor]:
    """The golden weights by their released names, read without any code of the package."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted((golden_dir / "weights").glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_unchanged(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, before[name]), name


def refuses(model: DeepseekV41ForCausalLM, folder: Path, error: type[Exception], message: str) -> None:
    """`load_released` raises, and not one value of `model` changes."""
    before = snapshot(model)
    with pytest.raises(error, match=message):
        load_released(model, folder)
    assert_unchanged(model, before)


# ---------------------------------------------------------------- round trips


def test_a_saved_model_loads_into_one_of_another_seed(tiny_model: Models, tmp_path: Path) -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    with torch.no_grad():
        for index, (_, buffer) in enumerate(item for item in model.named_buffers() if "bias" in item[0]):
            buffer.copy_(torch.arange(8.0) - index)  # buffers start at zero, where a lost one would not show
    written = save_released(model, tmp_path / "new" / "folder")
    assert written == tmp_path / "new" / "folder" / "model.safetensors"
    assert [file.name for file in written.parent.iterdir()] == ["model.safetensors"]
    ours, theirs = model.state_dict(), other.state_dict()
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    audit = load_released(other, written.parent)
    assert ours.keys() == theirs.keys()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    assert sorted(audit.loaded) == sorted(load_file(written))
    assert audit.skipped == []
    ids = torch.randint(512, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_saved_names_and_shapes_are_the_released_ones(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = load_file(save_released(tiny_model(), tmp_path))
    assert set(stored) == set(released)
    assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in released.items()}


def test_golden_weights_come_back_under_their_names(
    tiny_model: Models, released: dict[str, Tensor], golden_dir: Path, tmp_path: Path
) -> None:
    model = tiny_model()
    audit = load_released(model, golden_dir / "weights")
    assert sorted(audit.loaded) == sorted(released)
    stored = load_file(save_released(model, tmp_path))
    for name, tensor in released.items():
        assert torch.equal(stored[name], tensor.float()), name
    assert len({tensor.numpy().tobytes() for tensor in stored.values()}) == len(stored), "a swap would be seen"


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_load_without_an_index(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, shards: int
) -> None:
    names = sorted(released)
    for number in range(shards):
        save_file({name: released[name] for name in names[number::shards]}, tmp_path / f"part-{number}.safetensors")
    model = tiny_model()
    assert sorted(load_released(model, tmp_path).loaded) == names
    state = released_state_dict(model)
    for name, tensor in released.items():
        assert torch.equal(state[name], tensor.float()), name


def test_the_index_says_which_copy_counts(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, golden_dir: Path
) -> None:
    """A stray file beside an indexed checkpoint is not read."""
    shutil.copytree(golden_dir / "weights", tmp_path / "weights")
    stray = {name: torch.zeros_like(tensor) for name, tensor in released.items()} | {"stray": torch.zeros(1)}
    save_file(stray, tmp_path / "weights" / "aaa.safetensors")
    model = tiny_model()
    load_released(model, tmp_path / "weights")
    assert torch.equal(released_state_dict(model)["norm.weight"], released["norm.weight"].float())


def test_dtypes_of_the_model_are_kept(tiny_model: Models, released: dict[str, Tensor], tmp_path: Path) -> None:
    fp32 = {name: tensor.float() * (1 + 2.0**-12) for name, tensor in released.items()}
    save_file(fp32, tmp_path / "model.safetensors")
    narrow = tiny_model()
    narrow.cast_parameters(torch.bfloat16)
    before = {name: tensor.dtype for name, tensor in narrow.state_dict().items()}
    assert set(before.values()) == {torch.bfloat16, torch.float32}
    load_released(narrow, tmp_path)
    assert {name: tensor.dtype for name, tensor in narrow.state_dict().items()} == before
    for name, tensor in released_state_dict(narrow).items():
        assert torch.equal(tensor, fp32[name].to(tensor.dtype)), name
    # And back: a bf16 file widens exactly, also into float64.
    again = tmp_path / "again"
    stored = load_file(save_released(narrow, again))
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    wide = tiny_model().double()
    load_released(wide, again)
    for name, tensor in released_state_dict(wide).items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name


def test_tensors_of_parts_that_are_not_built_are_skipped_and_listed(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path
) -> None:
    extra = ["mtp.0.attn.wq_a.weight", "vision.blocks.0.norm1.weight", "aligner.linear1.weight"]
    extra += ["image_start", "image_end", "image_newline"]
    # What is not read may have any format.
    unread = {name: torch.zeros(4, 4).to(torch.float8_e4m3fn) for name in extra}
    save_file(released | unread, tmp_path / "model.safetensors")
    model = tiny_model()
    audit = load_released(model, tmp_path)
    assert sorted(audit.skipped) == sorted(extra)
    assert sorted(audit.loaded) == sorted(released)
    assert torch.equal(released_state_dict(model)["norm.weight"], released["norm.weight"].float())


# ---------------------------------------------------------------- files that do not fit

EXPERT = "layers.5.ffn.experts.7.w2.weight"


@pytest.mark.parametrize(
    "missing", ["embed.weight", EXPERT, "layers.2.ffn.gate.bias_vl", "layers.3.engram.embed.weight", "head.weight"]
)
def test_a_missing_tensor_is_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, missing: str
) -> None:
    save_file({n: t for n, t in released.items() if n != missing}, tmp_path / "model.safetensors")
    refuses(tiny_model(), tmp_path, ValueError, rf"1 tensors missing \['{missing}'\], 0 unexpected")


@pytest.mark.parametrize(
    "unexpected", ["layers.6.attn_norm.weight", "layers.5.ffn.experts.8.w2.weight", "embed.weight.scale", "mtp"]
)
def test_an_unexpected_tensor_is_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, unexpected: str
) -> None:
    save_file(released | {unexpected: torch.zeros(2)}, tmp_path / "model.safetensors")
    refuses(tiny_model(), tmp_path, ValueError, rf"0 tensors missing \[\], 1 unexpected \['{unexpected}'\]")


def test_a_tensor_in_two_shards_is_named(tiny_model: Models, released: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(released, tmp_path / "a.safetensors")
    save_file({EXPERT: released[EXPERT]}, tmp_path / "b.safetensors")
    refuses(tiny_model(), tmp_path, ValueError, rf"^{EXPERT}: stored twice, in a\.safetensors and in b\.safetensors")


@pytest.mark.parametrize("change", [lambda t: t.T, lambda t: t[:-1], lambda t: t[None], lambda t: t.flatten()])
def test_a_tensor_of_another_shape_is_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    save_file(released | {EXPERT: change(released[EXPERT]).contiguous()}, tmp_path / "model.safetensors")
    refuses(tiny_model(), tmp_path, ValueError, rf"^{EXPERT}: shape .* in model\.safetensors, .*\[64, 48\]")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool])
def test_a_tensor_in_a_format_that_is_no_float_is_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    save_file(released | {EXPERT: released[EXPERT].to(dtype)}, tmp_path / "model.safetensors")
    stored = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int64: "I64", torch.bool: "BOOL"}[dtype]
    refuses(tiny_model(), tmp_path, ValueError, rf"^{EXPERT}: .*{stored} in model\.safetensors")


def write_index(folder: Path, golden_dir: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """A copy of the golden checkpoint whose weight map went through `edit`."""
    shutil.copytree(golden_dir / "weights", folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/outside.safetensors", "sub/in.safetensors", "..", "no.st"]
)
def test_an_index_that_points_elsewhere_is_refused(
    tiny_model: Models, released: dict[str, Tensor], golden_dir: Path, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "inside"
    target = str(tmp_path / file[1:]) if file.startswith("/") else file
    write_index(folder, golden_dir, lambda weight_map: weight_map.update({"norm.weight": target}))
    (folder / "sub").mkdir()
    for existing in (tmp_path / "outside.safetensors", folder / "sub" / "in.safetensors"):
        save_file({"norm.weight": released["norm.weight"]}, existing)
    refuses(tiny_model(), folder, ValueError, rf"{INDEX_NAME}: norm\.weight .*is no file of")


def test_an_index_without_a_tensor_and_a_shard_without_one_are_refused(
    tiny_model: Models, golden_dir: Path, tmp_path: Path
) -> None:
    write_index(tmp_path / "a", golden_dir, lambda weight_map: weight_map.pop(EXPERT))
    refuses(tiny_model(), tmp_path / "a", ValueError, rf"1 tensors missing \['{EXPERT}'\]")
    # The index promises the tensor in a file that does not hold it.
    files = json.loads((golden_dir / "weights" / INDEX_NAME).read_text())["weight_map"]
    wrong = next(file for file in sorted(set(files.values())) if file != files[EXPERT])
    write_index(tmp_path / "b", golden_dir, lambda weight_map: weight_map.update({EXPERT: wrong}))
    refuses(tiny_model(), tmp_path / "b", ValueError, EXPERT)


def test_a_missing_or_empty_folder_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    refuses(tiny_model(), tmp_path / "nowhere", FileNotFoundError, "^folder: .*nowhere is not a directory")
    refuses(tiny_model(), tmp_path, FileNotFoundError, r"^folder: no \*\.safetensors")
    file = save_released(tiny_model(), tmp_path)
    refuses(tiny_model(), file, FileNotFoundError, "^folder: .*is not a directory")


# ---------------------------------------------------------------- interrupted saves


def test_an_interrupted_save_leaves_no_checkpoint(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(tensors: dict[str, Tensor], file: Path) -> None:
        file.write_bytes(b"half a header")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_module, "save_file", torn)
    model = tiny_model()
    with pytest.raises(OSError, match="disk full"):
        save_released(model, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    refuses(model, tmp_path, FileNotFoundError, r"no \*\.safetensors")


def test_an_interrupted_save_keeps_the_older_checkpoint(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(seed=1)
    file = save_released(model, tmp_path)
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", lambda _tensors, path: path.write_bytes(b"half") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_released(tiny_model(seed=2), tmp_path)
    assert file.read_bytes() == whole
    # What the torn save left behind is in nobody's way.
    other = tiny_model(seed=3)
    load_released(other, tmp_path)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    save_released(tiny_model(seed=2), tmp_path)
    assert file.read_bytes() != whole
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
