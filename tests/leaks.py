"""Checks for leftovers on the machine, while other tests come and go."""

from __future__ import annotations

import os
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Return the names of the segments and semaphores that exist now."""
    return set(os.listdir(SHARED_MEMORY))


def assert_shared_memory_is_as(before: set[str], timeout_s: float = 120) -> None:
    """Wait until every new name is gone. Names of concurrent tests go when these end."""
    new = shared_memory() - before
    deadline = time.monotonic() + timeout_s
    while new := new & shared_memory():
        assert time.monotonic() < deadline, f"left in {SHARED_MEMORY}: {sorted(new)}"
        time.sleep(0.2)
