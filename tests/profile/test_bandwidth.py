"""Bandwidth is measured over memory that fits the budget, and all of it is freed."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import closing

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.profile import bandwidth
from ds_memo.profile.bandwidth import CopyBench
from ds_memo.profile.live import LiveBytes
from ds_memo.swap import host_slab
from ds_memo.swap import pinned_segments as segments
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.stream_protocol import D2H, H2D
from ds_memo.swap.streams import ThreadStreams

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("budget", "chunk", "expected"),
    [
        (1 << 30, 1 << 20, 1 << 20),
        (10 * PAGE + 17, 1 << 20, 10 * PAGE),
        (PAGE, 1 << 20, PAGE),
        (0, 1 << 20, PAGE),
        (1 << 30, PAGE + 1, PAGE),
    ],
)
def test_the_block_fits_the_budget(budget, chunk, expected):
    bench = CopyBench(CPU, budget=budget, chunk=chunk)
    try:
        assert bench.chunk == expected == bench._slab.size
        assert bench.rate(D2H) > 0 and bench.rate(H2D) > 0
    finally:
        bench.close()


@pytest.mark.parametrize("budget, chunks", [(1 << 30, 16), (1 << 22, 4), (1 << 20, 1), (5 << 19, 2)])
def test_copies_go_round_over_a_span_of_the_host(budget, chunks):
    """A block that is copied over and over lies in the CPU's cache."""
    bench = CopyBench(CPU, budget=budget, chunk=1 << 20, span=1 << 24)
    copied = {D2H: [], H2D: []}
    real = bench._streams.copy
    bench._streams.copy = lambda stream, *copy: copied[stream].append(copy[:2]) or real(stream, *copy)
    bench.rate(D2H), bench.rate(H2D)
    bench.close()
    written, read = ({pair[side].data_ptr() for pair in copied[stream]} for side, stream in enumerate((D2H, H2D)))
    assert len(copied[D2H]) > 16 and written == read and len(written) == chunks
    assert max(written) - min(written) == (chunks - 1) << 20 == bench._slab.budget.nbytes - (1 << 20)
    for stream, (first, second) in {name: pairs[:2] for name, pairs in copied.items()}.items():
        assert chunks == 1 or first[stream == H2D].data_ptr() != second[stream == H2D].data_ptr()


def test_a_block_that_the_system_refuses_is_halved(monkeypatch):
    real = segments.map_pages
    monkeypatch.setattr(segments, "map_pages", lambda n: real(n) if n <= 1 << 18 else _no())
    bench = CopyBench(CPU, budget=1 << 30, chunk=1 << 20)
    assert bench.chunk == 1 << 18
    bench.close()
    monkeypatch.setattr(segments, "map_pages", lambda n: _no())
    with pytest.raises(MemoError, match="the bandwidth measurement needs"):
        CopyBench(CPU, budget=1 << 30)


def _no():
    raise MemoError("no")


class Throttled(ThreadStreams):
    """Copies over a slow link: each takes its bytes over the bandwidth, on its own thread."""

    def __init__(self, d2h_bytes_per_s, h2d_bytes_per_s):
        super().__init__()
        self._rates = {D2H: d2h_bytes_per_s, H2D: h2d_bytes_per_s}

    def _hand_over(self, stream, then):
        nbytes = sum(copied for _, _, copied, *_ in self._copies[stream])
        if nbytes:
            self._queues[stream].put((time.sleep, nbytes / self._rates[stream]))
        super()._hand_over(stream, then)


def test_each_direction_has_its_own_rate(monkeypatch):
    """Each direction of a throttled link is measured at its own rate."""
    monkeypatch.setattr(bandwidth, "streams_for", lambda device: Throttled(40e6, 800e6))
    with closing(CopyBench(CPU, 1 << 30, chunk=1 << 16)) as bench:
        d2h, h2d = bench.rate(D2H), bench.rate(H2D)
    assert d2h <= 40e6 and h2d <= 800e6  # a sleep is never too short; how much longer depends on the machine
    assert h2d > d2h


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left(monkeypatch, fails):
    before = threading.active_count()
    slabs = []
    real = host_slab.HostSlab.__init__
    monkeypatch.setattr(host_slab.HostSlab, "__init__", lambda self, *args: slabs.append(self) or real(self, *args))
    if fails:
        monkeypatch.setattr(bandwidth.torch, "zeros", lambda *args, **kwargs: _no())
    with LiveBytes() as count:
        if fails:
            with pytest.raises(MemoError):
                CopyBench(CPU, 1 << 30, chunk=1 << 16)
        else:
            with closing(CopyBench(CPU, 1 << 30, chunk=1 << 16)) as bench:
                bench.rate(D2H)
            del bench
    gc.collect()
    assert count.live == 0
    assert threading.active_count() == before
    assert [(held.size, held.used) for held in slabs] == [(0, 0)]
