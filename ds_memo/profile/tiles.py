"""Measure one layer in tiles of tokens, part by part: see ds_memo.profile.tile_sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.layer import Bench, alone
from ds_memo.profile.tile_sample import TileSample
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles.tiling import Tiling

_TILES = 4
"""Tiles of the sample that has most."""
_GROUPS = (8, 4, 2)
"""Groups of heads that are tried."""
_KINDS = (PlacementKind.GEMMS_RECOMPUTED, PlacementKind.ON_DEVICE)
"""Placements of the two peaks of a part."""


def measure_in_tiles(
    call: CaughtCall, lengths: Sequence[int], device: torch.device, attention: str | None = None, gathered: int = 0
) -> tuple[TileSample, ...]:
    """Measure one layer in tiles.

    Args:
        lengths: two of them, the second about twice the first.
        attention: as the "memo" section's.
        gathered: bytes that are on the device whenever the layer runs.

    Raises:
        CannotTile: with the reason.
    """
    short, long = lengths
    tokens = long // _TILES
    groups = _most_groups(call, short, tokens, device, attention)
    samples, kept = zip(
        *(
            _measure(call, length, Tiles(tile_tokens), groups, device, attention, gathered)
            for length, tile_tokens in ((short, tokens), (long, tokens), (long, 2 * tokens))
        ),
        strict=True,
    )
    _, many, larger = samples  # of as many tokens: only what goes from tile to tile differs
    carried = max(0, kept[1] - kept[2]) // (many.cut.tiles - larger.cut.tiles)
    return tuple(replace(sample, carried_bytes=carried) for sample in samples)


def _most_groups(call: CaughtCall, length: int, tokens: int, device: torch.device, attention: str | None) -> int:
    """Return the most groups of heads that the backward of a layer's attention can be divided into."""
    for groups in _GROUPS:
        said: list[str] = []
        with alone(call, length, device) as (fn, args, inputs, trained), closing(Tiling()) as tiling:
            bench = Bench(call.layer, fn, args, [*inputs, *trained], device, attention, said.append, tiling)
            try:
                bench.run(_placed(Tiles(tokens, groups)))
            finally:
                bench.close()
        if not said:
            return groups
    return 1


def _measure(
    call: CaughtCall, length: int, tiles: Tiles, groups: int, device: torch.device, attention: str | None, gathered: int
) -> tuple[TileSample, int]:
    """Return a sample, and the bytes that the layer keeps if no GEMM output is stored."""
    with alone(call, length, device) as (fn, args, inputs, trained), closing(Tiling()) as tiling:
        bench = Bench(call.layer, fn, args, [*inputs, *trained], device, attention, tiler=tiling)
        try:
            seconds = bench.timed(_placed(tiles))
            if (refused := tiling.report()) and refused["not_tiled"]:
                raise CannotTile(next(iter(refused["not_tiled"].values())))
            kept, peaks = bench.kept_bytes, []
            for way in (tiles._replace(head_groups=1 << doubled) for doubled in range(groups.bit_length())):
                bench.run(_placed(way))  # other groups are analysed
                peaks.append(tuple(zip(*(bench.peaks(_placed(way, kind), gathered) for kind in _KINDS), strict=True)))
            differs = tiling.result_differs
        finally:
            bench.close()
    return TileSample(call.batch, length, tiles.tokens, differs, seconds, tuple(peaks)), kept


def _placed(tiles: Tiles, kind: PlacementKind = PlacementKind.GEMMS_RECOMPUTED) -> Placement:
    return Placement(kind, tiles=tiles)
