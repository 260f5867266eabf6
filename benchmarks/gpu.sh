#!/usr/bin/env bash
# Correctness and numbers on one CUDA GPU, without a package index: importable packages are enough.
#   bash benchmarks/gpu.sh first    [--device cuda|cpu|emulator] [--out FILE]   what all else rests on, in three minutes
#   bash benchmarks/gpu.sh check    [--device cuda|cpu] [--parts A,B] [--out FILE]   gradients, stream order, memory
#   bash benchmarks/gpu.sh speed    [--help]   step time and memory of every rival, the three streams
#   bash benchmarks/gpu.sh capacity [--help]   longest trainable length at equal device and host budgets
#   bash benchmarks/gpu.sh all      [--device cuda|cpu]   all but first and table, each in 8 minutes (LIMIT_S) at most
#   bash benchmarks/gpu.sh table    [FILE …]   bring docs/benchmarks.md up to date with benchmarks/results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# Run a verb in a process group of its own until it ends or its time is over. A child that is left would hold the GPU.
verb=
end_verb() { [ -z "$verb" ] || kill -KILL -- "-$verb" 2>/dev/null || true; }
limited() {
    timeout --kill-after=5 "${LIMIT_S:-480}" "$PYTHON" -m "benchmarks.$1" "${@:2}" & verb=$!
    local status=0
    wait "$verb" || status=$?
    end_verb
    return "$status"
}

all() {
    local worst=0 summary= status words
    trap end_verb EXIT
    trap 'exit 143' INT TERM
    for words in check "check --parts flex,tiles,tiles_float32" speed capacity; do
        echo "==== $words"
        status=0
        limited $words "$@" || status=$?
        worst=$((status > worst ? status : worst))
        summary+="$(printf '%-30s exit %d' "$words" "$status")"$'\n'
    done
    printf '%s' "$summary"
    return "$worst"
}

case "${1:-}" in
    first | check | speed | capacity) exec "$PYTHON" -m "benchmarks.$1" "${@:2}" ;;
    all) shift && all "$@" ;;
    table) shift && exec "$PYTHON" -m benchmarks.table "$@" ;;
    *) sed -n '2,8p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
