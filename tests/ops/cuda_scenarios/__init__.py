"""The op on CUDA, with torch's other uses of device memory.

    python -m tests.ops.cuda_scenarios            # all that this machine can run; one line each, exit status 1 if any failed

Most also run over the emulator (benchmarks/emulator), where device memory is host memory, copies happen at once and kernels do
nothing. Copies alone move data there, and the recorded calls show the waits of each stream. Those marked `gpu` need a GPU.
"""

from __future__ import annotations

import gc
import traceback

import torch

from ds_memo.ops.allocator import Allocator
from tests.ops.cuda_scenarios import allocator, frames, kernels  # noqa: F401 (each adds its scenarios to the table)
from tests.ops.cuda_scenarios.rig import DEVICE, LEAVES_AN_ARENA, ON_A_GPU, ON_A_STANDIN, SCENARIOS, is_standin


def runnable() -> list[str]:
    here = ON_A_GPU if is_standin() else ON_A_STANDIN
    return [name for name in SCENARIOS if name not in here]


def run(name: str) -> str:
    """Nothing, or what went wrong."""
    op = Allocator(DEVICE)
    op.install()
    expected = op.retired_arenas
    try:
        SCENARIOS[name]()
    except Exception:
        return traceback.format_exc()
    finally:
        op.install()
        gc.collect()
        torch.cuda.ipc_collect()
        op.uninstall()
    left = op.retired_arenas
    expected += name in LEAVES_AN_ARENA
    return f"{left} arenas still have live blocks, and {expected} should\n" if left != expected else ""


def main() -> int:
    torch.cuda.init()
    Allocator(DEVICE).uninstall()  # without an install
    failed = 0
    for name in runnable():
        print(f"run {name}", flush=True)
        wrong = run(name)
        failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok'} {name}\n{wrong}", end="", flush=True)
    print(f"{failed} failed", flush=True)
    return 1 if failed else 0
