"""A folder's marker protects its files, or reading them ends with an error that names the marker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import DeepseekV41ForCausalLM
from dsv41.files import MARKER, DamagedFileError, begin_folder, checksums_of, publish_folder, require_intact

FILES = {"a.bin": b"12345", "b.bin": b"678"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    partial = begin_folder(tmp_path / "whole")
    for name, content in FILES.items():
        (partial / name).write_bytes(content)
    publish_folder(partial, tmp_path / "whole", {})
    return tmp_path / "whole"


def refused(folder: Path) -> str:
    with pytest.raises(DamagedFileError, match=f"{folder.name}/{MARKER}: cannot be used") as error:
        require_intact(folder, FILES)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_marker_cut_at_any_byte_is_an_error(folder: Path) -> None:
    marker = folder / MARKER
    whole = marker.read_bytes()
    for length in range(len(whole)):
        marker.write_bytes(whole[:length])
        refused(folder)
    marker.write_bytes(whole)
    require_intact(folder, FILES)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "3", '"files"', "[" * 100_000, "\x00", '{"files": {}, "sha256": {}}'],
    ids=lambda text: repr(text[:30]),
)  # fmt: skip
def test_a_marker_that_lists_nothing_is_an_error(folder: Path, text: str) -> None:
    (folder / MARKER).write_text(text)
    refused(folder)


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, ["a.bin"], {"a.bin": None}, {"a.bin": [1]}, {"c.bin": "0"}])
@pytest.mark.parametrize("key", ["files", "sha256"])
def test_a_list_of_another_kind_is_an_error(folder: Path, key: str, value: Any) -> None:
    found = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(found | {key: value}))
    refused(folder)


def test_a_missing_list_of_files_is_named(folder: Path) -> None:
    found = json.loads((folder / MARKER).read_text())
    del found["files"]
    (folder / MARKER).write_text(json.dumps(found))
    assert "it has no key 'files'" in refused(folder)


@pytest.mark.parametrize("key", ["files", "sha256"])
def test_a_file_missing_from_one_list_is_an_error(folder: Path, key: str) -> None:
    found = json.loads((folder / MARKER).read_text())
    del found[key]["a.bin"]
    (folder / MARKER).write_text(json.dumps(found))
    refused(folder)


def test_a_marker_that_is_no_text_no_file_or_a_broken_link_is_an_error(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"\xff\xfe\x00")
    refused(folder)
    (folder / MARKER).unlink()
    (folder / MARKER).symlink_to(folder / "gone")
    refused(folder)
    (folder / MARKER).unlink()
    (folder / MARKER).mkdir()
    refused(folder)


def test_a_file_that_the_marker_does_not_list_is_not_read(folder: Path) -> None:
    (folder / "c.bin").write_bytes(b"9")
    with pytest.raises(DamagedFileError, match=rf"c\.bin: {MARKER} does not list it"):
        require_intact(folder, ["a.bin", "c.bin"])
    require_intact(folder, ["a.bin", "d.bin"])  # asked for in case it is there


def test_a_folder_without_a_marker_is_read_unchecked(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / "a.bin").write_bytes(b"other")
    assert checksums_of(folder) == {}
    require_intact(folder, FILES)


@pytest.mark.parametrize("text", ["[]", "{}", None])
def test_no_model_is_made_of_damaged_weights_beside_a_damaged_marker(
    tiny_model: Callable[..., DeepseekV41ForCausalLM], tmp_path: Path, text: str | None
) -> None:
    folder = tmp_path / "saved"
    tiny_model(seed=1).save_pretrained(folder)
    weights = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-5] ^= 64
    weights.write_bytes(content)
    marker = folder / MARKER
    marker.write_bytes(marker.read_bytes()[:-1] if text is None else text.encode())
    with pytest.raises(ValueError, match=f"{MARKER}: cannot be used"):
        DeepseekV41ForCausalLM.from_pretrained(folder)
    marker.unlink()
    assert isinstance(DeepseekV41ForCausalLM.from_pretrained(folder).lm_head.weight, torch.Tensor)
