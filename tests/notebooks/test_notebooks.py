"""Notebooks: stored without outputs, short, and run from the first cell to the last as a reader runs them."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from lightning_modules.ablation.plan import make_plan
from lightning_modules.ablation.running import CONFIG, finish
from lightning_modules.ablation.study import read_study
from lightning_modules.cli import main

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a reader comes for: pictures and tables that each of them has to show.
PICTURES = {
    "01_architecture_tour": 2,
    "02_engram_memory": 2,
    "03_hyper_connections": 7,
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
# A cell measures with functions of the package, which are tested, and draws. What is not a statement of that belongs
# into the package.
NOT_IN_A_CELL = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.While,
    ast.If,
    ast.IfExp,
    ast.Try,
    ast.With,
)
LONGEST = 16  # lines of a cell that draws

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
def test_cells_call_and_draw(path: Path) -> None:
    for source in code_of(nbformat.read(path, as_version=4)):
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, NOT_IN_A_CELL)]
        assert not found, f"belongs into the package: {ast.unparse(found[0])}"
        if "plt." in source:
            drawing = source[source.index("plt.") :]
            assert len(drawing.splitlines()) <= LONGEST, "belongs into the package"


@every_notebook
def test_uses_the_command_line_s_objects(path: Path) -> None:
    assert any("get_cli(" in source and "run=False" in source for source in code_of(nbformat.read(path, as_version=4)))


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: they train on the same text."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that notebooks read, where they may write beside them."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("notebooks", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def finished_study(clone: Path, shared_cache: Path) -> Path:
    """The study of 05 with fewer and shorter steps, its runs made in this process; the notebook finds them finished."""
    file = clone / "notebooks" / "short_study.yaml"
    study = yaml.safe_load(file.read_text())
    options = study["base"]["options"]
    options["data"] = {"sequence_length": 32, "batch_size": 2}
    options["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 2, "log_every_n_steps": 1}
    options["model"]["schedule"]["warmup_steps"] = 1
    options["checkpoint"]["every_n_steps"] = 4
    file.write_text(yaml.safe_dump(study))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV41_CACHE", str(shared_cache))
        patch.chdir(file.parent)
        plan = make_plan(read_study(Path(file.name)))
        for run in plan.runs:
            run.folder.mkdir(parents=True)
            (run.folder / CONFIG).write_text(yaml.safe_dump(run.config, sort_keys=False))
            main(["fit", "--config", str(run.folder / CONFIG)])
            assert finish(run)
    assert len(plan.runs) == 9
    return file


@every_notebook
def test_runs(
    path: Path,
    clone: Path,
    shared_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if path.stem == "05_read_an_ablation":
        request.getfixturevalue("finished_study")
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
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    if path.stem == "05_read_an_ablation":
        assert printed.count("  finished\n") == 9, "it trains nothing anew"
    json.dumps(notebook)  # nothing but what a file can hold
