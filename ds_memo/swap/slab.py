"""The host slab: where one model's swapped rows wait, and how the models of a process share the host.

Models of one process that are configured with the same memo.host_memory_gib share one pool, and the budget of it, by two rules:

in turns   each model runs its backward before another begins its forward (an actor and its critic): each may use all of it
at once    passes of several models wait for their backward together (a generator's behind its discriminator's), or threads run
           them: from then on each of these models has an equal part, for as long as the others exist

A *claim* is what one pass may use: it is fixed by the first layer that asks and holds until the pass's forward is over, so that
alpha is chosen with a number that no other model can take away meanwhile.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock, RLock, Thread, current_thread

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.pool import HostPool, Range, Refused
from ds_memo.swap.segments import PAGE
from ds_memo.units import GIB, round_up

_deciding = RLock()
"""Held while it is worked out which slabs share, and how much a pass may use."""
_open: weakref.WeakSet[HostSlab] = weakref.WeakSet()
"""All slabs of this process that are not closed."""
_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""The shared pools, by memo.host_memory_gib and device."""


@dataclass(eq=False)
class Block:
    """Host memory lent to one frame."""

    pieces: list[Range]
    """Usually one; several where no free range of the pool was large enough."""

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
    """One model's view of a pool: lends blocks to its frames, never more than `budget` bytes at a time.

    Args:
        budget: bytes; may be changed later. If it is lowered, the next `take` has the pool release idle memory beyond it.
        pool: where the memory comes from, possibly shared with slabs of other models.
    """

    def __init__(self, budget: int, pool: HostPool) -> None:
        self.budget = budget
        self.pool = pool
        self.used = 0
        """Bytes lent now, in whole pages."""
        self.peak_used = 0
        self.refused: int | None = None
        """If the system ever refused memory that the budget allowed: how many bytes the pool held then. Else None. Whoever
        chooses alpha takes it for the real budget."""
        self.clear: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to a function that gives back the blocks of this model's dead frames; set by the swap engine."""
        self.fixed = False
        """Alpha and residents are configured, so the model cannot make do with a smaller part."""
        self.needs = 0
        """Bytes that a pass of a `fixed` model will take, as far as that is known before its first pass is complete."""
        self.has_part = False
        """This model has been seen to wait for its backward at the same time as another, which may be gone by now."""
        self._forward_in: Thread | None = None
        """The thread in which the model's training forward runs. It stays set if that was interrupted."""
        self._claim: int | None = None
        """Bytes that the forward under way may use; None: it has not asked yet."""
        self._lent: dict[Block, list[Range]] = {}
        self._lock = Lock()
        """Guards `_lent` and `used`: the model's own thread lends, but another model whose pass begins may give back."""
        weakref.finalize(self, pool.lost.append, self._lent).atexit = False
        with _deciding:
            _open.add(self)

    @property
    def size(self) -> int:
        """Bytes that the pool holds now, lent or free."""
        return self.pool.size

    @property
    def part(self) -> int:
        """Bytes of the budget that are this model's: all of it, or an equal part of what `fixed` models leave."""
        if not self.has_part:
            return self.budget
        sharing = self._sharing()
        fixed = sum(max(slab.needs, slab.peak_used) for slab in sharing if slab.fixed)
        return min(self.budget, max(0, _limit(sharing) - fixed) // sum(slab.has_part for slab in sharing))

    @property
    def left(self) -> int:
        """Bytes that can still be lent to this model, beside what it has already."""
        with _deciding:
            return min(max(self.part, self._claim or 0), self._room()) - self.used

    def pass_begins(self) -> None:
        """Say that a training pass of this model begins.

        If other models wait for their backward now, or run in other threads, each of them has a part from now on.
        """
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
        """How many bytes the pass that has begun may use: the model's part, or less if others still hold some of it.

        The answer stays the same until the pass's forward is over, except for a `fixed` model, which may use whatever is left.
        """
        with _deciding:
            if self._claim is not None:
                return self._claim
            claim = max(0, min(self.part, self._room()))
            if self._forward_in is not None and not self.fixed:
                self._claim = claim
            return claim

    def forward_over(self) -> None:
        """Say that the pass's forward is over: it will lend nothing more."""
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
        if pieces is None:  # another thread found it in the same dead frame, and was faster
            return
        self.pool.take_back(pieces)
        with self._lock:
            self.used -= block.nbytes

    @property
    def lent(self) -> list[Block]:
        """What is lent now."""
        return list(self._lent)

    def close(self) -> None:
        """Stop lending. The last slab of a pool releases the pool's memory to the system.

        Raises:
            MemoError: a block is still lent.
        """
        if self.used:
            raise MemoError(f"the host slab was closed while {self.used} bytes of it were lent")
        with _deciding:
            _open.discard(self)
            self.has_part = False
        if not self._sharing():
            self.pool.release()

    def _clear_all(self) -> None:
        """Take back the blocks of dead frames, of all slabs that share the pool."""
        for slab in self._sharing():
            if (clear := slab.clear()) is not None:
                clear()
        self.pool.take_lost_back()

    def _sharing(self) -> list[HostSlab]:
        with _deciding:
            return [slab for slab in _open if slab.pool is self.pool]

    @property
    def _runs_elsewhere(self) -> bool:
        """Whether the model's forward runs in another thread. One that was interrupted in this thread does not run any more."""
        thread = self._forward_in
        return thread not in (None, current_thread()) and thread.is_alive()

    def _is_alone(self) -> bool:
        return not any(slab.used or slab._runs_elsewhere for slab in self._sharing() if slab is not self)

    def _room(self) -> int:
        """Bytes of the pool's budget that no other slab holds, or has claimed for a forward in another thread."""
        sharing = self._sharing()
        held = (max(slab.used, (slab._claim or 0) * slab._runs_elsewhere) for slab in sharing if slab is not self)
        return _limit(sharing) - sum(held)


def _limit(sharing: Sequence[HostSlab]) -> int:
    """Bytes that the slabs of a pool may hold together."""
    return max((slab.budget for slab in sharing), default=0)


def shared_pool(host_memory_gib: float | None, device: torch.device) -> HostPool:
    """The pool that all models of this process on one device share that are configured with the same memo.host_memory_gib."""
    pool = _pools.get((host_memory_gib, device))
    if pool is None:
        pool = _pools[host_memory_gib, device] = HostPool(device)
    return pool


def promised_bytes(beside: HostPool) -> int:
    """Bytes that slabs of this process with other pools than `beside` may still take from the system."""
    if _open:
        gc.collect()  # a model that was dropped without detach() keeps its slab in reference cycles
    limits = {slab.pool: _limit(slab._sharing()) for slab in _open if slab.pool is not beside}
    return sum(max(0, limit - pool.size) for pool, limit in limits.items())
