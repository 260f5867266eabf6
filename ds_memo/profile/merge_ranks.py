"""Merge the profiles of all ranks into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_memo.profile.layer_sample import DEVICE_BYTES, LayerSample
from ds_memo.profile.sample import LayerProfile, Profile
from ds_memo.profile.tile_sample import PART_BYTES, TileSample


def most_careful(profiles: Sequence[Profile]) -> Profile:
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
    """Return the first rank's measurements of one kind, with the largest DEVICE_BYTES of all ranks."""

    def careful(sample: LayerSample) -> LayerSample:
        needs = zip(*(_needs(kind, sample) for kind in kinds), strict=True)
        return replace(sample, **dict(zip(DEVICE_BYTES, map(max, needs), strict=True)))

    first = kinds[0]
    whole = replace(first, samples=tuple(map(careful, first.samples)), check=first.check and careful(first.check))
    alike = {tuple((sample.batch, sample.length, sample.tile_tokens) for sample in kind.in_tiles) for kind in kinds}
    if len(alike) > 1:  # some rank could not, or its batch was another
        reason = next((kind.not_tiled for kind in kinds if kind.not_tiled), "ranks measured it at different lengths")
        return replace(whole, in_tiles=(), not_tiled=reason)
    return replace(whole, in_tiles=tuple(map(_needing_most_in_tiles, zip(*(kind.in_tiles for kind in kinds), strict=True))))


def _needing_most_in_tiles(samples: Sequence[TileSample]) -> TileSample:
    parts = [
        replace(of_ranks[0], **{name: max(getattr(part, name) for part in of_ranks) for name in PART_BYTES})
        for of_ranks in zip(*(sample.parts for sample in samples), strict=True)
    ]
    in_groups = tuple(  # as many groups as all ranks can make
        tuple(tuple(map(max, zip(*of_part, strict=True))) for of_part in zip(*of_ranks, strict=True))
        for of_ranks in zip(*(sample.in_groups for sample in samples), strict=False)
    )
    differs = any(sample.result_differs for sample in samples)
    return replace(samples[0], result_differs=differs, parts=tuple(parts), in_groups=in_groups)


def _needs(kind: LayerProfile, there: LayerSample) -> list[int]:
    """Return a kind's DEVICE_BYTES at the length of sample `there`: measured, else extrapolated."""
    for sample in kind.taken:
        if (sample.batch, sample.length) == (there.batch, there.length):
            return [getattr(sample, name) for name in DEVICE_BYTES]
    at = kind.costs(there.batch, there.length)
    full, at_0, without = at.working, at.working_at_0, at.working_without_attention
    return [full.backward, at_0.backward, without.backward, full.forward, at_0.forward]
