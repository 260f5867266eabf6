"""Lifetimes of frames, driven by hand: dropped graphs, tensors that change, wrong steps, closing."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.placement import SWAPPED
from ds_memo.swap.frame import Frame
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams
from tests.swap.by_hand import Rig
from tests.swap.delayed import DelayedStreams

# ---- lifetimes


@pytest.mark.parametrize("where", ["just recorded", "away", "on its way back", "replayed"])
def test_a_frame_may_die_on_a_copy_thread(where):
    """Garbage collection runs on any thread, even on the copy thread, which would wait for itself."""
    rig = Rig(DelayedStreams(1, delays_s=(1e-3,)))
    frames = [rig.layer() for _ in range({"just recorded": 1}.get(where, 4))]
    if where != "just recorded":
        rig.engine.bring_back(frames[-1])
        rig.engine.replayed(frames[-1])
    dying = frames.pop({"away": 0, "on its way back": 2, "replayed": 3, "just recorded": 0}[where])
    cycle = [dying]
    cycle.append(cycle)
    dead = weakref.ref(dying)
    del dying, cycle
    done = threading.Event()
    rig.streams._queues[D2H].put((gc.collect,))
    rig.streams._queues[H2D].put((done.set,))
    rig.streams.wait(COMPUTE, rig.streams.mark(D2H))
    assert dead() is None
    assert done.wait(30)
    rig.layer()
    assert rig.slab.used == (len(frames) + 1) * PAGE
    frames.clear()
    rig.engine.close()
    assert rig.slab.size == 0


# ---- tensors that change in place


def keep_and_change(rig: Rig, resident: bool, under_way: bool) -> tuple[Frame, torch.Tensor]:
    tensor = torch.ones(8, 64)
    frame = rig.begin([tensor, tensor], resident)
    rig.engine.keep(frame, frame.layout.kept[0], tensor)
    if under_way:
        rig.engine.keep(frame, frame.layout.kept[1], torch.full((8, 64), 7.0))
    rig.engine.about_to_change(frame, tensor)
    tensor.add_(1)
    if not under_way:
        rig.engine.keep(frame, frame.layout.kept[1], torch.full((8, 64), 7.0))
    rig.engine.end(frame)
    return frame, tensor


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("under_way", [False, True])
def test_a_kept_tensor_keeps_the_value_it_had(resident, under_way):
    rig = Rig(DelayedStreams(0, delays_s=(5e-3,)))
    frame, tensor = keep_and_change(rig, resident, under_way)
    others = [rig.layer() for _ in range(3)]
    for _ in range(2):
        first, second = rig.replay(frame)
        assert first.unique().tolist() == [1.0]
        assert second.unique().tolist() == [7.0]
    assert tensor.unique().tolist() == [2.0]
    assert len(others) == 3


def test_from_the_second_call_on_a_change_waits_for_its_own_copy_alone():
    """A layer that returns its router's choice: copies of later tensors go on."""
    waited, streams = [], ThreadStreams()
    rig, wait = Rig(streams), streams.wait
    streams.wait = lambda stream, event: (waited.append(event), wait(stream, event))
    tensors = [torch.ones(8, 64) for _ in range(3)]
    layout = rig.begin(tensors).layout
    marks = []
    for _ in range(2):
        frame = rig.engine.begin("x", SWAPPED)
        rig.engine.adopt(frame, layout)
        for kept, tensor in zip(layout.kept, tensors, strict=True):
            rig.engine.keep(frame, kept, tensor)
        waited.clear()
        rig.engine.about_to_change(frame, tensors[0])
        marks.append(waited == [frame.copied.get(0)])
        rig.engine.end(frame)
        assert 0 not in frame.device and 1 in frame.device
    assert marks == [False, True]


def test_an_aborted_frame_that_sent_nothing_waits_for_no_copy(rig):
    """An evaluation with gradients: copies of the layer before it go on."""
    rig.layer()
    frame = rig.begin([torch.ones(8, 64)])
    rig.engine.keep(frame, frame.layout.kept[0], torch.ones(8, 64))
    waited = []
    rig.streams.wait = lambda stream, event: waited.append(stream)
    rig.engine.abort(frame)
    assert waited == []


def test_an_unannounced_change_raises_each_time(rig):
    tensor = torch.ones(8, 64)
    frame = rig.layer_of([tensor], name="model.layers.3")
    tensor.add_(1)
    rig.layer()
    with pytest.raises(MemoError, match=r"model\.layers\.3: a tensor of shape .* was changed in place"):
        rig.layer()
    rig.layer()
    for _ in range(2):
        with pytest.raises(MemoError, match=r"model\.layers\.3: a tensor of shape .* was changed in place"):
            rig.replay(frame)


# ---- wrong steps


@pytest.mark.parametrize("resident", [False, True])
def test_wrong_steps_raise_with_the_frames_name(rig, resident):
    engine, name = rig.engine, r"model\.layers\.3"
    recording = rig.begin([torch.ones(8, 64)], resident, name="model.layers.3")
    with pytest.raises(MemoError, match=name):
        engine.bring_back(recording)
    engine.abort(recording)
    frame = rig.layer(name="model.layers.3", resident=resident)
    wrong = [[engine.end] if resident else []]
    wrong += [[] if resident else [engine.end, engine.bring_back]]
    wrong += [[engine.end, engine.replayed, lambda frame: frame.tensor(frame.layout.kept[0])]]
    for steps, then in zip(wrong, (engine.bring_back, engine.replayed, None), strict=True):
        for step in steps:
            with pytest.raises(MemoError, match=name):
                step(frame)
        if then is not None:
            then(frame)


# ---- closing


@pytest.mark.parametrize("state", ["swapping", "away", "returning", "ready", "done"])
def test_closing_with_living_frames(state):
    rig = Rig(DelayedStreams(2))
    frames = [rig.layer(name=f"layer {index}") for index in range(5)]
    if state in ("returning", "ready", "done"):
        rig.engine.bring_back(frames[4])
    if state == "done":
        rig.engine.replayed(frames[4])
    assert state in {frame.state for frame in frames}
    rig.engine.close()
    assert (rig.slab.used, rig.slab.size) == (0, 0)
    for frame in frames:
        with pytest.raises(MemoError, match=f"{frame.name} is wanted by a backward after ds_memo was detached"):
            rig.engine.bring_back(frame)
    with pytest.raises(MemoError, match="x was run after ds_memo was detached"):
        rig.layer()
    frame = None
    frames.clear()
    gc.collect()
    rig.engine.close()


@pytest.mark.parametrize("when", ["while it waits", "between two frees"])
def test_a_frame_that_dies_while_the_engine_closes(when):
    """As the garbage collector may end it, at any allocation."""
    frames: list[Frame] = []

    class Dying(ThreadStreams):
        def wait(self, stream, event) -> None:
            super().wait(stream, event)
            if when == "while it waits":
                frames.clear()

    rig = Rig(Dying())
    frames += [rig.layer()]
    frames += [rig.layer()]
    if when == "between two frees":
        free = rig.slab.free
        rig.slab.free = lambda block: (free(block), frames.clear())
    rig.engine.close()
    assert (rig.slab.used, rig.slab.size) == (0, 0)


def test_closing_after_a_copy_failed_raises_and_still_ends_the_threads(monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    rig = Rig()
    frame = rig.layer()
    rig.streams.wait(COMPUTE, rig.streams.mark(D2H))
    monkeypatch.setattr(ctypes, "memmove", fail)
    rig.streams.copy(D2H, torch.zeros(4), torch.zeros(4), 16)
    with pytest.raises(MemoError, match="a copy on the d2h stream failed"):
        rig.engine.close()
    assert not any(thread.is_alive() for thread in rig.streams._threads)
    rig.engine.close()
    del frame
