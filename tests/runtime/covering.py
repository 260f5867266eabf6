"""Every setting on every day, and every model family in one of two tests; each with each only among the slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.models import MODELS

FAMILIES = [name for name in MODELS if name != "gemma2"]
"""But for the one whose attention, with a soft cap, is never kept."""


def covering(settings: Sequence[Any], half: int) -> list[Any]:
    """Return parameters: a setting and a family.

    Args:
        half: 0 or 1, of the families.
    """
    return [
        pytest.param(setting, name, marks=() if number % (2 * len(settings)) == 2 * which + half else pytest.mark.slow)
        for which, setting in enumerate(settings)
        for number, name in enumerate(FAMILIES)
    ]
