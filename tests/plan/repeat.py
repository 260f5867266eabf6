"""Traces of more layers than were profiled: layer 1 is repeated, as the paper reuses one profiled layer for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds_memo.plan.errors import TracesDiffer
from ds_memo.plan.phases import LayerPass, PhaseName
from ds_memo.plan.trace import Phase, Request, Trace


class Copy(NamedTuple):
    """A phase of the longer trace."""

    of: int
    """Number of the profiled phase."""
    name: PhaseName
    shift: int = 0
    """Its layer's number less the profiled one's."""


def repeat_layer(trace: Trace, layers: int) -> Trace:
    """Return a trace of `layers` layers, the added ones like layer 1.

    A pass may free another layer's tensors (gradients, the hidden state); its copy frees those of the layer at the same
    distance. A phase outside the layers that frees a tensor of layer 1 frees that tensor of every copy.

    Raises:
        TracesDiffer: Layer 1 is not between two others, or the neighbours whose tensors it frees do not match it.
    """
    passes = {p: phase.name for p, phase in enumerate(trace.phases) if isinstance(phase.name, LayerPass)}
    extra = layers - _check(passes, layers)
    longer = _Longer(trace, passes, [copy for p, phase in enumerate(trace.phases) for copy in _copies(p, phase.name, extra)])
    return Trace(tuple(longer.requests), tuple(longer.phases), trace.notes)


def _check(passes: Mapping[int, LayerPass], layers: int) -> int:
    """Return the number of layers of the trace."""
    have = 1 + max((layer for layer, _ in passes.values()), default=-1)
    if not (have > 2 and LayerPass(1, backward=False) in passes.values() and layers >= have):
        raise TracesDiffer(f"cannot make {layers} layers by repeating layer 1 of {have}: it must lie between two others")
    return have


def _copies(p: int, name: PhaseName, extra: int) -> list[Copy]:
    """Return the copies of a phase, in the order of the longer trace."""
    if not isinstance(name, LayerPass) or name.layer == 0:
        return [Copy(p, name)]
    shifts = range(extra + 1) if name.layer == 1 else [extra]
    copies = [Copy(p, name._replace(layer=name.layer + shift), shift) for shift in shifts]
    return copies[::-1] if name.backward else copies


class _Longer:
    """The longer trace, made copy by copy. Malloc k of a phase has the id "phase:k"."""

    def __init__(self, trace: Trace, passes: Mapping[int, LayerPass], copies: Sequence[Copy]) -> None:
        self.requests: list[Request] = []
        self.phases: list[Phase] = []
        self._trace = trace
        self._passes = passes
        self._names: dict[int, list[PhaseName]] = defaultdict(list)
        """Names of the copies, by number of the profiled phase."""
        for copy in copies:
            self._names[copy.of].append(copy.name)
        self._births = trace.births()
        self._sizes = {tensor.id: tensor.size for tensor in trace.tensors()}
        self._alive: dict[str, int] = {}
        """Bytes of the live tensors, by id."""
        for copy in copies:
            self._add(copy)

    def _add(self, copy: Copy) -> None:
        first, k = len(self.requests), 0
        old = self._trace.phases[copy.of]
        for request in self._trace.requests[old.first : old.end]:
            if request.size is None:
                self._free(request.id, copy)
            else:
                born, k = f"{copy.name}:{k}", k + 1
                self._alive[born] = request.size
                self.requests.append(Request(born, request.size))
        self.phases.append(Phase(copy.name, first, len(self.requests)))

    def _free(self, id_: str, copy: Copy) -> None:
        """Free in a copy what the profiled phase frees by `id_`."""
        born_in, k = self._births[id_]
        for source in self._sources(born_in, copy):
            freed = f"{source}:{k}"
            if freed not in self._alive and born_in not in self._passes and copy.shift:
                continue  # another copy has freed it
            if self._alive.pop(freed, None) != self._sizes[id_]:
                raise TracesDiffer(f"{copy.name} would free tensor {k} of {source}, which does not match the profile's")
            self.requests.append(Request(freed, None))

    def _sources(self, born_in: int, copy: Copy) -> list[PhaseName]:
        """Return the phases whose tensors a copy frees if the profiled phase frees a tensor of `born_in`."""
        if born_in not in self._passes:
            return [self._trace.phases[born_in].name]
        if copy.of in self._passes:
            its = self._passes[born_in]
            return [its._replace(layer=its.layer + copy.shift)]
        return self._names[born_in]
