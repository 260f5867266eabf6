"""Measure one layer in tiles of tokens, part by part: see ds_memo.profile.tile_sample."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ds_memo.placement import Placement, PlacementKind, Tiles
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.layer import Bench, alone
from ds_memo.profile.live import AllocatedBytes, LiveBytes, bytes_made
from ds_memo.profile.stopwatch import now, repeats, seconds_between
from ds_memo.profile.tile_sample import PARTS, TileSample
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
                bench.backward(bench.forward(_placed(Tiles(tokens, groups))))
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
            _run(bench, _placed(tiles), lambda: None)  # analysed, and warm
            if (refused := tiling.report()) and refused["not_tiled"]:
                raise CannotTile(next(iter(refused["not_tiled"].values())))
            times = [_run(bench, _placed(tiles), partial(now, device)) for _ in range(repeats(device))]
            kept = bench.kept_bytes
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = [[seconds_between(*pair) for pair in pairwise(points)] for points in times]
            into = inputs[0].untyped_storage().nbytes()
            peaks = []
            for way in (tiles._replace(head_groups=1 << doubled) for doubled in range(groups.bit_length())):
                _run(bench, _placed(way), lambda: None)  # other groups are analysed
                peaks.append([_peaks(bench, _placed(way, kind), device, gathered, into) for kind in _KINDS])
            differs = tiling.result_differs
        finally:
            bench.close()
    medians = tuple(map(statistics.median, zip(*seconds, strict=True)))
    of_ways = tuple(tuple(zip(*of_way, strict=True)) for of_way in peaks)
    return TileSample(call.batch, length, tiles.tokens, differs, medians, of_ways), kept


def _peaks(bench: Bench, placement: Placement, device: torch.device, gathered: int, into: int) -> list[int]:
    """Return the peak bytes of each part.

    Args:
        gathered: bytes that are on the device whenever the layer runs.
        into: bytes of its input, which is not made in it.
    """
    with bytes_made(device) as count:
        begins = _run(bench, placement, partial(_peak, count))
    forward = len(PARTS) // 2
    beside = [gathered + (into if number < forward else -bench.frame_bytes) for number in range(len(PARTS))]
    return [max(0, peak + more) for peak, more in zip(begins[1:], beside, strict=True)]


def _run(bench: Bench, placement: Placement, read: Callable[[], Any]) -> list[Any]:
    """Run the layer forward and backward.

    Returns:
        What `read` returns at the begin of each part, and at the end.
    """
    readings: list[Any] = []
    bench.part_begins = lambda: readings.append(read())
    outputs = [_GivesOwnGradient.apply(output) for output in bench.forward(placement)]
    torch.autograd.grad(outputs, bench.leaves, allow_unused=True)
    return [*readings, read()]


def _peak(count: LiveBytes | AllocatedBytes) -> int:
    """Return the most bytes since the last reading."""
    found = count.peak
    count.reset_peak()
    return found


def _placed(tiles: Tiles, kind: PlacementKind = PlacementKind.GEMMS_RECOMPUTED) -> Placement:
    return Placement(kind, tiles=tiles)


class _GivesOwnGradient(torch.autograd.Function):
    """Hands a layer a gradient that no one else holds, as the layer above it does in training. The output stays alive."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.output = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(ctx.output, memory_format=torch.contiguous_format)
