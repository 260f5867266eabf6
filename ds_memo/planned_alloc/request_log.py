"""Request logs: what the allocator op saw in a pass, ready to be compared, merged and planned.

A log has the requests of each visit of a phase, and for each block where it died: in which visit, and after how many of that
visit's mallocs. Passes that ask for the same may free at different places (a gradient lives on after the first micro-batch of an
accumulation and dies at once in the others); then the latest place counts. A block that outlives its pass is an *escapee*: no
address can be promised to it. An exception is a block that always dies in the next pass before it is born again (a gradient,
where zero_grad() comes after the forward): it *wraps around*, and gets an address that nothing else uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ds_memo.plan.phases import PhaseName
from ds_memo.plan.trace import Phase, Trace
from ds_memo.plan.trace import Request as TraceRequest


class Event(Protocol):
    """One event of the op's log; see ds_memo.ops.allocator.Request."""

    @property
    def kind(self) -> str: ...
    @property
    def phase(self) -> PhaseName | None: ...
    @property
    def id(self) -> int: ...
    @property
    def size(self) -> int: ...


class Visit(NamedTuple):
    """One visit of a phase."""

    phase: PhaseName
    sizes: tuple[int, ...]
    """Bytes of its mallocs, in order."""


Place = tuple[int, int]
"""A visit, and how many of its mallocs came before."""
NEVER: Place = (1 << 62, 0)
"""Where an escapee dies."""


@dataclass(frozen=True)
class RequestLog:
    """The requests of one pass."""

    visits: tuple[Visit, ...]
    deaths: tuple[tuple[Place, ...], ...]
    """Per visit and malloc."""

    def repeated_by(self, later: RequestLog) -> bool:
        """Whether a later pass asks for the same, apart from what only the first pass makes and never frees: optimizer states,
        workspaces, caches."""
        if [visit.phase for visit in self.visits] != [visit.phase for visit in later.visits]:
            return False
        for (_, first), deaths, (_, again) in zip(self.visits, self.deaths, later.visits, strict=True):
            reached = {0}  # how many of the later mallocs may be accounted for
            for size, death in zip(first, deaths, strict=True):
                on = {k + 1 for k in reached if k < len(again) and again[k] == size}
                reached = on | reached if death == NEVER else on
            if len(again) not in reached:
                return False
        return True

    def merged(self, other: RequestLog) -> RequestLog | None:
        """Both logs in one: the visits of the longer, and of each block the later death. None where the visits of neither are the
        beginning of the other's."""
        long, short = (self, other) if len(self.visits) >= len(other.visits) else (other, self)
        if long.visits[: len(short.visits)] != short.visits:
            return None
        later = tuple(
            tuple(map(max, mine, theirs)) for mine, theirs in zip(long.deaths[: len(short.deaths)], short.deaths, strict=True)
        )
        return RequestLog(long.visits, later + long.deaths[len(short.deaths) :])

    def trace(self, wrapping: Collection[Place] = (), escapees: bool = False) -> Trace:
        """The log as the planner reads it; malloc k of visit v has the id "v:k".

        Args:
            wrapping: mallocs that wrap around: they live from the first request to the last.
            escapees: include the other escapees, never freed; they are left out otherwise.
        """
        frees: dict[Place, list[str]] = defaultdict(list)
        for v, places in enumerate(self.deaths):
            for k, place in enumerate(places):
                if place != NEVER:
                    frees[place].append(f"{v}:{k}")
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
        """The same log with other sizes, by the ids that `trace` gives."""
        visits = (
            Visit(visit.phase, tuple(sizes[f"{v}:{k}"] for k in range(len(visit.sizes)))) for v, visit in enumerate(self.visits)
        )
        return RequestLog(tuple(visits), self.deaths)

    def slots(self, offsets: Mapping[str, int], left: int) -> list[tuple[PhaseName, list[tuple[int, int]]]]:
        """Every visit with its mallocs as (bytes, offset), as the allocator op loads a plan.

        Args:
            offsets: by the ids that `trace` gives.
            left: the offset of those that have none.
        """
        return [
            (visit.phase, [(size, offsets.get(f"{v}:{k}", left)) for k, size in enumerate(visit.sizes)])
            for v, visit in enumerate(self.visits)
        ]


def read_log(events: Iterable[Event], escaped: dict[int, Place]) -> tuple[RequestLog, set[Place]]:
    """Make a log from the allocator op's events of one pass.

    Args:
        events: of this pass.
        escaped: birth, by id, of the blocks that escaped the pass before. Replaced by those that escape this one.

    Returns:
        The log, and the births of those blocks of `escaped` that wrapped around.
    """
    wrapping: set[Place] = set()
    phases: list[PhaseName] = []
    sizes: list[list[int]] = []
    deaths: list[list[Place]] = []
    born: dict[int, Place] = {}
    for event in events:
        if event.kind == "enter":
            phases.append(event.phase)
            sizes.append([])
            deaths.append([])
        elif event.kind == "malloc":
            born[event.id] = (len(sizes) - 1, len(sizes[-1]))
            sizes[-1].append(event.size)
            deaths[-1].append(NEVER)
        elif (place := born.pop(event.id, None)) is not None:
            deaths[place[0]][place[1]] = (len(sizes) - 1, len(sizes[-1]))
        elif (place := escaped.pop(event.id, None)) is not None and (not sizes or (len(sizes) - 1, len(sizes[-1])) <= place):
            wrapping.add(place)
    escaped.clear()
    escaped.update(born)
    visits = (Visit(phase, tuple(mallocs)) for phase, mallocs in zip(phases, sizes, strict=True))
    return RequestLog(tuple(visits), tuple(map(tuple, deaths))), wrapping
