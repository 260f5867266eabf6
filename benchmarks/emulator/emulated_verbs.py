"""Verbs of gpu.sh on the emulated device: `first` and `check --device emulator`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import allocator_gpu, check_addresses, host, point
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


class Times:
    """Seconds of a part of `check` on a GPU, without one: the emulator's clock, plus imports of the processes it starts.

    The clock knows launches and kernels, and no Python. A part of tiny models takes as long as Python: `host_s` on this machine.
    Ways to allocate, which are processes of their own, run in this one: a child has no clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, 0
        self.import_s = min(_imports_s() for _ in range(2))
        scenarios = check_addresses.scenarios

        def counted(segments: str, seconds: float) -> tuple[int, list[str]]:
            self._started += 1
            return scenarios(segments, seconds)

        def here(module: str, words: list[str], way: str, seconds: float) -> dict[str, Any]:
            self._started += 1
            return _last_line(module, words)

        check_addresses.scenarios, allocator_gpu.run_apart = counted, here

    def begin(self) -> None:
        self._at, self._started, self._host_at = self._clock.now(), 0, time.perf_counter()

    def row(self) -> dict[str, float]:
        """Return the seconds since `begin`."""
        imports_s = self._started * self.import_s
        host_s = time.perf_counter() - self._host_at
        found = {"clock_s": self._clock.now() - self._at, "processes": self._started, "imports_s": imports_s}
        return found | {"sum_s": found["clock_s"] + imports_s, "host_s": host_s}


def line(name: str, row: dict[str, float]) -> str:
    sums = f"{row['clock_s']:6.1f} s by the clock + {row['processes']} x imports = {row['sum_s']:6.1f} s"
    return f"    {name:27s} {sums}; Python, compilers and children here {row['host_s']:6.1f} s"


def _imports_s() -> float:
    """Return the seconds that a child takes until it could begin."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "benchmarks.allocator_gpu", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _last_line(module: str, words: list[str]) -> dict[str, Any]:
    """Run a module in this process and return its last line, as JSON."""
    before, sys.argv = sys.argv, [module, *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return json.loads(said.getvalue().splitlines()[-1])
