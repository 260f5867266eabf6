"""Random programs on logits give with lazy logits what they give with stock, or one error of memo's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_memo.logits.lazy_value import LazyValue
from ds_memo.logits.nodes import Precomputed, Term
from ds_memo.logits.tensor import LazyLogits
from tests.fuzz.logits_programs import Sides, fuzz

DAILY, SWEEP, PARTS = 80, 20_000, 10


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    made = Sides()
    yield made
    made.handle.detach()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_programs(sides: Sides) -> None:
    assert not fuzz(DAILY, 0, sides)[1]
    assert sides.handle._session.heads[0].lazy_calls >= DAILY / 2


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, PARTS + 1))
def test_many_programs(seed: int, sides: Sides) -> None:
    assert not fuzz(SWEEP // PARTS, seed, sides)[1]


def test_stock_beside_stock_is_exact(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles larger than any logits."""
    for head in sides.handle._session.heads:
        monkeypatch.setattr(head, "rows", 1000)
    counts, _ = fuzz(DAILY // 2, 0, sides)
    assert counts.keys() <= {"exact", "stock raises"}


# ---- negative controls


def works_on_a_temporary(patch: pytest.MonkeyPatch) -> None:
    """An op in place changes a clone."""
    right = LazyLogits.__torch_function__

    def wrong(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.__name__ in ("mul_", "add_", "__imul__", "__iadd__") and isinstance(args[0], LazyLogits):
            right(func, types, (args[0].clone(), *args[1:]), kwargs)
            return args[0]
        return right(func, types, args, kwargs)

    patch.setattr(LazyLogits, "__torch_function__", classmethod(wrong))


def dropped_tile(patch: pytest.MonkeyPatch) -> None:
    tiles = LazyValue.tiles
    patch.setattr(LazyValue, "tiles", lambda self: tiles(self)[:-1])


def factor_of_a_hook_left_out(patch: pytest.MonkeyPatch) -> None:
    for kind in (Term, Precomputed):
        patch.setattr(kind, "scaled", lambda self, factor: self)


@pytest.mark.parametrize("fault", [works_on_a_temporary, dropped_tile])
def test_the_fuzzer_sees_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert any(failure.outcome == "different" for failure in fuzz(DAILY, 0, sides)[1])


def test_the_fuzzer_sees_a_wrong_gradient(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ["h0 = values(7, 2, 5, 4).requires_grad_()", "h = h0 * 1", "x = head(h)"]
    hooked = [*begun, "x.register_hook(lambda g: g * 2)", "loss = loss + x.logsumexp(-1).sum()", "loss.backward()"]
    assert sides.judge("trained", hooked) == ("exact", "")
    factor_of_a_hook_left_out(monkeypatch)
    assert sides.judge("trained", hooked)[0] == "different"
