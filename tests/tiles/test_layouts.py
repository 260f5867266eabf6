"""Hidden states that do not lie row by row in memory: gradients are stock's, in tiles, whole and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.swap.frame import Kept
from ds_memo.tiles.tile_runs import TileRuns
from tests.compiled_layers.rig import compiled
from tests.everyday import everyday, pairs
from tests.faults import put_in
from tests.models import HIDDEN, VOCAB, Different, Outcome, gradients, poisoned_memory
from tests.tiles.rig import LAYERS, assert_step, assert_was_tiled, attached, toy

BATCH, LENGTH = 3, 23
ALPHAS = (0.0, 0.5, 1.0)
FORMS = ("tiles", "sequences", "whole", "compiled")
"""Tiles of parts of a sequence, tiles of whole sequences, no tiles, no tiles in compiled layers."""
TILE = {"tiles": 12, "sequences": 2 * LENGTH}

View = Callable[[torch.Tensor], torch.Tensor]
LAYOUTS: dict[str, tuple[tuple[int, ...], View]] = {
    "sequences second": ((LENGTH, BATCH, HIDDEN), lambda x: x.transpose(0, 1)),
    "hidden first": ((BATCH, HIDDEN, LENGTH), lambda x: x.permute(0, 2, 1)),
    "columns of a wider tensor": ((BATCH, LENGTH, HIDDEN + 8), lambda x: x[..., :HIDDEN]),
    "rows of a longer tensor": ((BATCH, LENGTH + 9, HIDDEN), lambda x: x[:, 5 : 5 + LENGTH]),
    "one vector for all tokens": ((BATCH, 1, HIDDEN), lambda x: x.expand(BATCH, LENGTH, HIDDEN)),
    "one sequence for all": ((1, LENGTH, HIDDEN), lambda x: x.expand(BATCH, LENGTH, HIDDEN)),
}
"""By name: the shape of a leaf, and the view of it that the layers get."""


LABELS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB


def run(model: nn.Module, view: View, leaf: torch.Tensor) -> Outcome:
    leaf.grad = None
    loss = model(view(leaf), LABELS).loss
    loss.backward()
    return Outcome(loss.detach(), {**gradients(model), "the input": leaf.grad})


def check(layout: str, form: str, alpha: float, **settings: Any) -> None:
    """Compare two steps, one that analyses and one by recipes, with stock's."""
    shape, view = LAYOUTS[layout]
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model = toy()
    if form == "compiled":
        torch._dynamo.reset()
        compiled(model, backend="aot_eager")
    want = run(model, view, leaf)
    with attached(model, tile=TILE.get(form, 0), alpha=alpha, **settings) as handle:
        for _ in range(2):
            with poisoned_memory():
                got = run(model, view, leaf)
            assert_step(got, want)
        report = handle.report()
    if form in TILE:
        assert_was_tiled(report)
    assert report["bytes_to_host"] or "resident_layers" in settings


CASES = pairs([*LAYOUTS], FORMS, ALPHAS)


@pytest.mark.parametrize("layout, form, alpha", everyday(CASES, [case for case in CASES if case[1] != "compiled"]))
def test_same_as_stock(layout: str, form: str, alpha: float) -> None:
    check(layout, form, alpha)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_on_the_device(layout: str) -> None:
    check(layout, "tiles", 1.0, resident_layers=LAYERS)


def test_a_layout_that_changes_between_steps() -> None:
    """Recipes of one layout serve calls of another."""
    leaf = torch.randn(BATCH, LENGTH, HIDDEN).requires_grad_()
    model, views = toy(), [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x.mT.contiguous().mT]
    for settings in ({"tile": 12}, {"tile": 0}):
        with attached(model, **settings) as handle:
            got = [run(model, view, leaf) for view in views * 2]
            assert handle.report()["bytes_to_host"]
        want = run(model, views[0], leaf)
        for outcome in got:
            assert_step(outcome, want)


# ---- controls


def test_without_the_handling_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles lie as parts of the whole, recipes are made of dense ones, and frames read flat memory."""

    monkeypatch.setattr(TileRuns, "leaf", lambda runs, hidden: hidden.detach().requires_grad_())
    put_in(monkeypatch, TileRuns, "analyse", lambda right, runs, *args: right(runs, *args[:2], args[2].contiguous(), *args[3:]))
    monkeypatch.setattr(Kept, "laid", lambda self, tensor: tensor)
    for case in (("sequences second", "tiles", 0.5), ("hidden first", "tiles", 0.0)):
        with pytest.raises(Different):
            check(*case)
