"""A machine whose memory grows as it is used."""

from dataclasses import dataclass

import pytest
import torch

from benchmarks import host
from ds_memo.units import GIB


@dataclass
class Machine:
    """One that gets `grows` bytes for each byte that is used, in blocks that take `block_s` each."""

    size: int = 8 * GIB
    grows: int = 2
    block_s: float = 0.0
    refuses: bool = False
    used: int = 0
    now: float = 0.0

    def grow(self, wanted: int) -> int:
        return host.grow(wanted, lambda: self.size, lambda: self.size - self.used, self.use, self.wait, lambda: self.now)

    def use(self, nbytes: int) -> range:
        if self.refuses:
            raise OSError("Cannot allocate memory")
        self.now += self.block_s
        self.used += nbytes
        self.size += self.grows * nbytes
        return range(nbytes)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_machine_that_grows_is_used_until_it_is_large_enough():
    machine = Machine()
    assert machine.grow(32 * GIB) == machine.size >= 32 * GIB and machine.now == 0
    used = machine.used
    assert machine.grow(32 * GIB) == machine.size and machine.used == used  # large enough


@pytest.mark.parametrize(
    "machine, least_s, most_s, most_used",
    [
        (Machine(grows=0), 0, 2 * host.PATIENCE_S, 5 * GIB),  # half of it, and it did not grow
        (Machine(size=1024 * GIB, grows=0, block_s=2), host.IDLE_S, host.IDLE_S + 5, 64 * GIB),
        (Machine(grows=1, block_s=15), host.MOST_S, host.MOST_S + 15, 64 * GIB),  # slow, and has no more than its time
        (Machine(refuses=True), 0, 0, 0),
    ],
    ids=["small", "large", "slow", "full"],
)
def test_a_machine_that_does_not_grow_is_left_soon(machine, least_s, most_s, most_used):
    assert machine.grow(1 << 62) == machine.size
    assert least_s <= machine.now <= most_s and machine.used <= most_used


@pytest.mark.parametrize("device, gib, wanted", [("cuda", None, 64 * GIB), ("cuda", 32, 48 * GIB), ("cpu", None, None)])
def test_budgets_look_at_a_machine_that_has_grown(device, gib, wanted, monkeypatch):
    grown = []
    monkeypatch.setattr(host, "grow", grown.append)
    monkeypatch.setattr(host, "budget_bytes", lambda *args, **kwargs: len(grown))
    assert host.budget(gib, torch.device(device)) == len(grown)
    assert grown == ([] if wanted is None else [wanted])
