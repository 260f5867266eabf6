"""Host memory that is locked once for all turns of a run, and the GB/s of locking it.

The last model of a process releases its pool. Rivals take turns, so each turn would map, touch and lock tens of GiB again.
A slab that stays open keeps the pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import results
from benchmarks.rivals import Budget
from ds_memo.swap import pinned_segments
from ds_memo.swap.host_budget import shared_pool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import Segment
from ds_memo.units import GIB


@dataclass
class Locking:
    """Host memory that was locked until now."""

    nbytes: int = 0
    seconds: float = 0.0
    segments: int = 0

    def report(self) -> dict[str, Any]:
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else None
        return {"bytes": self.nbytes, "seconds": self.seconds, "segments": self.segments, "gb_per_s": rate}


def in_words(report: dict[str, Any]) -> str:
    """Return a report of :class:`Locking` as one line."""
    if not report["segments"]:
        return "host memory: none was locked"
    locked = f"{report['bytes'] / GIB:.1f} GiB locked in {report['segments']} segments"
    return f"host memory: {locked}, {report['seconds']:.1f} s, {report['gb_per_s']:.1f} GB/s"


@contextlib.contextmanager
def watched() -> Iterator[Locking]:
    """Time what is touched and locked within the block."""
    found = Locking()
    touch, pin = pinned_segments.touch, pinned_segments.pin

    def timed(work: Callable[[Segment], None], locks: bool) -> Callable[[Segment], None]:
        def run(segment: Segment) -> None:
            begin = time.perf_counter()
            work(segment)
            found.seconds += time.perf_counter() - begin
            if locks:
                found.nbytes += segment.nbytes
                found.segments += 1

        return run

    pinned_segments.touch, pinned_segments.pin = timed(touch, locks=False), timed(pin, locks=True)
    try:
        yield found
    finally:
        pinned_segments.touch, pinned_segments.pin = touch, pin


@contextlib.contextmanager
def held_open(budget: Budget) -> Iterator[Budget]:
    """Within the block the pool of ds_memo and of the paper's MEMO stays, with what it holds."""
    device = torch.empty(0, device=budget.device).device  # with its index, as parameters have it
    slab = HostSlab(0, shared_pool(budget.host_bytes / GIB, device))
    try:
        yield replace(budget, slab=slab)
    finally:
        slab.close()


@contextlib.contextmanager
def locked_once(run: results.Run, budget: Budget) -> Iterator[Budget]:
    """Hold the pool of a run open; at its end print how fast memory was locked, and keep that in the result."""
    with watched() as locking, held_open(budget) as held:
        try:
            yield held
        finally:
            run.save(locked=locking.report())
            results.say(in_words(locking.report()))
