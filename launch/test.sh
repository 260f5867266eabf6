#!/usr/bin/env bash
# One command on a fresh machine: set everything up, then lint and test.
#   bash launch/test.sh [--all|--rest|--sweeps] [pytest arguments]
# Without an option: the everyday suite, a few minutes on 2 cores. --rest runs the tests marked slow or processes but no sweeps,
# --sweeps runs these, both without lint; --all is everything.
set -euo pipefail
EXTRA=dev . "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

MARKER=(-m "not (slow or processes)")
case "${1:-}" in
    --all) MARKER=() && shift ;;
    --rest) MARKER=(-m "(slow or processes) and not sweep") && REST=1 && shift ;;
    --sweeps) MARKER=(-m sweep) && REST=1 && shift ;;
esac
if [ -z "${REST:-}" ]; then
    say "lint"
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    lint-imports --no-cache  # what may import what: pyproject.toml
fi
say "tests"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$PYTHON" -m pytest -n 2 --durations 10 "${MARKER[@]}" "$@"
