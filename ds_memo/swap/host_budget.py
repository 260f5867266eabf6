"""The host budget of a model: how much host memory may its passes use? Policy, tuner and slab ask here.

Models of one process with the same memo.host_memory_gib share one pool and its budget, by two rules:

in turns   each model's backward is over before another's forward begins (an actor and its critic): each may use all of it
at once    a pass of one model begins while another's frames hold blocks (a discriminator's, behind which the generator waits):
           from then on each of these models has an equal share, for as long as it lives

A model whose alpha and residents are configured cannot make do with a share: it keeps what it needs, and others share the rest.

A *reservation* is what one pass may use. It is made as the forward begins and holds until it is over, so alpha is chosen with a
number that no other model takes away meanwhile.

There are no locks: models that share a pool train in one thread. Their backward may run on autograd's, for which that thread
waits. Frames and slabs may die on any thread; that only appends to a deque, and `_drain` frees their blocks. A training forward
that begins while another thread runs one is an error; a backward that runs meanwhile goes unnoticed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import current_thread

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool, Range
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB, round_up

_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""The shared pools, by memo.host_memory_gib and device."""


class HostBudget:
    """What one model, a client of a pool, may use of it.

    Args:
        budget: bytes.
        pool: possibly shared with other models.
    """

    def __init__(self, budget: int, pool: HostPool) -> None:
        self.budget = budget
        self.agreed = budget
        """Bytes of the budget to solve for: the smallest of all ranks."""
        self.pool = pool
        self.used = 0
        """Bytes allocated now, in whole pages."""
        self.peak_used = 0
        self.drain: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to a function that frees the blocks of this model's dead frames; set by the swap engine."""
        self.make_room: Callable[[], Callable[[Callable[[], bool]], None] | None] = lambda: None
        """A weak reference to a function that frees blocks whose bytes are in files, until its argument returns True or none is
        left; set by ds_memo.nvme.engine."""
        self.needs: int | None = None
        """Bytes that a pass takes, for a model whose alpha and residents are configured. They grow until its first pass is
        complete. None: the model takes what it gets."""
        self.has_share = False
        """True once a pass of this model and one of another were open at once."""
        self._reserved: int | None = None
        """The reservation of the forward that runs; None: none does."""
        self._told = budget
        """`solvable` when `changed` was last called."""
        self._why = ""
        """Why `agreed` was lowered since then: a rank's system refused memory."""
        pool.clients.add(self)

    # ---- how much

    @property
    def fixed(self) -> bool:
        """True if alpha and residents are configured."""
        return self.needs is not None

    @property
    def share(self) -> int:
        """Bytes that this model may hold: the whole budget, or an equal share of what `fixed` models leave."""
        if not self.has_share:
            return self.budget
        clients = self.pool.clients
        fixed = sum(max(client.needs, client.peak_used) for client in clients if client.needs is not None)
        shared = min(self.agreed, self.pool.limit) - fixed
        return min(self.budget, max(0, shared) // sum(client.has_share for client in clients))

    @property
    def solvable(self) -> int:
        """Bytes of the share that all ranks and the system have. A pass is solved for them, or for a smaller reservation."""
        return min(self.agreed, self.share)

    @property
    def reservation(self) -> int:
        """Bytes that the pass may use. A `fixed` model reserves none: its alpha counts on the whole budget, and its layers ask
        `has_room`."""
        if self.fixed:
            return self.share
        if self._reserved is not None:
            return min(self._reserved, self.agreed)
        return max(0, min(self.solvable, self.pool.limit - self.pool.used + self.used))

    @property
    def left(self) -> int:
        """Bytes that can still be allocated for this model, beyond what it has already."""
        return min(self._allowed, self.pool.most - self.pool.used)

    @property
    def _allowed(self) -> int:
        """`left`, if the system refuses nothing."""
        return min(max(self.share, self._reserved or 0) - self.used, self.pool.limit - self.pool.used)

    @property
    def offer(self) -> tuple[int, str]:
        """Bytes that this rank can solve for, and the system's error if it has refused more."""
        pool = self.pool
        return (pool.given, pool.why_no_more) if pool.why_no_more and pool.given < self.agreed else (self.agreed, "")

    def agree(self, nbytes: int, why: str = "") -> None:
        """Solve for `nbytes` at most: the smallest offer of all ranks. Without an error `why` that is no change to tell of."""
        if not why:
            self._told = min(self._told, nbytes)
        self.agreed, self._why = nbytes, why or self._why

    def changed(self) -> str | None:
        """Return in words how `solvable` has changed since the last call; None: it has not."""
        before, now, refused = self._told, self.solvable, self._why
        self._told, self._why = now, ""
        if now == before:
            return None
        if now > before:
            return f"host budget raised to {now / GIB:.4g} GiB: models that shared it are gone"
        why = "other models' passes wait for their backward at the same time"
        return f"host budget lowered to {now / GIB:.4g} GiB: {f'the system refused more: {refused}' if refused else why}"

    # ---- passes

    def pass_begins(self) -> None:
        """Reserve host memory for a training pass. If other models' frames hold blocks, each of them has a share from now on.

        Raises:
            MemoError: another thread is in a training forward of a model that shares the pool.
        """
        here, there = current_thread(), self.pool.forward_in
        if there is not None and there is not here and there.is_alive():  # in this thread, or a dead one, it was interrupted
            raise MemoError(
                f"a training forward began in thread {here.name} while one runs in thread {there.name} that shares its host "
                "memory. Train both models in one thread, or give each a memo.host_memory_gib of its own"
            )
        self.pool.forward_in = here
        self.pool.settle()
        self._drain()
        if any(not (client.has_share or client.fixed) for client in self._at_once()):
            gc.collect()  # graphs that were dropped do not wait
            self._drain()
            for client in self._at_once():
                client.has_share = not client.fixed
        self._reserved = None  # of a forward that was interrupted
        self._reserved = self.reservation

    def forward_over(self) -> None:
        """Say that the pass's forward is over: it will allocate nothing more."""
        self._reserved = None
        if self.pool.forward_in is current_thread():
            self.pool.forward_in = None

    # ---- blocks

    def has_room(self, nbytes: int) -> bool:
        """Return True if a block of `nbytes` can be allocated now, unless the system refuses."""
        pages = round_up(nbytes, PAGE)
        for client in [self, *self.pool.clients]:
            if pages > self.left and (make_room := client.make_room()) is not None:
                make_room(lambda: pages <= self.left)
        if pages > self.left:
            gc.collect()  # of a pass that raised, frames may be in reference cycles with its traceback
            self._drain()
        return pages <= self.left

    def allows(self, nbytes: int) -> bool:
        """Return True if the budget has room for a block of `nbytes` now."""
        return round_up(nbytes, PAGE) <= self._allowed

    def has_memory(self, nbytes: int) -> bool:
        """Return False if the system refuses a block of `nbytes` that the budget has room for."""
        pages = round_up(nbytes, PAGE)
        if not self.allows(nbytes) or self.pool.has_memory(pages):
            return True
        return self.has_room(nbytes) and self.pool.has_memory(pages)  # other blocks go to files

    def refusal(self, wanted_by: str, nbytes: int) -> MemoError:
        """Return the error for a block of `nbytes` that there is no room for."""
        others = self.pool.used - self.used
        held = f" beside {others / GIB:.3g} GiB that other models hold" if others else ""
        return MemoError(
            f"host memory: {wanted_by} needs {round_up(nbytes, PAGE) / GIB:.3g} GiB, {max(0, self.left) / GIB:.3g} of "
            f"{self.share / GIB:.3g} GiB are left{held}. Lower memo.alpha, raise memo.resident_layers or "
            "memo.host_memory_gib, or run fewer forwards before a backward."
        )

    def leave(self) -> None:
        """Share no more. The last client releases the pool's memory to the system."""
        self.pool.clients.discard(self)
        self.has_share = False
        if not self.pool.clients:
            self.pool.release()

    # ---- inside

    def recount(self) -> list[Range]:
        """Return the ranges of the blocks that are allocated, and count `used` anew."""
        return []

    def _drain(self) -> None:
        """Free the blocks of dead frames, of all clients of the pool."""
        for client in self.pool.clients:
            if (drain := client.drain()) is not None:
                drain()
        self.pool.free_lost()

    def _at_once(self) -> list[HostBudget]:
        """Return this model, whose pass begins, and those whose frames hold blocks; without those, an empty list."""
        others = [client for client in self.pool.clients if client.used and client is not self]
        return [self, *others] if others else []


def shared_pool(host_memory_gib: float | None, device: torch.device) -> HostPool:
    """The pool that all models of this process on one device share that are configured with the same memo.host_memory_gib."""
    pool = _pools.get((host_memory_gib, device))
    if pool is None:
        pool = _pools[host_memory_gib, device] = HostPool(device)
    return pool


def promised_bytes(beside: HostPool) -> int:
    """Bytes that models of this process with other pools than `beside` may still take from the system."""
    others = [pool for pool in _pools.values() if pool is not beside]
    for pool in _pools.values():
        pool.finish_locking()  # else what it has of the system's memory so far is no one's
    if others:
        gc.collect()  # a model that was dropped without detach() keeps its slab in reference cycles
    return sum(max(0, pool.limit - pool.size) for pool in others)
