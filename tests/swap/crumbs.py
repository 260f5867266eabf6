"""`Crumbs`: a slab that allocates each block in the smallest pieces there can be, in any order.

It holds and allocates the same bytes as any slab; but a kept tensor larger than a piece crosses borders, in models of any size.
"""

from __future__ import annotations

import random

from ds_memo.swap.host_pool import Range
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.units import ALIGN


def crumbled(pieces: list[Range], seed: int) -> list[Range]:
    """The same bytes, in another order, in pieces of the alignment that frames keep to."""
    crumbs = [Range(piece.segment, at, at + ALIGN) for piece in pieces for at in range(piece.begin, piece.end, ALIGN)]
    random.Random(seed).shuffle(crumbs)
    return crumbs


class Crumbs(HostSlab):
    """See the module's head."""

    crossed = 0
    """Blocks allocated in more than one piece, of all such slabs."""

    def allocate(self, nbytes: int, wanted_by: str) -> Block:
        block = super().allocate(nbytes, wanted_by)
        block.pieces = crumbled(block.pieces, seed=block.nbytes)
        Crumbs.crossed += len(block.pieces) > 1
        return block
