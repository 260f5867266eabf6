"""The device refuses memory, at every request of a step in turn: a clean error, nothing is left, training goes on with less.

What is refused: every reload buffer, and the output of every GEMM wherever it is computed: in a layer's forward, in a replay, in
a backward. (The host's refusals are in test_tuner.py, what the kernel itself refuses in test_host_limits.py.)
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

import ds_memo
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, Batch, Outcome, assert_same, build, step

BATCH = Batch.random(2, 24)
aten = torch.ops.aten
GEMMS = {aten.mm.default, aten.addmm.default, aten.mm.out, aten.addmm.out}
SAID = "CUDA out of memory. Tried to allocate 20.00 GiB (injected)"


class Refusing(TorchDispatchMode):
    """Refuses the n-th request as CUDA does; counts them all."""

    def __init__(self, nth: int | None, buffers_only: bool) -> None:
        super().__init__()
        self.count = 0
        self._nth = nth
        self._buffers_only = buffers_only

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_buffer = func is aten.empty.memory_format and kwargs.get("dtype") is torch.uint8
        if is_buffer or (func in GEMMS and not self._buffers_only):
            if self.count == self._nth:
                self.count += 1
                raise torch.OutOfMemoryError(SAID)
            self.count += 1
        return func(*args, **kwargs)


def attached(model: nn.Module, alpha: float, residents: int = 0) -> Any:
    return ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents, "plan": {"enabled": False}})


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def refused(model: nn.Module, nth: int, buffers_only: bool, twice: bool = False) -> tuple[type, str]:
    """What the step said; the error itself holds whatever its traceback passes through."""
    try:
        with Refusing(nth, buffers_only):
            run(model, twice)
    except (ds_memo.MemoError, torch.OutOfMemoryError) as error:
        return type(error), str(error)
    finally:
        model.zero_grad()
    pytest.fail(f"request {nth} was not refused")


def run(model: nn.Module, twice: bool = False) -> Outcome | None:
    if not twice:
        return step(model, BATCH)
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return None


def requests(alpha: float, residents: int, analysed: bool, buffers_only: bool, twice: bool = False) -> int:
    """In one step."""
    handle = attached(model := build("llama"), alpha, residents)
    if analysed:
        step(model, BATCH)
    with Refusing(None, buffers_only) as counting:
        run(model, twice)
    handle.detach()
    return counting.count


def assert_clean(handle: Any, model: nn.Module, before: tuple[int, int]) -> None:
    gc.collect()
    engine, slab = inside(handle).engine, inside(handle).slab
    engine.free_failed_graphs()  # as the next forward does
    assert not [found for found in gc.get_objects() if isinstance(found, Frame)], "frames"
    engine.drain()
    assert (engine._unsent, [ref() for ref in engine._leaving]) == (None, [None] * len(engine._leaving)), "copies"
    assert slab.used == engine.traffic.blocks_lost == 0 and slab.size == sum(free.nbytes for free in slab.pool._free_ranges), (
        "host blocks"
    )
    assert (threading.active_count(), hooks(model)) == before, "threads or hooks"
    assert _len_torch_dispatch_stack() == 0 and torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "modes"


@pytest.fixture(scope="module")
def stock() -> Iterator[Outcome]:
    yield step(build("llama"), BATCH)


def check(
    nth: int, stock: Outcome, alpha: float, residents: int, analysed: bool, buffers_only: bool, twice: bool
) -> tuple[type, str]:
    """One refusal, the next step as it was, and one with a smaller alpha."""
    model = build("llama")
    plain, threads = hooks(model), threading.active_count()
    handle = attached(model, alpha, residents)
    before = threading.active_count(), hooks(model)
    if analysed:
        step(model, BATCH)
    said = refused(model, nth, buffers_only, twice)
    assert_clean(handle, model, before)
    assert_same(step(model, BATCH), stock)
    handle.detach()
    assert inside(handle).slab.size == 0 and (threading.active_count(), hooks(model)) == (threads, plain)
    less = attached(model, alpha / 2, residents)
    assert_same(step(model, BATCH), stock)
    less.detach()
    return said


@pytest.mark.parametrize("alpha, twice", everyday([(0.0, True), (0.5, False), (1.0, False)], [(0.5, False)]))
def test_every_reload_buffer(stock: Outcome, alpha: float, twice: bool) -> None:
    """The first is asked for by the backward, each of the others by the replay of the layer above."""
    number = requests(alpha, 0, analysed=True, buffers_only=True, twice=twice)
    assert number == LAYERS * (1 + twice)
    for nth in range(number):
        kind, said = check(nth, stock, alpha, 0, analysed=True, buffers_only=True, twice=twice)
        assert kind is ds_memo.MemoError
        assert SAID in said  # what those look for who lower a batch by themselves
        wanted = LAYERS - 1 - nth % LAYERS
        assert f"device memory: frame model.layers.{wanted} needs a buffer of " in said


@pytest.mark.slow
@pytest.mark.parametrize("analysed", [False, True], ids=["first step", "later step"])
def test_every_gemm(stock: Outcome, analysed: bool) -> None:
    """In forward, replay and backward, one in four: the error is PyTorch's own, unless a buffer is refused."""
    number = requests(0.5, 1, analysed, buffers_only=False)
    assert number > LAYERS * 7 * 3  # seven products a layer, two more of each in its backward, and the replays
    for nth in range(0, number, 4):  # the other calls of a layer are like its neighbours
        kind, said = check(nth, stock, 0.5, 1, analysed, buffers_only=False, twice=False)
        assert SAID in said and kind in (torch.OutOfMemoryError, ds_memo.MemoError)


@pytest.mark.slow
def test_the_host_is_free_for_the_next_step_after_a_failed_backward(stock: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it holds one step and no more; autograd keeps graphs that raised for a while."""
    handle = attached(model := build("llama"), 1.0)
    step(model, BATCH)
    inside(handle).slab.budget.nbytes = inside(handle).slab.size
    backward = range(requests(1.0, 0, analysed=True, buffers_only=False))[LAYERS * 7 :: 3]
    for nth in backward:
        refused(model, nth, buffers_only=False)
        assert_same(step(model, BATCH), stock)
    monkeypatch.setattr(SwapEngine, "free_failed_graphs", lambda engine: None)  # the control
    with pytest.raises(ds_memo.MemoError, match="host memory: "):
        for nth in backward:
            refused(model, nth, buffers_only=False)
            step(model, BATCH)
    monkeypatch.undo()
    gc.collect()
    step(model, BATCH)
    handle.detach()


def test_a_leaked_block_is_noticed(stock: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frame, "free_block", lambda frame, slab: setattr(frame, "block", None))
    with pytest.raises(AssertionError, match="host blocks"):
        check(2, stock, 0.5, 0, analysed=True, buffers_only=False, twice=False)


def test_a_leaked_frame_is_noticed(stock: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, kept = SwapEngine.begin, []
    monkeypatch.setattr(SwapEngine, "begin", lambda *args: kept.append(begin(*args)) or kept[-1])
    with pytest.raises(AssertionError, match="frames"):
        check(2, stock, 0.5, 0, analysed=True, buffers_only=False, twice=False)


def said_of_memory(handle: Any) -> list[str]:
    return [warning for warning in handle.report()["warnings"] if "ran out of device memory" in warning]


@pytest.mark.parametrize("given, advice", [({}, "that is smaller"), ({"device_memory_gib": 0.5}, "of less than 0.5")])
def test_a_forward_that_runs_out_says_what_to_do(given: dict[str, float], advice: str) -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}, **given})
    with pytest.warns(ds_memo.MemoWarning, match=f"ran out of device memory: .* A memo.device_memory_gib {advice} leaves"):
        refused(model, 3, buffers_only=False)
    assert len(said_of_memory(handle)) == 1
    handle.detach()
