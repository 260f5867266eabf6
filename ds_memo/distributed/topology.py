"""What ranks do together, by DeepSpeed's word."""

from __future__ import annotations

import sys

from torch import nn

from ds_memo.distributed.agree import world_size


def meet_in_layers(model: nn.Module) -> bool:
    """Ranks gather parameters that they hold in pieces (ZeRO-3, OptimizedLinear), or trade tokens for experts, in layers: all
    call the same."""
    if world_size() == 1:
        return False
    in_pieces = any(hasattr(parameter, "ds_id") or is_experts(parameter) for parameter in model.parameters())
    return in_pieces or any(getattr(module, "zero_shards", 1) > 1 for module in model.modules())  # deepspeed.linear's


def talk_in_layers(model: nn.Module) -> bool:
    """A rank alone in a layer waits for others: they meet there, or share the sequence (Ulysses) or its GEMMs (AutoTP)."""
    return meet_in_layers(model) or ranks_per_sequence() > 1 or (world_size() > 1 and any(map(_shares, model.modules())))


def _shares(module: nn.Module) -> bool:
    """A GEMM (AutoTP), or a sequence (DistributedAttention)."""
    return getattr(module, "mp_group", None) is not None or type(module).__module__.startswith("deepspeed.sequence.")


def is_experts(parameter: nn.Parameter) -> bool:
    """Of an expert that other ranks lack."""
    return not getattr(parameter, "allreduce", True)


def ranks_per_sequence() -> int:
    """How many ranks share a sequence now: Ulysses' size, or 1."""
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if state is None or state._SEQUENCE_PARALLEL_GROUP is None:
        return 1
    return state.get_sequence_parallel_world_size()
