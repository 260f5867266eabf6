"""The benchmark of drives moves what it says, and its rule takes the faster way."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import nvme

pytestmark = pytest.mark.slow


def test_blocks_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "WAYS", {"threads": nvme.by_threads})
    found = nvme.measure(str(tmp_path), gib=0.125, rounds=2)
    assert found["bytes"] == 2 * nvme.BLOCK
    assert [len(rates) for rates in found["gb_per_s"]["threads"].values()] == [2, 2]
    assert "| threads |" in nvme.table(found)


def test_a_way_that_reads_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def forgetful(directory, blocks):
        def move(writes: bool) -> None:
            for block in blocks:
                block.views(0, 8)[0].zero_()

        yield move

    monkeypatch.setattr(nvme, "WAYS", {"threads": forgetful})
    with pytest.raises(OSError, match="something else"):
        nvme.measure(str(tmp_path), gib=0.0625, rounds=1)


@pytest.mark.parametrize("slowest, taken", [(1.0, "threads"), (1.2, "AsyncIO")])
def test_the_rule_compares_the_slower_directions(slowest: float, taken: str) -> None:
    rates = {"threads": {"write": [5.0], "read": [1.0]}, "async_io": {"write": [slowest], "read": [9.0]}}
    found = {"gb_per_s": rates, "page_cache_grew": {"threads": 0, "async_io": 0}, "missing": {}}
    assert nvme.table(found).endswith(f": {taken}.")
