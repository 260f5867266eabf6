"""Which cases of a test there are, and which run every day."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def everyday(cases: Iterable[Any], daily: Collection[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Return the parameters of a test. Those that are not in `daily` are slow.

    Args:
        slow: of these, the ones that run with the rest; the others are for sweeps. None: all run with the rest.

    Raises:
        AssertionError: a daily or slow case is none of the cases.
    """
    cases = list(cases)
    assert all(case in cases for case in (*daily, *(slow or ()))), (cases, daily, slow)

    def marks(case: Any) -> list[Any]:
        if case in daily:
            return []
        return [pytest.mark.slow] if slow is None or case in slow else [pytest.mark.slow, pytest.mark.sweep]

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]


def pairs(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which any two values of two settings meet, found greedily, in place of the whole product."""
    product = list(itertools.product(*map(enumerate, settings)))

    def met(case: tuple) -> set[tuple]:
        return set(itertools.combinations([(setting, number) for setting, (number, _) in enumerate(case)], 2))

    todo, cases = set().union(*map(met, product)), []
    while todo:
        case = max(product, key=lambda case: len(met(case) & todo))
        todo -= met(case)
        cases.append(tuple(value for _, value in case))
    return cases
