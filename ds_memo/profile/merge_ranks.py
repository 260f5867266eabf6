"""Merge the profiles of all ranks into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from ds_memo.profile.layer_sample import PEAKS, LayerSample
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from ds_memo.profile.tile_sample import TileSample
from ds_memo.solve.run_costs import PeakBytes


def most_careful(profiles: Sequence[RunProfile]) -> RunProfile:
    """Return one profile for all ranks: the slowest copies, and for each kind of layer the most memory that any rank needs.

    Times are rank 0's: the ranks have the same layers and wait for each other in every step.
    """
    return replace(
        profiles[0],
        kinds=tuple(map(_needing_most, zip(*(profile.kinds for profile in profiles), strict=True))),
        d2h_bytes_per_s=min(profile.d2h_bytes_per_s for profile in profiles),
        h2d_bytes_per_s=min(profile.h2d_bytes_per_s for profile in profiles),
    )


def _needing_most(kinds: Sequence[LayerProfile]) -> LayerProfile:
    """Return the first rank's measurements of one kind, with the largest peak bytes of all ranks."""

    def careful(sample: LayerSample) -> LayerSample:
        there = [kind.at(sample.batch, sample.length) for kind in kinds]
        peaks: dict[str, Any] = {}
        for name in PEAKS:
            peaks[name] = PeakBytes(*map(max, zip(*(astuple(getattr(one, name)) for one in there), strict=True)))
        return replace(sample, **peaks)

    first = kinds[0]
    whole = replace(first, samples=tuple(map(careful, first.samples)))
    alike = {tuple((sample.batch, sample.length, sample.tile_tokens) for sample in kind.in_tiles) for kind in kinds}
    if len(alike) > 1:  # some rank could not, or its batch was another
        reason = next((kind.not_tiled for kind in kinds if kind.not_tiled), "ranks measured it at different lengths")
        return replace(whole, in_tiles=(), not_tiled=reason)
    return replace(whole, in_tiles=tuple(map(_needing_most_in_tiles, zip(*(kind.in_tiles for kind in kinds), strict=True))))


def _needing_most_in_tiles(samples: Sequence[TileSample]) -> TileSample:
    peaks = tuple(  # in as many groups as all ranks can make
        tuple(tuple(map(max, zip(*of_part, strict=True))) for of_part in zip(*of_ranks, strict=True))
        for of_ranks in zip(*(sample.peaks for sample in samples), strict=False)
    )
    return replace(samples[0], result_differs=any(sample.result_differs for sample in samples), peaks=peaks)
