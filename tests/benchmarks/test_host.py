"""A machine whose memory grows as it is used."""

import pytest
import torch

from benchmarks import host
from ds_memo.units import GIB


def test_a_machine_that_grows_is_used_until_it_is_large_enough():
    size, used = 8 * GIB, []

    def use(nbytes, grows=2):
        nonlocal size
        used.append(nbytes)
        size = min(64 * GIB, size + grows * nbytes)
        return range(nbytes)

    total, free = lambda: size, lambda: size - sum(used)
    assert host.grow(32 * GIB, total, free, use, wait=pytest.fail) >= 32 * GIB
    used.clear()
    assert host.grow(32 * GIB, total, free, use) == size and used == []  # large enough
    size, waited = 8 * GIB, []
    assert host.grow(32 * GIB, total, free, lambda n: use(n, grows=0), waited.append) == 8 * GIB  # it does not grow
    assert sum(used) <= 5 * GIB and sum(waited) <= 2 * host.PATIENCE_S


def test_a_large_machine_that_does_not_grow_is_left_soon():
    clock, used = 0.0, []

    def use(nbytes):
        nonlocal clock
        clock += 2
        used.append(nbytes)
        return range(nbytes)

    def wait(seconds):
        nonlocal clock
        clock += seconds

    host.grow(1 << 62, lambda: 1024 * GIB, lambda: 1000 * GIB - sum(used), use, wait, lambda: clock)
    assert host.IDLE_S < clock < host.IDLE_S + 5


def test_a_machine_that_grows_slowly_has_no_more_than_its_time():
    clock, size = 0.0, 8 * GIB

    def use(nbytes):
        nonlocal clock, size
        clock += 15
        size += nbytes
        return range(nbytes)

    grown = host.grow(1 << 62, lambda: size, lambda: 64 * GIB, use, pytest.fail, lambda: clock)
    assert grown == size and host.MOST_S <= clock < host.MOST_S + 15


def test_memory_that_is_refused_ends_the_growth():
    def use(nbytes):
        raise OSError("Cannot allocate memory")

    assert host.grow(32 * GIB, lambda: 8 * GIB, lambda: 8 * GIB, use, pytest.fail) == 8 * GIB


@pytest.mark.parametrize("device, gib, wanted", [("cuda", None, 64 * GIB), ("cuda", 32, 48 * GIB), ("cpu", None, None)])
def test_budgets_look_at_a_machine_that_has_grown(device, gib, wanted, monkeypatch):
    grown = []
    monkeypatch.setattr(host, "grow", grown.append)
    monkeypatch.setattr(host, "budget_bytes", lambda *args, **kwargs: len(grown))
    assert host.budget(gib, torch.device(device)) == len(grown)
    assert grown == ([] if wanted is None else [wanted])
