import gc
import os
from collections.abc import Iterator

import pytest

from tests.runtime.traces import memo_threads


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path) -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor or a name in its folder."""
    gc.collect()
    threads, handles = set(memo_threads()), descriptors()
    yield
    gc.collect()
    for thread in set(memo_threads()) - threads:
        thread.join(60)
    assert not set(memo_threads()) - threads
    assert descriptors() <= handles
    assert not list(tmp_path.rglob(".ds_memo-*"))


def descriptors() -> set[str]:
    """Return what this process has open below temporary folders."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue
        if "(deleted)" in name and "pytest" in name:
            found.add(f"{handle} {name}")
    return found
