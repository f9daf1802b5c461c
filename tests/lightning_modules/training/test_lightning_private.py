"""Lightning's private names stand in one file of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "lightning_modules"
ALLOWED = "training/lightning_private.py"
# Private names of others than Lightning: (what they are read from, name).
OTHERS = {
    ("torch", "_foreach_mul_"),
    ("torch", "_dynamo"),
    ("os", "_exit"),
    ("schedule", "_last_lr"),  # torch's
    ("parser", "_actions"),  # argparse's
    ("writer", "_get_file_writer"),  # tensorboard's
}


def private_uses(source: str) -> Iterator[str]:
    """Attributes ``x._name`` of anything but self, cls and super(), and imports of private names from Lightning."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        owner = ast.unparse(node.value)
        module_of_ours = owner == "engram"
        if owner not in ("self", "cls", "super()") and (owner, node.attr) not in OTHERS and not module_of_ours:
            yield f"{owner}.{node.attr}"


def test_no_other_file_touches_them() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 60
    found = {str(path.relative_to(PACKAGE)): uses for path in files if (uses := list(private_uses(path.read_text())))}
    assert set(found.pop(ALLOWED)) >= {"trainer.fit_loop._should_accumulate", "_plugin_to_compute_dtype"}
    assert not found


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("self.trainer._logger_connector.log_metrics({})", "self.trainer._logger_connector"),
        ("loop._data_fetcher", "loop._data_fetcher"),
        ("from lightning.pytorch.loops import _FitLoop", "_FitLoop"),
        ("logger._version = 3", "logger._version"),
    ],
)
def test_a_use_is_seen(line: str, use: str) -> None:
    assert list(private_uses(line)) == [use]
