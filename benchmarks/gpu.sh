#!/usr/bin/env bash
# Correctness and numbers on one CUDA GPU, without a package index: importable packages are enough.
#   bash benchmarks/gpu.sh first    [--device cuda|cpu|emulator] [--out FILE]   what all else rests on, in three minutes
#   bash benchmarks/gpu.sh check    [--device cuda|cpu|emulator] [--parts A,B] [--out FILE]   gradients, stream order, memory
#   bash benchmarks/gpu.sh speed    [--help]   step time and memory of every rival, attention kernels, the three streams
#   bash benchmarks/gpu.sh capacity [--help]   longest trainable length at equal device and host budgets
#   bash benchmarks/gpu.sh planner  [--help]   allocators: cudaMalloc, reserved over requested, planned over measured
#   bash benchmarks/gpu.sh all      [--help]   all but first and table, each in 8 minutes at most
#   bash benchmarks/gpu.sh table    [FILE …]   bring benchmarks/README.md up to date with benchmarks/results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case "${1:-}" in
    first | check | speed | capacity | planner | all) exec "$PYTHON" -m benchmarks.preflight "$@" ;;
    table) shift && exec "$PYTHON" -m benchmarks.table "$@" ;;
    *) sed -n '2,9p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
