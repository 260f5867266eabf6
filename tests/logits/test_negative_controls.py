"""Negative controls: the comparison sees every mistake that tiles, sums and factors of gradients invite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.logits.lazy_value import LazyValue
from ds_memo.logits.nodes import HeadGradients, Precomputed, Term
from ds_memo.remat.layer_state import Before
from ds_memo.tiles import weight_gradients
from tests.logits.rig import IDS, TILE, UPSTREAM, VOCAB, attached, causal, compare, logits_of, lora, step
from tests.logits.test_heads import to_the_model_without_adapters
from tests.models import Different


def mean(model: nn.Module) -> torch.Tensor:
    return 0.37 * F.cross_entropy(logits_of(model).view(-1, VOCAB), IDS.view(-1))


def by_row(model: nn.Module) -> torch.Tensor:
    return (logits_of(model).logsumexp(-1) * UPSTREAM).sum()


Change = Callable[[pytest.MonkeyPatch], None]


def dropped_tile(patch: pytest.MonkeyPatch) -> None:
    tiles = LazyValue.tiles
    patch.setattr(LazyValue, "tiles", lambda self: tiles(self)[:-1])


def factor_of_hidden_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeadGradients, "scale", lambda self, factor: self._sums.scale(factor))


def factor_of_a_hook_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Precomputed, "scaled", lambda self, factor: self)


def rows_shifted(patch: pytest.MonkeyPatch) -> None:
    """Upstream gradients of the rows before."""
    init = Term.__init__

    def wrong(self: Term, content: Any, fn: Any, arguments: Any, gradients: Any) -> None:
        init(self, content, fn, arguments, tuple(each if each is None else each.roll(1, 0) for each in gradients))

    patch.setattr(Term, "__init__", wrong)


def gradients_used_twice(patch: pytest.MonkeyPatch) -> None:
    """Those that came with the loss, by a second backward."""

    class Kept(list):
        def pop(self, index: int = -1) -> Any:
            return self[index]

    init = Precomputed.__init__
    patch.setattr(Precomputed, "__init__", lambda self, term, gradients, factor: init(self, term, Kept(gradients), factor))


def adapters_as_they_are_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Before, "put_in", lambda self: nullcontext())


def hooked(model: nn.Module) -> torch.Tensor:
    logits = logits_of(model)
    logits.register_hook(lambda gradient: gradient / 4)
    return F.cross_entropy(logits.view(-1, VOCAB), IDS.view(-1))


def twice(model: nn.Module) -> torch.Tensor:
    loss = mean(model)
    loss.backward(retain_graph=True)
    return loss


CONTROLS: list[tuple[Change, Callable[[nn.Module], torch.Tensor]]] = [
    (dropped_tile, mean),
    (dropped_tile, by_row),
    (factor_of_hidden_left_out, mean),
    (factor_of_a_hook_left_out, hooked),
    (rows_shifted, by_row),
    (gradients_used_twice, twice),
    (adapters_as_they_are_now, to_the_model_without_adapters),
]


def model_for(loss: Callable[..., torch.Tensor]) -> nn.Module:
    return lora(causal(), target_modules=["lm_head"]) if loss is to_the_model_without_adapters else causal()


@pytest.mark.parametrize(("change", "loss"), CONTROLS)
def test_the_comparison_objects(change: Change, loss: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(Different):
        compare(model_for(loss), loss)


@pytest.mark.parametrize("loss", [mean, by_row, hooked, twice])
def test_it_does_not_where_nothing_is_changed(loss: Callable[..., torch.Tensor]) -> None:
    compare(causal(), loss)


def test_the_comparison_of_bfloat16_objects_to_sums_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with more tiles than the other tests have: 24."""
    ids = torch.randint(3, VOCAB, (24, TILE), generator=torch.Generator().manual_seed(2))
    model = causal(dtype=torch.bfloat16)

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=ids).logits.view(-1, VOCAB), ids.view(-1))

    def off(found: dict[str, Any]) -> float:
        return float((found["lm_head.weight"].double() - exact["lm_head.weight"]).norm() / exact["lm_head.weight"].norm())

    with attached(model):
        right = step(model, loss)
        monkeypatch.setattr(weight_gradients, "_sum_dtype", lambda dtype: dtype)
        wrong = step(model, loss)
    stock = step(model, loss)
    exact = step(model.double(), loss)
    assert off(right) <= 1.1 * off(stock) < off(wrong), (off(right), off(stock), off(wrong))
