"""Sequence parallelism (ds_memo.sequence), set up from "sequence_parallel_size" in the DeepSpeed JSON; its batches and its loss.

Process groups, and the division of gradients by them, are DeepSpeed's (runtime/sequence_parallel).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from ds_memo.distributed.store import groups_wait_no_longer
from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.errors import MemoConfigError, MemoError
from ds_memo.hf.attention import wrap_attention
from ds_memo.runtime.sequence import decoders, make_parallel
from ds_memo.runtime.sequence import refuse_inexact as refuse_own_inexact
from ds_memo.sequence import batches as of_group

FIELD = "sequence_parallel_size"


def size_in(config: Mapping[str, Any]) -> int:
    """Read from the DeepSpeed JSON the number of ranks that share a sequence.

    Raises:
        MemoConfigError: it is no whole number above 0.
    """
    size = config.get(FIELD, 1)
    if type(size) is not int or size < 1:
        raise MemoConfigError(f"{FIELD}: got {size!r}; allowed: a whole number above 0 (the ranks that share a sequence)")
    return size


def refuse_conflicts(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed cannot do beside sequence parallelism.

    Raises:
        MemoConfigError: naming both settings.
    """
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and zero.get("reduce_scatter") is False:
        raise MemoConfigError(
            f"zero_optimization.reduce_scatter: got false with stage 3 and {FIELD}; DeepSpeed then divides gradients of large "
            "parameters by the number of all ranks and of small ones by that of groups. Leave reduce_scatter out"
        )


def check(size: int, ulysses: int | None, world_size: int) -> None:
    """Refuse numbers of ranks that do not fit together.

    Args:
        size: ranks that share a sequence.
        ulysses: those among them that trade heads; None: chosen.
        world_size: ranks in all.

    Raises:
        MemoConfigError: with the numbers.
    """
    if world_size % size:
        raise MemoConfigError(
            f"{FIELD}: got {size}, but the {world_size} ranks of this run are no multiple of it; choose a divisor"
        )
    if ulysses is not None and size % ulysses:
        raise MemoConfigError(f"memo.ulysses_size: got {ulysses}; allowed: a number that divides {FIELD}, which is {size}")


def set_up(model: nn.Module, size: int, ulysses: int | None = None) -> ModuleType:
    """Make a Hugging Face model sequence-parallel over groups of `size` neighbouring ranks.

    Other models in the process stay as they are. Every forward must then be given this rank's part of the tokens
    (:func:`split`) and their ``position_ids``; that of a model with towers whole sequences.

    Args:
        ulysses: ranks of a group that trade heads; what is left is a ring. None: chosen.

    Returns:
        What ``deepspeed.initialize`` takes as ``mpu``.

    Raises:
        MemoConfigError: the numbers do not fit together.
        MemoError: the model cannot be made sequence-parallel.
    """
    if not deepspeed.comm.is_initialized():  # its own, which torch's group may come before (Accelerate on CPUs)
        deepspeed.init_distributed()
    check(size, ulysses, dist.get_world_size())
    _make_groups(size)
    make_parallel(model, parallel_state_sp.get_sequence_parallel_group(), ulysses)
    return parallel_state_sp


def refuse_inexact(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Refuse a sequence-parallel model whose parts do not give what whole sequences give; all ranks call this together.

    Args:
        model: made so by :func:`set_up`, or by DeepSpeed's own function, as Accelerate calls it. Another is left alone.
        forward: calls the model as training does.

    Raises:
        MemoError: the first module that differs, and by how much.
    """
    if model in decoders:
        refuse_own_inexact(model, forward)
    elif (registered := _registered_by_deepspeed(model)) is not None:
        from ds_memo.hf import sequence_probe

        name, before = model.config._attn_implementation, dict(vars(registered))
        registered.seq_length_is_variable, registered.disable_in_eval = True, False
        try:
            plain = functools.partial(_replaced, name, registered.attn)
            sequence_probe.refuse_inexact(model, forward, registered.process_group, plain, registered.batch_size)
        finally:
            vars(registered).update(before)


def _registered_by_deepspeed(model: nn.Module) -> UlyssesSPAttentionHF | None:
    """Return the attention that register_with_transformers has put in the table under this model's implementation, if any."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None or ranks_per_sequence(model) == 1:
        return None
    function = wrap_attention(name, lambda core: core)
    registered = inspect.getclosurevars(function).nonlocals.get("uattn") if inspect.isfunction(function) else None
    return registered if isinstance(registered, UlyssesSPAttentionHF) else None


@contextmanager
def _replaced(name: str, attend: Callable[..., Any]) -> Iterator[None]:
    before = wrap_attention(name, lambda _: attend)
    try:
        yield
    finally:
        wrap_attention(name, lambda _: before)


def split(batches: Iterable[dict[str, Any]], device: torch.device, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield this rank's part of every sequence.

    The ranks of a group each read batches of their own; all of the group then work on the first rank's, the second's, and so on,
    until one of them has no more. Parts are as equal as they can be; any length will do.

    Args:
        batches: dicts with ``input_ids``, ``position_ids`` and ``labels``, each (b, s); ``labels[i]`` is the token after
            ``input_ids[i]``, or -100. What has no dimension 1 of s tokens goes to all ranks as it is, lists of tensors too.
        device: where the parts are wanted.
        whole: cut labels alone, for a model with towers (images, audio), which takes whole sequences.

    Returns:
        The same dicts with (b, n), n = s / ranks, or one more on the first ranks.
    """
    return of_group.split(batches, parallel_state_sp.get_sequence_parallel_group(), device, whole)


def mean_over_ranks(loss: torch.Tensor, labels: torch.Tensor, engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """Return the mean loss over whole sequences, from every rank's mean over its part, weighted by the labels that count.

    Its gradient, as `engine` reduces it, is the one without sequence parallelism, under every ZeRO stage. (The loss of
    DeepSpeed's tutorial, an all-gather that autograd follows, gives that under ZeRO-3 only; below, gradients are too large by
    the size of the group. Adam hides it, clipping does not.)

    Args:
        loss: scalar, the mean over those of `labels` that are not -100.
        labels: this rank's part, each the token to predict at that position.
        engine: what runs the backward.
    """
    group = parallel_state_sp.get_sequence_parallel_group()
    return of_group.mean_over_ranks(loss, labels, group, dist.get_world_size(group) if _divides_by_all_ranks(engine) else 1)


def _divides_by_all_ranks(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return True if gradients are divided by the number of all ranks, not of groups, as ZeRO-3's reduce-scatter does.

    Seen in DeepSpeed 0.19.8; should it learn of groups, its source will say so.
    """
    return engine.zero_optimization_stage() == 3 and not _reduce_scatter_knows_groups()


@functools.cache
def _reduce_scatter_knows_groups() -> bool:
    reduce_scatter = DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
    return "sequence_parallel" in inspect.getsource(reduce_scatter)


def _make_groups(size: int) -> None:
    """Make the process groups that DeepSpeed asks for; its own function does so once per process."""
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        with groups_wait_no_longer():
            parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=size)
    there = parallel_state_sp.get_sequence_parallel_world_size()
    if there != size:
        raise MemoError(f"{FIELD}: got {size}, but DeepSpeed's groups in this process are of {there} ranks; use one size")
