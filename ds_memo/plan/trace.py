"""Request traces: what one iteration asks of the allocator, phase by phase.

    phase L0.f
    malloc 6 268435456
    free 6

A trace makes tensors (`Tensor`: born at one request, dead at another), and tensors make a plan. Time is the index of
the request; a tensor that is never freed lives to the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_memo.plan.errors import TracesDiffer
from ds_memo.units import round_up

UNIT = 512  # bytes; PyTorch's allocator rounds every request up to this, and so do slots
PHASE_NAME = re.compile(r"(L\d+|embed|head)\.[fb]|embed|head|reduce|step|end")
PHASE_WORDS = "a phase: L<i>.f, L<i>.b, embed, head (with or without .f .b), reduce, step or end"
LAYER_PASS = re.compile(r"L(\d+)\.([fb])")


def rounded(size: int) -> int:
    """Bytes rounded up to whole units."""
    return round_up(size, UNIT)


class Request(NamedTuple):
    """One malloc (size >= 0, bytes) or free (size None)."""

    id: str
    size: int | None


class Phase(NamedTuple):
    name: str
    first: int  # index of its first request
    end: int  # index after its last


class Tensor(NamedTuple):
    """One malloc with its free."""

    id: str
    size: int  # bytes as asked for
    birth: int  # index of the malloc
    death: int  # index of the free, or the trace's length
    birth_phase: int
    death_phase: int  # the phase of the free; the last one where there is none
    k: int  # the k-th malloc of its phase: the key of its slot

    @property
    def transient(self) -> bool:
        """Born and dead inside one phase. The others are skeletal: something later needs them."""
        return self.birth_phase == self.death_phase


@dataclass(frozen=True)
class Trace:
    """One iteration's requests.

    Args:
        requests: In the order of the run, ids unique, every free after its malloc (the readers in formats.py check).
        phases: Consecutive, covering all requests.
        notes: What the reader had to leave out, in words.
    """

    requests: tuple[Request, ...]
    phases: tuple[Phase, ...]
    notes: tuple[str, ...] = field(default=())

    def tensors(self) -> list[Tensor]:
        """All tensors in order of birth."""
        born: dict[str, tuple[int, int, int, int]] = {}
        died: dict[str, tuple[int, int]] = {}
        for p, phase in enumerate(self.phases):
            k = 0
            for t in range(phase.first, phase.end):
                request = self.requests[t]
                if request.size is None:
                    died[request.id] = (t, p)
                else:
                    born[request.id] = (request.size, t, p, k)
                    k += 1
        end = (len(self.requests), len(self.phases) - 1)
        return [Tensor(i, size, t, died.get(i, end)[0], p, died.get(i, end)[1], k) for i, (size, t, p, k) in born.items()]

    def shape(self, phase: int, home: dict[str, tuple[int, int]]) -> tuple:
        """A phase's requests without run-specific ids: mallocs by size, frees by (phases back, k of the malloc)."""
        at = self.phases[phase]
        out = []
        for request in self.requests[at.first : at.end]:
            if request.size is not None:
                out.append(request.size)
            else:
                p, k = home[request.id]
                out.append((phase - p, k))
        return tuple(out)

    def homes(self) -> dict[str, tuple[int, int]]:
        """id -> (phase, k) of its malloc."""
        return {x.id: (x.birth_phase, x.k) for x in self.tensors()}


def varying_phases(iterations: Sequence[Trace]) -> list[int]:
    """Indices of the phases whose requests are not the same in every iteration (MoE with uneven experts, for one).

    Raises:
        TracesDiffer: The iterations do not even have the same phases.
    """
    names = [p.name for p in iterations[0].phases]
    for number, other in enumerate(iterations[1:], 2):
        seen = [p.name for p in other.phases]
        if seen != names:
            raise TracesDiffer(f"iteration {number} has phases {seen}, iteration 1 has {names}")
    homes = [it.homes() for it in iterations]
    return [p for p in range(len(names)) if len({it.shape(p, home) for it, home in zip(iterations, homes, strict=True)}) > 1]


def repeat_layer(trace: Trace, layers: int) -> Trace:
    """A trace of `layers` layers, the added ones like layer 1: the paper profiles one layer and reuses it for all.

    What a pass frees of another layer's tensors (gradients, the hidden state handed on), its copy frees of the layer
    at the same distance; what a phase outside the layers frees of layer 1, it frees of every copy.

    Raises:
        TracesDiffer: Layer 1 is not between two others, or the neighbours it would free from do not match it.
    """
    passes = {(int(m[1]), m[2]): p for p, ph in enumerate(trace.phases) if (m := LAYER_PASS.fullmatch(ph.name))}
    layer_of = {p: (i, way) for (i, way), p in passes.items()}
    have = 1 + max((i for i, _ in passes), default=-1)
    extra = layers - have
    if len(passes) < sum(1 for ph in trace.phases if LAYER_PASS.fullmatch(ph.name)):
        raise TracesDiffer("cannot repeat a layer of a trace with several passes over it (gradient accumulation)")
    others = [phase.name for p, phase in enumerate(trace.phases) if p not in layer_of]
    if len(set(others)) < len(others):
        raise TracesDiffer("cannot repeat a layer of a trace that comes twice to a phase outside the layers")
    if not (have > 2 and (1, "f") in passes and extra >= 0):
        raise TracesDiffer(f"cannot make {layers} layers by repeating layer 1 of {have}: it must lie between two others")

    plan: list[tuple[int, int]] = []  # (old phase, its new layer)
    for p in range(len(trace.phases)):
        i, way = layer_of.get(p, (-1, ""))
        copies = range(1, 2 + extra) if i == 1 else [i + extra * (i > 1)]
        plan += [(p, n) for n in (reversed(copies) if way == "b" else copies)]

    sizes: dict[str, int] = {}
    requests: list[Request] = []
    phases: list[Phase] = []
    home, size_of = trace.homes(), {x.id: x.size for x in trace.tensors()}
    alive: set[str] = set()
    for p, new_layer in plan:
        old = trace.phases[p]
        old_layer, way = layer_of.get(p, (-1, ""))
        name = f"L{new_layer}.{way}" if way else old.name
        first, k = len(requests), 0
        for request in trace.requests[old.first : old.end]:
            if request.size is not None:
                new_id = f"{name}:{k}"
                k += 1
                sizes[new_id] = request.size
                alive.add(new_id)
                requests.append(Request(new_id, request.size))
                continue
            q, source_k = home[request.id]
            i, source_way = layer_of.get(q, (-1, ""))
            if not source_way:
                sources = [trace.phases[q].name]
            elif way:
                sources = [f"L{new_layer + i - old_layer}.{source_way}"]
            else:
                sources = [f"L{n}.{source_way}" for source, n in plan if source == q]
            for source in sources:
                new_id = f"{source}:{source_k}"
                if not source_way and new_id not in alive and new_layer != old_layer:
                    continue  # another copy has freed it
                if new_id not in alive or sizes[new_id] != size_of[request.id]:
                    raise TracesDiffer(f"{name} would free tensor {source_k} of {source}, which does not match the profile's")
                alive.remove(new_id)
                requests.append(Request(new_id, None))
        phases.append(Phase(name, first, len(requests)))
    return Trace(tuple(requests), tuple(phases), trace.notes)
