"""The host slab: where one model's swapped rows wait, and how the models of a process share the host.

Models that were given the same memory lend from one pool. Passes that take turns, each with its backward before the next forward,
may each have all of it. Where passes of several models wait for their backward at the same time (a generator's behind its
discriminator's), or are run by threads of their own, each of these models has its part, for as long as the others are there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock, RLock, Thread, current_thread

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.numa import node_of
from ds_memo.swap.pool import HostPool, Range, Refused
from ds_memo.swap.segments import PAGE
from ds_memo.units import GIB, round_up

_deciding = RLock()
"""Who shares with whom, and what a pass may have, are decided by one thread at a time."""
_open: weakref.WeakSet[HostSlab] = weakref.WeakSet()
"""All of this process that are not closed."""
_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""Those that models share, by what they are given."""


@dataclass(eq=False)
class Block:
    """Host memory lent to one frame."""

    pieces: list[Range]
    """One as a rule."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def views(self, begin: int, nbytes: int) -> list[torch.Tensor]:
        """The block's bytes from `begin` on, in order: uint8 views, one per piece that they lie in.

        They are cut on multiples of a page from the block's begin, so what is aligned in the block is aligned in them.
        """
        found, at = [], 0
        for piece in self.pieces:
            first, last = max(begin, at), min(begin + nbytes, at + piece.nbytes)
            if first < last:
                found.append(piece.segment.memory[piece.begin + first - at : piece.begin + last - at])
            at += piece.nbytes
        return found


class HostSlab:
    """Lends blocks, together no more than `budget` bytes, and can lend all of these.

    Args:
        budget: bytes; may be changed. What the pool holds beyond it goes with the next block, as far as it lies idle.
        pool: its own, or one that slabs of other models lend from.
    """

    def __init__(self, budget: int, pool: HostPool) -> None:
        self.budget = budget
        self.pool = pool
        self.used = 0
        """Bytes lent now, in whole pages."""
        self.peak_used = 0
        self.refused: int | None = None
        """Bytes held when the system refused memory that the budget allowed; None: it never did. For whoever chooses alpha."""
        self.clear: Callable[[], Callable[[], None] | None] = lambda: None
        """Refers to what has the blocks of frames that have died given back."""
        self.fixed = False
        """What its model stores is configured, and no smaller part would do."""
        self.needs = 0
        """Bytes of that for a pass, as far as they are known before all of them were lent."""
        self.has_part = False
        """Its passes and others' have waited together; these may be gone by now."""
        self._forward_in: Thread | None = None
        """A training forward is under way there, or was when it was interrupted."""
        self._claim: int | None = None
        """Bytes that it may have; None: it has not asked yet."""
        self._lent: dict[Block, list[Range]] = {}
        self._lock = Lock()
        """Blocks are lent by the model's own thread, and given back also by that of another model whose pass begins."""
        weakref.finalize(self, pool.lost.append, self._lent).atexit = False
        with _deciding:
            _open.add(self)

    @property
    def size(self) -> int:
        """Bytes that the pool holds now, lent or free."""
        return self.pool.size

    @property
    def part(self) -> int:
        """Bytes of the budget that are the model's now: all, or what it has beside others."""
        if not self.has_part:
            return self.budget
        sharing = self._sharing()
        fixed = sum(max(slab.needs, slab.peak_used) for slab in sharing if slab.fixed)
        return min(self.budget, max(0, _limit(sharing) - fixed) // sum(slab.has_part for slab in sharing))

    @property
    def left(self) -> int:
        """Bytes that can still be lent, beside what is."""
        with _deciding:
            return min(max(self.part, self._claim or 0), self._room()) - self.used

    def pass_begins(self) -> None:
        """A training pass of the model begins. Where others wait for their backward now, or run in other threads, each has its
        part from now on."""
        with _deciding:
            self._forward_in = current_thread()
            self._claim = None
        if self._is_alone():
            return
        self._clear_all()
        if self._is_alone():
            return
        if all(slab.has_part or slab.fixed for slab in self._sharing() if slab is self or slab.used or slab._runs_elsewhere):
            return
        gc.collect()  # graphs that were dropped do not wait
        self._clear_all()
        with _deciding:
            if not self._is_alone():
                for slab in self._sharing():
                    runs = slab is self or slab.peak_used > 0 or slab._runs_elsewhere
                    slab.has_part |= runs and not slab.fixed

    def claim(self) -> int:
        """Bytes that the pass which has begun may have, now and until its forward is over: the model's part, or what others leave
        of it. Of what is configured, all that others leave."""
        with _deciding:
            if self._claim is not None:
                return self._claim
            claim = max(0, min(self.part, self._room()))
            if self._forward_in is not None and not self.fixed:
                self._claim = claim
            return claim

    def forward_over(self) -> None:
        """The pass has lent all that it wants."""
        with _deciding:
            self._forward_in = self._claim = None

    def take(self, nbytes: int, wanted_by: str) -> Block:
        """Lend a block of `nbytes`, rounded up to a page.

        Raises:
            MemoError: the budget does not allow it beside what is lent, or the system refuses; names `wanted_by`, needed and
                available GiB. Nothing that is lent has changed.
        """
        pages = round_up(nbytes, PAGE)
        if not self.has_room(nbytes):
            others = self.pool.used - self.used
            held = f" beside {others / GIB:.3g} GiB that other models hold" if others else ""
            raise MemoError(
                f"host memory: {wanted_by} needs {pages / GIB:.3g} GiB, {max(0, self.left) / GIB:.3g} of "
                f"{self.part / GIB:.3g} GiB are left{held}. Lower memo.alpha, raise memo.resident_layers or "
                "memo.host_memory_gib, or run fewer forwards before a backward."
            )
        try:
            block = Block(self.pool.lend(pages, _limit(self._sharing()), wanted_by))
        except Refused as refusal:
            for slab in self._sharing():
                slab.refused = refusal.held
            raise
        with self._lock:
            self._lent[block] = block.pieces
            self.used += pages
            self.peak_used = max(self.peak_used, self.used)
        return block

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of `nbytes` can be lent now, unless the system refuses."""
        pages = round_up(nbytes, PAGE)
        if pages > self.left:
            gc.collect()  # of a pass that raised, frames may be in reference cycles with its traceback
            self._clear_all()
        return pages <= self.left

    def give(self, block: Block) -> None:
        """Take a block back. All copies from and to it must be ordered before whatever the next borrower issues."""
        with self._lock:
            pieces = self._lent.pop(block, None)
        if pieces is None:  # another thread has found it in the same dead frame
            return
        self.pool.take_back(pieces)
        with self._lock:
            self.used -= block.nbytes

    @property
    def lent(self) -> list[Block]:
        """What is lent now."""
        return list(self._lent)

    def close(self) -> None:
        """Lend no more; the last slab of a pool gives everything back to the system. Nothing may still be lent."""
        if self.used:
            raise MemoError(f"the host slab was closed while {self.used} bytes of it were lent")
        with _deciding:
            _open.discard(self)
            self.has_part = False
        if not self._sharing():
            self.pool.release()

    def _clear_all(self) -> None:
        """Have blocks back that no frame needs any more."""
        for slab in self._sharing():
            if (clear := slab.clear()) is not None:
                clear()
        self.pool.take_lost_back()

    def _sharing(self) -> list[HostSlab]:
        with _deciding:
            return [slab for slab in _open if slab.pool is self.pool]

    @property
    def _runs_elsewhere(self) -> bool:
        """In another thread. Who was interrupted in this one lends no more."""
        thread = self._forward_in
        return thread not in (None, current_thread()) and thread.is_alive()

    def _is_alone(self) -> bool:
        return not any(slab.used or slab._runs_elsewhere for slab in self._sharing() if slab is not self)

    def _room(self) -> int:
        """Bytes that others neither hold nor may have in the forwards that they run elsewhere."""
        sharing = self._sharing()
        held = (max(slab.used, (slab._claim or 0) * slab._runs_elsewhere) for slab in sharing if slab is not self)
        return _limit(sharing) - sum(held)


def _limit(sharing: Sequence[HostSlab]) -> int:
    """Bytes for all that share a pool together."""
    return max((slab.budget for slab in sharing), default=0)


def shared_pool(host_memory_gib: float | None, device: torch.device) -> HostPool:
    """The one that models of this process on a device share which are given the same memory.

    Args:
        host_memory_gib: as configured.
    """
    pool = _pools.get((host_memory_gib, device))
    if pool is None:
        pool = _pools[host_memory_gib, device] = HostPool(device.type == "cuda", node_of(device))
    return pool


def promised_bytes(beside: HostPool) -> int:
    """What the slabs of this process that lend from other pools may still take."""
    if _open:
        gc.collect()  # that of a model which was let go without detach() is in reference cycles
    limits = {slab.pool: _limit(slab._sharing()) for slab in _open if slab.pool is not beside}
    return sum(max(0, limit - pool.size) for pool, limit in limits.items())
