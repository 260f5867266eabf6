"""The verifier: believes no solver. Every plan passes here before it leaves the planner.

It shares no code with the solvers. One sweep through time keeps the live buffers by their rank in the order of addresses.
So a new buffer is compared with its two neighbours only: some 5 µs a buffer. `check` returns the error's name
and a sentence, or None; `require` raises it.

| error | meaning |
|---|---|
| bad_count | not one offset for every buffer |
| bad_buffer | a buffer without size or life |
| bad_offset | an offset below zero, or not a multiple of the alignment |
| bad_capacity | a buffer ends above the capacity |
| bad_peak | the stated peak is not the highest end of a buffer |
| bad_bound | the stated lower bound is above the peak, or not the most bytes alive at once |
| bad_overlap | two buffers share an address at the same time |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_memo.plan.dsa import Buffer, Column, Offset, most_between
from ds_memo.plan.errors import InvalidPlan

ERRORS = ("bad_count", "bad_buffer", "bad_offset", "bad_capacity", "bad_peak", "bad_bound", "bad_overlap")


def check(
    buffers: Sequence[Buffer],
    offsets: Sequence[Offset],
    *,
    peak: int | None = None,
    lower_bound: int | None = None,
    capacity: int | None = None,
    alignment: int = 1,
) -> tuple[str, str] | None:
    """Return None if the offsets are a solution, else (name, detail). All quantities are in the same unit."""
    if len(buffers) != len(offsets):
        return "bad_count", f"{len(offsets)} offsets for {len(buffers)} buffers"
    top = 0
    for b, offset in zip(buffers, offsets, strict=True):
        if b.size <= 0 or b.lifespan.lower >= b.lifespan.upper:
            return "bad_buffer", f"{b.id} has size {b.size} and lives from {b.lifespan.lower} to {b.lifespan.upper}"
        if offset < 0 or offset % alignment:
            return "bad_offset", f"{b.id} at {offset}, alignment {alignment}"
        if capacity is not None and offset + b.size > capacity:
            return "bad_capacity", f"{b.id} ends at {offset + b.size}, capacity {capacity}"
        top = max(top, offset + b.size)
    if peak is not None and peak != top:
        return "bad_peak", f"stated {peak}, found {top}"
    if top >= 2**63:
        return "bad_capacity", f"the plan ends at {top}, past 64 bits"

    by_address = sorted(range(len(buffers)), key=offsets.__getitem__)
    rank = [0] * len(buffers)
    for place, i in enumerate(by_address):
        rank[i] = place
    births = sorted(range(len(buffers)), key=lambda i: buffers[i].lifespan.lower)
    deaths = sorted(births, key=lambda i: buffers[i].lifespan.upper)
    alive: list[int] = []  # ranks of the live buffers, sorted; no two of them overlap
    bytes_alive = most = died = 0
    for i in births:
        b, at = buffers[i], offsets[i]
        while buffers[j := deaths[died]].lifespan.upper <= b.lifespan.lower:
            del alive[bisect_left(alive, rank[j])]
            bytes_alive -= buffers[j].size
            died += 1
        place = bisect_left(alive, rank[i])
        for r in alive[max(0, place - 1) : place + 1]:
            if at < offsets[j := by_address[r]] + buffers[j].size and offsets[j] < at + b.size:
                return "bad_overlap", f"{buffers[j].id} and {b.id} are alive together and share addresses"
        alive.insert(place, rank[i])
        bytes_alive += b.size
        most = max(most, bytes_alive)
    if lower_bound is not None and (lower_bound != most or most > top):
        return "bad_bound", f"stated {lower_bound}, most alive {most}, peak {top}"
    return None


def require_within(first: Column, last: Column, ticks: Column, birth: Column, death: Column, turns: Column) -> None:
    """Check that tensors live within their counterparts in a shorter trace, so that a plan of these is one of the tensors.

    Args:
        first, last: half-open lifespan of each tensor's counterpart.
        ticks: time of the shorter trace at each request.
        birth, death: half-open lifespan of each tensor.
        turns: number of the block that each tensor takes. Tensors of the same block must live one after another.

    Raises:
        InvalidPlan: bad_overlap.
    """
    out = (most_between(ticks, birth, death) >= last) | (-most_between(-ticks, birth, death) < first)
    order = np.lexsort((birth, turns))
    late = (turns[order][1:] == turns[order][:-1]) & (death[order][:-1] > birth[order][1:])
    if out.any() or late.any():
        raise InvalidPlan("bad_overlap", f"{out.sum()} tensors outlive their counterparts, {late.sum()} the next in their block")


def require(buffers: Sequence[Buffer], offsets: Sequence[Offset], **stated: Any) -> None:
    """Raise InvalidPlan if `check` finds an error."""
    if wrong := check(buffers, offsets, **stated):
        raise InvalidPlan(*wrong)
