"""Profiles on disk: found again by everything they depend on, checked before they are used.

The folder is this user's alone, and so is each file: a profile decides what a run keeps where.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_memo import files
from ds_memo.profile.json_file import MOST_PROFILE_BYTES, ProfileError, from_json, to_json
from ds_memo.profile.sample import Profile


def opened(folder: str | os.PathLike, warn: Callable[[str], None]) -> Path | None:
    """Return the folder of the profiles in a cache folder, made if need be; None, with a warning, where it cannot be trusted."""
    try:
        return files.private_folder(files.expanded(folder) / "profiles")
    except files.NotPrivate as error:
        warn(f"profiles are not cached: {error}; each start measures again. memo.plan.cache_dir names another folder")
        return None


def place_of(folder: Path, key: dict[str, Any]) -> Path:
    """Return where the profile with this key belongs."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return folder / f"{digest}.json"


def load(folder: Path, key: dict[str, Any], warn: Callable[[str], None]) -> Profile | None:
    """Return the profile with exactly this key, or None.

    Args:
        folder: from :func:`opened`.
        warn: is told of a file that is there and cannot be used.
    """
    place = place_of(folder, key)
    try:
        text = files.read_private(place, MOST_PROFILE_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, files.NotPrivate, files.TooLong) as error:
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


def store(folder: Path, profile: Profile, warn: Callable[[str], None]) -> None:
    """Write a profile to its place in a folder from :func:`opened`. A full disk costs the next start its head start, no more."""
    place = place_of(folder, profile.key)
    try:
        files.write_private(place, to_json(profile))
    except OSError as error:
        warn(f"the profile cannot be cached in {folder} ({error}); the next start will measure again")
