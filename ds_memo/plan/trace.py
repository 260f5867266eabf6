"""Request traces: the memory requests of one iteration, phase by phase.

    phase L0.f
    malloc 6 268435456
    free 6

A trace gives tensors (`Tensor`: born at one request, dead at another), and tensors give a plan. Time is the index of
the request; a tensor that is never freed lives to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ds_memo.plan.phases import PhaseName
from ds_memo.units import round_up

UNIT = 512  # bytes; PyTorch's allocator rounds every request up to this, and so do slots


def rounded(size: int) -> int:
    """Return the bytes rounded up to whole units."""
    return round_up(size, UNIT)


class Request(NamedTuple):
    """One malloc (size >= 0, bytes) or free (size None)."""

    id: str
    size: int | None


class Phase(NamedTuple):
    name: PhaseName
    first: int  # index of its first request
    end: int  # index after its last


class Tensor(NamedTuple):
    """One malloc with its free."""

    id: str
    size: int  # requested bytes
    birth: int  # index of the malloc
    death: int  # index of the free, or the trace's length
    birth_phase: int
    death_phase: int  # the phase of the free; the last phase without one
    k: int  # the k-th malloc of its phase: the key of its slot

    @property
    def transient(self) -> bool:
        """True if born and dead inside one phase. The others are skeletal: a later phase needs them."""
        return self.birth_phase == self.death_phase


class Columns(NamedTuple):
    """All tensors of a trace in order of birth: the fields of `Tensor`, each as a list."""

    ids: list[str]
    sizes: list[int]
    births: list[int]
    deaths: list[int]
    birth_phases: list[int]
    death_phases: list[int]
    ks: list[int]


@dataclass(frozen=True)
class Trace:
    """One iteration's requests.

    Args:
        requests: In the order of the run, ids unique, every free after its malloc. The readers in formats.py check that.
        phases: Consecutive, covering all requests.
        notes: Sentences about events that the reader left out.
    """

    requests: tuple[Request, ...]
    phases: tuple[Phase, ...]
    notes: tuple[str, ...] = field(default=())

    def tensors(self) -> list[Tensor]:
        """Return all tensors in order of birth."""
        return list(map(Tensor, *self.columns()))

    def columns(self) -> Columns:
        """Return the same as columns."""
        number: dict[str, int] = {}  # id -> index in the order of birth
        ids: list[str] = []
        sizes: list[int] = []
        births: list[int] = []
        deaths: list[int] = []
        birth_phases: list[int] = []
        death_phases: list[int] = []
        ks: list[int] = []
        end, last = len(self.requests), len(self.phases) - 1
        for p, phase in enumerate(self.phases):
            first = len(ids)
            for t in range(phase.first, phase.end):
                id_, size = self.requests[t]
                if size is None:
                    at = number[id_]
                    deaths[at], death_phases[at] = t, p
                else:
                    number[id_] = len(ids)
                    ks.append(len(ids) - first)
                    ids.append(id_)
                    sizes.append(size)
                    births.append(t)
                    birth_phases.append(p)
                    deaths.append(end)
                    death_phases.append(last)
        return Columns(ids, sizes, births, deaths, birth_phases, death_phases, ks)

    def births(self) -> dict[str, tuple[int, int]]:
        """Return (phase, k) of each tensor's malloc, by id."""
        return {x.id: (x.birth_phase, x.k) for x in self.tensors()}
