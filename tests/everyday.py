"""Which cases of a test run every day."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def everyday(cases: Iterable[Any], daily: Collection[Any]) -> list[Any]:
    """Return the parameters of a test. Those that are not in `daily` are slow.

    Raises:
        AssertionError: a daily case is none of the cases.
    """
    cases = list(cases)
    assert all(case in cases for case in daily), (cases, daily)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in daily else pytest.mark.slow)
        for case in cases
    ]
