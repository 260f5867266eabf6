"""A plain exact search, for comparison with ops/csrc/dsa_search.cpp: up to a dozen buffers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_memo.plan.dsa import Buffer, sections


def fits(buffers: Sequence[Buffer], capacity: int) -> bool:
    """Return True if the buffers can be placed below `capacity`, by trying all orders from the ground upwards.

    Any placement can be pushed down until each buffer rests on another or on the ground. In the order of these addresses,
    each buffer lies on the highest that its sections have so far.
    """
    first, last, count = sections(buffers)
    spans = [slice(lo, hi + 1) for lo, hi in zip(first, last, strict=True)]
    dead: set[tuple] = set()

    def rest(left: frozenset[int], floors: tuple[int, ...]) -> bool:
        if not left:
            return True
        to_come = [sum(buffers[i].size for i in left if first[i] <= s <= last[i]) for s in range(count)]
        if (left, floors) in dead or any(floor + more > capacity for floor, more in zip(floors, to_come, strict=True)):
            return False
        for i in left:
            at = max(floors[spans[i]])
            raised = [at + buffers[i].size] * (last[i] + 1 - first[i])
            if rest(left - {i}, (*floors[: first[i]], *raised, *floors[last[i] + 1 :])):
                return True
        dead.add((left, floors))
        return False

    return rest(frozenset(range(len(buffers))), (0,) * count)
