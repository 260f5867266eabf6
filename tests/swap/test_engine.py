"""The schedule itself, driven by hand: what the engine asks of its streams, lifetimes, wrong steps, closing."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.pool import HostPool
from ds_memo.swap.segments import PAGE
from ds_memo.swap.slab import HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import Immediate

CPU = torch.device("cpu")


class Diary(Immediate):
    """Writes down what the engine asks for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._events = 0

    def mark(self, stream: str) -> str:
        self._events += 1
        self.lines.append(f"mark {stream} as {self._events}")
        return str(self._events)

    def wait(self, stream: str, event: str) -> None:
        self.lines.append(f"{stream} waits for {event}")

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        super().copy(stream, dst, src)
        self.lines.append(f"{stream} copies {tuple(src.shape)}")


@dataclass
class Rig:
    """An engine and the least that a layer does to it."""

    streams: object = field(default_factory=ThreadStreams)
    pages: int = 1000

    def __post_init__(self) -> None:
        self.slab = HostSlab(self.pages * PAGE, HostPool(pinned=False))
        if hasattr(self.streams, "watch"):
            self.streams.watch(self.slab)
        self.engine = SwapEngine(self.streams, self.slab, CPU)

    def begin(
        self, tensors: list[torch.Tensor], resident: bool = False, rows: int | None = None, name: str = "x", ahead: bool = True
    ) -> Frame:
        frame = self.engine.begin(name, resident, ahead=ahead)
        layout = Layout()
        for tensor in tensors:
            layout.add(tensor, rows)
        self.engine.adopt(frame, layout)
        return frame

    def layer(self, *shapes: tuple[int, ...], value: float = 1.0, **options) -> Frame:
        tensors = [torch.full(shape, value) for shape in shapes or ((8, 64),)]
        return self.layer_of(tensors, **options)

    def layer_of(self, tensors: list[torch.Tensor], **options) -> Frame:
        frame = self.begin(tensors, **options)
        for kept, tensor in zip(frame.layout.kept, tensors, strict=True):
            self.engine.keep(frame, kept, tensor)
        self.engine.end(frame)
        return frame

    def replay(self, frame: Frame) -> list[torch.Tensor]:
        self.engine.bring_back(frame)
        tensors = [frame.tensor(kept).clone() for kept in frame.layout.kept]
        self.engine.replayed(frame)
        return tensors


@pytest.fixture
def rig():
    made = Rig()
    yield made
    with suppress(MemoError):
        made.engine.close()


# ---- the schedule


def test_the_schedule_of_four_layers():
    diary = Diary()
    rig = Rig(diary)
    frames = []
    for index in range(4):
        frames.append(rig.layer((index + 1, 64)))
        diary.lines.append(f"layer {index} has run")
    for index in reversed(range(4)):
        rig.replay(frames[index])
        diary.lines.append(f"layer {index} was replayed")
    assert "\n".join(diary.lines) == (
        """\
mark compute as 1
d2h waits for 1
d2h copies (64,)
mark d2h as 2
layer 0 has run
mark compute as 3
d2h waits for 3
d2h copies (128,)
mark d2h as 4
layer 1 has run
compute waits for 2
mark compute as 5
d2h waits for 5
d2h copies (192,)
mark d2h as 6
layer 2 has run
compute waits for 4
mark compute as 7
d2h waits for 7
d2h copies (256,)
mark d2h as 8
layer 3 has run
compute waits for 6
compute waits for 8
mark compute as 9
h2d waits for 9
h2d copies (256,)
mark h2d as 10
compute waits for 10
mark compute as 11
h2d waits for 11
h2d copies (192,)
mark h2d as 12
layer 3 was replayed
compute waits for 12
mark compute as 13
h2d waits for 13
h2d copies (128,)
mark h2d as 14
layer 2 was replayed
compute waits for 14
mark compute as 15
h2d waits for 15
h2d copies (64,)
mark h2d as 16
layer 1 was replayed
compute waits for 16
layer 0 was replayed"""
    )


def test_a_copy_starts_with_the_next_kept_tensor_after_its_own_event():
    diary = Diary()
    rig = Rig(diary)
    rig.layer((1, 64), (2, 64), (3, 64))
    assert diary.lines == [
        "mark compute as 1",
        "d2h waits for 1",
        "d2h copies (64,)",
        "mark compute as 2",
        "d2h waits for 2",
        "d2h copies (128,)",
        "mark compute as 3",
        "d2h waits for 3",
        "d2h copies (192,)",
        "mark d2h as 4",
    ]


def test_device_memory_is_let_go_when_the_layer_after_the_next_begins(rig):
    alive = []
    frames = []
    for index in range(5):
        tensor = torch.full((8, 64), float(index))
        alive.append(weakref.ref(tensor.untyped_storage()))
        frame = rig.begin([tensor])
        rig.engine.keep(frame, frame.layout.kept[0], tensor)
        del tensor
        rig.streams.mark(D2H).done.wait(30)
        gone = [ref() is None for ref in alive]
        assert gone == [True] * max(0, index - 1) + [False] * min(2, index + 1)
        rig.engine.end(frame)
        frames.append(frame)
    assert [frame.state for frame in frames] == ["away", "away", "away", "swapping", "swapping"]


def test_a_frame_that_is_not_to_come_back_ahead_takes_no_memory_before_it_is_wanted(rig):
    frames = [rig.layer_of([torch.full((64,), float(number))], ahead=number == 1) for number in range(4)]
    for number in (3, 2, 1, 0):
        assert rig.replay(frames[number])[0][0] == number
        assert [bool(frame.slots) for frame in frames[:number]] == [below == 1 and number == 2 for below in range(number)]
    assert (rig.engine.traffic.frames_on_demand, rig.engine.traffic.frames_prefetched) == (3, 1)
    rig.engine.close()


@pytest.mark.parametrize("streams", [ThreadStreams, lambda: DelayedStreams(5)], ids=["prompt", "late"])
def test_what_comes_back_is_what_left(streams):
    rig = Rig(streams())
    tensors = [
        torch.randn(9, 16),
        torch.randn(2, 5, 4, 8).transpose(1, 2),
        torch.randint(0, 9, (64,)),
        torch.randn(33).bfloat16(),
    ]
    frames = [rig.layer_of([tensor + index for tensor in tensors]) for index in range(4)]
    for index in reversed(range(4)):
        for back, tensor in zip(rig.replay(frames[index]), tensors, strict=True):
            assert torch.equal(back, tensor + index)
            assert back.dtype == tensor.dtype
    traffic = rig.engine.traffic
    assert (traffic.frames, traffic.frames_on_demand, traffic.frames_prefetched) == (4, 1, 3)
    assert traffic.bytes_to_host == traffic.bytes_from_host == 4 * sum(tensor.nbytes for tensor in tensors)
    rig.engine.close()


def test_only_stored_rows_travel(rig):
    frame = rig.layer_of([torch.arange(80.0).view(8, 10)], rows=3)
    (back,) = rig.replay(frame)
    assert torch.equal(back[:3], torch.arange(30.0).view(3, 10))
    assert rig.engine.traffic.bytes_to_host == 120


def test_a_frame_that_keeps_nothing(rig):
    frame = rig.layer_of([])
    assert rig.slab.used == 0
    assert rig.replay(frame) == []


def test_resident_frames_never_travel(rig):
    tensor = torch.randn(8, 64)
    frame = rig.layer_of([tensor], resident=True)
    assert rig.slab.used == 0
    for _ in range(3):
        rig.engine.bring_back(frame)
        assert frame.tensor(frame.layout.kept[0]).data_ptr() == tensor.data_ptr()
        rig.engine.replayed(frame)
    assert rig.engine.traffic.bytes_to_host == rig.engine.traffic.bytes_from_host == 0


def test_reloads_are_issued_ahead_across_resident_frames(rig):
    frames = [rig.layer(value=index, resident=index in (1, 3)) for index in range(5)]
    for index in reversed(range(5)):
        assert rig.replay(frames[index])[0].unique().tolist() == [index]
    assert rig.engine.traffic.frames_on_demand == 1
    assert rig.engine.traffic.frames_prefetched == 2


def test_what_backward_has_passed_is_not_reloaded_ahead(rig):
    """Two graphs, the older one first: below its oldest frame, the younger one finds frames that were replayed."""
    frames = [rig.layer() for _ in range(4)]
    for index in (1, 0, 3, 2):
        rig.replay(frames[index])
    assert (rig.engine.traffic.frames_on_demand, rig.engine.traffic.frames_prefetched) == (2, 2)


def test_at_most_two_reload_buffers_are_alive(rig):
    frames = [rig.layer() for _ in range(6)]
    for frame in reversed(frames):
        rig.replay(frame)
        assert sum(bool(other.slots) for other in frames) <= 2


# ---- lifetimes


def test_a_frame_can_come_back_as_often_as_its_graph_lives(rig):
    frames = [rig.layer(value=index) for index in range(3)]
    for _ in range(3):
        for index in reversed(range(3)):
            assert rig.replay(frames[index])[0].unique().tolist() == [index]
    assert rig.engine.traffic.frames_prefetched == 6
    assert rig.slab.used == 3 * PAGE
    frames.clear()
    rig.layer()
    assert rig.slab.used == PAGE


@pytest.mark.parametrize("replays", [0, 1, 2])
def test_a_dropped_graph_gives_its_host_blocks_back(rig, replays):
    frames = [rig.layer() for _ in range(4)]
    for frame in reversed(frames[4 - replays :]):
        rig.replay(frame)
    frame = None
    frames.clear()
    for _ in range(5):
        rig.layer()
        assert rig.slab.used <= 2 * PAGE
    assert rig.slab.size == 4 * PAGE


def test_steps_leave_nothing_behind(rig):
    for _ in range(20):
        frames = [rig.layer() for _ in range(3)]
        while frames:
            rig.replay(frames.pop())
    last = rig.layer()
    assert [ref() for ref in rig.engine._stack] == [last]
    assert len(rig.engine._leaving) <= 1
    assert not rig.engine._graves
    assert rig.slab.size == 3 * PAGE


def test_an_aborted_frame_leaves_nothing_behind(rig):
    tensor = torch.ones(8, 64)
    gone = weakref.ref(tensor.untyped_storage())
    frame = rig.begin([tensor, tensor])
    rig.engine.keep(frame, frame.layout.kept[0], tensor)
    rig.engine.keep(frame, frame.layout.kept[1], tensor)
    rig.engine.abort(frame)
    assert rig.slab.used == 0
    del tensor
    rig.streams.mark(D2H).done.wait(30)
    assert gone() is None
    assert frame.state == "done"


@pytest.mark.parametrize("where", ["just recorded", "away", "on its way back", "replayed"])
def test_a_frame_may_die_on_a_copy_thread(where):
    """Garbage collection runs wherever it likes, also where waiting for a copy would be waiting for itself."""
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


def test_a_change_of_another_tensor_costs_nothing(rig):
    tensor, other = torch.ones(8, 64), torch.ones(8, 64)
    frame = rig.begin([tensor])
    rig.engine.keep(frame, frame.layout.kept[0], tensor)
    rig.engine.about_to_change(frame, other)
    assert frame.device[0].data_ptr() == tensor.data_ptr()
    rig.engine.end(frame)


def test_a_change_that_nobody_announced_raises_each_time(rig):
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


def test_a_frame_cannot_be_replayed_while_its_layer_runs(rig):
    for resident in (False, True):
        frame = rig.begin([torch.ones(8, 64)], resident, name="model.layers.3")
        with pytest.raises(MemoError, match=r"model\.layers\.3"):
            rig.engine.bring_back(frame)
        rig.engine.abort(frame)


def test_wrong_steps_raise_with_the_frames_name(rig):
    frame = rig.layer(name="model.layers.3")
    rig.engine.bring_back(frame)
    for step in (rig.engine.end, rig.engine.bring_back):
        with pytest.raises(MemoError, match=r"model\.layers\.3"):
            step(frame)
    rig.engine.replayed(frame)
    for step in (rig.engine.end, rig.engine.replayed, lambda frame: frame.tensor(frame.layout.kept[0])):
        with pytest.raises(MemoError, match=r"model\.layers\.3"):
            step(frame)


def test_wrong_steps_of_a_resident_frame_raise_with_its_name(rig):
    frame = rig.layer(name="model.layers.3", resident=True)
    with pytest.raises(MemoError, match=r"model\.layers\.3"):
        rig.engine.end(frame)
    rig.engine.bring_back(frame)
    rig.engine.replayed(frame)
    for step in (rig.engine.replayed, lambda frame: frame.tensor(frame.layout.kept[0])):
        with pytest.raises(MemoError, match=r"model\.layers\.3"):
            step(frame)


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


def test_a_frame_that_dies_while_the_engine_closes():
    frames: list[Frame] = []

    class Dying(ThreadStreams):
        def wait(self, stream, event) -> None:
            super().wait(stream, event)
            frames.clear()  # as the garbage collector may, at any allocation

    rig = Rig(Dying())
    frames += [rig.layer() for _ in range(2)]
    rig.engine.close()
    assert (rig.slab.used, rig.slab.size) == (0, 0)


def test_a_frame_that_dies_between_two_steps_of_closing(monkeypatch):
    rig = Rig()
    frames = [rig.layer() for _ in range(3)]
    give = rig.slab.give

    def give_and_kill(block) -> None:
        give(block)
        frames.clear()

    monkeypatch.setattr(rig.slab, "give", give_and_kill)
    rig.engine.close()
    assert (rig.slab.used, rig.slab.size) == (0, 0)


def test_closing_after_a_copy_failed_raises_and_still_ends_the_threads():
    rig = Rig()
    frame = rig.layer()
    rig.streams.copy(D2H, torch.zeros(3), torch.zeros(4))
    with pytest.raises(MemoError, match="a copy on the d2h stream failed"):
        rig.engine.close()
    assert not any(thread.is_alive() for thread in rig.streams._threads)
    rig.engine.close()
    del frame
