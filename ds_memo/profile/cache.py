"""Profiles on disk: found again by everything they depend on, checked before they are used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_memo.cli.arguments import write_whole
from ds_memo.profile.json_file import ProfileError, from_json, to_json
from ds_memo.profile.sample import Profile


def place_of(folder: str | os.PathLike, key: dict[str, Any]) -> Path:
    """Where the profile with this key belongs."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return Path(folder).expanduser() / "profiles" / f"{digest}.json"


def load(folder: str | os.PathLike, key: dict[str, Any], warn: Callable[[str], None]) -> Profile | None:
    """The profile with exactly this key, or None; a file that is there and cannot be used is told of."""
    place = place_of(folder, key)
    try:
        text = place.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warn(f"the cached profile {place} cannot be read ({error}); measuring again")
        return None
    try:
        profile = from_json(text)
        if profile.key != key:
            different = sorted(name for name in {*profile.key, *key} if profile.key.get(name) != key.get(name))
            raise ProfileError(f"it was made for another run ({', '.join(different)} differ)")
    except ProfileError as error:
        warn(f"the cached profile {place} is not used: {error}; measuring again")
        return None
    return profile


def store(folder: str | os.PathLike, profile: Profile, warn: Callable[[str], None]) -> None:
    """Write a profile to its place. A folder that cannot be written costs the next start its head start, no more."""
    place = place_of(folder, profile.key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, to_json(profile))
    except OSError as error:
        warn(f"the profile cannot be cached in {place.parent} ({error}); the next start will measure again")
