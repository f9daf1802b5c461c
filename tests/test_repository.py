"""The repository itself: style, types, import direction, files a user needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent


def run(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_types_hold(tmp_path: Path) -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "dsv41", "lightning_modules")


def test_imports_point_one_way() -> None:
    run(str(SCRIPTS / "lint-imports"), "--no-cache")


def test_only_one_lightning_is_imported() -> None:
    for path in [*ROOT.glob("dsv41/**/*.py"), *ROOT.glob("lightning_modules/**/*.py")]:
        assert not re.search(r"^\s*(import|from) pytorch_lightning", path.read_text(), re.MULTILINE), path


def test_every_dependency_bound_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    optional = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    for requirement in project["dependencies"] + optional:
        if requirement.startswith(project["name"]):
            continue
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        assert re.search(r"#\s*\S+", line), f"no reason given for {requirement}"
        assert re.search(r"[<>=]", requirement), f"no bound for {requirement}"


@pytest.mark.parametrize("path", ["README.md", "LICENSE", "CITATION.cff", ".ci/run"])
def test_a_user_finds(path: str) -> None:
    assert (ROOT / path).stat().st_size > 100


def test_readme_points_at_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    paths = set(re.findall(r"`((?:dsv41|lightning_modules|configs|tests|docs|benchmarks)/[\w./]+)`", readme))
    paths |= {path for path in re.findall(r"\]\(([\w./-]+)\)", readme) if not path.startswith("http")}
    assert len(paths) > 20
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing


def test_continuous_integration_runs_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "pytest" in line and "pip install" in line)
    assert command.strip() in (ROOT / ".ci" / "run").read_text()
