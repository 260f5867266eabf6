"""Which ranks wait for each other inside layers, by DeepSpeed's and FSDP2's state, and which of them share a sequence."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_memo.distributed.agree import world_size

_sequence_groups: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The ranks that share the sequences of modules of ds_memo's own sequence-parallel models. Copies of a model have none."""


def note_sequence_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Note that the ranks of a group share this model's sequences."""
    _sequence_groups.update(dict.fromkeys(model.modules(), group))


def sequence_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group that shares the sequences of a model or a layer; None: this rank has whole ones.

    It is that of :func:`note_sequence_group`; else DeepSpeed's, which counts for each model of the process (an ``mpu``,
    Accelerate's ``sp_size``).
    """
    if _sequence_groups:  # else no module is looked at: tiles ask in each call of a layer
        own = next((group for part in model.modules() if (group := _sequence_groups.get(part))), None)
        if own is not None:
            return own
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    return None if state is None or state._SEQUENCE_PARALLEL_GROUP is None else state.get_sequence_parallel_group()


def ranks_per_sequence(model: nn.Module) -> int:
    """Return the number of ranks that share a sequence of a model or a layer."""
    group = sequence_group(model)
    return 1 if group is None else dist.get_world_size(group)


def meet_in_layers(model: nn.Module) -> bool:
    """Return True if all ranks must call the same layers, because they gather parameters (ZeRO-3, FSDP2, OptimizedLinear) or
    exchange tokens for experts there."""
    if world_size() == 1:
        return False
    if is_in_pieces(model) or any(map(is_experts, model.parameters())):
        return True
    return any(getattr(module, "zero_shards", 1) > 1 for module in model.modules())  # deepspeed.linear's


def talk_in_layers(model: nn.Module) -> bool:
    """Return True if a rank in a layer waits for others: they meet there, or share a sequence (Ulysses) or GEMMs (AutoTP)."""
    return meet_in_layers(model) or ranks_per_sequence(model) > 1 or (world_size() > 1 and any(map(_shares, model.modules())))


def _shares(module: nn.Module) -> bool:
    """Return True for a module that shares a GEMM (AutoTP) or a sequence (DistributedAttention)."""
    return getattr(module, "mp_group", None) is not None or type(module).__module__.startswith("deepspeed.sequence.")


def sharing_ranks(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks, this one among them, that share this rank's sequences (Ulysses) or GEMMs (AutoTP). They have the same
    lengths, and what one of them replays, or runs in tiles, all must."""
    groups = {_of_sequences(model), *(_ranks_of(module) for module in model.modules() if world_size() > 1 and _shares(module))}
    largest = max(groups, key=len)
    return largest if all(set(group) <= set(largest) for group in groups) else tuple(range(world_size()))


def _of_sequences(model: nn.Module) -> tuple[int, ...]:
    group = sequence_group(model)
    return (dist.get_rank() if world_size() > 1 else 0,) if group is None else tuple(dist.get_process_group_ranks(group))


def _ranks_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks that share a module; all of them, if its group cannot be told."""
    group = getattr(module, "mp_group", None) or getattr(module, "spg", None)
    return tuple(dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else range(world_size()))


def units(module: nn.Module) -> list[Any]:
    """Return the modules inside a module, itself among them, whose parameters FSDP2 (``fully_shard``) gathers and frees."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # None: nothing is sharded by it
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def gathered_together(state: Any) -> list[Any]:
    """Return the groups of parameters that a unit of FSDP2 gathers at once, by its state: at most one, to torch 2.11."""
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def reductions(model: nn.Module) -> set[tuple[tuple[int, ...], float]]:
    """Return the ranks over which FSDP2 sums the gradients of a model's units, and by what it divides each sum."""
    found = set()
    for group in [group for unit in units(model) for group in gathered_together(unit._get_fsdp_state())]:
        ranks = tuple(group.mesh_info.mesh.mesh.flatten().tolist())
        found.add((ranks, group.gradient_divide_factor or len(ranks)))
    return found


def beside_units(model: nn.Module) -> str | None:
    """Return the name of a trained parameter that FSDP2 does not have, so that its gradient stays this rank's; None: there is
    none, or nothing is under FSDP2. Units around the model are known after a forward."""
    states = {state for unit in units(model) for state in (unit._get_fsdp_state(), *unit._get_fsdp_state()._state_ctx.all_states)}
    held = {
        id(getattr(parameter, name, None))
        for state in states
        for group in gathered_together(state)
        for parameter in group.fsdp_params
        for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    }
    named = model.named_parameters() if held else ()
    return next((name for name, parameter in named if parameter.requires_grad and id(parameter) not in held), None)


def is_in_pieces(module: nn.Module) -> bool:
    """Return True if ZeRO-3 or FSDP2 has divided its parameters among the ranks."""
    return any(map(is_zero3s, module.parameters())) or bool(units(module))


def is_zero3s(parameter: nn.Parameter) -> bool:
    """Return True for a parameter that ZeRO-3 gathers and frees."""
    return hasattr(parameter, "ds_id")


def gathers_by_module(layer: nn.Module) -> bool:
    """Return True for a layer whose parameters ZeRO-3 gathers by hooks of the modules in it, not all by one of the layer."""
    return any(is_zeros(hook) for part in layer.modules() if part is not layer for hook in part._forward_pre_hooks.values())


def is_zeros(hook: object) -> bool:
    """Return True for a module's hook by which ZeRO-3 gathers or releases; DeepSpeed wraps some for NVIDIA's profiler."""
    return getattr(hook, "__module__", "").startswith(("deepspeed.runtime.zero.", "deepspeed.utils.nvtx"))


def is_experts(parameter: nn.Parameter) -> bool:
    """Return True for a parameter of an expert that other ranks lack."""
    return not getattr(parameter, "allreduce", True)
