#!/usr/bin/env bash
# Correctness and numbers on one CUDA GPU, without a package index: what is importable or on PYTHONPATH is enough.
#   bash benchmarks/gpu.sh check [--device cuda|cpu] [--out FILE]     gradients, stream order, memory, allocator: under 12 minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case "${1:-}" in
    check) shift && exec "$PYTHON" -m benchmarks.check "$@" ;;
    *) sed -n '2,3p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
