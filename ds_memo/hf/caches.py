"""Caches of keys and values, or of states, that a Hugging Face model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CACHES = ("cache", "past_key_values", "cache_params")
"""Arguments for them. Transformers 5.24 calls the other two ``cache``, and takes their old names until 5.40."""


def earlier_tokens(given: Mapping[str, Any]) -> str | None:
    """Return the name of the argument that hands a model earlier tokens, or None.

    A cache of keys and values may be empty. ``cache_params`` may not: before 5.24 each replay of a layer writes to it again.
    """
    for name in CACHES:
        cache = given.get(name)
        if cache is not None and (name == "cache_params" or _is_filled(cache)):
            return name
    return None


def _is_filled(cache: Any) -> bool:
    if not hasattr(cache, "get_seq_length"):
        return bool(cache)
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # it has states alone
        return bool(cache.has_previous_state())
