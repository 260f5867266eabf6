"""The host budget of a model: how much of the host may its passes use? Everything that asks, asks here.

Models of one process that are configured with the same memo.host_memory_gib share one pool and its budget, by two rules:

in turns   each model runs its backward before another begins its forward (an actor and its critic): each may use all of it
at once    passes of several models wait for their backward together (a generator's behind its discriminator's), or threads run
           them: from then on each of these models has an equal share, for as long as the others exist

A *reservation* is what one pass may use. The first layer that asks fixes it, and it holds until the pass's forward is over: alpha
is chosen with a number that no other model can take away meanwhile.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import RLock, Thread, current_thread

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB, round_up

_deciding = RLock()
"""Held while shares and reservations are worked out."""
_open: weakref.WeakSet[HostBudget] = weakref.WeakSet()
"""The budgets of this process that are not closed."""
_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""The shared pools, by memo.host_memory_gib and device."""


class HostBudget:
    """What one model, a client of a pool, may use of it.

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
        self.drain: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to a function that frees the blocks of this model's dead frames; set by the swap engine."""
        self.needs: int | None = None
        """Bytes that a pass takes, for a model whose alpha and residents are configured: it cannot make do with a smaller share.
        They grow until its first pass is complete. None: the model takes what it gets."""
        self.has_share = False
        """True once this model has waited for its backward at the same time as another, which may be gone by now."""
        self._agreed: int | None = None
        """Bytes to solve for: agreed between ranks, or what the system gave. None: the budget's."""
        self._refused: int | None = None
        """Bytes that the pool held when the system last refused memory that the budget allowed; None: it did not, or is told."""
        self._told = budget
        self._forward_in: Thread | None = None
        """The thread in which the model's training forward runs. It stays set if that was interrupted."""
        self._reserved: int | None = None
        """Bytes that the forward under way may use; None: it has not asked yet."""
        with _deciding:
            _open.add(self)

    # ---- how much

    @property
    def fixed(self) -> bool:
        """True if alpha and residents are configured."""
        return self.needs is not None

    @property
    def share(self) -> int:
        """Bytes of the budget that are this model's: all of it, or an equal share of what `fixed` models leave."""
        if not self.has_share:
            return self.budget
        clients = self._clients()
        fixed = sum(max(client.needs, client.peak_used) for client in clients if client.needs is not None)
        return min(self.budget, max(0, self.limit - fixed) // sum(client.has_share for client in clients))

    @property
    def solvable(self) -> int:
        """Bytes of this rank that a pass is solved for."""
        return min(self.agreed, self.share)

    @property
    def agreed(self) -> int:
        """Bytes of this rank that passes are solved for while no other model has a share."""
        return self.budget if self._agreed is None else min(self._agreed, self.budget)

    @property
    def limit(self) -> int:
        """Bytes that the clients of the pool may hold together."""
        return max((client.budget for client in self._clients()), default=0)

    @property
    def left(self) -> int:
        """Bytes that can still be allocated for this model, beyond what it has already."""
        with _deciding:
            return min(max(self.share, self._reserved or 0), self._room()) - self.used

    def agree(self, nbytes: int) -> None:
        """Solve for `nbytes` at most: the smallest budget of all ranks."""
        self._agreed = nbytes

    def changed(self) -> str | None:
        """Return in words how `solvable` has changed since the last call; None: it has not.

        The system refused memory, other models got their share, or they are gone.
        """
        before, held, self._refused = min(self._told, self.agreed), self._refused, None
        why = "other models' passes wait for their backward at the same time"
        if held is not None and held < self.agreed:
            why = "the system refused more" if held < self.solvable else why
            self._agreed = held
        now = self._told = self.solvable
        if now == before:
            return None
        if now > before:
            return f"host budget raised to {now / GIB:.4g} GiB: models that shared it are gone"
        return f"host budget lowered to {now / GIB:.4g} GiB: {why}"

    # ---- passes

    def pass_begins(self) -> None:
        """Say that a training pass of this model begins.

        If other models wait for their backward now, or run in other threads, each of them has a share from now on.
        """
        with _deciding:
            self._forward_in = current_thread()
            self._reserved = None
        if self._is_alone():
            return
        self._drain_all()
        if self._is_alone():
            return
        if not any(client._wants_share(self) for client in self._clients()):
            return
        gc.collect()  # graphs that were dropped do not wait
        self._drain_all()
        with _deciding:
            if not self._is_alone():
                for client in self._clients():
                    runs = client is self or client.peak_used > 0 or client._runs_elsewhere
                    client.has_share |= runs and not client.fixed

    def reserve(self) -> int:
        """Return the bytes that the pass that has begun may use: the model's share, or less if others still hold some of it.

        The answer stays the same until the pass's forward is over, except for a `fixed` model, which may use whatever is left.
        """
        with _deciding:
            if self._reserved is not None:
                return self._reserved
            reserved = max(0, min(self.share, self._room()))
            if self._forward_in is not None and not self.fixed:
                self._reserved = reserved
            return reserved

    def reserve_solvable(self) -> int:
        """Return as `reserve`, at most what a pass is solved for."""
        return min(self.agreed, self.reserve())

    def forward_over(self) -> None:
        """Say that the pass's forward is over: it will allocate nothing more."""
        with _deciding:
            self._forward_in = self._reserved = None

    # ---- blocks

    def has_room(self, nbytes: int) -> bool:
        """Return True if a block of `nbytes` can be allocated now, unless the system refuses."""
        pages = round_up(nbytes, PAGE)
        if pages > self.left:
            gc.collect()  # of a pass that raised, frames may be in reference cycles with its traceback
            self._drain_all()
        return pages <= self.left

    def refusal(self, wanted_by: str, nbytes: int) -> MemoError:
        """Return the error for a block of `nbytes` that there is no room for."""
        others = self.pool.used - self.used
        held = f" beside {others / GIB:.3g} GiB that other models hold" if others else ""
        return MemoError(
            f"host memory: {wanted_by} needs {round_up(nbytes, PAGE) / GIB:.3g} GiB, {max(0, self.left) / GIB:.3g} of "
            f"{self.share / GIB:.3g} GiB are left{held}. Lower memo.alpha, raise memo.resident_layers or "
            "memo.host_memory_gib, or run fewer forwards before a backward."
        )

    def system_refused(self, held: int) -> None:
        """Say that the system refused memory that the budget allowed, when the pool held `held` bytes."""
        for client in self._clients():
            client._refused = held

    def leave(self) -> None:
        """Share no more. The last client releases the pool's memory to the system."""
        with _deciding:
            _open.discard(self)
            self.has_share = False
        if not self._clients():
            self.pool.release()

    # ---- inside

    def _drain_all(self) -> None:
        """Free the blocks of dead frames, of all clients of the pool."""
        for client in self._clients():
            if (drain := client.drain()) is not None:
                drain()
        self.pool.free_lost()

    def _clients(self) -> list[HostBudget]:
        with _deciding:
            return [client for client in _open if client.pool is self.pool]

    @property
    def _runs_elsewhere(self) -> bool:
        """True if the model's forward runs in another thread. One that was interrupted in this thread does not run any more."""
        thread = self._forward_in
        return thread is not None and thread is not current_thread() and thread.is_alive()

    def _wants_share(self, beginner: HostBudget) -> bool:
        """True if the model is at work beside the one whose pass begins, or is that one, and has no share yet."""
        return (self is beginner or self.used > 0 or self._runs_elsewhere) and not (self.has_share or self.fixed)

    def _is_alone(self) -> bool:
        return not any(client.used or client._runs_elsewhere for client in self._clients() if client is not self)

    def _room(self) -> int:
        """Bytes of the pool's budget that no other client holds, or has reserved for a forward in another thread."""
        others = (client for client in self._clients() if client is not self)
        return self.limit - sum(max(client.used, (client._reserved or 0) * client._runs_elsewhere) for client in others)


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
