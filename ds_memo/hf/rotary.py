"""Rotary embeddings whose frequencies depend on the largest position that a forward is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def seen_by_rotary(config: Any) -> tuple[str, Callable[[int], int]] | None:
    """Return the type of a model's rotary embedding, and the function that maps a length to what its frequencies depend on.

    "longrope" has one set of frequencies up to a length and another beyond it; "dynamic" has others for every length beyond it.

    Args:
        config: the Hugging Face configuration of the text model.

    Returns:
        None if frequencies are the same for every length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # some models have one for each kind of layer
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind == "longrope":
            return kind, functools.partial(_is_beyond, one["original_max_position_embeddings"])
        if kind == "dynamic":
            return kind, functools.partial(max, config.max_position_embeddings)
    return None


def _is_beyond(limit: int, length: int) -> int:
    return int(length > limit)
