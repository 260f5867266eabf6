"""Profiles as files: a round trip keeps them, and damaged ones are refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from ds_memo.profile.json_file import ProfileError, from_json, to_json
from ds_memo.profile.layer_sample import AttentionSample
from ds_memo.profile.run_profile import LayerProfile
from tests.placements import swapped_at
from tests.profile.samples import make_profile, make_sample


def data() -> dict[str, Any]:
    kind = LayerProfile("layer 0", (make_sample(64), make_sample(128), make_sample(256)), AttentionSample(1, 512, 1e-3, 2e-3))
    return json.loads(to_json(dataclasses.replace(make_profile(), kinds=(kind,))))


def test_there_and_back() -> None:
    text = json.dumps(data())
    profile = from_json(text)
    assert from_json(to_json(profile)) == profile
    assert profile.kinds[0].check == make_sample(64)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '"x"', "{}", '{"format": 1}', '{"format": 4}', '{"format": 5}', "NaN"]
)
def test_what_is_no_profile(text: str) -> None:
    with pytest.raises(ProfileError):
        from_json(text)


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Yield the path of every entry in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        found += paths(part, (*path, name))
    return found


UNDAMAGED = data()
PATHS = [path for path in paths(UNDAMAGED) if path[0] not in ("key", "measured")]
JUNK = (None, -1, 0, 1.5, math.nan, math.inf, 10**30, True, "x", [], {}, [1], {"a": 1}, [None])


def damaged(path: tuple, value: Any) -> str:
    """Return a profile with another value at a path; "gone": without it."""
    found = copy.deepcopy(UNDAMAGED)
    owner: Any = found
    for name in path[:-1]:
        owner = owner[name]
    if value == "gone":
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return json.dumps(found)


def test_anything_damaged_is_refused_or_does_no_harm() -> None:
    """Replacing or removing any single value gives a ProfileError or a usable profile."""
    for path, junk in itertools.product(PATHS, (*JUNK, "gone")):
        try:
            profile = from_json(damaged(path, junk))
        except ProfileError:
            continue
        run = profile.costs([(2, 777)] * len(profile.kinds), 10**9, 10**9)
        assert all(
            math.isfinite(layer.forward_s) and layer.forward_s >= 0 and layer.host_bytes(swapped_at(1.0)) >= 0
            for layer in run.layers
        ), (path, junk)
        assert profile.kinds[0].off() >= 0 and isinstance(profile.kinds[0].name, str), (path, junk)
        assert from_json(to_json(profile)) == profile, (path, junk)


@pytest.mark.parametrize(
    "path, value, says",
    [
        (("format",), 3, "no profile of format 12"),
        (("kinds", 0, "samples", 0, "forward_s"), math.nan, "forward_s is nan, expected a number from 0 on"),
        (("d2h_bytes_per_s",), 0.0, "contradict each other"),
        (("layers",), [0] * 100_000, "100,000 layers, the most is 65,536"),
        (("kinds", 0, "name"), "x" * 201, "name has 201 characters, the most is 200"),
        (("kinds", 0, "samples", 0, "forward_s"), "1", "kinds.0.samples.0.forward_s: Input should be a valid number"),
    ],
)
def test_what_no_run_can_have(path: tuple, value: Any, says: str) -> None:
    """Refused when read, not in the first step."""
    with pytest.raises(ProfileError, match=says) as caught:
        from_json(damaged(path, value))
    assert len(str(caught.value)) < 1000
