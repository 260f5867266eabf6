from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.integrate.traces import memo_threads


@pytest.fixture
def nothing_stays_planned() -> Iterator[None]:
    from tests.integrate.planned import CPU

    yield
    gc.collect()
    CPU.uninstall()  # it stays in front for as long as blocks are alive
    assert not CPU.installed and CPU.mode == "off" and CPU.arena_bytes == 0 and CPU.retired_arenas == 0
    assert CPU.stats()["live_bytes"] == 0


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(memo_threads())
    yield
    gc.collect()
    for thread in set(memo_threads()) - before:
        thread.join(5)
        assert not thread.is_alive()
