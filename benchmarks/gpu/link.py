"""GB/s of large copies between the device and the host slab: each direction and both at once, alone and beside GEMMs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import seconds
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, streams_for
from ds_memo.units import GIB

WAYS = {"d2h": (True, False), "h2d": (False, True), "both": (True, True)}
"""Copies to the host, copies back."""
GEMM_WIDTH = 8192
SAMPLES = 5


class Link:
    """Two blocks of the slab, two tensors on the device, and the streams between them. The caller closes it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._slab, self._streams = HostSlab(2 * nbytes + 8192, HostPool(device)), streams_for(device)
        self._blocks = [self._slab.allocate(nbytes, "the link test") for _ in range(2)]
        self.there, self._back_from = (block.pieces[0].memory[:nbytes] for block in self._blocks)  # one piece: the slab is new
        self._tensors = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def issue(self, out: bool, back: bool) -> list[Any]:
        """Issue the copies and return an event behind each."""
        events = []
        if out:
            self._streams.copy(D2H, self.there, self._tensors[0], self.nbytes)
            events.append(self._streams.mark(D2H))
        if back:
            self._streams.copy(H2D, self._tensors[1], self._back_from, self.nbytes)
            events.append(self._streams.mark(H2D))
        return events

    def alone_s(self, out: bool, back: bool) -> float:
        """Return the seconds of the copies with nothing beside them."""
        self._synchronize()
        begin = time.perf_counter()
        for event in self.issue(out, back):
            self._streams.wait(COMPUTE, event)
        self._synchronize()
        return time.perf_counter() - begin

    def beside_s(self, out: bool, back: bool, work: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds of the copies, and those of the work on the compute stream that runs meanwhile. On CUDA only."""
        self._synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        events = self.issue(out, back)
        first.record()
        work()
        last.record()
        for event in events:
            event.synchronize()
        copies_s = time.perf_counter() - begin
        last.synchronize()
        return copies_s, first.elapsed_time(last) * 1e-3

    def rate(self, way: str, took_s: float) -> float:
        """Return GB/s."""
        return self.nbytes * (2 if way == "both" else 1) / took_s / 1e9

    def close(self) -> None:
        for block in self._blocks:
            self._slab.free(block)
        self._streams.close()
        self._slab.close()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def under_gemms(device: torch.device, gib: float) -> dict[str, dict[str, float]]:
    """Measure each way on CUDA, alone and beside GEMMs that last as long: GB/s of both, and how many times longer GEMMs take."""
    link = Link(device, int(gib * GIB))
    left, right = (torch.randn(GEMM_WIDTH, GEMM_WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def gemms(number: int) -> None:
        for _ in range(number):
            torch.mm(left, right, out=product)

    one_s = min(seconds(lambda: gemms(8), device) for _ in range(3)) / 8
    found = {}
    for name, way in WAYS.items():
        copy_s = statistics.median([link.alone_s(*way) for _ in range(SAMPLES)][1:])
        number = max(1, math.ceil(copy_s / one_s))
        gemms_s, pairs = [], []
        for _ in range(SAMPLES + 1):  # they take turns: a card that is held to a power limit slows down as it gets warm
            gemms_s.append(link.beside_s(False, False, lambda number=number: gemms(number))[1])
            pairs.append(link.beside_s(*way, lambda number=number: gemms(number)))
        copies_s, slowed_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
        found[name] = {
            "gb_per_s": link.rate(name, copy_s),
            "gb_per_s_beside": link.rate(name, copies_s),
            "gemm_slowdown": slowed_s / statistics.median(gemms_s[1:]),
            "samples_s": {"gemms": gemms_s, "copies, gemms beside": pairs},
        }
    link.close()
    return found
