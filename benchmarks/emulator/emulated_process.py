"""A process whose CUDA is emulator.cpp, below a real CUDA build of torch: how it is started, and what is left out in it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ds_memo.compiled import compiler
from ds_memo.ops.library import cuda_headers
from ds_memo.units import GIB

HERE = Path(__file__).parent
REPO = HERE.parents[1]
HOST_GIB = 115
"""Free host memory of the emulated machine."""


def compiled(folder: Path, headers: Path) -> Path:
    """Compile the stand-in, unless it is there, under the one name that torch looks for besides those of the runtime."""
    library = folder / "libcuda.so.1"
    if library.exists():
        return library
    command = [*compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{headers}", str(HERE / "emulator.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def is_emulated() -> bool:
    """Return True if CUDA is the stand-in in this process."""
    return hasattr(ctypes.CDLL(None), "emulated_calls")


def environment(folder: Path, headers: Path, device_gib: float) -> dict[str, str]:
    """Return the environment of a process whose CUDA is the stand-in."""
    return {
        "LD_PRELOAD": str(compiled(folder, headers)),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "EMULATED_GIB": str(device_gib),
        "DS_ACCELERATOR": "cuda",
        "CUDA_MODULE_LOADING": "LAZY",
    }


def run_emulated(
    module: str, arguments: list[str], device_gib: float, lock_gib: float | None = None, compiled_in: Path | None = None
) -> int:
    """Run a module in a process whose CUDA is the stand-in; print why and return 2 if there can be none.

    Args:
        lock_gib: host memory that can be locked; None: any.
        compiled_in: a folder that keeps what is compiled for further processes; None: it is compiled for this one.

    Raises:
        subprocess.TimeoutExpired: it runs for more seconds than the environment's EMULATED_LIMIT_S.
    """
    python, headers = os.environ.get("DS_MEMO_CUDA_TORCH"), cuda_headers()
    if python is None or headers is None:
        torch = "DS_MEMO_CUDA_TORCH is not set; it names a Python with a CUDA build of torch"
        why = torch if python is None else "no CUDA runtime headers: neither a toolkit nor the packages of a CUDA build of torch"
        print(f"{module.rpartition('.')[2]}: {why}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as own:
        folder = compiled_in or Path(own)
        given = environment(folder, headers, device_gib)
        if lock_gib is not None:
            given["EMULATED_LOCK_GIB"] = str(lock_gib)
        given["XDG_CACHE_HOME"] = str(folder)  # never the user's: no profile made here is of a GPU
        given["PYTHONPATH"] = f"{REPO}:{os.environ.get('PYTHONPATH', '')}"
        limit_s = float(os.environ.get("EMULATED_LIMIT_S", 0)) or None
        command = [python, "-m", module, *arguments]
        return subprocess.run(command, env=os.environ | given, cwd=REPO, check=False, timeout=limit_s).returncode


class NoKernels:
    """A library of kernels that do nothing, in place of bitsandbytes' own, whose Python code allocates and calls PyTorch."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def without_values(host_gib: float = HOST_GIB, flash_attn_3: bool = False) -> None:
    """Leave out code that reads values, or touches memory only to have it.

    Args:
        host_gib: free on the emulated machine.
        flash_attn_3: True if its package is installed.
    """
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from transformers import masking_utils

    from benchmarks import emulated_attention
    from ds_memo.estimate import mixer_kernels
    from ds_memo.hf import sequence
    from ds_memo.logits import lazy_head, lazy_value
    from ds_memo.memory import device as device_memory
    from ds_memo.memory import host as host_memory
    from ds_memo.profile import stopwatch
    from ds_memo.remat import attention_kernels, recipe, replay_check
    from ds_memo.sequence import catch_mixers
    from ds_memo.swap import pinned_segments
    from ds_memo.tiles.check import compare, probe, refuse

    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.backends.cuda import ops

        ops.lib = NoKernels()
    emulated_attention.implement_cudnn()
    if flash_attn_3:
        emulated_attention.install_flash_attn_3()
    mixer_kernels.implement("CUDA")
    catch_mixers._INSTEAD.update(mixer_kernels.KERNELS)
    recipe.Observed.note_hidden_writes = lambda observed: None
    replay_check._differ = attention_kernels.differs = lambda *_: False
    probe.compare = probe.refuse_others = probe.refuse_hidden_draws = lambda *_: None
    compare.is_by_token = refuse.alike = lambda *_: True
    lazy_head.raise_what_is_known = lazy_value.raise_what_is_known = lazy_value._UNKNOWN.clear  # sums of weights mean nothing
    pinned_segments.touch = lambda segment: None
    stopwatch.SUSTAINED_S = 0.0
    for module in (device_memory, host_memory):
        module.available_bytes = lambda *_, **__: int(host_gib * GIB)
    for optimizer in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        optimizer.has_overflow = lambda *_, **__: False
    stage_1_and_2.is_invalid_grad_norm = stage3.is_invalid_grad_norm = lambda _: False
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # else a mask for documents that are not there
    describe = sequence.describe_part
    # Waits for positions stay; what they would say is that each part begins a document, as all ranks have one rank's.
    sequence.describe_part = lambda rows, length, *others: (describe(rows, length, *others), describe(rows, length, None))[1]
