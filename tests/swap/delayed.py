"""`DelayedStreams`: copies come late, and freed memory does not keep its value.

On a CPU the compute stream is synchronous and freed memory usually keeps its bytes, so a wrong schedule can give right gradients.
Here every copy first waits a random time on its thread, and 0xFF bytes (NaN in every float type) are written

- over device memory, as soon as only a copy under way holds its storage: another tensor might live there by now;
- over a fresh reload buffer, when its first copy is issued;
- over a host block, when it is freed.

A copy under way works on bare addresses and does not count as a holder: its memory stays mapped, but loses its value.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from dataclasses import dataclass

import torch

from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams

POISON = 0xFF
DELAYS_S = (0.0, 0.0, 1e-4, 3e-4, 1e-3)


@dataclass
class _Watched:
    """A device storage that copies touch. This object holds exactly one reference to it."""

    storage: torch.UntypedStorage
    pending: int = 0

    def is_abandoned(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) == 1

    def poison(self) -> None:
        ctypes.memset(self.storage.data_ptr(), POISON, self.storage.nbytes())


class DelayedStreams(ThreadStreams):
    """The streams described at the top of this file.

    Args:
        seed: the seed of the delays.
        delays_s: the delays to draw from, in seconds.
    """

    def __init__(self, seed: int, delays_s: tuple[float, ...] = DELAYS_S) -> None:
        super().__init__()
        self.poisoned = 0
        """Storages overwritten after they were freed."""
        self._random = random.Random(seed)
        self._delays = delays_s
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()

    def watch(self, slab: HostSlab) -> HostSlab:
        """Overwrite a slab's blocks when they are freed. Return the slab."""
        free = slab.free

        def poison_and_free(block: Block) -> None:
            for piece in block.pieces:
                ctypes.memset(piece.memory.data_ptr(), POISON, piece.nbytes)
            free(block)

        slab.free = poison_and_free
        return slab

    def mark(self, stream: str):
        self._look()
        return super().mark(stream)

    def wait(self, stream: str, event) -> None:
        self._look()
        super().wait(stream, event)
        if stream == COMPUTE:
            self._look()

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        self._look()
        device = {D2H: src, H2D: dst}[stream].untyped_storage()
        watched = self._watched.get(device._cdata)
        if watched is None:
            watched = self._watched[device._cdata] = _Watched(device)
            if stream == H2D:
                watched.poison()
        del device
        with self._lock:
            watched.pending += 1
        host = dst if stream == D2H else src
        delay = self._random.choice(self._delays)
        to, whence = dst.data_ptr() + dst_at, src.data_ptr() + src_at
        self._queues[stream].put((_late_copy, self._lock, delay, to, whence, nbytes, watched, host))

    def _look(self) -> None:
        for key, watched in list(self._watched.items()):
            if watched.is_abandoned():
                watched.poison()
                self.poisoned += 1
                if not watched.pending:
                    del self._watched[key]


def _late_copy(lock, delay: float, dst: int, src: int, nbytes: int, watched: _Watched, _host) -> None:
    time.sleep(delay)
    ctypes.memmove(dst, src, nbytes)
    with lock:
        watched.pending -= 1
