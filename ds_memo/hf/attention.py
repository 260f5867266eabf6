"""Transformers' attention functions: make those that no dispatch mode observes (FlexAttention, flash-attn 4, flash kernels of the
hub) saved ops, and wrap any of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ds_memo.attention_kernel import FA4
from ds_memo.remat import attention_kernels
from ds_memo.remat.functions import keep_whole
from ds_memo.remat.shared_changes import Undo, for_good, need
from ds_memo.tiles.attention_call import catch_from

_OBSERVED = {"flash_attn.flash_attn_interface", "flash_attn_interface"}
"""Modules whose functions call custom ops, which ds_memo.remat.op_policy saves by name."""


def keep_unobserved_attention(undo_with: Callable[[Undo], Any] = for_good) -> None:
    """Make Transformers, if imported, call unobserved attention through :func:`keep_whole`. Outside of memo nothing changes.

    Args:
        undo_with: is given what puts it back, unless another model still needs it.
    """
    for file, name, by in (
        ("transformers.integrations.flex_attention", "compile_friendly_flex_attention", keep_whole),
        ("transformers.modeling_flash_attention_utils", "lazy_import_flash_attention", _keeping),
    ):
        if (module := sys.modules.get(file)) is not None:
            need(module, functools.partial(_replace, module, name, by), undo_with)


def catch_attention(undo_with: Callable[[Undo], Any] = for_good) -> None:
    """Let tiles be cut where a layer calls an attention function of Transformers.

    Args:
        undo_with: as above.
    """
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        catch_from(modeling.AttentionInterface, undo_with)


def use_one_op(
    model: nn.Module, ways: dict[str, str], warn: Callable[[str], None], undo_with: Callable[[Callable[[], Any]], None]
) -> None:
    """Do the same as ``ds_memo.hf.eager_attention.use_one_op``, which imports Transformers, if the model is of Transformers."""
    if "transformers.modeling_utils" in sys.modules:
        from ds_memo.hf import eager_attention

        eager_attention.use_one_op(model, ways, warn, undo_with)


def wrap_attention(name: str, around: Callable[[Any], Any]) -> Any:
    """Replace an implementation in Transformers' table of attention functions by ``around(implementation)``.

    The name stays, as in DeepSpeed: models choose their mask by it.

    Returns:
        The previous implementation.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = around(before)
    return before


def _replace(module: ModuleType, name: str, by: Callable[[Any], Any]) -> Undo | None:
    function = getattr(module, name, None)
    if function is None or hasattr(function, "_ds_memo"):
        return None
    patched = by(function)
    patched._ds_memo = True
    setattr(module, name, patched)

    def undo() -> None:
        if getattr(module, name) is patched:
            setattr(module, name, function)

    return undo


def _keeping(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that loads a flash package and returns its functions: for full batches first, then for packed ones."""

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        (flash, packed, *others), rest = load(*args, **kwargs)
        return (_kept(flash), _kept(packed), *others), rest

    return loaded


@functools.cache
def _kept(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if function is None or function.__module__ in _OBSERVED:
        return function
    kept = keep_whole(function)
    return _by_flash_op(kept) if function.__module__.startswith("flash_attn.cute") else kept


_OF_FLASH_OP = {"softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_OFF = (None, False, 0, (None, None), (-1, -1))
"""Values of other arguments with which they change nothing."""


def _by_flash_op(kept: Callable[..., Any]) -> Callable[..., Any]:
    """Have flash-attn 4 run by PyTorch's flash op, which tiles can cut and split by heads, where it is active and can serve."""

    @functools.wraps(kept)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [value for name, value in kwargs.items() if name not in _OF_FLASH_OP]
        borders = kwargs.get("cu_seqlens_q"), kwargs.get("cu_seqlens_k")
        longest = (q.shape[1], k.shape[1]) if borders[0] is None else (kwargs.get("max_seqlen_q"), kwargs.get("max_seqlen_k"))
        off = not args and not any(isinstance(value, torch.Tensor) or value not in _OFF for value in others)
        kernel = attention_kernels.choice(attention_kernels.described(q, v), q.device)
        if not off or not all(isinstance(length, int) for length in longest) or kernel.name != FA4:
            return kept(q, k, v, *args, **kwargs)
        attention_kernels.note(kernel)
        how = *borders, *longest, 0.0, bool(kwargs.get("causal")), False
        return torch.ops.aten._flash_attention_forward(q, k, v, *how, scale=kwargs.get("softmax_scale"))[0]

    return attend
