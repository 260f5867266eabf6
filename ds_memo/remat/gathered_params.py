"""Gather a ZeRO-3 layer, so that it runs without the other ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ds_memo.remat.undo import changed

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
"""Hooks by which ZeRO-3 gathers and releases; the last, of leaf modules (``set_z3_leaf_modules``), reduces their gradients."""


def partitioned(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ZeRO-3 holds partitioned over the ranks now."""
    return [p for p in module.parameters() if hasattr(p, "ds_id") and p.ds_status.name == "NOT_AVAILABLE"]


def gathered_bytes(module: nn.Module) -> int:
    """Return the bytes that gathering a layer takes."""
    return sum(p.ds_numel * p.element_size() for p in partitioned(module))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather a layer's parameters and hold them: inside the block, the layer runs without ZeRO's collectives.

    ZeRO-3 gathers at each submodule's hook. A rank that fails between two hooks leaves the others waiting in the next one; after
    one gather that all ranks enter, it fails alone. The hooks would also release the parameters, and record the profile in
    ZeRO-3's prefetch trace. So DeepSpeed's hooks are removed meanwhile, as trl does (models/utils.py,
    unwrap_model_for_generation).
    """
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


def _is_deepspeeds(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("deepspeed.")  # some of ZeRO-3's are wrapped by deepspeed.utils.nvtx
