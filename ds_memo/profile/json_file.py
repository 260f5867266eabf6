"""A profile as one readable JSON, and everything checked when it is read back. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from ds_memo.errors import MemoError
from ds_memo.profile.extrapolate import OUTPUT_KINDS
from ds_memo.profile.sample import LayerProfile, LayerSample, Profile
from ds_memo.solve.costs import Output

FORMAT = 3


class ProfileError(MemoError, ValueError):
    """A profile that cannot be used: says why."""


def to_json(profile: Profile) -> str:
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1)


def from_json(text: str) -> Profile:
    """Read a profile and check everything in it.

    Raises:
        ProfileError: it is damaged, or of another version.
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
    check, half = (None if data[name] is None else _sample(data[name]) for name in ("check", "half_source"))
    return LayerProfile(data["name"], samples, check, half)


def _sample(data: dict[str, Any]) -> LayerSample:
    return LayerSample(**{**data, "outputs": tuple(Output(**output) for output in data["outputs"])})


def _check(profile: Profile) -> None:
    halves = [(kind.taken[-1], kind.half_source) for kind in profile.kinds if kind.taken and kind.half_source]
    samples = [*(sample for kind in profile.kinds for sample in kind.taken), *(half for _, half in halves)]
    numbers = [getattr(sample, f.name) for sample in samples for f in fields(LayerSample) if f.name != "outputs"]
    outputs = [output for sample in samples for output in sample.outputs]
    numbers += [value for output in outputs for value in (output.rows, output.row_bytes, output.born)]
    numbers += [profile.d2h_bytes_per_s, profile.h2d_bytes_per_s]
    if not all(type(number) in (int, float) and 0 <= number < 1 << 63 for number in numbers):
        raise ProfileError("a number in it is negative, not finite, or no number")
    whole = [f.name for f in fields(LayerSample) if f.type == "int"]
    counts = [getattr(sample, name) for sample in samples for name in whole]
    if not all(type(number) is int for number in (*counts, *(n for output in outputs for n in (output.rows, output.row_bytes)))):
        raise ProfileError("a number of bytes or rows in it is not whole")
    ok = (
        isinstance(profile.key, dict)
        and isinstance(profile.method, str)
        and isinstance(profile.measured, dict)
        and all(type(ranks) is int and ranks > 0 for ranks in (profile.ranks_copying, profile.ranks_per_sequence))
        and all(isinstance(kind.name, str) for kind in profile.kinds)
        and profile.d2h_bytes_per_s > 0
        and profile.h2d_bytes_per_s > 0
        and profile.kinds
        and any(kind is not None for kind in profile.layers)
        and all(kind is None or (type(kind) is int and 0 <= kind < len(profile.kinds)) for kind in profile.layers)
        and all(kind.samples and len({len(s.outputs) for s in kind.samples}) == 1 for kind in profile.kinds)
        and all(sample.batch > 0 and sample.length > 0 for sample in samples)
        and all(half.source < whole.source and len(half.outputs) == len(whole.outputs) for whole, half in halves)
        and all(output.kind in OUTPUT_KINDS for output in outputs)
    )
    if not ok:
        raise ProfileError("what it tells does not fit together")
