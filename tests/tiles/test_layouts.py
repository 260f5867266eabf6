"""Hidden states that do not lie row by row in memory: gradients are stock's, in tiles, whole and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.spans import Span
from ds_memo.swap.frame import Kept
from ds_memo.tiles.slices import part
from ds_memo.tiles.tile_runs import TileRuns
from tests.compiled_layers.rig import compiled
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import HIDDEN, VOCAB, Different, Outcome, gradients, poisoned_memory
from tests.tiles.rig import LAYERS, assert_step, assert_was_tiled, attached, toy

BATCH, LENGTH = 3, 23
ALPHAS = (0.0, 0.5, 1.0)
FORMS = ("tiles", "sequences", "whole", "compiled")
"""Tiles of parts of a sequence, tiles of whole sequences, no tiles, no tiles in compiled layers."""
TILE = {"tiles": 12, "sequences": 2 * LENGTH}

LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sequences second": ((LENGTH, BATCH, HIDDEN), lambda x: x.transpose(0, 1)),
    "hidden first": ((BATCH, HIDDEN, LENGTH), lambda x: x.permute(0, 2, 1)),
    "columns of a wider tensor": ((BATCH, LENGTH, HIDDEN + 8), lambda x: x[..., :HIDDEN]),
    "rows of a longer tensor": ((BATCH, LENGTH + 9, HIDDEN), lambda x: x[:, 5 : 5 + LENGTH]),
    "one vector for all tokens": ((BATCH, 1, HIDDEN), lambda x: x.expand(BATCH, LENGTH, HIDDEN)),
    "one sequence for all": ((1, LENGTH, HIDDEN), lambda x: x.expand(BATCH, LENGTH, HIDDEN)),
}
"""By name: the shape of a leaf, and the view of it that the layers get."""


def run(model: nn.Module, given: dict[str, Any], leaf: torch.Tensor, loss_of: Callable[[Any], torch.Tensor]) -> Outcome:
    leaf.grad = None
    loss = loss_of(model(**given))
    loss.backward()
    found = {name: grad for name, grad in gradients(model).items() if not name.endswith("k_proj.bias")}  # zero but for rounding
    return Outcome(loss.detach(), {**found, "the input": leaf.grad})


def two_steps(
    model: nn.Module, settings: dict[str, Any], given: Callable[[torch.Tensor], dict[str, Any]], leaf: torch.Tensor, **more: Any
) -> dict[str, Any]:
    """Compare two steps, one that analyses and one by recipes, with stock's. Return the report."""
    want = run(model, given(leaf), leaf, **more)
    with attached(model, **settings) as handle:
        for _ in range(2):
            with poisoned_memory():
                got = run(model, given(leaf), leaf, **more)
            assert_step(got, want)
        return handle.report()


def check(layout: str, form: str, alpha: float, **settings: Any) -> None:
    shape, view = LAYOUTS[layout]
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
    model = toy()
    if form == "compiled":
        torch._dynamo.reset()
        compiled(model, backend="aot_eager")
    report = two_steps(
        model,
        {"tile": TILE.get(form, 0), "alpha": alpha, **settings},
        lambda leaf: {"inputs_embeds": view(leaf), "labels": labels},
        leaf,
        loss_of=lambda out: out.loss,
    )
    if form in TILE:
        assert_was_tiled(report)
    assert report["bytes_to_host"] or "resident_layers" in settings


CASES = [(layout, form, alpha) for layout in LAYOUTS for form in FORMS for alpha in ALPHAS]
DAILY = [case for case in CASES if case[1] == "tiles" or (case[1] in ("sequences", "whole") and case[2] == 0.5)]


@pytest.mark.parametrize("layout, form, alpha", everyday(CASES, DAILY, slow=[case for case in CASES if case[2] == 0.5]))
def test_same_as_stock(layout: str, form: str, alpha: float) -> None:
    check(layout, form, alpha)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_on_the_device(layout: str) -> None:
    check(layout, "tiles", 1.0, resident_layers=LAYERS)


def test_a_layout_that_changes_between_steps() -> None:
    """Recipes of one layout serve calls of another."""
    leaf, labels = torch.randn(BATCH, LENGTH, HIDDEN).requires_grad_(), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    model, views = toy(), [lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x.mT.contiguous().mT]
    for settings in ({"tile": 12}, {"tile": 0}):
        with attached(model, **settings) as handle:
            got = [run(model, {"inputs_embeds": view(leaf), "labels": labels}, leaf, lambda out: out.loss) for view in views * 2]
            assert handle.report()["bytes_to_host"]
        want = run(model, {"inputs_embeds": leaf, "labels": labels}, leaf, lambda out: out.loss)
        for outcome in got:
            assert_step(outcome, want)


# ---- a model of Transformers whose layers get such hidden states


def check_encoder(form: str) -> None:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 32, "encoder_layers": LAYERS, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "dropout": 0.0}
    config = WhisperConfig(num_mel_bins=8, max_source_positions=48, attn_implementation="sdpa", **sizes)
    torch.manual_seed(0)
    model, leaf, weights = WhisperEncoder(config), torch.randn(2, 8, 96), torch.randn(48, 32)
    if form == "compiled":
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    report = two_steps(
        model.train(),
        {"tile": 16 if form == "tiles" else 0, "alpha": 0.5},
        lambda leaf: {"input_features": leaf},
        leaf.requires_grad_(),
        loss_of=lambda out: (out.last_hidden_state * weights).mean(),
    )
    assert report["bytes_to_host"]
    if form == "tiles":
        assert_was_tiled(report)


@pytest.mark.parametrize("form", everyday(["tiles", "whole", "compiled"], ["tiles"]))
def test_an_encoder(form: str) -> None:
    check_encoder(form)


# ---- controls


def test_without_the_handling_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles lie as parts of the whole, recipes are made of dense ones, and frames read flat memory."""

    def as_it_lies(self: TileRuns, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        return part(hidden, span, 1).detach().requires_grad_()

    monkeypatch.setattr(TileRuns, "hidden_of", as_it_lies)
    put_in(monkeypatch, TileRuns, "analyse", lambda right, runs, *args: right(runs, *args[:2], args[2].contiguous(), *args[3:]))
    monkeypatch.setattr(Kept, "laid", lambda self, tensor: tensor)
    for case in (("sequences second", "tiles", 0.5), ("hidden first", "tiles", 0.0)):
        with pytest.raises(Different):
            check(*case)
    with pytest.raises(Different):
        check_encoder("tiles")
