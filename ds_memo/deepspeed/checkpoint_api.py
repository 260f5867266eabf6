"""deepspeed.checkpointing.checkpoint, called inside the forward of a model that is under ds_memo, is ds_memo's."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from ds_memo.deepspeed.rebind import replace_in_modules
from ds_memo.remat.modes import inside_a_layer
from ds_memo.remat.undo import Undoing, stacks_restored
from ds_memo.runtime.active_forward import in_forward
from ds_memo.runtime.session import Session, module_of

_NAMES = ("checkpoint", "non_reentrant_checkpoint")
_hold_layers: weakref.WeakKeyDictionary[Session, dict[CodeType, bool]] = weakref.WeakKeyDictionary()
"""By the code of a checkpointed function: True if it called layers that memo runs anyway."""


def redirect() -> None:
    """Replace DeepSpeed's checkpoint functions. Outside of attached models they do what they did."""
    for name in _NAMES:
        stock = getattr(checkpointing, name)
        if not hasattr(stock, "_before_ds_memo"):
            redirected: Any = functools.wraps(stock)(functools.partial(_checkpoint, stock))
            redirected._before_ds_memo = stock
            replace_in_modules(stock, redirected)  # also modules that imported it by name


def give_back() -> None:
    for name in _NAMES:
        redirected = getattr(checkpointing, name)
        if hasattr(redirected, "_before_ds_memo"):
            replace_in_modules(redirected, redirected._before_ds_memo)


def _checkpoint(stock: Callable[..., Any], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if inside_a_layer():
        return _as_deepspeed_does(fn(*args, **kwargs))
    memo: Session | None = in_forward()
    if memo is None:
        return stock(fn, *args, **kwargs)
    return _as_deepspeed_does(_run(memo, fn, args, kwargs))


def _run(memo: Session, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """A function around layers, such as Megatron's over a chunk of them, is simply called: its layers come through memo."""
    code = getattr(fn, "__code__", None)
    if code is None or module_of(fn) is not None or not torch.is_grad_enabled():
        return memo.run(fn, *args, **kwargs)
    known = _hold_layers.setdefault(memo, {})
    if code in known:
        return fn(*args, **kwargs) if known[code] else memo.run(fn, *args, **kwargs)
    seen, thread = [], threading.get_ident()

    def look(module: nn.Module, inputs: Any) -> None:
        seen.append(thread == threading.get_ident() and memo.owns(module))

    hooks = nn.modules.module._global_forward_pre_hooks
    with stacks_restored(), Undoing(lambda: [hooks.pop(key) for key, hook in list(hooks.items()) if hook is look]):
        nn.modules.module.register_module_forward_pre_hook(look)
        out = memo.run(fn, *args, **kwargs)
    known[code] = any(seen)
    return out


def _as_deepspeed_does(out: Any) -> Any:
    """A tensor or a tuple; of one thing the thing itself."""
    if not isinstance(out, (tuple, list)):
        return out
    return out[0] if len(out) == 1 else tuple(out)
