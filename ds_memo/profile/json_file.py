"""A profile as one JSON file, checked in full when it is read. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ds_memo.errors import MOST_NAME, MemoError, brief
from ds_memo.profile.extrapolate import OUTPUT_KINDS
from ds_memo.profile.layer_sample import LayerSample
from ds_memo.profile.sample import LayerProfile, Profile
from ds_memo.profile.tile_sample import PART_BYTES, PARTS, SAMPLES, PartSample, TileSample
from ds_memo.solve.run_costs import Output

FORMAT = 9
MOST_PROFILE_BYTES = 1 << 24
MOST_KINDS, MOST_LAYERS, MOST_SAMPLES, MOST_OUTPUTS = 1 << 12, 1 << 16, 16, 1 << 12
"""Kinds and layers of a model; samples and kept tensors of one kind."""
MOST_TOKENS = 1 << 34
MOST_BYTES = 1 << 50
"""Bytes of a layer call, also of all its outputs. The solver's sums over thousands of layers stay within 64 bits."""
MOST_SECONDS = 1e6
MOST_TILES = 1 << 10
"""Tiles of a sample."""
MOST_DOUBLINGS = 16
"""How often groups of heads may be doubled in a sample."""
MOST_REASON = 1 << 12
"""Characters."""
MOST_FLOPS = 1 << 70
RATES = (1.0, 1e15)
"""Least and most bytes per second of the copies."""
_MOST = {
    **dict.fromkeys(("batch", "length"), MOST_TOKENS),
    **dict.fromkeys(("gemm_flops", "attention_flops"), MOST_FLOPS),
}
"""Upper limits by field of a sample; the other fields are bytes, or seconds (`…_s`)."""


class ProfileError(MemoError, ValueError):
    """A profile that cannot be used; the message says why."""


def to_json(profile: Profile) -> str:
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1)


def from_json(text: str) -> Profile:
    """Read a profile and check everything in it.

    Raises:
        ProfileError: the profile is damaged, or of another version.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"it is no JSON ({error})") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ProfileError(f"it is no profile of format {FORMAT}, which this version's `ds-memo profile` writes")
    try:
        kinds = tuple(_layer_profile(kind) for kind in data.pop("kinds"))
        profile = Profile(kinds=kinds, layers=tuple(data.pop("layers")), **data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ProfileError(f"it does not have the fields of a profile ({error!r})") from None
    _check(profile)
    return profile


def _layer_profile(data: dict[str, Any]) -> LayerProfile:
    samples = tuple(map(_sample, data["samples"]))
    check = None if data["check"] is None else _sample(data["check"])
    in_tiles = tuple(map(_tile_sample, data["in_tiles"]))
    return LayerProfile(data["name"], samples, check, in_tiles, data["not_tiled"])


def _tile_sample(data: dict[str, Any]) -> TileSample:
    in_groups = tuple(tuple(map(tuple, of_groups)) for of_groups in data["in_groups"])
    return TileSample(**{**data, "parts": tuple(PartSample(**part) for part in data["parts"]), "in_groups": in_groups})


def _sample(data: dict[str, Any]) -> LayerSample:
    return LayerSample(**{**data, "outputs": tuple(Output(**output) for output in data["outputs"])})


def _check_counts(profile: Profile, samples: Sequence[LayerSample]) -> None:
    counts = [
        (len(profile.kinds), MOST_KINDS, "kinds of layers"),
        (len(profile.layers), MOST_LAYERS, "layers"),
        (max((len(kind.samples) for kind in profile.kinds), default=0), MOST_SAMPLES, "samples of a kind"),
        (max((len(sample.outputs) for sample in samples), default=0), MOST_OUTPUTS, "outputs of a layer"),
    ]
    for count, most, what in counts:
        if count > most:
            raise ProfileError(f"it has {count:,} {what}, the most is {most:,}")


def _check(profile: Profile) -> None:
    samples = [sample for kind in profile.kinds for sample in kind.taken]
    _check_counts(profile, samples)
    outputs = [output for sample in samples for output in sample.outputs]
    numbers = [
        (getattr(sample, f.name), _MOST.get(f.name, MOST_SECONDS if f.name.endswith("_s") else MOST_BYTES), f.name)
        for sample in samples
        for f in fields(LayerSample)
        if f.name != "outputs"
    ]
    for output in outputs:
        numbers += [
            (output.rows, MOST_BYTES, "rows"),
            (output.row_bytes, MOST_BYTES, "row_bytes"),
            (output.born, MOST_SECONDS, "born"),
        ]
    numbers += [(profile.d2h_bytes_per_s, RATES[1], "d2h_bytes_per_s"), (profile.h2d_bytes_per_s, RATES[1], "h2d_bytes_per_s")]
    for number, most, name in numbers:
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise ProfileError("a number in it is negative, not finite, or no number")
        if number > most:
            raise ProfileError(f"{name} is {brief(number)}, the most is {most:,.0f}")
    integers = [f.name for f in fields(LayerSample) if f.type == "int"]
    counts = [getattr(sample, name) for sample in samples for name in integers]
    if not all(type(number) is int for number in (*counts, *(n for output in outputs for n in (output.rows, output.row_bytes)))):
        raise ProfileError("a number of bytes or rows in it is not whole")
    for sample in samples:
        if sample.tokens > MOST_TOKENS:
            raise ProfileError(f"a sample has {sample.tokens:,} tokens, the most is {MOST_TOKENS:,}")
        if (held := sum(output.rows * output.row_bytes for output in sample.outputs)) > MOST_BYTES:
            raise ProfileError(f"the outputs of a sample have {brief(held)} bytes, the most is {MOST_BYTES:,}")
    names = [profile.method, *(kind.name for kind in profile.kinds)]
    ok = (
        isinstance(profile.key, dict)
        and isinstance(profile.measured, dict)
        and all(type(ranks) is int and 0 < ranks < 1 << 20 for ranks in (profile.ranks_copying, profile.ranks_per_sequence))
        and all(isinstance(name, str) and len(name) <= MOST_NAME for name in names)
        and min(profile.d2h_bytes_per_s, profile.h2d_bytes_per_s) >= RATES[0]
        and profile.kinds
        and any(kind is not None for kind in profile.layers)
        and all(kind is None or (type(kind) is int and 0 <= kind < len(profile.kinds)) for kind in profile.layers)
        and all(kind.samples and len({len(s.outputs) for s in kind.samples}) == 1 for kind in profile.kinds)
        and all(sample.batch > 0 and sample.length > 0 for sample in samples)
        and all(output.kind in OUTPUT_KINDS for output in outputs)
    )
    if not ok or not all(map(_tiles_ok, profile.kinds)):
        raise ProfileError("its fields contradict each other")


def _tiles_ok(kind: LayerProfile) -> bool:
    """Return True if a kind has no samples in tiles, or those that its lines are drawn through."""
    if not isinstance(kind.not_tiled, str) or len(kind.not_tiled) > MOST_REASON or len(kind.in_tiles) not in (0, SAMPLES):
        return False
    for sample in kind.in_tiles:
        counts = (sample.batch, sample.length, sample.tile_tokens)
        if not all(type(count) is int and 0 < count <= MOST_TOKENS for count in counts):
            return False
        if len(sample.parts) != len(PARTS) or len(sample.in_groups) > MOST_DOUBLINGS:
            return False
        if not 2 <= sample.tile_tokens < sample.length <= MOST_TOKENS // sample.batch:
            return False
        if sample.batch * sample.length > MOST_TILES * sample.tile_tokens:
            return False
        if type(sample.result_differs) is not bool or sample.result_differs is not kind.in_tiles[0].result_differs:
            return False
        for peaks in map(list, (sample.peaks(1 << doubled) for doubled in range(len(sample.in_groups) + 1))):
            if len(peaks) != len(PARTS) or any(len(of_part) != len(PART_BYTES) for of_part in peaks):
                return False
            if not all(type(nbytes) is int and 0 <= nbytes <= MOST_BYTES for of_part in peaks for nbytes in of_part):
                return False
        for part in sample.parts:
            if type(part.seconds) not in (int, float) or not 0 <= part.seconds <= MOST_SECONDS:
                return False
    if not kind.in_tiles:
        return True
    few, many, larger = (sample.cut for sample in kind.in_tiles)
    return few.tokens < many.tokens == larger.tokens and many.tiles > larger.tiles and few.of_tile < larger.of_tile
