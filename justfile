# Recipes for contributors; every one is a plain command that runs without `just`. The environment is .venv, see CONTRIBUTING.md.

python := ".venv/bin/python"

# style, types, import contracts
check:
    {{python}} -m ruff check .
    {{python}} -m ruff format --check .
    {{python}} -m mypy dsv41 lightning_modules
    .venv/bin/lint-imports

# the model and the repository
test:
    {{python}} -m pytest -n 2 tests/dsv41 tests/test_repository.py

# everything, as continuous integration does
test-all:
    {{python}} -m pytest -n 2

# pictures of docs/ that are drawn from code and CSV files
docs:
    {{python}} docs/draw_architecture.py
    {{python}} docs/draw_train_step.py

# known vulnerabilities of the installed dependencies, by pip-audit in an environment apart
audit:
    python3 -m venv build/audit
    build/audit/bin/pip install -q pip-audit
    build/audit/bin/pip-audit --skip-editable --path "$({{python}} -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
