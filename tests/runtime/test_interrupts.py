"""Ctrl-C in the swap engine, and in the middle of a forward; test_any_bytecode.py has all other places of a step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.runtime.active_forward import in_forward
from ds_memo.runtime.module_patches import nothing
from ds_memo.swap.engine import SwapEngine
from tests.inside import inside
from tests.models import LAYERS, Batch, assert_same, build, step

BATCH = Batch.random(2, 33)
MEMO = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}


class Rig:
    """An attached model whose host holds one step and no more, and its stock twin."""

    def __init__(self) -> None:
        self.model = build("llama")
        self.stock = copy.deepcopy(self.model)
        self.handle = ds_memo.attach(self.model, MEMO)
        for _ in range(2):
            step(self.model, BATCH)
        self.slab = inside(self.handle).slab
        self.slab.budget.nbytes = self.slab.peak_used

    def loss(self) -> torch.Tensor:
        return self.model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss

    def goes_on(self) -> None:
        frames = self.handle.report()["frames"]
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()
        assert in_forward() is None
        assert_same(step(self.model, BATCH), step(self.stock, BATCH))
        assert self.handle.report()["frames"] == frames + LAYERS

    def ends(self) -> None:
        assert self.handle.report()["warnings"] == []
        self.handle.detach()
        assert self.slab.used == self.slab.pool.used == 0


@pytest.mark.parametrize("goes_on", [True, False])
def test_when_a_frame_dies(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python passes over what a destructor raises: the frame was not deferred."""
    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr(SwapEngine, "_defer", lambda engine, frame: None)
        rig.loss()
    assert rig.slab.used == rig.slab.budget.nbytes
    if goes_on:
        rig.goes_on()
    rig.ends()
    assert inside(rig.handle).engine.traffic.blocks_lost == LAYERS - 1


class Checkpoints(nn.Module):
    """Calls functions, of which nothing but the running forward tells whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, before: Callable[[], None] = nothing, then: Callable[[], None] = nothing) -> torch.Tensor:
        before()
        x = ds_memo.checkpoint(lambda y: self.inside(y).relu(), x)
        then()
        return x


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("way", ["after an interrupt", "while another thread evaluates"])
def test_whose_forward_runs(way: str) -> None:
    models = [Checkpoints(), Checkpoints()]
    handles = [ds_memo.attach(model, MEMO, layers=()) for model in models]
    x = torch.ones(2, 16, requires_grad=True)
    if way == "after an interrupt":
        with pytest.raises(KeyboardInterrupt):
            models[0](x, then=ctrl_c)
        models[1](x).sum().backward()
    else:
        begun, over = threading.Event(), threading.Event()

        def evaluate() -> None:
            with torch.no_grad():
                models[1](x, before=begun.set, then=lambda: over.wait(30))

        thread = threading.Thread(target=evaluate, daemon=True)
        models[0](x, before=lambda: (thread.start(), begun.wait(30))).sum().backward()
        over.set()
        thread.join(30)
    assert [handle.report()["frames"] for handle in handles] == [1, 1 if way == "after an interrupt" else 0]
    for handle in handles:
        handle.detach()
    assert in_forward() is None
