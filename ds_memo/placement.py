"""Places: what each layer keeps, and where.

plain      not checkpointed: autograd keeps what it likes, nothing is computed again
resident   the kept outputs stay on the device
lean       they stay there too, but for GEMM outputs
swapped    all others: whole tensors and a share alpha of the GEMM outputs' rows go to the host
dropped    lean or swapped, and the attention output is not kept
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Home(NamedTuple):
    """Where one layer's kept outputs live; none of the four: swapped."""

    plain: bool = False
    resident: bool = False
    lean: bool = False
    dropped: bool = False

    @property
    def stays(self) -> bool:
        """Nothing goes to the host."""
        return self.plain or self.resident or self.lean

    def alpha(self, alpha: float) -> float:
        """The share of GEMM outputs' rows that this layer keeps, where swapped ones keep `alpha`."""
        return 1.0 if self.plain or self.resident else 0.0 if self.lean else alpha


HOMES = (
    *(Home(), Home(dropped=True)),
    *(Home(lean=True), Home(lean=True, dropped=True)),
    *(Home(resident=True), Home(plain=True)),
)
"""All homes there are. The *code* of a home is its index here. A home with `dropped` follows directly after the one without."""
_LEAN, _RESIDENT, _PLAIN = (HOMES.index(home) for home in (Home(lean=True), Home(resident=True), Home(plain=True)))
STAYS, DROPPED = (np.array([getattr(home, what) for home in HOMES]) for what in ("stays", "dropped"))
"""Of each home, by its code."""


class Places(NamedTuple):
    """Which of a model's layers live where, by index. A swapped layer is in none of these, or in `dropped` alone."""

    residents: Collection[int] = frozenset()
    lean: Collection[int] = frozenset()
    dropped: Collection[int] = frozenset()
    plain: Collection[int] = frozenset()

    def codes(self, layers: int) -> np.ndarray:
        """The code of every layer's home."""
        codes = np.zeros(layers, np.intp)
        codes[list(self.lean)] = _LEAN
        codes[list(self.dropped)] += 1
        codes[list(self.residents)] = _RESIDENT
        codes[list(self.plain)] = _PLAIN
        return codes

    def homes(self, layers: int) -> list[Home]:
        return [HOMES[code] for code in self.codes(layers)]

    def swapped(self, layers: int) -> list[int]:
        return np.flatnonzero(~STAYS[self.codes(layers)]).tolist()


@lru_cache(maxsize=1 << 12)
def spread(layers: int, count: int) -> frozenset[int]:
    """Indices of the layers that stay on the device: the last two first (their backward starts at once), the others evenly."""
    last = range(layers - min(count, 2, layers), layers)
    rest, room = max(0, min(count, layers) - len(last)), layers - len(last)
    return frozenset(last) | {(2 * i + 1) * room // (2 * rest) for i in range(rest)}


@lru_cache(maxsize=1 << 12)
def place(layers: int, residents: int, plain: int = 0) -> Places:
    """Spread so many residents and plain layers. Which layers are plain depends on their number alone, not on the residents', so
    that ranks need only agree on that number."""
    without = spread(layers, plain)
    others = [index for index in range(layers) if index not in without]
    return Places(residents=frozenset(others[position] for position in spread(len(others), residents)), plain=without)
