"""Lock host memory on a thread, before frames need it.

Locking runs at a few GB/s, so tens of GiB take seconds. Once a pass is solved it is known how much its frames will take. A thread
locks that in segments while the main thread goes on to the first layers, and the pool takes them over one by one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import torch

from ds_memo.errors import MemoError
from ds_memo.memory.numa import Node, on
from ds_memo.swap import pinned_segments
from ds_memo.swap.pinned_segments import Segment

Locked = tuple[Segment, float]
"""A locked segment, and the seconds that locking took."""


def segments_for(blocks: Sequence[int], held: int, most: int) -> list[int]:
    """Return the sizes of segments for blocks beyond `held` bytes. Blocks that are smaller than a segment lie in one.

    Args:
        blocks: bytes of each block, whole pages, in order of allocation.
        held: bytes that the first of them will take and that exist.
        most: bytes of all segments together.
    """
    largest = pinned_segments.SEGMENT
    sizes, segment = [], 0
    for nbytes in blocks:
        if held >= nbytes:
            held -= nbytes
            continue
        if segment + nbytes > largest:
            sizes.append(segment)
            segment = 0
        whole, rest = divmod(nbytes, largest)
        sizes += [largest] * whole
        segment += rest
    sizes.append(segment)
    within, most = [], most // pinned_segments.PAGE * pinned_segments.PAGE  # a budget may end inside a page, no segment may
    for nbytes in sizes:
        within.append(min(nbytes, most))
        most -= within[-1]
    return [nbytes for nbytes in within if nbytes > 0]


def lock(nbytes: int, node: Node | None) -> Locked:
    """Map and lock a segment on a NUMA node.

    Raises:
        MemoError: the system or CUDA refuses.
    """
    begin = time.perf_counter()
    segment = pinned_segments.map_pages(nbytes)
    with on(node):
        pinned_segments.touch(segment)
        pinned_segments.pin(segment)
    return segment, time.perf_counter() - begin


class LockAhead:
    """A thread that locks segments of these sizes.

    It ends early if the system refuses one: the frame that needs the memory then asks for it, and raises the error. It refers
    neither to the pool nor to this object, and is no daemon: CUDA must not go while it locks.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, node: Node | None) -> None:
        self._locked: queue.SimpleQueue[Locked | BaseException | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        """Set it to end the thread after the segment that it is locking."""
        self._thread = threading.Thread(
            target=_lock_all, args=(sizes, device, node, self._locked, self.stopped), name="ds_memo-lock", daemon=False
        )
        self._thread.start()

    def take(self, wait: bool) -> Locked | None:
        """Return the next segment; None: there will be none, or it is not locked yet and `wait` is False.

        Raises:
            BaseException: what ended the thread, unless the system refused memory.
        """
        while True:
            alive = self._thread.is_alive()  # not in a forked child
            try:
                item = self._locked.get(timeout=0.1 if wait and alive else 0)
            except queue.Empty:
                if wait and alive:
                    continue
                return None
            if isinstance(item, BaseException):
                raise item
            return item

    @property
    def is_over(self) -> bool:
        """True if there will be no more segments."""
        return not self._thread.is_alive() and self._locked.empty()

    def stop(self) -> None:
        """End the thread, and wait for it. Segments that were not taken go with this object."""
        self.stopped.set()
        self._thread.join()


def _lock_all(
    sizes: Sequence[int],
    device: torch.device,
    node: Node | None,
    locked: queue.SimpleQueue[Locked | BaseException | None],
    stopped: threading.Event,
) -> None:
    try:
        torch.cuda.set_device(device)  # a thread begins on device 0, where locking would make a context
        for nbytes in sizes:
            if stopped.is_set() or not threading.main_thread().is_alive():
                break
            locked.put(lock(nbytes, node))
    except MemoError:
        pass
    except BaseException as error:
        locked.put(error)
    locked.put(None)
