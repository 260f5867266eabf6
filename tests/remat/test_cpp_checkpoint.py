"""The C++ checkpoint by itself does what torch.utils.checkpoint does: the same values, runs and errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as torchs
from torch.utils._pytree import tree_leaves

from ds_memo.remat import follower

Run = Callable[..., Any]
Checkpoint = Callable[..., Any]


@pytest.fixture(scope="module")
def library() -> Any:
    return follower.library(lambda _: None) or pytest.skip(str(follower._Followed.why))


def by_torch(run: Run, *args: Any) -> Any:
    return torchs.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def by_cpp(run: Run, *args: Any) -> Any:
    library = follower.library()
    saved = [library.SavedInput(value) for value in args]

    def again(pack: Callable[[torch.Tensor], Any]) -> None:
        values = [value.unpack() for value in saved]
        with torch.enable_grad(), saved_tensors_hooks(pack, library.same):
            run(*values)

    checkpoint = library.checkpoint(again, None)
    with saved_tensors_hooks(library.pack(checkpoint), library.unpack):
        return run(*args)


class Layer(nn.Module):
    """Counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.b(torch.tanh(self.a(x))).exp()

    def grads(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]


def given() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


# ---- situations: each returns values to compare, or raises


def one_backward(checkpoint: Checkpoint) -> Any:
    layer, x = Layer(), given()
    checkpoint(layer, x).sum().backward()
    return layer.runs, x.grad, layer.grads()


def retained(checkpoint: Checkpoint) -> Any:
    layer, x = Layer(), given()
    out = checkpoint(layer, x).sum()
    for left in (2, 1, 0):
        out.backward(retain_graph=bool(left))
    return layer.runs, x.grad, layer.grads()


def freed(checkpoint: Checkpoint) -> Any:
    out = checkpoint(Layer(), given()).sum()
    out.backward()
    out.backward()


def parts(checkpoint: Checkpoint) -> Any:
    """Backwards of parts of the graph, then of all: each runs the layer once."""
    layer, x = Layer(), given()
    out = checkpoint(layer, x).sum()
    found = [torch.autograd.grad(out, part, retain_graph=True) for part in (layer.b.weight, layer.a.bias, x)]
    out.backward()
    return layer.runs, found, x.grad, layer.grads()


def dead_holders(checkpoint: Checkpoint) -> Any:
    """One of two outputs goes, and what it alone saved."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y.exp().cos(), y.tanh() * x

    x = given()
    gone, out = checkpoint(run, x)
    del gone
    out.sum().backward()
    return x.grad


def outside_of_a_backward(checkpoint: Checkpoint) -> Any:
    """Each look at a saved tensor is a run."""
    layer, x = Layer(), given()
    out = checkpoint(layer, x)
    node = out.grad_fn
    looked = [node._saved_other.detach().clone(), node._saved_other.detach().clone(), node._saved_self.detach().clone()]
    runs = layer.runs
    out.sum().backward()
    return runs, layer.runs, looked, x.grad, layer.grads()


def twice_differentiated(checkpoint: Checkpoint) -> Any:
    layer, x = Layer(), given()
    (gradient,) = torch.autograd.grad(checkpoint(layer, x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return layer.runs, gradient.detach(), x.grad, layer.grads()


def backward_inside(checkpoint: Checkpoint, retain: bool = True) -> Any:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y.exp()
        (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=retain)
        return (z if retain else x).cos() * gradient * x.tanh()

    x = given()
    checkpoint(run, x).sum().backward()
    return x.grad


def backward_inside_that_frees(checkpoint: Checkpoint) -> Any:
    return backward_inside(checkpoint, retain=False)


def nested(checkpoint: Checkpoint) -> Any:
    inner, outer, x = Layer(), Layer(), given()
    out = checkpoint(lambda x: outer(by_torch(inner, x.sin()) + 1), x)
    out.sum().backward()
    return inner.runs, outer.runs, x.grad, inner.grads(), outer.grads()


def inside_torchs(checkpoint: Checkpoint) -> Any:
    inner, outer, x = Layer(), Layer(), given()
    by_torch(lambda x: outer(checkpoint(inner, x.sin()) + 1), x).sum().backward()
    return inner.runs, outer.runs, x.grad, inner.grads(), outer.grads()


def a_chain(checkpoint: Checkpoint) -> Any:
    layers, x = [Layer() for _ in range(3)], given()
    out = x
    for layer in layers:
        out = checkpoint(layer, out)
    out.mean().backward()
    return [layer.runs for layer in layers], x.grad, [layer.grads() for layer in layers]


def groups(checkpoint: Checkpoint) -> Any:
    """Two backwards of one group share a run."""
    if not hasattr(torchs, "GraphExecGroup"):
        pytest.skip("this torch has no GraphExecGroup")

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal runs
        runs += 1
        return x.sin().exp(), y.cos().tanh()

    runs, x, y = 0, given(), given()
    first, second = checkpoint(run, x, y)
    with torchs.GraphExecGroup():
        first.sum().backward()
        second.sum().backward()
    return runs, x.grad, y.grad


def overlapping_groups(checkpoint: Checkpoint) -> Any:
    if not hasattr(torchs, "GraphExecGroup"):
        pytest.skip("this torch has no GraphExecGroup")
    out = checkpoint(Layer(), given()).sum()
    with torchs.GraphExecGroup():
        out.backward(retain_graph=True)
        out.backward()


def saves(checkpoint: Checkpoint, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
    runs = []

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return x.sin().exp() if len(runs) == 1 else again(x)

    checkpoint(run, given()).sum().backward()


def saves_fewer(checkpoint: Checkpoint) -> None:
    saves(checkpoint, lambda x: x.sin())


def saves_other_shapes(checkpoint: Checkpoint) -> None:
    saves(checkpoint, lambda x: x.sin()[1:].exp())


def saves_other_dtypes(checkpoint: Checkpoint) -> None:
    saves(checkpoint, lambda x: x.sin().double().exp())


def swallows_the_end(checkpoint: Checkpoint) -> None:
    """The layer goes on behind its last saved tensor."""

    def again(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        try:
            y.exp()
        except Exception:
            return y.cos()

    saves(checkpoint, again)


def fails_once(checkpoint: Checkpoint, error: type[BaseException]) -> Any:
    layer, x, runs = Layer(), given(), []

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        out = layer(x)
        if len(runs) == 2:
            raise error
        return out.exp()

    out = checkpoint(run, x).sum()
    with pytest.raises(error):
        out.backward(retain_graph=True)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    x.grad = None
    layer.zero_grad()
    out.backward()
    return len(runs), x.grad, layer.grads()


def fails_in_its_run(checkpoint: Checkpoint) -> Any:
    return fails_once(checkpoint, ZeroDivisionError)


def interrupted_in_its_run(checkpoint: Checkpoint) -> Any:
    return fails_once(checkpoint, KeyboardInterrupt)


def under_the_users_hooks(checkpoint: Checkpoint) -> Any:
    """Hooks outside see the inputs alone, hooks inside what they stand around."""
    outside, inside, layer, x = [], [], Layer(), given()

    def run(x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda tensor: (inside.append(tensor.shape), tensor * 1)[1], lambda tensor: tensor):
            y = x.sin()
        return layer(y)

    with saved_tensors_hooks(lambda tensor: (outside.append(tensor.shape), tensor)[1], lambda tensor: tensor):
        out = checkpoint(run, x)
    out.sum().backward()
    return [shape for shape in outside if shape.numel()], inside, x.grad, layer.grads()


def saves_its_output(checkpoint: Checkpoint) -> Any:
    """A node that saves its own output holds itself, unless the run gives away a detached one."""
    x = given()
    checkpoint(lambda x: x.exp().tanh().sigmoid(), x).sum().backward()
    return x.grad


def subclasses(checkpoint: Checkpoint) -> Any:
    x = TwoTensor(given().detach(), given().detach() * 2).requires_grad_()
    checkpoint(lambda x: x.sin().exp().tanh(), x).sum().backward()
    return type(x.grad).__name__, x.grad.a, x.grad.b


def a_changed_leaf(checkpoint: Checkpoint) -> Any:
    """A buffer that the layer changes in place by weights."""
    layer, x, buffer = Layer(), given(), torch.ones(4)
    out = checkpoint(lambda x, buffer: layer(x) * buffer.mul(layer.a.bias), x, buffer)
    out.sum().backward()
    return x.grad, layer.grads()


def a_changed_input(checkpoint: Checkpoint) -> Any:
    x = given()
    y = x * 1
    checkpoint(lambda y: (y * 2).sin_().exp(), y).sum().backward()
    return x.grad


def in_another_thread(checkpoint: Checkpoint) -> Any:
    layer, x = Layer(), given()
    out = checkpoint(layer, x).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    return layer.runs, x.grad, layer.grads()


def in_torchscript(checkpoint: Checkpoint) -> Any:
    """TorchScript words the end of a run as a RuntimeError of its own."""
    x = given()
    checkpoint(lambda x: scripted(x.sin()), x).sum().backward()
    return x.grad


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.cos().exp()


def batched(checkpoint: Checkpoint) -> Any:
    layer, x = Layer(), given()
    return torch.autograd.grad(checkpoint(layer, x), x, torch.eye(12).view(12, 3, 4), is_grads_batched=True), layer.runs


def detects_anomalies(checkpoint: Checkpoint) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return one_backward(checkpoint)


SITUATIONS = [
    one_backward, retained, freed, parts, dead_holders, outside_of_a_backward, twice_differentiated, backward_inside,
    backward_inside_that_frees, nested, inside_torchs, a_chain, groups, overlapping_groups,
    saves_fewer, saves_other_shapes, saves_other_dtypes, fails_in_its_run, interrupted_in_its_run, under_the_users_hooks,
    saves_its_output, subclasses, a_changed_leaf, a_changed_input, in_another_thread, batched, detects_anomalies,
]  # fmt: skip


def found_by(situation: Callable[[Checkpoint], Any], checkpoint: Checkpoint) -> Any:
    """Return the values of a situation, or the class of its error and its first words."""
    try:
        return situation(checkpoint)
    except (RuntimeError, AssertionError) as error:
        return type(error), str(error)[:60]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_as_torch(situation: Callable[[Checkpoint], Any], library: Any) -> None:
    got, want = (tree_leaves(found_by(situation, checkpoint)) for checkpoint in (by_cpp, by_torch))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


# ---- where torch's words are others, or it fails


def test_what_is_saved_behind_the_last_is_an_error(library: Any) -> None:
    with pytest.raises(torchs.CheckpointError, match="A different number of tensors was saved"):
        swallows_the_end(by_cpp)


def test_a_group_around_a_backward_inside(library: Any) -> None:
    """The run inside the forward is complete, and has none of what is saved behind it."""
    if not hasattr(torchs, "GraphExecGroup"):
        pytest.skip("this torch has no GraphExecGroup")
    with torchs.GraphExecGroup(), pytest.raises(torchs.CheckpointError, match="was either never recomputed, or already"):
        backward_inside(by_cpp)


def test_the_end_inside_torchscript(library: Any) -> None:
    for _ in range(3):  # it saves others until it is compiled
        scripted(given()).sum().backward()
    x = given()
    scripted(x.sin()).sum().backward()
    assert torch.equal(in_torchscript(by_cpp), x.grad)


# ---- nothing stays


@contextmanager
def without_the_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LEAVING = [one_backward, retained, parts, dead_holders, a_chain, fails_in_its_run, saves_its_output]


@pytest.mark.parametrize("situation", LEAVING)
def test_nothing_stays(situation: Callable[[Checkpoint], Any], library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a run saved nor its function outlives the graph, without a garbage collection."""
    held: list[weakref.ref] = []

    class Marked:
        pass

    def marking(run: Run, *args: Any) -> Any:
        mark = Marked()
        held.append(weakref.ref(mark))

        def marked(*values: Any) -> Any:
            made = (run(*values), mark)[0]
            held.extend(weakref.ref(value) for value in (made if isinstance(made, tuple) else (made,)))
            return made

        return by_cpp(marked, *args)

    with without_the_garbage_collector():
        situation(marking)
        assert len(held) >= 2 and not [ref() for ref in held if ref() is not None]


def test_a_dropped_graph_leaves_nothing(library: Any) -> None:
    def drop() -> weakref.ref:
        layer = Layer()
        by_cpp(layer, given())
        return weakref.ref(layer)

    with without_the_garbage_collector():
        assert drop()() is None
