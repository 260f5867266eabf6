"""Request logs: a pass's requests as the allocator op logged them, to compare, merge and plan.

A log has the requests of each visit of a phase, and the position at which each block died: the visit, and the number of mallocs
before it there. Passes with the same requests may free at different positions; then the latest counts. (A gradient survives the
first micro-batch of an accumulation and dies at once in the others.) A block that outlives its pass is an *escapee* and gets no
address. But a block may always die in the next pass before it is born again, such as a gradient if zero_grad() follows the
forward. It *wraps around* and gets an address of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ds_memo.ops.allocator import LogEvent
from ds_memo.plan.phases import PhaseName
from ds_memo.plan.trace import Phase, Trace
from ds_memo.plan.trace import Request as TraceRequest


class Visit(NamedTuple):
    """One visit of a phase."""

    phase: PhaseName
    sizes: tuple[int, ...]
    """Bytes of its mallocs, in order."""


Position = tuple[int, int]
"""Index of a visit, and the number of its mallocs before this point."""
NEVER: Position = (1 << 62, 0)
"""The death of an escapee."""


@dataclass(frozen=True)
class RequestLog:
    """The requests of one pass."""

    visits: tuple[Visit, ...]
    deaths: tuple[tuple[Position, ...], ...]
    """Per visit and malloc."""

    def repeated_by(self, later: RequestLog) -> bool:
        """Return True if a later pass makes the same requests. Blocks that only the first pass makes and never frees (optimizer
        states, workspaces, caches) do not count."""
        if [visit.phase for visit in self.visits] != [visit.phase for visit in later.visits]:
            return False
        for (_, first), deaths, (_, again) in zip(self.visits, self.deaths, later.visits, strict=True):
            reached = {0}  # possible numbers of later mallocs accounted for
            for size, death in zip(first, deaths, strict=True):
                on = {k + 1 for k in reached if k < len(again) and again[k] == size}
                reached = on | reached if death == NEVER else on
            if len(again) not in reached:
                return False
        return True

    def merged(self, other: RequestLog) -> RequestLog | None:
        """Return one log with the visits of the longer and the later death of each block, or None if neither log begins with the
        other's visits."""
        long, short = (self, other) if len(self.visits) >= len(other.visits) else (other, self)
        if long.visits[: len(short.visits)] != short.visits:
            return None
        later = tuple(
            tuple(map(max, ours, others)) for ours, others in zip(long.deaths[: len(short.deaths)], short.deaths, strict=True)
        )
        return RequestLog(long.visits, later + long.deaths[len(short.deaths) :])

    def trace(self, wrapping: Collection[Position] = (), escapees: bool = False) -> Trace:
        """Return the log as a trace for the planner. Malloc k of visit v has the id "v:k".

        Args:
            wrapping: births of the blocks that wrap around. They live from the first request to the last.
            escapees: include the other escapees, which are never freed.
        """
        frees: dict[Position, list[str]] = defaultdict(list)
        for v, deaths in enumerate(self.deaths):
            for k, death in enumerate(deaths):
                if death != NEVER:
                    frees[death].append(f"{v}:{k}")
        requests: list[TraceRequest] = []
        phases = []
        for v, visit in enumerate(self.visits):
            first = len(requests)
            if v == 0:
                requests += [TraceRequest(f"{w}:{k}", self.visits[w].sizes[k]) for w, k in sorted(wrapping)]
            for k, size in enumerate(visit.sizes):
                requests += [TraceRequest(id_, None) for id_ in frees[v, k]]
                if (v, k) not in wrapping and (escapees or self.deaths[v][k] != NEVER):
                    requests.append(TraceRequest(f"{v}:{k}", size))
            requests += [TraceRequest(id_, None) for id_ in frees[v, len(visit.sizes)]]
            phases.append(Phase(visit.phase, first, len(requests)))
        return Trace(tuple(requests), tuple(phases))

    def resized(self, sizes: Mapping[str, int]) -> RequestLog:
        """Return the same log with other sizes (bytes, by the ids that `trace` gives)."""
        visits = (
            Visit(visit.phase, tuple(sizes[f"{v}:{k}"] for k in range(len(visit.sizes)))) for v, visit in enumerate(self.visits)
        )
        return RequestLog(tuple(visits), self.deaths)

    def slots(self, offsets: Mapping[str, int], left: int) -> list[tuple[PhaseName, list[tuple[int, int]]]]:
        """Return every visit with its mallocs as (bytes, offset), as the allocator op loads a plan.

        Args:
            offsets: bytes from the arena's start, by the ids that `trace` gives.
            left: offset for a malloc that has none.
        """
        return [
            (visit.phase, [(size, offsets.get(f"{v}:{k}", left)) for k, size in enumerate(visit.sizes)])
            for v, visit in enumerate(self.visits)
        ]


def read_log(events: Iterable[LogEvent], escaped: dict[int, Position]) -> tuple[RequestLog, set[Position]]:
    """Return the log of one pass, and the births of the blocks in `escaped` that wrapped around.

    Args:
        events: the allocator op's events of this pass.
        escaped: births, by id, of the blocks that escaped the pass before. Replaced by those that escape this one.
    """
    wrapping: set[Position] = set()
    phases: list[PhaseName] = []
    sizes: list[list[int]] = []
    deaths: list[list[Position]] = []
    born: dict[int, Position] = {}
    for event in events:
        if event.kind == "enter":
            phases.append(event.phase)
            sizes.append([])
            deaths.append([])
        elif event.kind == "malloc":
            born[event.id] = (len(sizes) - 1, len(sizes[-1]))
            sizes[-1].append(event.size)
            deaths[-1].append(NEVER)
        elif (birth := born.pop(event.id, None)) is not None:
            deaths[birth[0]][birth[1]] = (len(sizes) - 1, len(sizes[-1]))
        elif (birth := escaped.pop(event.id, None)) is not None and (not sizes or (len(sizes) - 1, len(sizes[-1])) <= birth):
            wrapping.add(birth)
    escaped.clear()
    escaped.update(born)
    visits = (Visit(phase, tuple(mallocs)) for phase, mallocs in zip(phases, sizes, strict=True))
    return RequestLog(tuple(visits), tuple(map(tuple, deaths))), wrapping
