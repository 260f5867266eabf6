# Sourced by quickstart.sh and test.sh:  EXTRA=hf . launch/setup_env.sh
# Leaves the repository root as the working directory, in $PYTHON an interpreter that has ds_memo with that extra, and in
# $ACTIVATE the command that puts it on the PATH of a shell; empty where it is there already.
# Uses the environment that is active, else makes .venv. Keeps an importable torch, else installs the tested one.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { if [ -t 1 ]; then printf '\033[1m== %s\033[0m\n' "$*"; else printf '== %s\n' "$*"; fi; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

ACTIVATE=
if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON=$VIRTUAL_ENV/bin/python
elif [ -n "${CONDA_PREFIX:-}" ]; then
    PYTHON=$CONDA_PREFIX/bin/python
else
    if [ ! -x .venv/bin/python ]; then
        BASE=$(command -v python3 || command -v python) || fail "no python3 found: Python 3.10 or newer is needed"
        "$BASE" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$BASE" --version) found, 3.10 or newer is needed"
        say "making .venv"
        SITE=$("$BASE" -c 'import torch' 2>/dev/null && echo --system-site-packages || true)  # so that its torch is kept
        "$BASE" -m venv $SITE .venv || { rm -rf .venv; fail "python3 -m venv failed (on Debian: apt install python3-venv)"; }
    fi
    PYTHON=$PWD/.venv/bin/python
    export VIRTUAL_ENV=$PWD/.venv
    ACTIVATE=". .venv/bin/activate"
fi
export PATH=$(dirname "$PYTHON"):$PATH  # the deepspeed launcher and its ranks must find the same interpreter

# What is installed is good until one of these files changes.
STAMP=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.ds_memo-$EXTRA
STATE="$PWD $(cat setup.cfg pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$STAMP" 2>/dev/null)" != "$STATE" ]; then
    "$PYTHON" -m pip --version >/dev/null 2>&1 || fail "$PYTHON has no pip"
    CONSTRAINTS=$(mktemp)
    trap 'rm -f "$CONSTRAINTS"' EXIT
    grep -v '^torch==' constraints.txt >"$CONSTRAINTS"
    # pip's version of it: torch.__version__ may say more ("2.13.0+cu130"), and pip then finds nothing that it allows.
    if TORCH=$("$PYTHON" -c 'import torch; from importlib.metadata import version; print(version("torch"))' 2>/dev/null); then
        say "keeping torch $TORCH"
        echo "torch==$TORCH" >>"$CONSTRAINTS"
    else
        say "installing torch: the one big download, gigabytes with CUDA's libraries"
        "$PYTHON" -m pip install -c constraints.txt torch
        cp constraints.txt "$CONSTRAINTS"
    fi
    say "installing ds_memo[$EXTRA]"
    # DeepSpeed comes as source; its ops are built when first used, and nothing here needs one on a CPU.
    DS_BUILD_OPS=0 "$PYTHON" -m pip install -c "$CONSTRAINTS" -e ".[$EXTRA]"
    echo "$STATE" >"$STAMP"
fi
