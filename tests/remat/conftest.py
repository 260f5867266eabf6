"""Fixtures of the tests of training situations."""

from __future__ import annotations

import weakref

import pytest

from ds_memo.swap.frame import Frame
from tests.faults import put_in


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Frame]:
    """Return the living frames of those made in this test."""
    alive: weakref.WeakSet[Frame] = weakref.WeakSet()
    put_in(monkeypatch, Frame, "__init__", lambda right, *args: (right(*args), alive.add(args[0]))[0])
    return alive
