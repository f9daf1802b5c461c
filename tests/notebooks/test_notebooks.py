"""Notebooks: stored without outputs, free of logic, and run from the first cell to the last as a reader runs them."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a reader comes for: pictures and tables that each of them has to show.
PICTURES = {
    "01_architecture_tour": 2,
    "02_engram_memory": 2,
    "03_hyper_connections": 4,
    "04_csa2_selection": 1,
    "05_read_an_ablation": 3,
}
TABLES = {
    "01_architecture_tour": 1,
    "02_engram_memory": 1,
    "03_hyper_connections": 1,
    "04_csa2_selection": 2,
    "05_read_an_ablation": 3,
}
LOGIC = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.For,
    ast.While,
    ast.If,
    ast.IfExp,
    ast.Try,
    ast.With,
    ast.BinOp,
    ast.Compare,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(notebook: Any) -> list[str]:
    """Sources of the code cells, without IPython's own lines."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return ["\n".join(line for line in source.splitlines() if not line.startswith("%")) for source in sources]


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_these_are_the_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(PICTURES) == list(TABLES)


@every_notebook
def test_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not outputs_of(notebook)
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}, "a version would change with every reader"


@every_notebook
def test_has_no_logic(path: Path) -> None:
    for source in code_of(nbformat.read(path, as_version=4)):
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOGIC)]
        assert not found, f"belongs into the package: {ast.unparse(found[0])}"


@every_notebook
def test_uses_the_command_line_s_objects(path: Path) -> None:
    assert any("get_cli(" in source and "run=False" in source for source in code_of(nbformat.read(path, as_version=4)))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that notebooks read, where they may write beside them."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("notebooks", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: they train on the same text."""
    return tmp_path_factory.mktemp("cache")


@every_notebook
def test_runs(path: Path, clone: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CACHE", str(shared_cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = sorted(clone.glob("notebooks/*"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(clone / "notebooks")}})
    client.execute()
    outputs = outputs_of(notebook)
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    assert sum("image/png" in data for data in shown) >= PICTURES[path.stem]
    assert sum("|---" in data.get("text/markdown", "") for data in shown) >= TABLES[path.stem]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")
    assert "Warning" not in said, said
    assert len(said.splitlines()) < 60, "noise between the pictures"
    assert sorted(clone.glob("notebooks/*")) == before, "files beside the notebooks"
    json.dumps(notebook)  # nothing but what a file can hold
