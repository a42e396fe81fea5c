#!/usr/bin/env bash
# Lint everything: ruff, mypy --strict, the import contracts of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/ruff ]; then
    scripts/test.sh --prepare
fi
echo "lint: ruff"
.venv/bin/ruff check .
echo "lint: mypy --strict"
.venv/bin/mypy
echo "lint: who may import whom"
PYTHONPATH=.:clients:adapters .venv/bin/lint-imports
