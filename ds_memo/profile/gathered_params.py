"""A layer of ZeRO-3 in one piece, so that it can be run without the other ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
"""The last one is there for leaf modules (``set_z3_leaf_modules``): it hands their gradients over to be reduced."""


def partitioned(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that ZeRO-3 keeps in pieces on all ranks, and that are in pieces now."""
    return [p for p in module.parameters() if hasattr(p, "ds_id") and p.ds_status.name == "NOT_AVAILABLE"]


def whole_bytes(module: nn.Module) -> int:
    """Bytes that gathering a layer takes."""
    return sum(p.ds_numel * p.element_size() for p in partitioned(module))


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Gather a layer's parameters, and leave them so: inside, a run of it makes no collective of ZeRO's.

    ZeRO-3 gathers at each submodule's hook. A rank that fails between two of them leaves the others waiting in the next one;
    with one gather before, which all ranks come to, it fails for itself alone. The hooks would also let the parameters go, and
    write the profile into the trace that ZeRO-3 prefetches by. So DeepSpeed's hooks are taken out meanwhile; trl does both too
    (trl: models/utils.py, unwrap_model_for_generation).
    """
    parts = partitioned(module)
    if not parts:
        yield
        return
    import deepspeed

    taken = [(part, name, getattr(part, name)) for part in module.modules() for name in _HOOKS]
    with deepspeed.zero.GatheredParameters(parts):
        for part, name, hooks in taken:
            setattr(part, name, OrderedDict((key, hook) for key, hook in hooks.items() if not _is_deepspeeds(hook)))
        try:
            yield
        finally:
            for part, name, hooks in taken:
                setattr(part, name, hooks)


def _is_deepspeeds(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("deepspeed.")  # some of ZeRO-3's are wrapped by deepspeed.utils.nvtx
