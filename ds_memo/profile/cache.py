"""Profiles on disk: found by a key of everything they depend on, checked before use.

Only this user may write the folder and its files, because a profile decides the placement of a run's layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_memo import files
from ds_memo.profile.json_file import FORMAT, MOST_PROFILE_BYTES, ProfileError, from_json, to_json
from ds_memo.profile.run_profile import RunProfile


def open_folder(cache_dir: str | None, warn: Callable[[str], None]) -> Path | None:
    """Return the profiles' folder inside a cache folder (None: the user's), made if missing; None, after a warning, if there is
    none that can be trusted."""
    try:
        home = files.cache_home() if cache_dir is None else files.expanded(cache_dir)
        return files.private_folder(home / "profiles")
    except files.NotPrivate as error:
        warn(f"profiles are not cached: {error}; each start measures again. memo.cache_dir names another folder")
        return None


def path_of(folder: Path, key: dict[str, Any]) -> Path:
    """Return the path of the profile with this key. Profiles of other formats have other paths."""
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()[:20]
    return folder / f"{digest}.json"


def load(folder: Path, key: dict[str, Any], warn: Callable[[str], None]) -> RunProfile | None:
    """Return the profile with exactly this key, or None.

    Args:
        folder: from :func:`open_folder`.
        warn: called with a message if the file exists and cannot be used.
    """
    path = path_of(folder, key)
    try:
        text = files.read_private(path, MOST_PROFILE_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, files.NotPrivate, files.TooLong) as error:
        warn(f"the cached profile {path} cannot be read ({error}); measuring again")
        return None
    try:
        profile = from_json(text)
        if profile.key != key:
            different = sorted(name for name in {*profile.key, *key} if profile.key.get(name) != key.get(name))
            raise ProfileError(f"it was made for another run ({', '.join(different)} differ)")
    except ProfileError as error:
        warn(f"the cached profile {path} is not used: {error}; measuring again")
        return None
    return profile


def store(folder: Path, profile: RunProfile, warn: Callable[[str], None]) -> None:
    """Write a profile into a folder from :func:`open_folder`. If that fails, warn: the next start measures again."""
    path = path_of(folder, profile.key)
    try:
        files.write_private(path, to_json(profile))
    except OSError as error:
        warn(f"the profile cannot be cached in {folder} ({error}); the next start will measure again")
