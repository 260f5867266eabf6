"""How fast this rank's drives are written and read, beside its copies: blocks go from the device to the files and back.

Ranks of a node share its drives, so all must measure at the same time, and for a fixed time; see ds_memo.profile.bandwidth.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ds_memo.errors import MemoError
from ds_memo.nvme.direct_files import DirectFiles, DirectTransfer
from ds_memo.nvme.extents import Extent
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import COMPUTE, D2H, H2D, Streams, streams_for

BLOCK = 1 << 26
"""Bytes of one block: about the size of a frame of a long layer's tile."""
BLOCKS = 8
"""Under way at once."""
SECONDS = 0.5
"""Length of one measurement."""


def measure_drives(files: DirectFiles, host_budget: int, device: torch.device) -> tuple[float, float]:
    """Return bytes per second to and from the files.

    Args:
        host_budget: bytes of host memory that may be used; blocks shrink to fit.

    Raises:
        MemoError: there is no memory or no file space for blocks of a page, or a transfer fails.
    """
    nbytes = min(BLOCK, host_budget // BLOCKS, files.budget // BLOCKS) // PAGE * PAGE
    if not nbytes:
        raise MemoError(f"the drives cannot be measured: {BLOCKS} pages of host memory and of files are expected")
    with ExitStack() as undo:
        slab = HostSlab(nbytes * BLOCKS, HostPool(device))
        undo.callback(slab.close)
        blocks: list[tuple[Block, Extent]] = []
        for _ in range(BLOCKS):
            block = slab.allocate(nbytes, "the measurement of the drives")
            undo.callback(slab.free, block)
            extent = files.extent(nbytes, "the measurement of the drives")
            undo.callback(files.free, extent)
            blocks.append((block, extent))
        undo.callback(files.finish)
        streams = streams_for(device)
        undo.callback(streams.close)
        there = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()  # drives may compress

        def write(block: Block, extent: Extent) -> DirectTransfer:
            _copy(streams, D2H, block, there)
            return files.write(block, extent, (streams.mark(D2H),))

        def read(block: Block, extent: Extent) -> DirectTransfer:
            _copy(streams, H2D, block, there)
            return files.read(extent, block, (streams.mark(H2D),))

        _rate(write, blocks, 0.0)  # the first write to preallocated bytes is slow
        return _rate(write, blocks, SECONDS), _rate(read, blocks, SECONDS)


def _copy(streams: Streams, stream: str, block: Block, there: torch.Tensor) -> None:
    streams.wait(stream, streams.mark(COMPUTE))
    for memory, begin, at, nbytes in block.parts(0, block.nbytes):
        if stream == D2H:
            streams.copy(stream, memory, there, nbytes, begin, at)
        else:
            streams.copy(stream, there, memory, nbytes, at, begin)


def _rate(move: Callable[[Block, Extent], DirectTransfer], blocks: list[tuple[Block, Extent]], seconds: float) -> float:
    """Return bytes per second while all blocks are moved again and again, at least once each."""
    begin, moved = time.perf_counter(), 0
    under_way = deque((move(*block), block) for block in blocks)
    while under_way:
        transfer, block = under_way.popleft()
        transfer.over.wait()
        if transfer.failure is not None:
            raise transfer.failure
        moved += block[1].nbytes
        if time.perf_counter() - begin < seconds:
            under_way.append((move(*block), block))
    return moved / (time.perf_counter() - begin)
