"""`Crumbs`: a slab that allocates each block in the smallest possible pieces, in any order.

It holds and allocates the same bytes as any slab. But a kept tensor larger than a piece crosses borders, in models of any size.
"""

from __future__ import annotations

import random

from ds_memo.swap.host_pool import Range
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.units import ALIGN


def crumbled(pieces: list[Range], seed: int) -> list[Range]:
    """Return the same bytes in another order, in pieces as small as the frames' alignment."""
    crumbs = [Range(piece.segment, at, at + ALIGN) for piece in pieces for at in range(piece.begin, piece.end, ALIGN)]
    random.Random(seed).shuffle(crumbs)
    return crumbs


class Crumbs(HostSlab):
    """The slab described at the top of this file."""

    crossed = 0
    """Blocks that all such slabs have allocated in more than one piece."""

    def allocate(self, nbytes: int, wanted_by: str) -> Block:
        block = super().allocate(nbytes, wanted_by)
        block.pieces = crumbled(block.pieces, seed=block.nbytes)
        Crumbs.crossed += len(block.pieces) > 1
        return block
