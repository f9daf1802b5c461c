"""On two ranks, a wrong bit is found and a full disk is told, by all ranks alike (`integrity_checks.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("integrity_checks.py")
FILES = {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has met."""
    directory = tmp_path_factory.mktemp("integrity")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_each_rank_hashes_the_file_that_it_has_written(found: list[dict[str, Any]]) -> None:
    assert found[0]["hashed on saving"] == [".metadata", "__0_0.distcp", "meta.pt"]
    assert found[1]["hashed on saving"] == ["__1_0.distcp"]


def test_the_ranks_share_the_reading(found: list[dict[str, Any]]) -> None:
    """All read the plain values, which are small and which all need."""
    assert found[0]["hashed on loading"] == [".metadata", "__1_0.distcp", "meta.pt"]
    assert found[1]["hashed on loading"] == ["__0_0.distcp", "meta.pt", "meta.pt"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_wrong_bit_in_any_file_stops_all_ranks_and_is_named(found: list[dict[str, Any]], name: str) -> None:
    texts = [rank["damaged"][name] for rank in found]
    assert sorted(text.split(":")[0] for text in texts) == ["DamagedFileError", "OtherRankError"]
    for text in texts:
        assert f"step-00000001.ckpt/{name}: its content is not what was written" in text
        assert "no other checkpoint is beside it" in text


def test_every_file_has_been_damaged_and_mended(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["damaged"].keys() == FILES
        assert rank["intact again"] == ""


def test_a_disk_that_is_full_for_one_rank_stops_all_and_leaves_the_older_checkpoint(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        for text in rank["full"]:
            assert "step-00000002.ckpt could not be written: rank 1: [Errno 27] File too large" in text
            assert "rank 0:" not in text
            assert "about 0.5 MB were needed" in text
            assert "what was complete before is untouched" in text
        assert rank["beside the full"] == ["step-00000001.ckpt"]
        assert rank["older"] == 1


def test_a_disk_that_is_full_for_the_one_file_stops_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank, kind in zip(found, ("OSError", "OtherRankError"), strict=True):
        assert rank["full file"].startswith(kind)
        assert "step-00000002.ckpt could not be written: File too large" in rank["full file"]
        assert rank["beside the full file"] == ["step-00000001.ckpt"]


def test_a_wrong_bit_in_the_one_file_stops_all_ranks_and_the_choice_is_named(found: list[dict[str, Any]]) -> None:
    for rank, kind in zip(found, ("DamagedFileError", "OtherRankError"), strict=True):
        assert rank["damaged file"].startswith(kind)
        assert "file/step-00000001.ckpt: its content is not what was written (the CRC-32" in rank["damaged file"]
        assert "complete beside it: best.ckpt" in rank["damaged file"]
