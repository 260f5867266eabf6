#!/usr/bin/env bash
# Correctness and numbers on one CUDA GPU, without a package index: importable packages are enough.
#   bash benchmarks/gpu.sh first    [--device cuda|cpu|emulator] [--out FILE]   what all else rests on, in three minutes
#   bash benchmarks/gpu.sh check    [--device cuda|cpu] [--parts A,B] [--out FILE]   gradients, stream order, memory
#   bash benchmarks/gpu.sh speed    [--help]   step time and memory of every rival, the three streams
#   bash benchmarks/gpu.sh capacity [--help]   longest trainable length at equal device and host budgets
#   bash benchmarks/gpu.sh table    [FILE …]   bring docs/benchmarks.md up to date with benchmarks/results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case "${1:-}" in
    first | check | speed | capacity | table) exec "${PYTHON:-$(command -v python3 || command -v python)}" -m "benchmarks.$1" "${@:2}" ;;
    *) sed -n '2,7p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
