"""Random programs on logits give with lazy logits what they give with stock, or one error of memo's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ds_memo.logits.content import Content
from ds_memo.logits.nodes import Known
from ds_memo.logits.tensor import handlers
from tests.fuzz.logits_programs import Sides, fuzz

DAILY, SWEEP, PARTS = 300, 20_000, 10


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


def failures(sides: Sides, programs: int, seed: int, **how: Any) -> list[str]:
    _, kinds = fuzz(programs, seed, sides, **how)
    return [f"{kind}: {found[0]}" for kind, found in kinds.items() if kind.startswith(("different", "crash"))]


def test_programs(sides: Sides) -> None:
    assert not failures(sides, DAILY, seed=0)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs(part: int, sides: Sides) -> None:
    """As ``python -m tests.fuzz.logits_programs`` prints them, with other seeds."""
    assert not failures(sides, SWEEP // PARTS, seed=part + 1)


# ---- negative controls


def in_place_on_a_temporary(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(handlers, "mul_", lambda func, name, logits, *args: logits)


def dropped_tile(patch: pytest.MonkeyPatch) -> None:
    tiles = Content.tiles
    patch.setattr(Content, "tiles", lambda self: tiles(self)[:-1])


def factor_of_a_hook_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Known, "scaled", lambda self, factor: self)


@pytest.mark.parametrize("change", [in_place_on_a_temporary, dropped_tile, factor_of_a_hook_left_out])
def test_the_fuzzer_sees_a_fault(change: Any, sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert any(each.startswith("different") for each in failures(sides, DAILY, seed=0, shrunk=5))
