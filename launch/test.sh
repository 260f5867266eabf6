#!/usr/bin/env bash
# One command on a fresh machine: set everything up, then lint and test.   bash launch/test.sh [--all] [pytest arguments]
# --all adds the tests marked slow.
set -euo pipefail
EXTRA=dev . "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

MARKER=(-m "not slow")
if [ "${1:-}" = --all ]; then
    MARKER=()
    shift
fi
say "lint"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
lint-imports --no-cache  # what may import what: pyproject.toml
say "tests"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$PYTHON" -m pytest -n 2 "${MARKER[@]}" "$@"
