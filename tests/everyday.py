"""Which cases of a test run every day."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
