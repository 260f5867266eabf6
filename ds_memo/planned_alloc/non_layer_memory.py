"""Non-layer memory: device bytes that a pass takes outside its layers, computed from its request log.

The solver then keeps that much free.

head         logits, loss, their gradients: between the last layer's forward and its backward; grows with the tokens
forward      gathered parameters, masks
backward     gradients and their reduction buckets: more with every layer
elsewhere    other streams, where no address is planned: gathering and reducing while layers compute

Blocks that are still alive when the log ends do not count: the device's free memory no longer includes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ds_memo.ops.allocator import LogEvent
from ds_memo.plan.phases import LayerPass, PassPart, PhaseName


class NonLayerMemory(NamedTuple):
    """Bytes of one pass."""

    head: int
    """Head and loss, between the last layer's forward and its backward; without `staying`."""
    staying: int = 0
    """Head and loss, alive through the whole backward."""
    forward: int = 0
    backward: tuple[int, ...] = (0,)
    """By layer, in the order of the forward."""
    elsewhere: int = 0


class Most(NamedTuple):
    """Bytes of the blocks that were born in the latest visit of a phase and died before the log ended."""

    peak: int
    """The most alive at once."""
    staying: int
    """Those still alive at the end of the next phase, without the gradient that is passed on to it."""


def non_layer_memory(
    events: Sequence[LogEvent],
    carried: Mapping[int, int],
    hidden_bytes: int,
    forward: Mapping[int, int],
    backward: Mapping[int, int],
) -> NonLayerMemory | None:
    """Return the non-layer memory of a pass, or None if the pass had no head.

    Args:
        events: the pass's log.
        carried: bytes, by id, of blocks that earlier passes left behind.
        hidden_bytes: bytes of the last layer's output, and so of its gradient. Autograd may add to that gradient in every layer.
            Each layer's backward counts it, so it does not count as staying.
        forward, backward: predicted bytes by layer, in the order of the forward, with all kept tensors.
    """
    head = most_in(PassPart.HEAD, events, hidden_bytes)
    if head is None:
        return None
    peaks = _peaks(events, carried)
    ahead = [peaks.get(LayerPass(layer, backward=False), 0) - solved for layer, solved in forward.items()]
    back = [peaks.get(LayerPass(layer, backward=True), 0) - solved for layer, solved in backward.items()]
    return NonLayerMemory(
        head=head.peak - head.staying,
        staying=head.staying,
        forward=max([0, *ahead]),
        backward=tuple(max(head.staying, over) for over in back) or (head.staying,),
        elsewhere=max(alive for _, alive in _alive(events, _sizes(events, "elsewhere"))),
    )


def largest(several: Sequence[NonLayerMemory]) -> NonLayerMemory:
    """Return the largest of each number over several ranks or passes."""
    heads, staying, forwards, backwards, elsewhere = zip(*several, strict=True)
    backward = tuple(map(max, zip_longest(*backwards, fillvalue=0)))
    return NonLayerMemory(max(heads), max(staying), max(forwards), backward, max(elsewhere))


def carry(carried: dict[int, int], events: Iterable[LogEvent]) -> None:
    """Update `carried` (bytes of the live blocks, by id) with a pass's events."""
    for event in events:
        if event.kind == "malloc":
            carried[event.id] = event.size
        elif event.kind == "free":
            carried.pop(event.id, None)


def most_in(phase: PhaseName, events: Sequence[LogEvent], passed_on: int = 0) -> Most | None:
    """Return the memory that one phase took, or None if the pass did not visit it.

    Args:
        events: the pass's log so far. A block without a free in it does not count.
        passed_on: bytes of the gradient that the next phase begins with. It does not count as staying.
    """
    visits: list[PhaseName | None] = []
    born: dict[int, tuple[int, int]] = {}
    died: dict[int, int] = {}
    for event in events:
        if event.kind == "enter":
            visits.append(event.phase)
        elif event.kind == "malloc":
            born[event.id] = len(visits), event.size
        elif event.kind == "free":
            died[event.id] = len(visits)
    if phase not in visits:
        return None
    last = len(visits) - visits[::-1].index(phase)
    sizes = {id_: size for id_, (visit, size) in born.items() if visit == last and id_ in died}
    staying = [size for id_, size in sizes.items() if died[id_] > last + 1]
    if passed_on in staying:
        staying.remove(passed_on)
    return Most(max(alive for _, alive in _alive(events, sizes)), sum(staying))


def _peaks(events: Sequence[LogEvent], carried: Mapping[int, int]) -> dict[PhaseName | None, int]:
    """Return the most bytes alive at once on the pass's stream, by phase."""
    peaks: dict[PhaseName | None, int] = {}
    for phase, alive in _alive(events, {**carried, **_sizes(events, "malloc")}, frozenset(carried)):
        peaks[phase] = max(peaks.get(phase, 0), alive)
    return peaks


def _sizes(events: Iterable[LogEvent], kind: str) -> dict[int, int]:
    return {event.id: event.size for event in events if event.kind == kind}


def _alive(
    events: Sequence[LogEvent], sizes: Mapping[int, int], before: frozenset[int] = frozenset()
) -> Iterator[tuple[PhaseName | None, int]]:
    """Yield the phase and the bytes alive after each event.

    Args:
        sizes: bytes of the blocks to count, by id. A block that is not freed does not count.
        before: ids of the blocks that are alive from the start.
    """
    died = {event.id for event in events if event.kind == "free"} & sizes.keys()
    alive, phase = sum(sizes[id_] for id_ in died & before), None
    yield phase, alive
    for event in events:
        if event.kind == "enter":
            phase = event.phase
        elif event.id in died:
            alive += -sizes[event.id] if event.kind == "free" else sizes[event.id]
        yield phase, alive
