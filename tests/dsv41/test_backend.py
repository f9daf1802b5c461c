"""Implementation choices: what is refused, and that the defaults are the fast ones."""

from __future__ import annotations

from typing import Any

import pytest

from dsv41 import BackendConfig


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("attn", "('sparse', 'sdpa', 'eager')"),
        ("experts", "('auto', 'loop', 'grouped', 'dense')"),
        ("loss", "('chunked', 'full')"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(field: str, choices: str) -> None:
    wrong: dict[str, Any] = {field: "fastest"}
    with pytest.raises(ValueError, match="must be one of") as error:
        BackendConfig(**wrong)
    assert str(error.value) == f"{field}: must be one of {choices}, got 'fastest'"


def test_the_first_choice_is_the_default() -> None:
    default = BackendConfig()
    assert (default.attn, default.experts, default.loss) == ("sparse", "auto", "chunked")
