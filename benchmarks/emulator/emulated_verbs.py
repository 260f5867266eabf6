"""Verbs of gpu.sh on the emulated device: `first` and `check --device emulator`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from benchmarks import host, point
from benchmarks.emulated_process import run_emulated, without_values
from benchmarks.emulated_time import Clock, keeping_time
from ds_memo.estimate import hardware

DEVICE_GIB = 139.8


def run_emulated_verb(verb: str, words: Sequence[str]) -> int:
    """Run the verb once more, in a process that has the emulator."""
    os.environ["EMULATED_CALLS"] = "1"
    return run_emulated("benchmarks.preflight", [verb, *words], DEVICE_GIB)


@contextlib.contextmanager
def emulation(emulated: bool) -> Iterator[Clock | None]:
    """Within the block code that reads values is left out and the clock runs, if CUDA is the emulator's."""
    if not emulated:
        yield None
        return
    without_values()
    point.watch_streams = lambda *_: {"skipped": "the profiler wants a driver"}
    host.grow = lambda wanted: wanted
    with keeping_time(hardware.load("h200")) as clock:
        yield clock
