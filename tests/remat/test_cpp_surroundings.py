"""C++ among other people's modes, hooks, transforms and threads: as Python follows, or torch's checkpoint does it."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

import ds_memo
from ds_memo.remat import checkpoint, follower
from tests.faults import put_in
from tests.models import Batch, Outcome, assert_same, gradients, step
from tests.processes import python
from tests.remat.situations import WAYS, Lines, toy
from tests.remat.test_in_cpp import compare_ways, library, ops_in_cpp  # noqa: F401  a fixture

pytestmark = [pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning"), pytest.mark.usefixtures("library")]
HALF = {"alpha": 0.5, "resident_layers": 1}
Step = Callable[[nn.Module, int], Outcome]


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """Only torch functions see this class."""


def given(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = Batch.random(2, 17, seed=number)
    torch.manual_seed(number)
    return batch.embeds.clone().requires_grad_(), batch.labels


def outcome(model: nn.Module, loss: torch.Tensor, x: torch.Tensor, **more: torch.Tensor) -> Outcome:
    return Outcome(loss.detach(), {**gradients(model), "x": x.grad, **more})


def under(*contexts: Callable[[], Any], backward: bool = True) -> Step:
    """Return a step whose forward, and its backward as well, runs inside of contexts."""

    def run(model: nn.Module, number: int) -> Outcome:
        x, labels = given(number)
        for context in contexts:
            with context():
                loss = model(x, labels).loss
                if backward:
                    loss.backward()
        if not backward:
            loss.backward()
        return outcome(model, loss, x)

    return run


def backward_under_another_device(model: nn.Module, number: int) -> Outcome:
    x, labels = given(number)
    loss = model(x, labels).loss
    with torch.device("meta"):
        loss.backward()
    return outcome(model, loss, x)


def in_another_thread(model: nn.Module, number: int) -> Outcome:
    x, labels = given(number)
    loss = model(x, labels).loss
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return outcome(model, loss, x)


def of_marked_tensors(model: nn.Module, number: int) -> Outcome:
    x, labels = given(number)
    x = x.detach().as_subclass(Marked).requires_grad_()
    loss = model(x, labels).loss
    loss.backward()
    return outcome(model, loss, x)


def kept_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor)


STEPS = {
    "a dispatch mode": under(Counts),
    "a dispatch mode in the forward": under(Counts, backward=False),
    "FlopCounterMode": under(lambda: FlopCounterMode(display=False)),
    "a profiler": under(torch.profiler.profile),
    "anomaly detection": under(lambda: torch.autograd.set_detect_anomaly(True)),
    "hooks": under(kept_hooks, backward=False),
    "save_on_cpu": under(save_on_cpu, backward=False),
    "another thread": in_another_thread,
    "tensors of a class": of_marked_tensors,
    "another device in the backward": backward_under_another_device,
}


@pytest.mark.parametrize("way", ["mixed", "tiles"])
@pytest.mark.parametrize("name", STEPS)
def test_around(name: str, way: str) -> None:
    compare_ways(toy(layers=2), STEPS[name], HALF if way == "mixed" else WAYS[way])


BY_TORCH = {"a default device": lambda: torch.device("cpu"), "a mode of torch functions": Calls}


@pytest.mark.parametrize("name", BY_TORCH)
def test_what_torchs_checkpoint_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone knows these modes. Ops are followed in C++ all the same."""
    calls: list[Any] = []
    put_in(monkeypatch, checkpoint, "run_by_cpp", lambda right, *args: pytest.fail("C++'s checkpoint took it"))
    put_in(monkeypatch, checkpoint, "run_by_torch", lambda right, *args: (calls.append(args), right(*args))[1])
    compare_ways(toy(layers=2), under(BY_TORCH[name], backward=False), HALF)
    assert calls


# ---- inside layers


class Inside(Lines):
    inside: Any
    """Calls a function of the layer's and its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c(F.gelu(self.b(x) * type(self).inside(self, x)))


def under_a_mode(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    with Counts():
        return F.silu(layer.a(x))


def under_no_mode(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes(), torch.no_grad():
        return layer.a(x).sigmoid()


def in_inference_mode(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        mean = float(layer.a(x.detach()).mean())
    return x * mean


def under_hooks(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    with kept_hooks():
        return F.silu(layer.a(x))


def in_autocast(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(layer.a(x)).float()


def vmapped(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: layer.a(row).tanh())(x)


def forward_differentiated(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    product = lambda x: (x @ layer.a.weight.T).tanh()  # noqa: E731  # F.linear is DeepSpeed's where ZeRO-3 ran in the process
    out, tangent = torch.func.jvp(product, (x,), (torch.ones_like(x),))
    return out + tangent


def from_another_thread(layer: Inside, x: torch.Tensor) -> torch.Tensor:
    """Modes are of a thread: none sees these ops."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(layer.a(x.detach()).detach().tanh()))
    thread.start()
    thread.join()
    return found[0]


INSIDE = [
    under_a_mode, under_no_mode, in_inference_mode, under_hooks, in_autocast, vmapped, forward_differentiated, from_another_thread
]  # fmt: skip


@pytest.mark.parametrize("inside", INSIDE)
def test_inside(inside: Any) -> None:
    block = type(inside.__name__, (Inside,), {"inside": inside})
    model, batch = toy(block, layers=2), Batch.random(2, 17)
    log = compare_ways(model, lambda model, _: step(model, batch), HALF)
    assert_same(log.outcomes[-1], step(model, batch))


# ---- threads, processes


def test_two_models_in_two_threads() -> None:
    models = [toy(layers=2), toy(layers=3)]
    wants = [step(copy.deepcopy(model), Batch.random(2, 17)) for model in models]
    handles = [ds_memo.attach(model, {**HALF, "host_memory_gib": 0.01 * (1 + number)}) for number, model in enumerate(models)]
    got: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            for _ in range(8):
                x = Batch.random(2, 17).embeds.requires_grad_()
                models[number](x, Batch.random(2, 17).labels).loss.backward()
                got[number] = {**gradients(models[number]), "the input": x.grad}
        except BaseException as error:
            got[number] = error

    before = ops_in_cpp()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ops_in_cpp() > before
    for number, want in enumerate(wants):
        assert isinstance(got[number], dict), got[number]
        assert_same(Outcome(want.loss, got[number], want.generator), want)
    for handle in handles:
        handle.detach()


PROCESS = """
import os, sys
import ds_memo, torch
from tests.models import Batch, step
from tests.remat.situations import toy
model, batch = toy(layers=2), Batch.random(2, 17)
handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2, "plan": {"enabled": False}})
for _ in range(2):
    step(model, batch)
loss = model(batch.embeds, batch.labels).loss
host = handle.report()["host"]["record_and_replay"]
assert host["way"] == "C++" and host["ops_in_cpp"] > 0
"""
ENDS = {
    "with a graph alive": "print('ends')",
    "inside a layer": "model.blocks[1].down.register_forward_hook(lambda *_: (print('ends'), sys.exit(0)))\nstep(model, batch)",
    "in a child": """
if (child := os.fork()) == 0:
    stock = step(toy(layers=2), batch)
    loss.backward()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
loss.backward()
print('ends')
""",
}


@pytest.mark.processes
@pytest.mark.parametrize("how", ENDS)
def test_the_process_ends(how: str) -> None:
    done = python("-c", PROCESS + ENDS[how], DS_ACCELERATOR="cpu")
    assert done.returncode == 0 and done.stdout.strip().endswith("ends"), done.stderr


# ---- nothing stays


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Tiny.fails and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return x + self.b(torch.tanh(self.a(x))).sigmoid()

    fails = False


class Tinies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tiny() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def backward(model: Tinies, loss: torch.Tensor) -> None:
    loss.backward()


def dropped(model: Tinies, loss: torch.Tensor) -> None:
    pass


def in_part(model: Tinies, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, model.blocks[3].a.weight)


def retained(model: Tinies, loss: torch.Tensor) -> None:
    for _ in range(3):
        loss.backward(retain_graph=True)


def failing(model: Tinies, loss: torch.Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Tiny, "fails", True)
        loss.backward(retain_graph=True)


@contextmanager
def no_garbage_is_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("residents", [0, 4])
@pytest.mark.parametrize("end, steps", [(backward, 60), (dropped, 60), (in_part, 60), (retained, 30), (failing, 60)])
def test_nothing_stays(end: Callable[[Tinies, torch.Tensor], None], steps: int, residents: int, frames: Any) -> None:
    alive = run_tinies(end, steps, residents)
    assert not frames and max(alive[1:]) - alive[0] <= 64  # objects of the garbage collector; a step makes hundreds


@pytest.mark.slow
def test_ten_thousand_calls_take_no_memory(frames: Any) -> None:
    """A frame, a checkpoint and a follower have 2 kB, of each call 20 MB."""
    run_tinies(backward, 50, 4)
    before = resident_bytes()
    run_tinies(backward, 2500, 4)
    assert not frames and resident_bytes() - before < 4e6


@pytest.mark.slow
def test_compiled_autograd() -> None:
    """Its graph breaks at each saved tensor, as with torch's checkpoint. The layers run again in C++."""
    model, x = Tinies(), torch.ones(3, 8)
    stock = copy.deepcopy(model)
    stock(x).backward()
    want, before = gradients(stock), ops_in_cpp()
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2, "plan": {"enabled": False}})
    for _ in range(2):
        model(x).backward()
    model.zero_grad()
    loss, in_forward = model(x), ops_in_cpp()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert ops_in_cpp() > in_forward > before
    assert all(torch.equal(gradient, want[name]) for name, gradient in gradients(model).items())
    handle.detach()


def run_tinies(end: Callable[[Tinies, torch.Tensor], None], steps: int, residents: int) -> list[int]:
    """Return the number of the garbage collector's objects after the first half of the steps, and after each of the others."""
    model = Tinies()
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": residents, "plan": {"enabled": False}})
    alive, before = [], ops_in_cpp()
    with no_garbage_is_collected():
        for number in range(steps):
            model.zero_grad()
            end(model, model(torch.ones(3, 8, requires_grad=True)))
            if number >= steps // 2:
                alive.append(len(gc.get_objects()))
    handle.detach()
    assert ops_in_cpp() > before and follower.way()["way"] == "C++"
    return alive
