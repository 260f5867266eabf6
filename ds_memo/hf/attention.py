"""Transformers' attention functions: those that no dispatch mode sees (FlexAttention, flash-attn 4, flash kernels of the hub) are
kept whole, and any of them can be wrapped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ds_memo.remat.functions import keep_whole

_SEEN = {"flash_attn.flash_attn_interface", "flash_attn_interface"}
"""Modules whose functions call custom ops, which are kept by name (ds_memo.remat.op_policy)."""


def keep_unseen_attention() -> None:
    """Have Transformers, if it is imported, call these by :func:`keep_whole` from now on. Outside of memo nothing changes."""
    _replace(sys.modules.get("transformers.integrations.flex_attention"), "compile_friendly_flex_attention", keep_whole)
    _replace(sys.modules.get("transformers.modeling_flash_attention_utils"), "lazy_import_flash_attention", _keeping)


def wrap_attention(name: str, around: Callable[[Any], Any]) -> Any:
    """Replace an implementation in Transformers' table of attention functions by ``around(implementation)``.

    Under its own name, as DeepSpeed does it: models ask for the name to choose their mask.

    Returns:
        The implementation that was there.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = around(before)
    return before


def _replace(module: ModuleType | None, name: str, by: Callable[[Any], Any]) -> None:
    function = getattr(module, name, None)
    if function is not None and not hasattr(function, "_ds_memo"):
        ours = by(function)
        ours._ds_memo = True
        setattr(module, name, ours)


def _keeping(load: Callable[..., Any]) -> Callable[..., Any]:
    """Around the function that loads a flash package and returns its functions: first of whole batches, then of packed ones."""

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        (flash, packed, *others), rest = load(*args, **kwargs)
        return (_kept(flash), _kept(packed), *others), rest

    return loaded


@functools.cache
def _kept(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return function if function is None or function.__module__ in _SEEN else keep_whole(function)
