"""Ctrl-C at any bytecode of a step: nothing that memo has changed stays changed, and the next step is as if it had never been.

Each *place* is a bytecode that a step runs in memo's files, or in PyTorch's and Python's files for contexts. At one place of a
step KeyboardInterrupt is raised. CPython looks for signals at fewer places.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ds_memo
from ds_memo.remat import undo
from ds_memo.remat.modes import inside_a_layer
from ds_memo.swap import host_budget
from tests.everyday import everyday
from tests.inside import inside
from tests.models import Batch, Block, Toy

FILES = (
    str(Path(ds_memo.__file__).parent),
    *(file.__file__ for file in (_python_dispatch, torch.utils.checkpoint, torch.autograd.graph, contextlib)),
)
LEAK = ("PUSH_EXC_INFO", "COPY", "POP_EXCEPT", "NOP")
"""Bytecodes at which CPython looks for no signal. At those of handlers it never frees the frame if a trace function raises; the
NOP of a ``try`` right inside a ``with`` lies outside of that block."""
BATCH = Batch.random(1, 23)

Place = tuple[CodeType, int, int]
"""Code, offset of the bytecode, and how many times it runs before."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A fault fails one test, and none behind it."""
    yield
    put_all_back()


def put_all_back() -> None:
    while undo._thread.open:
        undo._thread.open.pop()._undo()
    undo._restore([], [], None, True)


class Rig:
    """An attached model with two layers, or with four of which two compute their inputs."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Toy(Block, layers=4 if "input_every" in settings else 2)
        self.linear = F.linear
        self.plain = nn.Linear(3, 2)
        self.want = self.step()
        self.settings = {"alpha": 0.5, "resident_layers": 0, "plan": {"enabled": False}, **settings}
        self.tables = self.tables_now()
        self.handle = ds_memo.attach(self.model, self.settings)

    def tables_now(self) -> list[dict[str, Any]]:
        parts = list(self.model.modules())
        return [*(part._parameters.copy() for part in parts), *({"training": part.training} for part in parts)]

    def loss(self) -> torch.Tensor:
        return self.model(BATCH.embeds, BATCH.labels).loss

    def backward(self, loss: torch.Tensor) -> list[torch.Tensor]:
        self.model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        return [loss.detach(), *(parameter.grad for parameter in self.model.parameters())]

    def step(self) -> list[torch.Tensor]:
        return self.backward(self.loss())

    def is_stocks(self, got: list[torch.Tensor]) -> bool:
        return all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(got, self.want, strict=True))

    def check(self) -> None:
        """Check that nothing is left of an interrupted step, and take the next."""
        assert _get_current_dispatch_mode_stack() == [] and _get_current_function_mode_stack() == [], "a mode is left"
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "hooks are left"
        assert F.linear is self.linear and self.plain(torch.ones(4, 3)).shape == (4, 2)
        assert torch.is_grad_enabled() and not inside_a_layer()
        for now, before in zip(self.tables_now(), self.tables, strict=True):
            assert now.keys() == before.keys() and all(now[name] is before[name] for name in now), "a module is changed"
        assert self.is_stocks(self.step()), "the next step is not stock's"
        session = inside(self.handle)
        session.engine.drain()
        if session.slab.used:
            gc.collect()  # frames may be in reference cycles with the interrupt's traceback
            session.engine.drain()
        assert session.slab.used == session.slab.pool.used == 0, "host memory is left"

    def ends(self) -> None:
        assert self.handle.report()["warnings"] == []
        self.handle.detach()
        assert self.is_stocks(self.step())


def places(run: Callable[[], Any], files: tuple[str, ...] = FILES) -> list[Place]:
    """Return the places of a run, each once, at a run of it that differs from place to place."""
    seen: Counter[tuple[CodeType, int]] = Counter()

    def on_opcode(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            seen[frame.f_code, frame.f_lasti] += 1
        return on_opcode

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = True
        return on_opcode

    traced(run, on_call)
    found = [(code, at, number % times) for number, ((code, at), times) in enumerate(seen.items())]
    return [(code, at, before) for code, at, before in found if dis.opname[code.co_code[at]] not in LEAK]


def traced(run: Callable[[], Any], on_call: Callable[..., Any]) -> Any:
    before, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # pytest's keeps what a destructor raises, and so its frame
    sys.settrace(on_call)
    try:
        return run()
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook


def interrupted(run: Callable[[], Any], place: Place) -> bool:
    """Raise KeyboardInterrupt at a place of a run. Return False if the caller saw none: Python drops what a destructor raises."""
    code, at, left = place

    def on_opcode(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "opcode" and frame.f_lasti == at:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_opcode

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        return on_opcode

    try:
        traced(run, on_call)
    except KeyboardInterrupt:
        return True
    return False


WHOLE, TILED, GROUPS = {"tile_tokens": 0}, {"tile_tokens": 12}, {"tile_tokens": 12, "input_every": 3}
FEW, MANY = 12, 200
"""Places of a case, of every day and of the slow test."""


@pytest.mark.parametrize("number", everyday([FEW, MANY], [FEW]))
@pytest.mark.parametrize("settings", everyday([WHOLE, TILED, GROUPS], [WHOLE, TILED]))
def test_in_a_step(settings: dict[str, Any], number: int) -> None:
    rig = Rig(**settings)
    for _ in range(2):
        rig.check()
    found = places(rig.step)
    assert len(found) > 5000
    came = 0
    for place in found[:: len(found) // number]:
        came += interrupted(rig.step, place)
        rig.check()
    assert came > 0.9 * number
    rig.ends()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [WHOLE, TILED, GROUPS])
def test_in_a_first_step(settings: dict[str, Any]) -> None:
    """The layers are analysed, and probed for tiles."""
    found = places(Rig(**settings).step)
    for place in found[:: len(found) // 12]:
        rig = Rig(**settings)
        interrupted(rig.step, place)
        rig.check()
        rig.ends()


LATE = {"run_posts_again", "take_hidden", "_drop_input", "keep_late", "let_go_late_but", "drop_late", "free_late"}
"""Functions that compute, store and drop inputs, beside those of tiles/groups.py."""


@pytest.mark.parametrize("times", everyday([1, 40], [1]))
@pytest.mark.parametrize("same_graph", [False, True])
def test_while_inputs_are_computed(same_graph: bool, times: int) -> None:
    """The next step is stock's, and so is the same graph's next backward."""
    rig = Rig(**GROUPS)
    rig.check()
    of_groups = lambda code: code.co_filename.endswith("tiles/groups.py") or code.co_name in LATE  # noqa: E731
    found = [place for place in places(rig.step) if of_groups(place[0])]
    assert len(found) > 100 and {place[0].co_name for place in found} >= LATE
    for place in found[:: max(1, len(found) // (5 * times))]:
        run = functools.partial(rig.backward, rig.loss()) if same_graph else rig.step
        interrupted(run, place)
        assert not same_graph or rig.is_stocks(run())
        del run
        rig.check()
    rig.ends()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [WHOLE, TILED])
def test_detach_after_it(settings: dict[str, Any]) -> None:
    rig = Rig(**settings)
    rig.check()
    for place in where_modes_change(places(rig.step))[::50]:
        interrupted(rig.step, place)
        rig.ends()
        rig = Rig(**settings)
        rig.check()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [WHOLE, TILED, GROUPS])
def test_the_same_backward_once_more(settings: dict[str, Any]) -> None:
    rig = Rig(**settings)
    rig.check()
    found = places(functools.partial(rig.backward, rig.loss()))
    for place in found[:: len(found) // 60]:
        run = functools.partial(rig.backward, rig.loss())
        interrupted(run, place)
        assert rig.is_stocks(run())
        del run
        rig.check()


def where_modes_change(found: Iterable[Place]) -> list[Place]:
    return [place for place in found if place[0].co_name in ("__enter__", "__exit__") and "/remat/" in place[0].co_filename]


@pytest.mark.parametrize("closes", [True, False])
def test_contexts_that_are_entered_or_left(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch pops function modes by a generator, which would push one back when it is freed: the control leaves it open."""
    rig, failed = Rig(**TILED), 0
    rig.check()
    if not closes:
        monkeypatch.setattr(undo, "_close_generators", lambda raised_in: None)
    ends = [place for place in places(rig.step) if place[0] in undo._ENDS]
    assert len(ends) > 10
    for place in ends:
        interrupted(rig.step, place)
        try:
            rig.check()
        except AssertionError:
            assert not closes
            failed += 1
            put_all_back()
    host_budget._pools.clear()
    assert closes or failed


# ---- negative controls


def only_itself(block: undo.Undoing, *exception: Any) -> None:
    """End a block, and none inside it."""
    block._undo()
    if block in undo._thread.open:
        undo._thread.open.remove(block)


CONTROLS = [(undo, "_restore", lambda *stacks: None), (undo.Undoing, "__exit__", only_itself)]


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, broken", CONTROLS)
def test_without_the_outer_block(owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, restore, failed = Rig(**TILED), undo._restore, 0
    rig.check()
    monkeypatch.setattr(owner, name, broken)
    found = places(rig.step, (*FILES, __file__))
    for place in [place for place in found if place[0] is only_itself.__code__] or where_modes_change(found)[::12]:
        interrupted(rig.step, place)
        try:
            rig.check()
        except (AssertionError, RuntimeError):
            failed += 1
            while undo._thread.open:
                undo._thread.open.pop()._undo()
            restore([], [], None, True)
    host_budget._pools.clear()
    assert failed
