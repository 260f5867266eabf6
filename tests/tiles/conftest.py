"""Fixtures of the tests of tiles."""

from __future__ import annotations

from tests.remat.conftest import frames  # noqa: F401  a fixture
