"""Copy bandwidth between this rank's device and its host memory, over the streams and the slab that training uses."""

from __future__ import annotations

import statistics
import time

import torch

from ds_memo.swap.slab import PAGE, HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, Streams, streams_for

CHUNK = 1 << 26
"""Bytes of one copy: about what one kept output of a long layer takes."""
_COPIES = 8
_REPEATS = 3


def measure_bandwidth(device: torch.device, pinned: bool, budget: int, chunk: int = CHUNK) -> tuple[float, float]:
    """Bytes a second to and from the host. Ranks of a node share its memory: let all of them call this at the same time.

    Args:
        pinned: lock the host block, as training will.
        budget: bytes of the host this rank may use; the block is made smaller to fit, down to a page.
    """
    chunk = max(PAGE, min(chunk, budget // PAGE * PAGE))
    slab = HostSlab(chunk, pinned)
    block = slab.take(chunk, "the bandwidth measurement")
    there = torch.zeros(chunk, dtype=torch.uint8, device=device)
    here = block.memory[:chunk]
    streams = streams_for(device)
    try:
        rates = []
        for stream, dst, src in ((D2H, here, there), (H2D, there, here)):
            _copy(streams, stream, dst, src, device, 1)  # touches every page, and starts the threads
            rates.append(
                chunk * _COPIES / statistics.median(_copy(streams, stream, dst, src, device, _COPIES) for _ in range(_REPEATS))
            )
        return rates[0], rates[1]
    finally:
        streams.close()
        slab.give(block)
        slab.close()


def _copy(streams: Streams, stream: str, dst: torch.Tensor, src: torch.Tensor, device: torch.device, times: int) -> float:
    streams.wait(stream, streams.mark(COMPUTE))
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        streams.copy(stream, dst, src)
    streams.wait(COMPUTE, streams.mark(stream))
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
