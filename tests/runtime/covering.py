"""Every setting and every model family on every day, each with each only among the slow tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.models import MODELS

FAMILIES = [name for name in MODELS if name != "gemma2"]
"""But for the one whose attention, with a soft cap, is never kept."""


def covering(settings: Sequence[Any]) -> list[Any]:
    """Parameters: a setting and a family."""
    return [
        pytest.param(setting, name, marks=() if number % len(settings) == which else pytest.mark.slow)
        for which, setting in enumerate(settings)
        for number, name in enumerate(FAMILIES)
    ]
