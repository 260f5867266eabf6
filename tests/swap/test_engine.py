"""The schedule itself, driven by hand; and what happens when things come in an order nobody foresaw."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from delayed import DelayedStreams
from ordered import Immediate, OrderedStreams
from rig import Block as Layer
from rig import Stack, attached, gradients
from torch import nn
from torch.nn import functional as F

from ds_memo.errors import MemoError
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Layout
from ds_memo.swap.slab import PAGE, HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams

CPU = torch.device("cpu")
SWAP = {"alpha": 0.5, "resident_layers": 0}


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
        self.slab = HostSlab(self.pages * PAGE, pinned=False)
        if hasattr(self.streams, "watch"):
            self.streams.watch(self.slab)
        self.engine = SwapEngine(self.streams, self.slab, CPU)

    def begin(self, tensors: list[torch.Tensor], resident: bool = False, rows: int | None = None, name: str = "x") -> Frame:
        frame = self.engine.begin(name, resident)
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
d2h copies (1, 64)
mark d2h as 2
layer 0 has run
mark compute as 3
d2h waits for 3
d2h copies (2, 64)
mark d2h as 4
layer 1 has run
compute waits for 2
mark compute as 5
d2h waits for 5
d2h copies (3, 64)
mark d2h as 6
layer 2 has run
compute waits for 4
mark compute as 7
d2h waits for 7
d2h copies (4, 64)
mark d2h as 8
layer 3 has run
compute waits for 6
compute waits for 8
mark compute as 9
h2d waits for 9
h2d copies (4, 64)
mark h2d as 10
compute waits for 10
mark compute as 11
h2d waits for 11
h2d copies (3, 64)
mark h2d as 12
layer 3 was replayed
compute waits for 12
mark compute as 13
h2d waits for 13
h2d copies (2, 64)
mark h2d as 14
layer 2 was replayed
compute waits for 14
mark compute as 15
h2d waits for 15
h2d copies (1, 64)
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
        "d2h copies (1, 64)",
        "mark compute as 2",
        "d2h waits for 2",
        "d2h copies (2, 64)",
        "mark compute as 3",
        "d2h waits for 3",
        "d2h copies (3, 64)",
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


def test_collecting_on_both_copy_threads_all_the_time_changes_nothing():
    streams = ThreadStreams()
    model = Stack(3)
    x = torch.randn(1, 8, 16)
    with attached(model, streams, SWAP):
        for _ in range(4):
            for stream in (D2H, H2D):
                streams._queues[stream].put((gc.collect,))
            loss = model(x)
            loss.cycle = [loss]
            streams._queues[D2H].put((gc.collect,))
            loss.backward()
            loss = None
    gc.collect()


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


# ---- whole models


class Mlp(nn.Module):
    """Layers whose every op can be differentiated twice."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def differences(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], tolerance: float = 2e-6) -> list[str]:
    assert ours.keys() == stock.keys()
    return [name for name, g in stock.items() if (ours[name] - g).norm() > tolerance * max(g.norm(), 1e-4)]


def with_and_without(make, steps, config=SWAP) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    stock = make()
    steps(stock)
    model = make()
    checker = OrderedStreams()
    with checker, attached(model, checker, config):
        steps(model)
    checker.verify()
    return gradients(model), gradients(stock)


BATCHES = [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def in_reverse(model: nn.Module) -> None:
    first, second, third = model(BATCHES[0]), model(BATCHES[1]), model(BATCHES[2])
    third.backward()
    first.backward()
    second.backward()


def interleaved(model: nn.Module) -> None:
    """Backwards of two graphs, each in parts."""
    first, second = model(BATCHES[0]), model(BATCHES[1])
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for depth in (3, 1):
        for loss in (first, second):
            torch.autograd.grad(loss, list(layers[depth].parameters()), retain_graph=True, allow_unused=True)
    (first + second).backward()


def shared(model: nn.Module) -> None:
    """One backward through two graphs at once: autograd goes by sequence number, youngest first."""
    (model(BATCHES[0]) * 2 + model(BATCHES[1])).backward()


def chained(model: nn.Module) -> None:
    """The same layers twice in one graph."""
    x = BATCHES[0].clone().requires_grad_()
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for _ in range(2):
        for layer in layers:
            x = layer(x)
    x.square().mean().backward()


def retained_twice(model: nn.Module) -> None:
    loss = model(BATCHES[0])
    loss.backward(retain_graph=True)
    model(BATCHES[1]).backward()
    loss.backward(retain_graph=True)
    loss.backward()


def forward_between_parts(model: nn.Module) -> None:
    """A reload is under way when the next forward begins, and is asked for much later."""
    loss = model(BATCHES[0])
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    torch.autograd.grad(loss, list(layers[-1].parameters()), retain_graph=True)
    other = model(BATCHES[1])
    loss.backward()
    other.backward()


def forward_inside_backward(model: nn.Module) -> None:
    """A hook on a gradient runs the model again, forward and backward, in the middle of a backward."""
    x = BATCHES[0].clone().requires_grad_()
    done = []

    def again(grad: torch.Tensor) -> None:
        if not done:
            done.append(True)
            with torch.enable_grad():
                model(BATCHES[1]).backward()

    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    hook = layers[1].register_forward_hook(lambda module, args, out: out.register_hook(again) and None)
    loss = model(x)
    hook.remove()
    loss.backward()


def forward_inside_forward(model: nn.Module) -> None:
    """A hook between two layers runs the model forward and backward in the middle of a forward."""
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    done = []

    def again(module: nn.Module, args: tuple) -> None:
        if not done:
            done.append(True)
            model(BATCHES[1]).backward()

    hook = layers[2].register_forward_pre_hook(again)
    loss = model(BATCHES[0])
    hook.remove()
    loss.backward()


def raise_in_backward(model: nn.Module) -> None:
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    hook = layers[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    loss = model(BATCHES[0])
    hook.remove()
    with suppress(ArithmeticError):
        loss.backward()
    del loss
    model.zero_grad()
    model(BATCHES[1]).backward()


def frozen_below(model: nn.Module) -> None:
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    model(BATCHES[0]).backward()
    layers[1].requires_grad_(True)
    model(BATCHES[1]).backward()


def frozen_in_the_middle(model: nn.Module) -> None:
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers[2].requires_grad_(False)
    model(BATCHES[0]).backward()


def skipped_layers(model: nn.Module) -> None:
    """Layer drop: another set of layers runs each time."""
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for batch, chosen in zip(BATCHES, [(0, 2, 3), (1,), (3, 0), (0, 1, 2, 3)], strict=False):
        x = batch
        for index in chosen:
            x = layers[index](x)
        x.square().mean().backward()


def branches(model: nn.Module) -> None:
    """Two layers read the same tensor, and their outputs meet: frames that are no chain."""
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    x = layers[0](BATCHES[0])
    (layers[3](layers[1](x)) * layers[2](x)).mean().backward()


STORIES = [
    in_reverse,
    interleaved,
    shared,
    chained,
    retained_twice,
    forward_between_parts,
    forward_inside_backward,
    forward_inside_forward,
    raise_in_backward,
    frozen_below,
    frozen_in_the_middle,
    skipped_layers,
    branches,
]


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("resident", [0, 1, 2, 4])
@pytest.mark.parametrize("make", [lambda: Stack(4), Mlp], ids=["attention", "mlp"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_unforeseen_orders(story, make, resident):
    wrong = differences(*with_and_without(make, story, SWAP | {"resident_layers": resident}))
    assert not wrong


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
def test_gradients_of_gradients():
    def penalty(model: nn.Module) -> None:
        x = BATCHES[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
        grad.norm().backward()

    assert not differences(*with_and_without(Mlp, penalty), tolerance=1e-5)


class AsksForAGradient(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(x))
        (slope,) = torch.autograd.grad(y.sum(), y, retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), self.up.weight, retain_graph=True)
        return x + self.down(y) + slope.mean()


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("resident", [0, 2])
def test_a_backward_inside_a_layer_is_refused_clearly(resident):
    model = Stack(2)
    model.blocks = nn.ModuleList(AsksForAGradient(16) for _ in range(2))
    with (
        attached(model, ThreadStreams(), SWAP | {"resident_layers": resident}),
        pytest.raises(MemoError, match=r"blocks\.0 runs a backward of its own"),
    ):
        model(BATCHES[0])


def test_too_little_host_memory_in_the_middle_leaves_the_rest_usable():
    model, stock = Stack(4), Stack(4)
    x = torch.randn(2, 32, 16)
    with attached(model, ThreadStreams(), SWAP) as memo:
        model(x).backward()
        memo.slab.budget = int(memo.slab.peak_used * 1.6)
        model.zero_grad()
        first = model(x)
        with pytest.raises(MemoError, match="run fewer forwards before a backward"):
            model(x)
        first.backward()
        del first
        for _ in range(2):
            model(x).backward()
        assert memo.slab.used <= memo.slab.budget
    for _ in range(3):
        stock(x).backward()
    assert not differences(gradients(model), gradients(stock))


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, None)])
def test_autocast_to_another_type_each_step(kinds):
    def steps(model: nn.Module) -> None:
        for kind in kinds * 2:
            with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
                loss = model(BATCHES[0])
            loss.backward()

    assert not differences(*with_and_without(lambda: Stack(4), steps, SWAP | {"resident_layers": 1}))


class OtherHeads(Layer):
    """Attention of another shape each time, between products that do not change."""

    heads = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_attention_of_another_shape_leaves_the_recipe(resident):
    def make() -> nn.Module:
        model = Stack(2)
        torch.manual_seed(5)
        model.blocks = nn.ModuleList(OtherHeads(16) for _ in range(2))
        return model

    def steps(model: nn.Module) -> None:
        for heads in (1, 2, 1, 4):
            for block in model.blocks:
                block.heads = heads
            model(BATCHES[0]).backward()

    assert not differences(*with_and_without(make, steps, SWAP | {"resident_layers": resident}))


def test_detaching_while_a_layer_runs_is_refused_and_changes_nothing():
    model, stock = Stack(3), Stack(3)
    with attached(model, ThreadStreams(), SWAP) as memo:
        hook = model.blocks[1].up.register_forward_hook(lambda *_: memo.detach())
        with pytest.raises(MemoError, match="while a layer runs"):
            model(BATCHES[0])
        hook.remove()
        model(BATCHES[0]).backward()
        assert memo.report()["frames"]
    stock(BATCHES[0]).backward()
    assert not differences(gradients(model), gradients(stock))
