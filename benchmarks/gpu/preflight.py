"""Check that a verb of gpu.sh has what it needs, before anything is timed; then run it."""

from __future__ import annotations

import argparse
import compileall
import ctypes
import importlib
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
NEEDED = ("transformers", "deepspeed", "ds_memo")


def missing(device: torch.device) -> str | None:
    """Return what cannot be imported or built, and why; None: nothing is missing."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here; --device cpu tries the harness itself"
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # broken is as bad as absent
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    from ds_memo.ops.builder import AllocatorBuilder

    try:
        AllocatorBuilder(device.type).load()
    except Exception as error:
        return f"the allocator op cannot be built: {error}"
    return None


def compile_here() -> None:
    """Compile the sources once, before processes are started that each would."""
    for folder in ("ds_memo", "benchmarks", "tests"):
        compileall.compile_dir(ROOT / folder, quiet=2)


def main(verb: str, words: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    name = parser.parse_known_args(words)[0].device
    # The process that has the emulator comes here, too, and then all must be there.
    starts_emulator = name == "emulator" and not hasattr(ctypes.CDLL(None), "emulated_calls")
    device = torch.device("cuda" if name == "emulator" else name)
    compile_here()
    asks_for_help = bool({"-h", "--help"} & set(words))
    if not asks_for_help and not starts_emulator and (lacks := missing(device)) is not None:
        print(f"{verb}: {' '.join(lacks.split())[:1000]}", file=sys.stderr)
        return 2
    sys.argv[1:] = words
    runpy.run_module(f"benchmarks.{verb}", run_name="__main__", alter_sys=True)  # ends with a SystemExit of its own
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
