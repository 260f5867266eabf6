"""Fixtures of the tests of training situations."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from ds_memo.swap.frame import Frame


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Frame]:
    """Return the living frames of those made in this test."""
    alive: weakref.WeakSet[Frame] = weakref.WeakSet()
    init = Frame.__init__

    def noted(self: Frame, *args: Any) -> None:
        init(self, *args)
        alive.add(self)

    monkeypatch.setattr(Frame, "__init__", noted)
    return alive
