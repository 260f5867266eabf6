"""The host slab: where one model's swapped rows wait."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import Lock

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_pool import HostPool, Range, Refused
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.sharing import Sharer
from ds_memo.units import GIB, round_up


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


class HostSlab(Sharer):
    """One model's view of a pool: lends blocks to its frames, never more than `budget` bytes at a time.

    Args:
        budget: bytes; may be changed later. If it is lowered, the next `take` has the pool release idle memory beyond it.
        pool: where the memory comes from, possibly shared with slabs of other models.
    """

    def __init__(self, budget: int, pool: HostPool) -> None:
        super().__init__(budget, pool)
        self._lent: dict[Block, list[Range]] = {}
        self._lock = Lock()
        """Guards `_lent` and `used`: the model's own thread lends, but another model whose pass begins may give back."""
        weakref.finalize(self, pool.lost.append, self._lent).atexit = False

    @property
    def size(self) -> int:
        """Bytes that the pool holds now, lent or free."""
        return self.pool.size

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
            block = Block(self.pool.lend(pages, self.limit, wanted_by))
        except Refused as refusal:
            for slab in self._sharing():
                slab.refused = refusal.held
            raise
        with self._lock:
            self._lent[block] = block.pieces
            self.used += pages
            self.peak_used = max(self.peak_used, self.used)
        return block

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
        self.leave()
