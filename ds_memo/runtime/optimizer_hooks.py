"""The steps of plain torch optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

T = TypeVar("T")


def watch_optimizers(
    model: weakref.ref[nn.Module], who: T, begins: Callable[[T], None], ended: Callable[[T], None]
) -> list[Callable[[], None]]:
    """Tell `who` of the steps of every torch optimizer that has a parameter of the model.

    Returns:
        Functions that end it. It also ends with `who`: the hooks are torch's and keep nothing alive.
    """
    known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
    """Number of groups of parameters, and True if one of them is the model's."""
    target = weakref.ref(who)

    def told(say: Callable[[T], None]) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
            listener, module = target(), model()
            if listener is None or module is None:
                return
            groups, is_models = known.get(optimizer, (0, False))
            if len(optimizer.param_groups) != groups:
                own = set(map(id, module.parameters()))
                is_models = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
                known[optimizer] = len(optimizer.param_groups), is_models
            if is_models:
                say(listener)

        return hook

    handles = [register_optimizer_step_pre_hook(told(begins)), register_optimizer_step_post_hook(told(ended))]
    for handle in handles:
        weakref.finalize(who, handle.remove)
    return [handle.remove for handle in handles]
