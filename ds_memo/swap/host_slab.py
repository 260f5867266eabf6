"""The host slab: where one model's swapped rows wait."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.host_budget import HostBudget
from ds_memo.swap.host_pool import HostPool, Range, Refused
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import round_up


@dataclass(eq=False)
class Block:
    """Host memory of one frame."""

    pieces: list[Range]
    """Usually one; several where no free range of the pool was large enough."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def parts(self, begin: int, nbytes: int) -> list[tuple[torch.Tensor, int, int, int]]:
        """Return where the block's bytes from `begin` on lie, in order: one part per piece of the block.

        They are cut on multiples of a page from the block's begin, so what is aligned in the block is aligned in them.

        Returns:
            tuples: a segment's memory, the part's first byte in it, the bytes before the part, and its own bytes.
        """
        if len(self.pieces) == 1 and nbytes:  # nearly always, and for each kept tensor of a layer
            (piece,) = self.pieces
            return [(piece.segment.memory, piece.begin + begin, 0, nbytes)]
        found, at = [], 0
        for piece in self.pieces:
            first, last = max(begin, at), min(begin + nbytes, at + piece.nbytes)
            if first < last:
                found.append((piece.segment.memory, piece.begin + first - at, first - begin, last - first))
            at += piece.nbytes
        return found

    def views(self, begin: int, nbytes: int) -> list[torch.Tensor]:
        """Return uint8 views of those parts."""
        return [memory[first : first + size] for memory, first, _, size in self.parts(begin, nbytes)]


class HostSlab:
    """One model's part of a pool: allocates blocks for its frames, within its budget.

    Args:
        nbytes: the budget's.
        pool: where the memory comes from, possibly shared with slabs of other models.
    """

    def __init__(self, nbytes: int, pool: HostPool) -> None:
        self.budget = HostBudget(nbytes, pool)
        self.pool = pool
        self._blocks: dict[Block, list[Range]] = {}
        pool.clients.add(self)
        weakref.finalize(self, pool.lost.append, self._blocks).atexit = False

    @property
    def size(self) -> int:
        """Bytes that the pool holds now, allocated or free."""
        return self.pool.size

    @property
    def used(self) -> int:
        """Bytes allocated now, in whole pages."""
        return self.budget.used

    @property
    def peak_used(self) -> int:
        return self.budget.peak_used

    @property
    def blocks(self) -> list[Block]:
        """Blocks that are allocated now."""
        return list(self._blocks)

    def held_by(self, engine: Any) -> None:
        """Have an engine free blocks when any model of the pool wants room. The pool refers to it weakly."""
        self.pool.holders.add(engine)

    def allocate(self, nbytes: int, wanted_by: str) -> Block:
        """Allocate a block of `nbytes`, rounded up to a page.

        Raises:
            MemoError: the budget does not allow it beside what is allocated, or the system refuses; names `wanted_by`, needed and
                available GiB. No block has changed.
        """
        if not self.budget.has_room(nbytes):
            raise self.budget.refusal(wanted_by, nbytes)
        pages = round_up(nbytes, PAGE)
        try:
            block = self._allocated(pages, wanted_by)
        except Refused:
            if not self.budget.has_room(nbytes):  # now that less is left, other blocks go to files
                raise
            block = self._allocated(pages, wanted_by)
        self.budget.peak_used = max(self.peak_used, self.used)
        return block

    def _allocated(self, pages: int, wanted_by: str) -> Block:
        with self.pool.changing():
            block = Block(self.pool.allocate(pages, wanted_by))
            self._blocks[block] = block.pieces
            self.budget.used += pages
        return block

    def free(self, block: Block) -> None:
        """Free a block. All copies from and to it must be ordered before whatever its next owner issues."""
        with self.pool.changing():
            if (pieces := self._blocks.pop(block, None)) is None:  # Ctrl-C came between this and its frame's letting go of it
                return
            self.pool.free(pieces)
            self.budget.used -= block.nbytes

    def recount(self) -> list[Range]:
        """Return the ranges of the blocks that are allocated, and count their bytes anew."""
        held = [piece for pieces in self._blocks.values() for piece in pieces]
        self.budget.used = sum(piece.nbytes for piece in held)
        return held

    def leave(self) -> None:
        """Share no more. The last client releases the pool's memory to the system."""
        self.pool.clients.discard(self)
        self.budget.has_share = False
        if not self.pool.clients:
            self.pool.release()

    def close(self) -> None:
        """Stop allocating, and leave the pool.

        Raises:
            MemoError: a block is still allocated.
        """
        if self.used:
            raise MemoError(f"the host slab was closed while {self.used} bytes of it were allocated")
        self.leave()
