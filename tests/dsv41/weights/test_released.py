"""Released checkpoints: names and values survive a round trip, and a file that does not fit leaves the model alone.

Several ranks: `tests/distributed/test_released.py`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, files
from dsv41.checkpoint import load_released, save_released
from dsv41.files import is_complete
from dsv41.weights import reading as checkpoint_reading
from dsv41.weights import writing as checkpoint_writing
from dsv41.weights.formats import FP4_ROWS, FP8_BLOCKS, FP8_ROWS, WeightFormat, decode_
from dsv41.weights.names import held_tensors, released_slots
from dsv41.weights.reading import match_tensors, slots_for
from dsv41.weights.tensor_files import INDEX_NAME, TensorWriter, find_tensors

Models = Callable[..., DeepseekV41ForCausalLM]


@pytest.fixture(scope="module")
def released(golden_dir: Path) -> dict[str, Tensor]:
    """The golden weights by their released names, read without any code of the package."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted((golden_dir / "weights").glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def released_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """The values of a model by their released names."""
    state = model.state_dict()
    return {
        name: state[slot.name] if slot.expert is None else state[slot.name][slot.expert]
        for name, slot in released_slots(model).items()
    }


def content(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, read by the library."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
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
    assert written.folder == tmp_path / "new" / "folder"
    assert written.files == ["model.safetensors"]
    files = {file.name for file in written.folder.iterdir()}
    assert files >= {"model.safetensors", INDEX_NAME, "config.json", "tokenizer.json", "complete.json"}
    assert [file.name for file in written.folder.parent.iterdir()] == ["folder"], "nothing is left beside"
    ours, theirs = model.state_dict(), other.state_dict()
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    audit = load_released(other, written.folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    stored = content(written.folder)
    assert sorted(audit.loaded) == sorted(written.tensors) == sorted(stored)
    assert audit.skipped == []
    size = sum(tensor.nbytes for tensor in stored.values())
    assert audit.bytes_read == written.bytes_written == size
    assert audit.largest_scratch == 0, "fp32 into fp32 goes straight to its place"
    ids = torch.randint(512, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_saved_names_and_shapes_are_the_released_ones(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = content(save_released(tiny_model(), tmp_path).folder)
    assert set(stored) == set(released)
    assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in released.items()}


def test_golden_weights_come_back_under_their_names(
    tiny_model: Models, released: dict[str, Tensor], golden_dir: Path, tmp_path: Path
) -> None:
    model = tiny_model()
    audit = load_released(model, golden_dir / "weights")
    assert sorted(audit.loaded) == sorted(released)
    stored = content(save_released(model, tmp_path).folder)
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
    stored = content(save_released(narrow, again).folder)
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
    refuses(tiny_model(), tmp_path, ValueError, rf"^{EXPERT}: shape .* in \S*model\.safetensors, .*\[64, 48\]")


@pytest.mark.parametrize("name", [EXPERT, "norm.weight", "head.weight", "layers.3.engram.embed.weight"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float8_e5m2])
def test_a_tensor_in_a_format_that_is_no_weight_is_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    save_file(released | {name: released[name].to(dtype)}, tmp_path / "model.safetensors")
    stored = {torch.uint8: "U8", torch.int64: "I64", torch.bool: "BOOL", torch.float8_e5m2: "F8_E5M2"}[dtype]
    refuses(
        tiny_model(), tmp_path, ValueError, rf"^{name}: stored as {stored} in \S*model\.safetensors; it can be one of F"
    )


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
    refuses(tiny_model(), tmp_path / "a", ValueError, rf"{INDEX_NAME}: does not list {EXPERT}, which is in")
    # The index promises the tensor in a file that does not hold it.
    files = json.loads((golden_dir / "weights" / INDEX_NAME).read_text())["weight_map"]
    wrong = next(file for file in sorted(set(files.values())) if file != files[EXPERT])
    write_index(tmp_path / "b", golden_dir, lambda weight_map: weight_map.update({EXPERT: wrong}))
    refuses(tiny_model(), tmp_path / "b", ValueError, EXPERT)


def test_a_missing_or_empty_folder_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    refuses(tiny_model(), tmp_path / "nowhere", FileNotFoundError, "^folder: .*nowhere is not a directory")
    refuses(tiny_model(), tmp_path, FileNotFoundError, r"^folder: no \*\.safetensors")
    file = save_released(tiny_model(), tmp_path).folder / "model.safetensors"
    refuses(tiny_model(), file, FileNotFoundError, "^folder: .*is not a directory")


# ---------------------------------------------------------------- quantised weights

FORMATS = {  # a tensor of each format, by the release
    "layers.1.attn.wq_b.weight": FP8_BLOCKS,
    "layers.3.engram.embed.weight": FP8_ROWS,
    EXPERT: FP4_ROWS,
}


def quantised(folder: Path, model: DeepseekV41ForCausalLM, **options: Any) -> dict[str, Tensor]:
    """The tensors of a quantised export of `model`."""
    return content(save_released(model, folder, quantized=True, **options).folder)


def decoded(stored: dict[str, Tensor], name: str, fmt: WeightFormat) -> Tensor:
    codes = stored[name]
    out = torch.empty(codes.shape[0], codes.shape[1] * fmt.per_byte)
    decode_(out, fmt, codes, stored[name.removesuffix(".weight") + ".scale"])
    return out


def formats_of(stored: dict[str, Tensor]) -> dict[str, WeightFormat]:
    """The format that section 9 gives each tensor with scales, by name, spelled out here."""
    found = {}
    for name in stored:
        if name.removesuffix(".weight") + ".scale" in stored and name.endswith(".weight"):
            found[name] = FP8_ROWS if ".engram.embed." in name else FP4_ROWS if ".experts." in name else FP8_BLOCKS
    return found


def test_a_quantised_export_has_the_formats_of_the_release(
    golden_model: Models, released: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = quantised(tmp_path, golden_model())
    scales = {name for name in stored if name.endswith(".scale")}
    assert set(stored) - scales == set(released)
    layers = range(6)
    projections = {f"layers.{i}.attn.{p}.weight" for i in layers for p in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
    projections |= {f"layers.{i}.attn.indexer.wq_b.weight" for i in (1, 3, 4, 5)}
    projections |= {f"layers.{i}.ffn.shared_experts.w{j}.weight" for i in layers for j in (1, 2, 3)}
    projections |= {f"layers.{i}.engram.wkv.weight" for i in (1, 3)}
    experts = {f"layers.{i}.ffn.experts.{e}.w{j}.weight" for i in layers for e in range(8) for j in (1, 2, 3)}
    tables = {f"layers.{i}.engram.embed.weight" for i in (1, 3)}
    expected = (
        dict.fromkeys(projections, FP8_BLOCKS) | dict.fromkeys(experts, FP4_ROWS) | dict.fromkeys(tables, FP8_ROWS)
    )
    assert formats_of(stored) == expected
    assert len(scales) == len(expected)
    for name, fmt in expected.items():
        rows, columns = released[name].shape
        assert stored[name].dtype == (torch.int8 if fmt == FP4_ROWS else torch.float8_e4m3fn), name
        assert stored[name].shape == (rows, columns // (2 if fmt == FP4_ROWS else 1)), name
        scale = stored[name.removesuffix(".weight") + ".scale"]
        assert scale.dtype == torch.float8_e8m0fnu, name
        assert scale.shape == (math.ceil(rows / 32) if fmt == FP8_BLOCKS else rows, math.ceil(columns / 32)), name
    for name in set(released) - set(expected):
        kept = ("attn_sink", "_fn", "_base", "_scale", "gate.bias", "gate.bias_vl")
        assert stored[name].dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
        assert torch.equal(stored[name].float(), released[name].float()), name  # all of them are exact in bf16


def test_a_quantised_export_loads_and_comes_back_bit_by_bit(
    golden_model: Models, tiny_model: Models, released: dict[str, Tensor], tmp_path: Path
) -> None:
    stored = quantised(tmp_path / "1", golden_model())
    model = tiny_model(seed=1)
    audit = load_released(model, tmp_path / "1")
    assert sorted(audit.loaded) == sorted(released)
    assert audit.bytes_read == sum(tensor.nbytes for tensor in stored.values())
    ours, formats = released_state_dict(model), formats_of(stored)
    for name in released:
        expected = decoded(stored, name, formats[name]) if name in formats else stored[name].float()
        assert torch.equal(ours[name], expected), name
        error = (ours[name] - released[name].float()).abs().max() / released[name].float().abs().max()
        # Half a step of the codes that a block with this maximum uses: at worst 1 of 5, and 16 of 272.
        assert error <= (1 / 5 if formats.get(name) == FP4_ROWS else 1 / 16 if name in formats else 0) + 1e-6, name
    # Encoding what was decoded changes no value, and a third export not even a byte.
    quantised(tmp_path / "2", model)
    again = tiny_model(seed=2)
    load_released(again, tmp_path / "2")
    for name, tensor in released_state_dict(again).items():
        assert torch.equal(tensor.view(torch.int32), ours[name].view(torch.int32)), name
    quantised(tmp_path / "3", again)
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == (tmp_path / "3" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_quantised_weights_are_decoded_into_models_of_any_dtype(
    golden_model: Models, tiny_model: Models, tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = quantised(tmp_path, golden_model())
    model = tiny_model(seed=1).to(dtype)
    load_released(model, tmp_path)
    ours, formats = released_state_dict(model), formats_of(stored)
    for name, tensor in ours.items():
        expected = decoded(stored, name, formats[name]) if name in formats else stored[name]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    for name, parameter in model.named_parameters():
        wide = model.stays_fp32(name) and dtype != torch.float64
        assert parameter.dtype == (torch.float32 if wide else dtype), name


def test_values_are_quantised_as_the_model_has_them(tiny_model: Models, tmp_path: Path) -> None:
    """Not after a cast to the dtype of what is beside them, which would round twice."""
    model = tiny_model()
    just_above_a_tie = 1.0625 * (1 + 2.0**-20)  # bf16 makes it the tie, which goes down to 1
    with torch.no_grad():
        model.get_submodule("model.layers.3.engram.embed").weight[0] = 256 * just_above_a_tie
    stored = quantised(tmp_path, model)
    assert (decoded(stored, "layers.3.engram.embed.weight", FP8_ROWS)[0] == 256 * 1.125).all()


def with_stored(
    tiny_model: Models, folder: Path, golden_model: Models, edit: Callable[[dict[str, Tensor]], Any]
) -> DeepseekV41ForCausalLM:
    """A quantised export whose tensors went through `edit`, and a model to load it into."""
    stored = quantised(folder / "whole", golden_model())
    edit(stored)
    save_file(stored, folder / "edited.safetensors")
    shutil.rmtree(folder / "whole")
    return tiny_model()


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_missing_or_alone_is_named(
    tiny_model: Models, golden_model: Models, tmp_path: Path, name: str
) -> None:
    scale = name.removesuffix("weight") + "scale"
    for folder, action, message in (
        ("a", lambda stored: stored.pop(scale), rf"^{name}: stored as .* but its scales {scale} are missing"),
        ("b", lambda stored: stored.pop(name), rf"1 tensors missing \['{name}'\], 1 unexpected \['{scale}'\]"),
        ("c", lambda stored: stored.update({name: decoded(stored, name, FORMATS[name])}),
         rf"0 tensors missing \[\], 1 unexpected \['{scale}'\]"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        model = with_stored(tiny_model, tmp_path / folder, golden_model, action)
        refuses(model, tmp_path / folder, ValueError, message)


def as_scales(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`change` of the bytes of scales, which torch does not index itself."""
    return lambda scales: change(scales.view(torch.uint8)).contiguous().view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    "change",
    [
        as_scales(lambda t: t[:-1]),
        as_scales(lambda t: t[:, :-1]),
        as_scales(lambda t: torch.cat((t, t))),
        as_scales(lambda t: t.flatten()),
        as_scales(lambda t: t[None]),
        lambda scales: scales.float(),
        lambda scales: scales.view(torch.uint8).clone(),
    ],
    ids=["a row less", "a column less", "twice the rows", "flat", "one axis more", "fp32", "bytes"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_does_not_fit_is_named(
    tiny_model: Models, golden_model: Models, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    scale = name.removesuffix("weight") + "scale"
    model = with_stored(
        tiny_model, tmp_path, golden_model, lambda stored: stored.update({scale: change(stored[scale])})
    )
    refuses(model, tmp_path, ValueError, rf"^{scale}: .* does not fit its weight, which needs F8_E8M0")


# ---------------------------------------------------------------- files of an export


def test_files_are_as_large_as_asked_for_and_hold_every_tensor_once(
    golden_model: Models, tiny_model: Models, tmp_path: Path
) -> None:
    model = golden_model()
    audit = save_released(model, tmp_path / "out", max_shard_size="100KB")
    sizes = {file: sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) for file in audit.files}
    count = len(sizes)
    assert list(sizes) == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert count > 20
    largest = max(tensor.nbytes for tensor in released_state_dict(model).values())
    assert max(sizes.values()) <= max(100_000, largest)
    assert sum(sizes.values()) == audit.bytes_written
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == audit.bytes_written
    assert sorted(index["weight_map"]) == sorted(audit.tensors) == sorted(released_state_dict(model))
    other = tiny_model(seed=3)
    load_released(other, tmp_path / "out")
    for name, tensor in released_state_dict(other).items():
        assert torch.equal(tensor, released_state_dict(model)[name]), name


@pytest.mark.parametrize("size", [0, -1, "0GB", "5 apples", "5.5GB", "GB", ""])
def test_a_size_that_is_none_is_refused_before_anything_is_written(
    tiny_model: Models, tmp_path: Path, size: int | str
) -> None:
    with pytest.raises(ValueError, match=r"^max_shard_size: must be a positive number of bytes, or a text such as"):
        save_released(tiny_model(), tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_that_is_none_for_weights_is_refused(tiny_model: Models, tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^dtype: must be one of"):
        save_released(tiny_model(), tmp_path / "out", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_configuration_and_tokenizer_are_beside_the_weights(
    golden_model: Models, tmp_path: Path, golden_dir: Path
) -> None:
    model = golden_model()
    save_released(model, tmp_path / "out", dtype=torch.bfloat16, card="# A card\n")
    config = DeepseekV41Config.from_pretrained(tmp_path / "out")
    # The golden tokenizer is a bare one of the library, which names no special tokens.
    unnamed = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    assert config.text_config.fields() == model.config.text_config.fields() | unnamed
    assert config.dtype == torch.bfloat16
    saved = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert saved.get_vocab() == Tokenizer.from_file(str(golden_dir / "tokenizer.json")).get_vocab()
    assert (tmp_path / "out" / "README.md").read_text() == "# A card\n"


def test_an_export_overwrites_nothing(tiny_model: Models, tmp_path: Path) -> None:
    save_released(tiny_model(seed=1), tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for target in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
            save_released(tiny_model(seed=2), target)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["write", "close", "index", "config"])
def test_a_full_disk_leaves_nothing(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_arguments: Any, **_keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {
        "write": (TensorWriter, "write"),
        "close": (os, "fsync"),
        "index": (checkpoint_writing, "write_index"),
        "config": (GenerationConfig, "save_pretrained"),
    }[where]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left"):
        save_released(tiny_model(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["first shard", "last shard", "index", "naming"])
def test_a_killed_export_is_never_taken_for_a_whole_one(tiny_model: Models, tmp_path: Path, stage: str) -> None:
    """What a kill leaves has another name; even under its own it would lack tensors or its marker."""

    class Killed(BaseException):
        """Nothing cleans up after a kill."""

    def killed(*_arguments: Any, **_keywords: Any) -> None:
        raise Killed

    owner, name = {
        "first shard": (checkpoint_writing, "sha256_of"),
        "last shard": (checkpoint_writing, "write_index"),
        "index": (checkpoint_writing, "publish_folder"),
        "naming": (files, "_take_name"),
    }[stage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killed)
        patch.setattr(checkpoint_writing, "discard", lambda path: None)
        with pytest.raises(Killed):
            save_released(tiny_model(seed=1), tmp_path / "out", max_shard_size="500KB")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.")
    assert left.name.endswith(".partial")
    assert is_complete(left) == (stage == "naming")
    model = tiny_model(seed=2)
    refuses(model, tmp_path / "out", FileNotFoundError, "is not a directory")
    if stage == "first shard":
        refuses(model, left, ValueError, "tensors missing")


@pytest.mark.parametrize("position", [-1, 10_000, 200])
def test_a_flipped_bit_is_found_before_anything_is_overwritten(
    tiny_model: Models, tmp_path: Path, position: int
) -> None:
    """In a weight, or in the header where a name or an offset could become another one."""
    save_released(tiny_model(seed=1), tmp_path / "out", max_shard_size="500KB")
    victim = tmp_path / "out" / "model-00002-of-00007.safetensors"
    assert victim.is_file(), sorted(path.name for path in (tmp_path / "out").iterdir())
    data = bytearray(victim.read_bytes())
    data[position] ^= 1
    victim.write_bytes(data)
    refuses(tiny_model(seed=2), tmp_path / "out", ValueError, "model-00002-of-00007.safetensors")
    if position == -1:
        load_released(tiny_model(seed=2), tmp_path / "out", verify=False)  # the price of not looking


# ---------------------------------------------------------------- corners


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b.weight", "norm.weight", "layers.2.attn.attn_sink"])
def test_fp4_where_it_is_not_used_and_fp8_of_a_vector_are_named(
    tiny_model: Models, released: dict[str, Tensor], tmp_path: Path, name: str
) -> None:
    dtype = torch.int8 if released[name].dim() == 2 else torch.float8_e4m3fn
    for shape in (released[name].shape, (1, released[name].numel())):
        save_file(released | {name: torch.zeros(shape).to(dtype)}, tmp_path / "model.safetensors")
        refuses(
            tiny_model(),
            tmp_path,
            ValueError,
            rf"^{name}: stored as \w+ in \S*model\.safetensors; it can be one",
        )


def test_experts_of_odd_width_are_refused_before_a_folder_is_made(tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model(moe_intermediate_size=47)
    with pytest.raises(ValueError, match=r"^layers\.0\.ffn\.experts\.0\.w2\.weight: 47 columns cannot be stored"):
        save_released(model, tmp_path / "out", quantized=True)
    assert list(tmp_path.iterdir()) == []
    save_released(model, tmp_path / "plain")
    stored = content(tmp_path / "plain") | {EXPERT: torch.zeros(64, 23, dtype=torch.int8)}
    save_file(stored, tmp_path / "model.safetensors")
    refuses(model, tmp_path, ValueError, rf"^{EXPERT}: stored as I8")


@pytest.mark.parametrize("slice_bytes", [2000, 5000])
@pytest.mark.parametrize("quantized", [False, True])
def test_slices_do_not_show(
    golden_model: Models, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int,
    quantized: bool,
) -> None:  # fmt: skip
    """Tables and projections are larger than a slice, as real ones are."""
    model, options = golden_model(), {"quantized": quantized, "dtype": torch.bfloat16}
    with torch.no_grad():
        for matrix in (tensor for tensor in model.parameters() if tensor.dim() == 2):
            matrix.mul_(2.0 ** (torch.arange(len(matrix)) // 13 % 5)[:, None])  # or scales would be much alike
    expected = save_released(model, tmp_path / "whole", **options).folder / "model.safetensors"
    whole = tiny_model()
    load_released(whole, tmp_path / "whole")
    monkeypatch.setattr(checkpoint_writing, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(checkpoint_reading, "SLICE_BYTES", slice_bytes)
    written = save_released(model, tmp_path / "sliced", **options).folder / "model.safetensors"
    assert written.read_bytes() == expected.read_bytes()
    other = tiny_model(seed=1)
    assert load_released(other, tmp_path / "sliced").largest_scratch <= slice_bytes + 5000, "or a row, with its scales"
    assert_unchanged(other, snapshot(whole))


@pytest.mark.parametrize("quantized", [False, True])
def test_parameters_of_any_memory_layout(
    golden_model: Models, tiny_model: Models, tmp_path: Path, quantized: bool
) -> None:
    """Column-major matrices and views of one flat buffer at odd places."""
    expected = golden_model()
    save_released(expected, tmp_path / "1", quantized=quantized)
    load_released(expected, tmp_path / "1")
    model = tiny_model(seed=1)
    flat = torch.zeros(sum(p.numel() + 1 for p in model.parameters()) + 1)
    place = 1
    for index, parameter in enumerate(model.parameters()):
        if index % 2 and parameter.dim() == 2:
            parameter.data = parameter.data.T.contiguous().T
        else:
            parameter.data = flat[place : place + parameter.numel()].view(parameter.shape)
            place += parameter.numel() + 1
    load_released(model, tmp_path / "1")
    assert_unchanged(model, snapshot(expected))
    save_released(model, tmp_path / "2", quantized=quantized)
    save_released(expected, tmp_path / "3", quantized=quantized)
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == (tmp_path / "3" / "model.safetensors").read_bytes()


def test_an_export_goes_where_a_link_leads_and_keeps_what_came_meanwhile(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real = checkpoint_writing.write_index

    def meanwhile(*arguments: Any) -> None:
        real(*arguments)
        (tmp_path / "real" / "thesis.tex").write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writing, "write_index", meanwhile)
        with pytest.raises(OSError, match=r"real could not be written: Directory not empty"):
            save_released(tiny_model(seed=1), tmp_path / "link")
    assert (tmp_path / "real" / "thesis.tex").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}
    (tmp_path / "real" / "thesis.tex").unlink()
    save_released(tiny_model(seed=1), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    other = tiny_model(seed=2)
    load_released(other, tmp_path / "real")
    assert_unchanged(other, snapshot(tiny_model(seed=1)))


def test_a_model_without_memory_can_be_checked_but_not_filled_or_written(
    golden_dir: Path, golden_tokenizer: Any, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(DeepseekV41Config.from_pretrained(golden_dir), tokenizer=golden_tokenizer)
    stored = find_tensors(golden_dir / "weights")
    sources, skipped = match_tensors(slots_for(model, stored), held_tensors(model), stored)
    assert (len(sources), skipped) == (len(stored), [])
    for action in (
        lambda: load_released(model, golden_dir / "weights"),
        lambda: save_released(model, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match=r"^model: model\.embed_tokens\.weight is on the meta device"):
            action()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- memory

LARGE = """
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.checkpoint import load_released, save_released

torch.set_num_threads(1)
golden, folder, options = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3], {"torch": torch})
config = DeepseekV41Config.from_pretrained(golden)
config.text_config.engram_head_dim = 512
config.text_config.engram_num_embeddings = [300_000, 484]
tokenizer = Tokenizer.from_file(str(golden / "tokenizer.json"))


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def growth(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


with torch.device("meta"):
    model = DeepseekV41ForCausalLM(config, tokenizer=tokenizer)
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.25)  # drawing the table would take most of this test's time
saving = growth(lambda: save_released(model, folder, **options))
with torch.no_grad():
    model.get_submodule("model.layers.1.engram.embed").weight[-1] = 7.0
audits = []
loading = growth(lambda: audits.append(load_released(model, folder)))
assert (model.get_submodule("model.layers.1.engram.embed").weight[-1] != 7.0).all()
print(saving, loading, audits[0].largest_scratch, sum(file.stat().st_size for file in folder.iterdir()))
"""


@pytest.mark.parametrize("options", ["{}", "{'dtype': torch.bfloat16}", "{'quantized': True}"])
def test_memory_beside_the_model_is_bounded_whatever_the_file(golden_dir: Path, tmp_path: Path, options: str) -> None:
    """A table of 614 MB in fp32, with a child process's largest resident memory."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.fail("this test reads Linux's /proc")
    command = [sys.executable, "-c", LARGE, str(golden_dir), str(tmp_path / "out"), options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    saving, loading, scratch, size = map(int, done.stdout.split())
    assert size > 150e6
    assert scratch <= 17 * 2**20
    assert loading < 64e6, "a quarter of what is promised"
    assert saving < 128e6
