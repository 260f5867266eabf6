"""Calls of CUDA in an emulated process, and the code that made each.

    with Calls() as calls:
        step()
    calls.counts        # (call, who, where) → number

A call belongs to the code that asked PyTorch for it. An op that a dispatch mode passes on is not the mode's, and a collective's
calls are those of the code that began it.
"""

from __future__ import annotations

import collections
import ctypes
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

HERE = Path(__file__).parent
REPO = HERE.parents[1]
SYNCHRONIZING = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cuMemCreate",
    "cuMemRelease",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaHostAlloc",
    "cudaFreeHost",
)
"""Calls in which the host waits for the device, or the driver holds its lock for long."""
SET_STREAM = "set stream"
"""Another stream becomes PyTorch's current one. A `torch.cuda.stream` context does that twice. CUDA is not asked."""
WAIT_OF_COMPUTE = "wait of compute"
"""A cudaStreamWaitEvent of PyTorch's current stream."""
PER_LAYER = (WAIT_OF_COMPUTE, "cudaStreamWaitEvent", "cudaEventRecord", "cudaMemcpyAsync", SET_STREAM)
_WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)


@dataclass(frozen=True)
class Call:
    """A call of CUDA that is over."""

    name: str
    what: int
    """Handle of the event, or address of the memory that is written, made or freed."""
    source: int
    """Address that a copy reads."""
    amount: int
    """Bytes; of a wait the nanoseconds that it holds the stream, or the host."""
    stream: int


class Calls:
    """Counts calls of CUDA while it is entered.

    Args:
        listen: called with each call, at once.
    """

    def __init__(self, listen: Callable[[Call], None] = lambda call: None) -> None:
        self.counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.held: collections.Counter[tuple[str, str]] = collections.Counter()
        """Seconds for which waits held a stream that PyTorch computes on, by who asked for them and where."""
        self.least_queued_s = float("inf")
        """Least work that compute had left when ds_memo had made the host wait for an event."""
        self._listen = listen
        self._emulator = ctypes.CDLL("libcuda.so.1")
        self._emulator.emulated_watch.argtypes = [ctypes.c_void_p]
        self._emulator.emulated_queued.argtypes, self._emulator.emulated_queued.restype = [ctypes.c_void_p], ctypes.c_double
        self._watcher = _WATCHER(self._called)
        self._set_stream = torch._C._cuda_setStream

    def forget(self) -> None:
        """Count from now on."""
        self.counts.clear()
        self.held.clear()
        self.least_queued_s = float("inf")

    def __enter__(self) -> Calls:
        torch._C._cuda_setStream = self._setting_stream
        self._emulator.emulated_watch(ctypes.cast(self._watcher, ctypes.c_void_p))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._emulator.emulated_watch(None)
        torch._C._cuda_setStream = self._set_stream

    @property
    def held_s(self) -> float:
        """Seconds for which waits that ds_memo asked for held compute."""
        return sum(seconds for (who, _), seconds in self.held.items() if who == "ds_memo")

    def _called(self, name: bytes, what: int, source: int, amount: int, stream: int) -> None:
        call = Call(name.decode(), what, source, amount, stream)
        who, where = caller()
        on_compute = stream == torch.cuda.current_stream().cuda_stream
        if call.name == "cudaStreamWaitEvent" and on_compute:
            self.counts[WAIT_OF_COMPUTE, who, where] += 1
            self.held[who, where] += amount * 1e-9  # type: ignore[assignment]
        if call.name == "cudaEventSynchronize" and who == "ds_memo" and amount:
            queued = self._emulator.emulated_queued(torch.cuda.current_stream().cuda_stream)
            self.least_queued_s = min(self.least_queued_s, queued)
        self.counts[call.name, who, where] += 1
        self._listen(call)

    def _setting_stream(self, *args: Any, **kwargs: Any) -> None:
        who, where = caller()
        self.counts[SET_STREAM, who, where] += 1
        self._set_stream(*args, **kwargs)


def caller() -> tuple[str, str]:
    """Return who asked for the call that is made now, and in which line: the innermost code that is neither PyTorch's nor passes
    an op on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _passes_on(frame):
            func = frame.f_locals["func"]
            while not (frame.f_code.co_name == "__torch_dispatch__" and frame.f_locals.get("func") is func):
                frame = frame.f_back
        elif (who := _package(frame.f_code.co_filename)) is not None:
            return who, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "PyTorch", "autograd"


def _passes_on(frame: FrameType) -> bool:
    """Return True if a frame is a dispatch mode's, or a function that it calls, and runs the op that came to the mode."""
    is_op = isinstance(frame.f_locals.get("func"), torch._ops.OpOverload)
    return is_op and "func(*args" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _package(file: str) -> str | None:
    """Return the name of the package that a file is of; None: PyTorch, Python itself, or the emulator."""
    path = Path(file)
    if path.is_relative_to(REPO) and "site-packages" not in path.parts:  # a venv may stand in the checkout
        if path.parent == HERE and path.name.startswith("emulated_"):
            return None
        return path.relative_to(REPO).parts[0]
    _, installed, inside = file.partition("site-packages/")
    name = inside.split("/")[0]
    if name in ("", "torch"):
        return None if installed or file.startswith(("<", sys.base_prefix)) else path.stem
    return name
