"""The repository itself: style, types, import direction, files a user needs."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
PACKAGES = ("dsv41", "lightning_modules")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Extras whose packages the code imports, inside the functions that need them. The others are tools.
IMPORTED_EXTRAS = ("hf", "parquet", "zst", "deepseek", "plots")


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
    optional = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    for requirement in PROJECT["dependencies"] + optional:
        if requirement.startswith(PROJECT["name"]):
            continue
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        assert re.search(r"#\s*\S+", line), f"no reason given for {requirement}"
        assert re.search(r"[<>=]", requirement), f"no bound for {requirement}"


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Absolute imports below a syntax tree and modules asked for by `find_spec` or `import_module`, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("find_spec", "import_module")):
            parts = (part for argument in node.args for part in ast.walk(argument))
            yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def top_imports(node: ast.stmt) -> Iterator[str]:
    """Imports of a statement that run when its file is read."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield from imports_of(node)


def distributions_of(module: str, installed: Mapping[str, list[str]]) -> set[str]:
    """Normalised names of the distributions that hold a top package; the name itself where none is installed."""
    names = installed.get(module.partition(".")[0], [module])
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def names_of(requirements: list[str]) -> set[str]:
    """Normalised names of requirements, without the project's references to its own extras."""
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower() for requirement in requirements}
    return names - {PROJECT["name"]}


def test_imports_and_declared_dependencies_agree() -> None:
    """What a file imports when it is read is in `dependencies`; what a function imports may be in an extra."""
    base = names_of(PROJECT["dependencies"])
    extras = names_of([one for extra in IMPORTED_EXTRAS for one in PROJECT["optional-dependencies"].get(extra, [])])
    known = sys.stdlib_module_names | set(PACKAGES) | {"compression"}  # compression.zstd, from Python 3.14
    installed = packages_distributions()
    imported: set[str] = set()
    for path in [path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")]:
        tree = ast.parse(path.read_text())
        at_once = {module for node in tree.body if not isinstance(node, ast.If) for module in top_imports(node)}
        for module in set(imports_of(tree)):
            if module.partition(".")[0] in known:
                continue
            found = distributions_of(module, installed) & (base if module in at_once else base | extras)
            assert found, f"{path.relative_to(ROOT)} imports {module}, which pyproject.toml does not declare"
            imported |= found
    assert base | extras == imported, f"declared and never imported: {sorted((base | extras) - imported)}"


def test_wheels_have_the_files_that_are_not_python() -> None:
    """Package data of pyproject.toml name every such file, type markers included; each folder of code is a package."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        files = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        listed = {path for pattern in data[package] for path in (ROOT / package).glob(pattern)}
        assert {path for path in files if path.suffix != ".py"} == listed
        assert ROOT / package / "py.typed" in listed
        assert all((path.parent / "__init__.py").exists() for path in files)


# Files whose docstrings follow CONTRIBUTING.md, "Style"; those of `UNREAD` are not yet read through.
FOLDERS = ("ablation", "optim", "parallel", "training")
READ = ("dsv41/**/*.py", *(f"lightning_modules/{folder}/*.py" for folder in FOLDERS), "lightning_modules/budget.py")
UNREAD = ("dsv41/weights/*.py", "dsv41/inherited.py", "dsv41/model.py", "lightning_modules/ablation/progress.py")
RIDDLE = re.compile(r"(What|How|Who|Whoever|Where|Likewise|Nothing|For people|Say|Of|As (in|of)|As \S+[.;,])(\W|$)")


def test_docstrings_begin_with_the_thing() -> None:
    """First words are a noun of the field or a verb, not a question or a reference."""
    found, riddles = 0, []
    paths = {path for pattern in READ for path in ROOT.glob(pattern)}
    for path in paths - {path for pattern in UNREAD for path in ROOT.glob(pattern)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                found += text is not None
                if text and RIDDLE.match(text):
                    riddles.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found > 300
    assert not riddles


@pytest.mark.parametrize("path", ["README.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md", ".ci/run"])
def test_a_user_finds(path: str) -> None:
    assert (ROOT / path).stat().st_size > 100


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_pages_point_at_files_that_exist(page: str) -> None:
    """Paths in code marks count from the root, links from the page."""
    text = (ROOT / page).read_text()
    marked = re.findall(r"`((?:dsv41|lightning_modules|configs|tests|docs|benchmarks|notebooks)/[\w./-]*)`", text)
    linked = [path for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text) if not path.startswith("http")]
    assert marked or linked
    missing = [path for path in marked if not (ROOT / path).exists()]
    missing += [path for path in linked if not ((ROOT / page).parent / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", ["architecture", "train_step"])
def test_drawn_pictures_are_current(name: str, tmp_path: Path) -> None:
    """Elements and colours of the stored picture are those that its script draws; glyphs depend on the library."""
    runpy.run_path(str(ROOT / "docs" / f"draw_{name}.py"))["main"](tmp_path / "drawn.svg")
    drawn, stored = ((path).read_text() for path in (tmp_path / "drawn.svg", ROOT / "docs" / f"{name}.svg"))
    for pattern in (r'id="((?:text|patch|line2d)_\d+)"', r"fill: (#\w+)", r"<!-- (.*?) -->"):
        assert re.findall(pattern, drawn) == re.findall(pattern, stored) != []


def test_hooks_workflow_and_forms_parse() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "codespell", "notebook-outputs"}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert {"run": ".ci/run"}.items() <= workflow["jobs"]["tests"]["steps"][-1].items()
    forms = [yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")]
    assert len(forms) == 2
    assert all(form["name"] and form["description"] and form["body"] for form in forms)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in sorted(ROOT.glob("docs/*.md")) if f"]({page.name})" not in index] == ["README.md"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_continuous_integration_runs_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "pytest" in line and "pip install" in line)
    assert command.strip() in (ROOT / ".ci" / "run").read_text()
