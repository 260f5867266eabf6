"""A profile as one JSON file, checked in full when it is read. No torch.

Types are those of the data classes. Every number is finite and not negative; lists and texts have lengths that a run can have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ds_memo.errors import MOST_NAME, MemoError, brief, quoted
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from ds_memo.profile.tile_sample import PARTS, SAMPLES

FORMAT = 12
MOST_PROFILE_BYTES = 1 << 24
_MOST_ENTRIES = {"kinds": 1 << 12, "layers": 1 << 16, "samples": 3, "outputs": 1 << 12, "peaks": 1 << 4}
_MOST_CHARACTERS = {"name": MOST_NAME, "method": MOST_NAME, "not_tiled": 1 << 12}
_FREE = ("key", "measured")
"""Entries that only people read, or that are compared as a whole."""
_PROFILE = TypeAdapter(RunProfile)


class ProfileError(MemoError, ValueError):
    """A profile that cannot be used; the message says why."""


def to_json(profile: RunProfile) -> str:
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1)


def from_json(text: str) -> RunProfile:
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
    """Raise ProfileError if an entry of this name, or one inside of it, is too long, or is no number from 0 on."""
    if isinstance(value, dict):
        for inner, part in value.items():
            _check_sizes(inner, part)
    elif isinstance(value, (list, str)):
        what, most = f"it has {len(value):,} {quoted(name)}", _MOST_ENTRIES.get(name, 1 << 16)
        if isinstance(value, str):
            what, most = f"{quoted(name)} has {len(value):,} characters", _MOST_CHARACTERS.get(name, MOST_NAME)
        if len(value) > most:
            raise ProfileError(f"{what}, the most is {most:,}")
        for part in value if isinstance(value, list) else ():
            _check_sizes(name, part)
    elif isinstance(value, (int, float)) and not 0 <= value < math.inf:  # nor is NaN
        raise ProfileError(f"{quoted(name)} is {brief(value)}, expected a number from 0 on")


def _contradictions(profile: RunProfile) -> Iterator[bool]:
    """Yield False for a profile that no run writes."""
    yield bool(profile.kinds) and any(kind is not None for kind in profile.layers)
    yield all(kind is None or kind < len(profile.kinds) for kind in profile.layers)
    yield min(profile.ranks_copying, profile.ranks_per_sequence, profile.d2h_bytes_per_s, profile.h2d_bytes_per_s) > 0
    for kind in profile.kinds:
        yield bool(kind.samples) and len({len(sample.outputs) for sample in kind.samples[-2:]}) == 1
        yield all(sample.tokens for sample in kind.samples) and (kind.attention is None or kind.attention.tokens > 0)
        yield not kind.in_tiles or _are_samples_in_tiles(kind)


def _are_samples_in_tiles(kind: LayerProfile) -> bool:
    """Return True if lines can be drawn through a kind's samples in tiles."""
    if len(kind.in_tiles) != SAMPLES or len({sample.result_differs for sample in kind.in_tiles}) > 1:
        return False
    for sample in kind.in_tiles:
        if len(sample.seconds) != len(PARTS) or not sample.peaks or any(len(peaks) != len(PARTS) for peaks in sample.peaks):
            return False
        if not (2 <= sample.tile_tokens < sample.length and sample.batch):
            return False
    few, many, larger = (sample.cut for sample in kind.in_tiles)
    return few.tokens < many.tokens == larger.tokens and many.tiles > larger.tiles and few.of_tile < larger.of_tile
