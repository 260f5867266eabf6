"""Gather a layer whose parameters ranks hold in pieces (ZeRO-3, FSDP2), so that it runs without the other ranks."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ds_memo.distributed.topology import gathered_together, is_zero3s, units
from ds_memo.remat.undo import changed

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
"""Hooks by which ZeRO-3 gathers and releases; the last, of leaf modules (``set_z3_leaf_modules``), reduces their gradients."""


def partitioned(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ZeRO-3 holds partitioned over the ranks now."""
    return [p for p in module.parameters() if is_zero3s(p) and p.ds_status.name == "NOT_AVAILABLE"]


def reshard(model: nn.Module) -> None:
    """Have FSDP2 free what a forward inside the model's own has gathered, and which did not come to its end.

    The root stays as it is: the model's own forward has begun.
    """
    for unit in units(model):
        state = unit._get_fsdp_state()
        if state._is_root:
            continue
        for group in gathered_together(state):
            group._training_state = type(group._training_state).IDLE  # else one that stays gathered would stay so
        unit.reshard()


def tell_before_freeing(
    model: nn.Module, module: nn.Module, act: Callable[[], None], undo_with: Callable[[Callable[[], None]], Any]
) -> bool:
    """Have FSDP2 call `act` before it frees gathered parameters of a module. Parameters that it does not free are left alone.

    Args:
        undo_with: is given what gives FSDP2 its own methods back.

    Returns:
        False if it cannot be told.
    """
    parts = set(module.modules())
    try:
        if any(unit is not module for unit in units(module)):  # freed inside the module's own forward
            return False
        for group in [group for unit in units(model) for group in gathered_together(unit._get_fsdp_state())]:
            infos = [parameter._module_info for parameter in group.fsdp_params]
            if any(not parts.isdisjoint((info.module, *info.shared_modules)) for info in infos):
                for name in ("_to_sharded", "_to_sharded_post_forward"):
                    free, before = getattr(group, name), vars(group).get(name)
                    if not _tells(free, act):
                        setattr(group, name, functools.partial(_told_first, act, free))
                        undo_with(functools.partial(_put_back, weakref.ref(group), name, before))
    except AttributeError:  # another torch's FSDP2
        return False
    return True


def _put_back(of: weakref.ref[Any], name: str, before: Any) -> None:
    if (group := of()) is None:
        return
    if before is None:
        delattr(group, name)
    else:
        setattr(group, name, before)


def _tells(free: Any, act: Callable[[], None]) -> bool:
    return isinstance(free, functools.partial) and (free.args[0] == act or _tells(free.args[1], act))


def _told_first(act: Callable[[], None], free: Callable[[], None]) -> None:
    try:
        act()
    finally:  # FSDP2 goes on
        free()


def gathered_bytes(module: nn.Module) -> int:
    """Return the bytes that gathering a layer takes."""
    sharded = [p for p in module.parameters() if hasattr(p, "device_mesh")] if units(module) else []
    return sum(p.ds_numel * p.element_size() for p in partitioned(module)) + sum(p.numel() * p.element_size() for p in sharded)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather a layer's parameters and hold them: inside the block, the layer runs without ZeRO's collectives.

    ZeRO-3 gathers at each submodule's hook. A rank that fails between two hooks leaves the others waiting in the next one; after
    one gather that all ranks enter, it fails alone. The hooks would also release the parameters, and record the profile in
    ZeRO-3's prefetch trace. So DeepSpeed's hooks are removed meanwhile, as trl does (models/utils.py,
    unwrap_model_for_generation).
    """
    if found := units(module):
        with _unsharded(module, found):
            yield
        return
    parts = partitioned(module)
    if not parts:
        yield
        return
    import deepspeed

    taken = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS]
    with deepspeed.zero.GatheredParameters(parts), ExitStack() as stack:
        for part, name, hooks in taken:
            left = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_deepspeeds(hook))
            stack.enter_context(changed(part, name, left))
        yield


@contextmanager
def _unsharded(module: nn.Module, found: list[Any]) -> Iterator[None]:
    """Do the same for FSDP2. A unit that was gathered before stays so."""
    freed = [unit for unit in found if any(hasattr(p, "device_mesh") for p in unit.parameters())]
    taken = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS]
    try:
        for unit in found:
            unit.unshard()
        with ExitStack() as stack:
            for part, name, hooks in taken:
                left = OrderedDict((key, hook) for key, hook in hooks.items() if not is_fsdps(hook))
                stack.enter_context(changed(part, name, left))
            yield
    finally:
        for unit in freed:
            unit.reshard()


def is_fsdps(hook: Any) -> bool:
    """Return True for a hook by which FSDP2 gathers or frees; those on tensors return gradients as they are."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")


def _is_deepspeeds(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("deepspeed.")  # some of ZeRO-3's are wrapped by deepspeed.utils.nvtx
