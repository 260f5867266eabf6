"""Tensors that a backward stores, in the engine driven by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.placement import Placement, PlacementKind
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.streams import ThreadStreams
from tests.swap.by_hand import Rig
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import OrderedStreams

STREAMS: dict[str, Callable[[], Any]] = {"prompt": ThreadStreams, "late": lambda: DelayedStreams(5), "ordered": OrderedStreams}


def without_first(rig: Rig, number: int) -> Frame:
    """Run a layer that keeps two tensors, of which the backward stores the first."""
    frame = rig.engine.begin(f"layer {number}", Placement(PlacementKind.SWAPPED_WITHOUT_INPUT))
    layout, (first, second) = Layout(), values(number)
    layout.add(first, 0)
    kept = layout.add(second)
    rig.engine.adopt(frame, layout)
    rig.engine.keep(frame, kept, second)
    rig.engine.end(frame)
    return frame


def values(number: int) -> list[torch.Tensor]:
    return [torch.full((8, 64), number + 0.5), torch.full((16, 64), float(number))]


def store(rig: Rig, frame: Frame, number: int) -> None:
    rig.engine.keep_late(frame, frame.layout.kept[0], values(number)[0])


def assert_back(rig: Rig, frame: Frame, number: int, again: bool = False) -> None:
    rig.engine.bring_back(frame, again=again)
    for kept, value in zip(frame.layout.kept, values(number), strict=True):
        assert torch.equal(frame.tensor(kept), value)
    rig.engine.replayed(frame)


@pytest.fixture(params=STREAMS)
def rig(request: Any) -> Any:
    streams = STREAMS[request.param]()
    rig = Rig(streams)
    if isinstance(streams, OrderedStreams):
        with streams:
            yield rig
            rig.engine.close()
        streams.verify()
        assert not streams.violations
    else:
        yield rig
        rig.engine.close()
    assert rig.slab.used == rig.slab.pool.used == 0


def test_what_was_stored_late_comes_back(rig: Rig) -> None:
    """Three backwards of one graph; what is stored late is there for one of them."""
    frames = [without_first(rig, number) for number in range(4)]
    before = rig.slab.used
    for last in (False, False, True):
        for number, frame in enumerate(frames):
            store(rig, frame, number)
        rig.engine.let_go_late_but(0)
        for number in reversed(range(4)):
            for again in (True, False):
                assert_back(rig, frames[number], number, again)
            rig.engine.give_up(frames[number])
            rig.engine.drop_late(frames[number])
        assert rig.slab.used == before, last
    assert rig.engine.traffic.frames_prefetched > 0


def test_without_it_its_slot_is_empty(rig: Rig) -> None:
    frame = without_first(rig, 1)
    for stored in (False, True, False):
        if stored:
            store(rig, frame, 1)
        rig.engine.bring_back(frame)
        assert set(frame.slots) == ({0, 1} if stored else {1})
        rig.engine.give_up(frame)
        rig.engine.drop_late(frame)


def test_two_of_them_are_on_the_device_at_once(rig: Rig) -> None:
    frames = [without_first(rig, number) for number in range(4)]
    for number, frame in enumerate(frames):
        store(rig, frame, number)
        assert len(rig.engine._late) == 1
    rig.engine.let_go_late_but(0)
    assert not rig.engine._late
    for number in reversed(range(4)):
        assert_back(rig, frames[number], number)


def test_one_that_is_stored_twice_takes_one_block(rig: Rig) -> None:
    frame = without_first(rig, 1)
    store(rig, frame, 0)
    used = rig.slab.used
    store(rig, frame, 1)
    assert rig.slab.used == used
    assert_back(rig, frame, 1)


@pytest.mark.parametrize("reloaded", [False, True])
def test_frames_that_die_with_it(rig: Rig, reloaded: bool) -> None:
    """Their copies may be under way. The next frames get their blocks."""
    for turn in range(3):
        frames = [without_first(rig, number) for number in range(3)]
        for number, frame in enumerate(frames):
            store(rig, frame, number)
        if reloaded:
            rig.engine.bring_back(frames[2])
        del frames, frame
        gc.collect()
        rig.engine.drain()
        assert rig.slab.used == 0, turn


@pytest.mark.parametrize("reloaded", [False, True])
def test_close_with_it(rig: Rig, reloaded: bool) -> None:
    frames = [without_first(rig, number) for number in range(3)]
    for number, frame in enumerate(frames):
        store(rig, frame, number)
    if reloaded:
        rig.engine.bring_back(frames[2])
    rig.engine.close()
    assert rig.slab.used == 0 and not any(frame.late for frame in frames)
    with pytest.raises(MemoError, match="after ds_memo was detached"):
        rig.engine.bring_back(frames[0])


def test_a_host_that_is_full(rig: Rig) -> None:
    frame = without_first(rig, 1)
    rig.slab.budget.nbytes = rig.slab.used
    with pytest.raises(MemoError, match=r"frame layer 1, whose input was computed again,"):
        store(rig, frame, 1)
    assert not frame.late and 0 not in frame.stored
    rig.slab.budget.nbytes *= 2
    store(rig, frame, 1)
    assert_back(rig, frame, 1)
