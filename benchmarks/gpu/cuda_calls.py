"""Calls of CUDA during some steps that a steady step must not make, from a trace, or in the emulator from its own counts."""

from __future__ import annotations

import collections
import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import streams

UNWANTED = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaMemcpy",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
)
_MARK = "steady steps"
_LOGGED = {"malloc": "cudaMalloc", "free": "cudaFree", "register": "cudaHostRegister", "unregister": "cudaHostUnregister"}
"""Names in the emulator's log, which it keeps with EMULATED_CALLS=1."""


def unwanted(steps: Callable[[], Any], emulated: bool) -> dict[str, int]:
    """Run the steps and return the unwanted calls by name."""
    return _counted(steps) if emulated else _traced(steps)


def _traced(steps: Callable[[], Any]) -> dict[str, int]:
    def marked() -> None:
        with torch.profiler.record_function(_MARK):
            steps()

    with tempfile.TemporaryDirectory() as folder:
        return in_trace(streams.traced(marked, Path(folder) / "trace.json"))


def in_trace(events: list[dict[str, Any]]) -> dict[str, int]:
    """Count calls within the mark. Around it the profiler itself synchronizes the device."""
    spans = [event for event in events if event.get("ph") == "X"]
    (mark,) = (event for event in spans if event["name"] == _MARK and event["cat"] == "user_annotation")  # the host's
    inside = [event["name"] for event in spans if 0 <= event["ts"] - mark["ts"] < mark["dur"]]
    return dict(collections.Counter(name for name in inside if name in UNWANTED))


def _counted(steps: Callable[[], Any]) -> dict[str, int]:
    emulator = ctypes.CDLL("libcuda.so.1")
    emulator.emulated_host_waits.restype, emulator.emulated_calls.restype = ctypes.c_size_t, ctypes.c_char_p
    waits = emulator.emulated_host_waits()
    emulator.emulated_calls()
    steps()
    calls = collections.Counter(line.split()[0] for line in emulator.emulated_calls().decode().splitlines())
    found = {name: calls[logged] for logged, name in _LOGGED.items() if calls[logged]}
    waited = emulator.emulated_host_waits() - waits
    return found | ({"synchronize": waited} if waited else {})
