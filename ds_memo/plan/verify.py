"""The verifier: believes no solver. Nothing leaves the planner without passing here.

It shares no code with the solvers. One sweep through time keeps the buffers that are alive sorted by address, so that
a new one need only be compared with its two neighbours: O(n log n) comparisons, 6,000 buffers in 20 ms. `check`
returns the name of what is wrong and a sentence, or None; `require` raises it.

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

from ds_memo.plan.dsa import Buffer, Offset
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
    """None where the offsets are a solution, else (name, detail). All quantities in the same unit."""
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

    births = sorted(range(len(buffers)), key=lambda i: buffers[i].lifespan.lower)
    deaths = sorted(births, key=lambda i: buffers[i].lifespan.upper)
    alive: list[tuple[Offset, int]] = []  # (offset, index), sorted; no two of them overlap
    bytes_alive = most = died = 0
    for i in births:
        b, at = buffers[i], offsets[i]
        while buffers[deaths[died]].lifespan.upper <= b.lifespan.lower:
            j = deaths[died]
            del alive[bisect_left(alive, (offsets[j], j))]
            bytes_alive -= buffers[j].size
            died += 1
        place = bisect_left(alive, (at, i))
        for start, j in alive[max(0, place - 1) : place + 1]:
            if at < start + buffers[j].size and start < at + b.size:
                return "bad_overlap", f"{buffers[j].id} and {b.id} are alive together and share addresses"
        alive.insert(place, (at, i))
        bytes_alive += b.size
        most = max(most, bytes_alive)
    if lower_bound is not None and (lower_bound != most or most > top):
        return "bad_bound", f"stated {lower_bound}, most alive {most}, peak {top}"
    return None


def require(buffers: Sequence[Buffer], offsets: Sequence[Offset], **stated: int | None) -> None:
    """Raises InvalidPlan where `check` finds something."""
    if wrong := check(buffers, offsets, **stated):
        raise InvalidPlan(*wrong)
