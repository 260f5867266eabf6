"""Sections of the DeepSpeed JSON that cannot go together with memo; ds_memo.runtime.conflicts has what models bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_memo.errors import MemoConfigError

_SAME_WORK = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")


def refuse_config(config: Mapping[str, Any]) -> None:
    """Refuse sections of the DeepSpeed JSON that do memo's work in another way.

    Raises:
        MemoConfigError: naming the setting.
    """
    for key in _SAME_WORK:
        if config.get("activation_checkpointing", {}).get(key):
            raise MemoConfigError(f"activation_checkpointing.{key} does what memo does in another way; remove one of the two")
    if config.get("compile", {}).get("deepcompile"):
        raise MemoConfigError(
            "compile.deepcompile compiles the layers, and what happens inside a compiled region cannot be kept or swapped; "
            "remove it or memo"
        )
