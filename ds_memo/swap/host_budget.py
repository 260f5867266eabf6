"""The host budget of a model: how much host memory may its passes use? Policy, tuner and slab ask here.

    nbytes        bytes for the models that take turns      |  pool.limit   the largest `nbytes` of its clients
    share         bytes that this model may hold            |  pool.most    bytes that the system has not refused
    needs         bytes that a configured model must have   |  pool.given   bytes that the system gave before it refused
    reservation   bytes of the share for the pass that runs |  offer        bytes that a rank tells the others
    left          bytes that can still be allocated now     |  used         bytes of blocks, as in the pool

Models of one process with the same memo.host_memory_gib share one pool and its budget, by two rules:

in turns   each model's backward is over before another's forward begins (an actor and its critic): each may use all of it
at once    a pass of one model begins while another's frames hold blocks (a discriminator's, behind which the generator waits):
           from then on each of these models has an equal share, for as long as it lives

A model whose alpha and residents are configured cannot make do with a share: it keeps what it needs, and others share the rest.

A *reservation* is what one pass may use. It is made as the forward begins and holds until it is over, so alpha is chosen with a
number that no other model takes away meanwhile.

There are no locks: models that share a pool train in one thread. Their backward may run on autograd's, for which that thread
waits. Frames and slabs may die on any thread; that only appends to a deque, and `HostPool.drain` frees their blocks. A training
forward that begins while another thread runs one is an error; a backward that runs meanwhile goes unnoticed.
"""

from __future__ import annotations

import gc
import weakref
from threading import current_thread

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB, round_up

_pools: weakref.WeakValueDictionary[tuple[float | None, torch.device], HostPool] = weakref.WeakValueDictionary()
"""The shared pools, by memo.host_memory_gib and device."""


class HostBudget:
    """Bytes of a pool that one model may use.

    Args:
        nbytes: of all models that take turns.
        pool: possibly shared with other models' budgets.
    """

    def __init__(self, nbytes: int, pool: HostPool) -> None:
        self.nbytes = nbytes
        self.pool = pool
        self.used = 0
        """Bytes allocated now, in whole pages."""
        self.peak_used = 0
        self.needs: int | None = None
        """Bytes that a pass takes, for a model whose alpha and residents are configured. They grow until its first pass is
        complete. None: the model takes what it gets."""
        self.has_share = False
        """True once a pass of this model and one of another were open at once."""
        self._agreed = nbytes
        """The smallest offer of all ranks."""
        self._reserved: int | None = None
        """The reservation of the forward that runs; None: none does."""
        self._told = nbytes
        """`share` when `changed` was last called."""
        self._why = ""
        """Why the ranks agreed on less since then: a system refused memory."""

    # ---- how much

    @property
    def share(self) -> int:
        """Bytes that this model may hold: all that the ranks agreed on, or an equal share of what models with `needs` leave."""
        if not self.has_share:
            return min(self.nbytes, self._agreed)
        budgets = [client.budget for client in self.pool.clients]
        needed = sum(max(budget.needs, budget.peak_used) for budget in budgets if budget.needs is not None)
        shared = min(self._agreed, self.pool.limit) - needed
        return min(self.nbytes, max(0, shared) // sum(budget.has_share for budget in budgets))

    @property
    def reservation(self) -> int:
        """Bytes that the pass may use. A model with `needs` reserves none: its alpha counts on its share, and its layers ask
        `has_room`."""
        if self.needs is not None:
            return self.share
        if self._reserved is not None:
            return min(self._reserved, self._agreed)
        return max(0, min(self.share, self.pool.limit - self.pool.used + self.used))

    @property
    def left(self) -> int:
        """Bytes that can still be allocated for this model, beyond what it has already."""
        return min(self._left_if_granted, self.pool.most - self.pool.used)

    @property
    def _left_if_granted(self) -> int:
        """`left`, if the system refuses nothing."""
        return min(max(self.share, self._reserved or 0) - self.used, self.pool.limit - self.pool.used)

    @property
    def offer(self) -> tuple[int, str]:
        """Bytes that this rank can solve for, and the system's error if it has refused more."""
        pool, most = self.pool, min(self.nbytes, self._agreed)
        return (pool.given, pool.why_no_more) if pool.why_no_more and pool.given < most else (most, "")

    def agree(self, nbytes: int, why: str = "") -> None:
        """Use `nbytes` at most: the smallest offer of all ranks. Without an error `why` that is no change to tell of."""
        if not why:
            self._told = min(self._told, nbytes)
        self._agreed, self._why = nbytes, why or self._why

    def changed(self) -> str | None:
        """Return in words how `share` has changed since the last call; None: it has not."""
        before, now, refused = self._told, self.share, self._why
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
        self.pool.recount()
        self.pool.drain()
        if any(not budget.has_share and budget.needs is None for budget in self._at_once()):
            gc.collect()  # graphs that were dropped do not wait
            self.pool.drain()
            for budget in self._at_once():
                budget.has_share = budget.needs is None
        self._reserved = None  # of a forward that was interrupted
        self._reserved = self.reservation

    def forward_over(self) -> None:
        """Say that the pass's forward is over: it will allocate nothing more."""
        self._reserved = None
        self.pool.tell_of_locking()
        if self.pool.forward_in is current_thread():
            self.pool.forward_in = None

    def _at_once(self) -> list[HostBudget]:
        """Return the budgets of this model, whose pass begins, and of those whose frames hold blocks; without those, nothing."""
        others = [client.budget for client in self.pool.clients if client.budget.used and client.budget is not self]
        return [self, *others] if others else []

    # ---- blocks

    def has_room(self, nbytes: int) -> bool:
        """Return True if a block of `nbytes` can be allocated now, unless the system refuses."""
        pages = round_up(nbytes, PAGE)
        pool = self.pool
        if not self.has_share and pool.used + pages <= min(self.nbytes, self._agreed, pool.most):  # the usual case, without
            return True  # a look at all clients: `used` is a part of the pool's, and its limit no less than `nbytes`
        if pages > self.left:
            for engine in sorted(self.pool.holders, key=lambda engine: engine.slab.budget is not self):  # its own first
                engine.make_room(lambda: pages <= self.left)
        if pages > self.left:
            gc.collect()  # of a pass that raised, frames may be in reference cycles with its traceback
            self.pool.drain()
        return pages <= self.left

    def allows(self, nbytes: int) -> bool:
        """Return True if the budget has room for a block of `nbytes` now."""
        return round_up(nbytes, PAGE) <= self._left_if_granted

    def has_memory(self, nbytes: int) -> bool:
        """Return False if the system refuses a block of `nbytes` that the budget has room for."""
        pages = round_up(nbytes, PAGE)
        if self.pool.has_free(pages) or not self.allows(nbytes) or self.pool.has_memory(pages):
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


def shared_pool(host_memory_gib: float | None, device: torch.device) -> HostPool:
    """The pool that all models of this process on one device share that are configured with the same memo.host_memory_gib."""
    pool = _pools.get((host_memory_gib, device))
    if pool is None:
        pool = _pools[host_memory_gib, device] = HostPool(device)
    return pool


def promised_bytes(beside: HostPool) -> int:
    """Bytes that models of this process with other pools than `beside` may still take from the system."""
    others = [pool for pool in _pools.values() if pool is not beside]
    if others:
        gc.collect()  # a model that was dropped without detach() keeps its slab in reference cycles
    return sum(max(0, pool.limit - pool.size) for pool in others)
