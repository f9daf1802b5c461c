"""All configuration keys with type and default, against a recorded file: none changes unnoticed.

A key that is renamed, removed or given another default breaks configurations and saved runs of users. On a change that
is meant, record the file anew and write a line into CHANGELOG.md:

    python -m pytest tests/lightning_modules/test_options_snapshot.py --record-options
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_modules.inspecting import Parsed

FILE = Path(__file__).parents[1] / "data" / "options.json"
# Lightning's, which change with its releases.
NOT_OURS = ("trainer.",)


def options() -> dict[str, list[str]]:
    parser = Parsed(["--config", str(Path(__file__).parents[2] / "configs" / "tiny.yaml")]).parser
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        kind: Any = getattr(action, "_typehint", None)
        if kind is None or action.dest.startswith(NOT_OURS):
            continue
        shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        found[action.dest] = [shown, repr(action.default)]
    return dict(sorted(found.items()))


def test_no_key_type_or_default_has_changed(request: pytest.FixtureRequest) -> None:
    ours = options()
    assert len(ours) > 100
    if request.config.getoption("--record-options"):
        FILE.write_text(json.dumps(ours, indent=1) + "\n")
        return
    recorded = json.loads(FILE.read_text())
    assert ours == recorded
