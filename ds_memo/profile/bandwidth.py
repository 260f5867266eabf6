"""Copy bandwidth between this rank's device and its host memory, over the streams and the slab that training uses.

Ranks of a node share its memory and its links, so all of them must copy at the same time. They start together and copy for a
fixed time, not a fixed number of times: no rank is left to copy alone over a free link.

On CUDA copies go round over a GiB of the host: a block that is copied over and over lies in the CPU's cache, which is faster than
memory. The bytes are random.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import COMPUTE, D2H, H2D, streams_for

CHUNK = 1 << 26
"""Bytes of one copy: about the size of one kept output of a long layer."""
SPAN = 1 << 30
"""Bytes of the host that copies go round over on CUDA: several times a CPU's cache."""
SECONDS = 0.3
"""Length of one measurement."""
_COPIES = 8
"""Copies issued before each wait."""


class CopyBench:
    """Memory on both sides and the streams between them. The caller closes it.

    Args:
        budget: host bytes this rank may use; chunks are fewer, and one shrinks, to fit: down to one page.
        chunk: bytes of one copy.
        span: bytes of the host to go round over; None: SPAN on CUDA, one chunk on a CPU.

    Raises:
        MemoError: the system refuses even a page.
    """

    def __init__(self, device: torch.device, budget: int, chunk: int = CHUNK, span: int | None = None) -> None:
        self._device = device
        cuda = device.type == "cuda"
        if span is None:
            span = SPAN if cuda else chunk
        chunk = max(PAGE, min(chunk, budget) // PAGE * PAGE)
        self._slab = HostSlab(max(1, min(span, budget) // chunk) * chunk, HostPool(device))
        self._block = _largest(self._slab)
        self.chunk = min(chunk, self._block.nbytes)
        try:
            there = torch.zeros(self.chunk, dtype=torch.uint8, device=device)
            if cuda:  # random bytes, of a generator that training does not use
                there.random_(generator=torch.Generator(device))
            (whole,) = self._block.views(0, self._block.nbytes // self.chunk * self.chunk)  # the slab had allocated nothing
            host = whole.split(self.chunk)
            self._ends = {
                D2H: itertools.cycle([(here, there) for here in host]),
                H2D: itertools.cycle([(there, here) for here in host]),
            }
            self._streams = streams_for(device)
            self._copy(D2H, len(host))  # touches every page, and leaves there what the device has
        except BaseException:
            self._slab.free(self._block)
            self._slab.close()
            raise

    def rate(self, stream: str) -> float:
        """Return bytes per second over `d2h` or `h2d`: the median over batches of copies."""
        self._copy(stream, 1)  # starts the threads
        rates: list[float] = []
        end = time.perf_counter() + SECONDS
        while not rates or time.perf_counter() < end:
            rates.append(self.chunk * _COPIES / self._copy(stream, _COPIES))
        return statistics.median(rates)

    def close(self) -> None:
        self._streams.close()
        self._slab.free(self._block)
        self._slab.close()

    def _copy(self, stream: str, times: int) -> float:
        streams = self._streams
        streams.wait(stream, streams.mark(COMPUTE))
        self._synchronize()
        start = time.perf_counter()
        for _ in range(times):
            streams.copy(stream, *next(self._ends[stream]), self.chunk)
        streams.wait(COMPUTE, streams.mark(stream))
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _largest(slab: HostSlab) -> Block:
    """Allocate the slab's budget; halve the request until the system grants it."""
    nbytes = slab.budget.nbytes
    while True:
        try:
            return slab.allocate(nbytes, "the bandwidth measurement")
        except MemoError:
            if nbytes <= PAGE:
                raise
            nbytes //= 2
