"""Faults that negative controls put into the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def put_in(patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Call `fault` in place of a function of a class or module. Its first argument is the right function."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: fault(right, *args, **named))
