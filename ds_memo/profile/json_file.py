"""A profile as one JSON file, checked in full when it is read. No torch.

Types are those of the data classes. Every number is finite, and bounded by the unit that its name ends with: then the solver's
sums over thousands of layers stay within 64 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ds_memo.errors import MOST_NAME, MemoError, brief, quoted
from ds_memo.profile.sample import LayerProfile, Profile
from ds_memo.profile.tile_sample import PARTS, SAMPLES

FORMAT = 11
MOST_PROFILE_BYTES = 1 << 24
MOST_TOKENS = 1 << 34
MOST_BYTES = 1 << 50
"""Bytes of a layer call, also of all its outputs."""
MOST_TILES = 1 << 10
"""Tiles of a sample."""
_MOST = {
    "bytes_per_s": 1e15,
    "_s": 1e6,
    "seconds": 1e6,
    "_flops": 1 << 70,
    "batch": MOST_TOKENS,
    "length": MOST_TOKENS,
    "tokens": MOST_TOKENS,
    "ranks_copying": 1 << 20,
    "ranks_per_sequence": 1 << 20,
}
"""Upper limits of numbers, by the end of their names. All others are bytes."""
_MOST_ENTRIES = {"kinds": 1 << 12, "layers": 1 << 16, "samples": 3, "outputs": 1 << 12, "peaks": 1 << 4}
_MOST_CHARACTERS = {"name": MOST_NAME, "method": MOST_NAME, "not_tiled": 1 << 12}
_FREE = ("key", "measured")
"""Entries that only people read, or that are compared as a whole."""
_PROFILE = TypeAdapter(Profile)


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
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ProfileError(f"it is no profile of format {FORMAT}, which this version's `ds-memo profile` writes")
        for name, value in data.items():
            if name not in _FREE:
                _check_sizes(name, value)
        profile = _PROFILE.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise ProfileError(f"{quoted('.'.join(map(str, first['loc'])))}: {quoted(first['msg'])}") from None
    except ProfileError:
        raise
    except ValueError as error:  # also of a number with thousands of digits
        raise ProfileError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise ProfileError("it is nested too deeply") from None
    if not all(_contradictions(profile)):
        raise ProfileError("its fields contradict each other")
    return profile


def _check_sizes(name: str, value: Any) -> None:
    """Raise ProfileError if an entry of this name, or one inside of it, is out of all proportion."""
    if isinstance(value, dict):
        for inner, part in value.items():
            _check_sizes(inner, part)
    elif isinstance(value, list):
        most = _MOST_ENTRIES.get(name, 1 << 16)
        if len(value) > most:
            raise ProfileError(f"it has {len(value):,} {quoted(name)}, the most is {most:,}")
        for part in value:
            _check_sizes(name, part)
    elif isinstance(value, str):
        if len(value) > (most := _MOST_CHARACTERS.get(name, MOST_NAME)):
            raise ProfileError(f"{quoted(name)} has {len(value):,} characters, the most is {most:,}")
    elif isinstance(value, (int, float)):
        least = 1.0 if name.endswith("bytes_per_s") else 0.0
        limit = next((most for ending, most in _MOST.items() if name.endswith(ending)), MOST_BYTES)
        if not least <= value <= limit:  # nor is NaN
            raise ProfileError(f"{quoted(name)} is {brief(value)}, expected {least:g} to {limit:,.0f}")


def _contradictions(profile: Profile) -> Iterator[bool]:
    """Yield False for a profile that no run writes."""
    yield bool(profile.kinds) and any(kind is not None for kind in profile.layers)
    yield all(kind is None or kind < len(profile.kinds) for kind in profile.layers)
    yield min(profile.ranks_copying, profile.ranks_per_sequence) > 0
    for kind in profile.kinds:
        yield bool(kind.samples) and len({len(sample.outputs) for sample in kind.samples[:2]}) == 1
        for sample in kind.samples:
            yield 0 < sample.tokens <= MOST_TOKENS
            yield sum(output.nbytes for output in sample.outputs) <= MOST_BYTES
        yield not kind.in_tiles or _are_samples_in_tiles(kind)


def _are_samples_in_tiles(kind: LayerProfile) -> bool:
    """Return True if lines can be drawn through a kind's samples in tiles."""
    if len(kind.in_tiles) != SAMPLES or len({sample.result_differs for sample in kind.in_tiles}) > 1:
        return False
    for sample in kind.in_tiles:
        if len(sample.seconds) != len(PARTS) or not sample.peaks or any(len(peaks) != len(PARTS) for peaks in sample.peaks):
            return False
        if not (2 <= sample.tile_tokens < sample.length and 0 < sample.batch * sample.length <= MOST_TOKENS):
            return False
        if sample.batch * sample.length > MOST_TILES * sample.tile_tokens:
            return False
    few, many, larger = (sample.cut for sample in kind.in_tiles)
    return few.tokens < many.tokens == larger.tokens and many.tiles > larger.tiles and few.of_tile < larger.of_tile
