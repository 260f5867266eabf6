"""How the models of a process share the host.

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
from collections.abc import Callable
from threading import RLock, Thread, current_thread

import torch

from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import round_up

_deciding = RLock()
"""Held while it is worked out which slabs share, and how much a pass may use."""
_open: weakref.WeakSet[Sharer] = weakref.WeakSet()
"""All slabs of this process that are not closed."""
_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""The shared pools, by memo.host_memory_gib and device."""


class Sharer:
    """What one of them, by its slab, may use of its pool.

    Args:
        budget: bytes; may be changed later.
        pool: possibly shared with other models.
    """

    def __init__(self, budget: int, pool: HostPool) -> None:
        self.budget = budget
        self.pool = pool
        self.used = 0
        """Bytes allocated now, in whole pages."""
        self.peak_used = 0
        self.refused: int | None = None
        """If the system ever refused memory that the budget allowed: how many bytes the pool held then. Else None. Whoever
        chooses alpha takes it for the real budget."""
        self.drain: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to a function that frees the blocks of this model's dead frames; set by the swap engine."""
        self.needs: int | None = None
        """Of a model whose alpha and residents are configured, which cannot make do with a smaller part: the bytes that a pass
        takes, as far as that is known before its first one is complete. None: the model takes what it gets."""
        self.has_part = False
        """This model has been seen to wait for its backward at the same time as another, which may be gone by now."""
        self._forward_in: Thread | None = None
        """The thread in which the model's training forward runs. It stays set if that was interrupted."""
        self._claim: int | None = None
        """Bytes that the forward under way may use; None: it has not asked yet."""
        with _deciding:
            _open.add(self)

    @property
    def fixed(self) -> bool:
        """Its alpha and residents are configured."""
        return self.needs is not None

    @property
    def part(self) -> int:
        """Bytes of the budget that are this model's: all of it, or an equal part of what `fixed` models leave."""
        if not self.has_part:
            return self.budget
        sharing = self._sharing()
        fixed = sum(max(slab.needs, slab.peak_used) for slab in sharing if slab.fixed)
        return min(self.budget, max(0, self.limit - fixed) // sum(slab.has_part for slab in sharing))

    @property
    def limit(self) -> int:
        """Bytes that the slabs of the pool may hold together."""
        return max((slab.budget for slab in self._sharing()), default=0)

    @property
    def left(self) -> int:
        """Bytes that can still be allocated for this model, beside what it has already."""
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
        self._drain_all()
        if self._is_alone():
            return
        if all(slab.has_part or slab.fixed for slab in self._sharing() if slab is self or slab.used or slab._runs_elsewhere):
            return
        gc.collect()  # graphs that were dropped do not wait
        self._drain_all()
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
        """Say that the pass's forward is over: it will allocate nothing more."""
        with _deciding:
            self._forward_in = self._claim = None

    def has_room(self, nbytes: int) -> bool:
        """Whether a block of `nbytes` can be allocated now, unless the system refuses."""
        pages = round_up(nbytes, PAGE)
        if pages > self.left:
            gc.collect()  # of a pass that raised, frames may be in reference cycles with its traceback
            self._drain_all()
        return pages <= self.left

    def leave(self) -> None:
        """Share no more. The last one releases the pool's memory to the system."""
        with _deciding:
            _open.discard(self)
            self.has_part = False
        if not self._sharing():
            self.pool.release()

    def _drain_all(self) -> None:
        """Free the blocks of dead frames, of all slabs that share the pool."""
        for slab in self._sharing():
            if (drain := slab.drain()) is not None:
                drain()
        self.pool.free_lost()

    def _sharing(self) -> list[Sharer]:
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
        others = (slab for slab in self._sharing() if slab is not self)
        return self.limit - sum(max(slab.used, (slab._claim or 0) * slab._runs_elsewhere) for slab in others)


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
    limits = {slab.pool: slab.limit for slab in _open if slab.pool is not beside}
    return sum(max(0, limit - pool.size) for pool, limit in limits.items())
