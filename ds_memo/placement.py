"""Placement: where a layer call's outputs wait for its backward, and what the backward computes again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple

from ds_memo.units import round_up


class Undecided(Enum):
    """The alpha of a swapped call until its sizes are known: then remat asks the policy for it."""

    UNDECIDED = "undecided"


UNDECIDED = Undecided.UNDECIDED

EVEN_ROWS = 128
"""The recomputed rows of a GEMM are a multiple of it: the height of the tiles that GEMM kernels compute."""
_MANY_ROWS = 1_024
"""GEMMs with fewer rows are split exactly as alpha says."""


class PlacementKind(IntEnum):
    """The solver keeps these numbers in arrays. A kind that recomputes attention follows directly after the one that does not."""

    SWAPPED = 0
    """Whole tensors and a share alpha of the GEMM outputs' rows go to the host; the other rows are recomputed."""
    SWAPPED_ATTENTION_RECOMPUTED = 1
    """The same without the attention output. The frame takes no device memory before its backward: no reload ahead of it."""
    SWAPPED_WITHOUT_INPUT = 2
    """As SWAPPED, in tiles, but the input is not stored: the backward computes it from the layer below, whose attention output is
    there (ds_memo.tiles.groups)."""
    GEMMS_RECOMPUTED = 3
    """On the device, without GEMM outputs."""
    FULL_RECOMPUTE = 4
    """As torch.utils.checkpoint: the input stays on the device, GEMM and attention outputs are recomputed."""
    ON_DEVICE = 5
    """A resident layer: every kept tensor stays on the device."""
    NO_RECOMPUTE = 6
    """Not checkpointed: autograd saves its own tensors, nothing is computed again."""

    @property
    def on_device(self) -> bool:
        """True if nothing goes to the host."""
        return self >= PlacementKind.GEMMS_RECOMPUTED

    @property
    def without_gemms(self) -> bool:
        """True if the call is on the device and stores no row of a GEMM output. A swapped one stores a share alpha of them."""
        return self in (PlacementKind.GEMMS_RECOMPUTED, PlacementKind.FULL_RECOMPUTE)

    @property
    def recomputes_attention(self) -> bool:
        return self in (PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, PlacementKind.FULL_RECOMPUTE)


class Tiles(NamedTuple):
    """How a layer call runs in tiles of tokens."""

    tokens: int
    """Tokens of a tile, at most, of the flattened batch."""
    head_groups: int = 1
    """Groups of heads that attention's backward runs for, one after another; under Ulysses its forward, too."""
    input_every: int = 1
    """Layers in a row, at most, of which the first alone stores its input. Above 1 a layer may have one tile."""


@dataclass(frozen=True)
class Placement:
    """The placement of one layer call, part of the key of its recipe."""

    kind: PlacementKind
    alpha: float | Undecided = UNDECIDED
    """The share of each GEMM output's rows that is stored, as `stored_rows` counts them. On the device the kind sets it and the
    argument is ignored."""
    empty_frame: bool = False
    """True if a call without recompute opens an empty frame. Swapped frames move only as frames open and close, and so does the
    run-ahead limit (ds_memo.deepspeed.run_ahead_limit)."""
    tiles: Tiles | None = None
    """None: the call runs whole, as calls without recompute always do."""
    nvme: bool = field(default=False, compare=False)
    """True if a swapped call's host block is written to a file. What is kept stays the same, so recipes do not depend on it."""

    def __post_init__(self) -> None:
        if self.kind.on_device:
            object.__setattr__(self, "alpha", 0.0 if self.kind.without_gemms else 1.0)

    @property
    def decided_alpha(self) -> float:
        """Alpha where it is known: of a placement by the solver, and of a call that was admitted."""
        assert not isinstance(self.alpha, Undecided)
        return self.alpha


SWAPPED = Placement(PlacementKind.SWAPPED, UNDECIDED)
GEMMS_RECOMPUTED = Placement(PlacementKind.GEMMS_RECOMPUTED)
FULL_RECOMPUTE = Placement(PlacementKind.FULL_RECOMPUTE)
ON_DEVICE = Placement(PlacementKind.ON_DEVICE)
NO_RECOMPUTE = Placement(PlacementKind.NO_RECOMPUTE)


def stored_rows(alpha: float, rows: int) -> int:
    """Return the number of a GEMM output's rows that are stored at `alpha`: at most that share, and fewer by less than EVEN_ROWS.

    Fewer rows than the whole may get another kernel, whose results differ in the last bit. Whole tiles make that less likely.
    """
    stored = int(alpha * rows)
    return stored if rows < _MANY_ROWS else max(0, rows - round_up(rows - stored, EVEN_ROWS))


@lru_cache(maxsize=1 << 12)
def spread(layers: int, count: int) -> frozenset[int]:
    """Return the indices of `count` layers of `layers`: the last two first (their backward starts at once), the others evenly."""
    last = range(layers - min(count, 2, layers), layers)
    rest, room = max(0, min(count, layers) - len(last)), layers - len(last)
    return frozenset(last) | {(2 * i + 1) * room // (2 * rest) for i in range(rest)}
