"""Sequence parallelism without an engine: ranks of a DeviceMesh share the sequences of a model under FSDP2 or DDP."""

from __future__ import annotations

import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ds_memo.distributed import agree
from ds_memo.distributed.topology import beside_units, note_sequence_group, reductions
from ds_memo.errors import MemoConfigError, MemoError
from ds_memo.memory.host import ranks_on_node
from ds_memo.remat.undo import changed
from ds_memo.runtime.attach import refuse_attached
from ds_memo.runtime.module_patches import Patched
from ds_memo.sequence import batches
from ds_memo.sequence.ranks import group_of, ranks_of
from ds_memo.sequence.ulysses_size import ulysses_size as solved

if TYPE_CHECKING:
    from ds_memo.hf.sequence import Decoder

decoders: weakref.WeakKeyDictionary[nn.Module, Decoder] = weakref.WeakKeyDictionary()
"""The decoder of each model that is sequence-parallel."""


def share_sequences(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    ulysses_size: int | None = None,
    averaged_over: DeviceMesh | dist.ProcessGroup | None = None,
) -> SharedSequences:
    """Have ranks share each sequence of a Hugging Face model: Ulysses, and a ring for the ranks that it leaves over.

    All ranks of the run call this together, before ``ds_memo.attach`` and the first forward; ``fully_shard`` and DDP may come
    before or after. Other models in the process stay as they are. Every forward must then be given this rank's part of the tokens
    and their ``position_ids``; that of a model that reads more than text whole sequences. The first one tries the model on about
    75 tokens, whole and in parts.

    Args:
        mesh: the ranks that share a sequence: ``mesh["sp"]``, ``mesh["ring", "ulysses"]``, or their process group.
        ulysses_size: ranks that trade heads; the rest is a ring. None: as a mesh of two dimensions says, else solved.
        averaged_over: the ranks over which code of the caller's own averages gradients, these among them. None: FSDP2 or DDP
            reduces them, and is asked.

    Raises:
        MemoConfigError: the numbers do not fit together.
        MemoError: the model cannot be made sequence-parallel, is so already, or is attached.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    refuse_attached(model)
    if model in decoders:
        raise MemoError(f"ranks share the sequences of this {type(model).__name__} already; call share_sequences once")
    group, of_mesh = group_of(mesh)
    size = dist.get_world_size(group)
    if ulysses_size is not None and (ulysses_size < 1 or size % ulysses_size or of_mesh not in (None, ulysses_size)):
        allowed = f"a number that divides the {size} ranks of the mesh" if of_mesh is None else f"{of_mesh}, as the mesh has it"
        raise MemoConfigError(f"ulysses_size: got {ulysses_size}; allowed: {allowed}")
    if size > 1:
        make_parallel(model, group, ulysses_size or of_mesh)
        _try_first(model)
    return SharedSequences(model, group, None if averaged_over is None else group_of(averaged_over)[0])


class SharedSequences:
    """What a training loop needs of the ranks that share a model's sequences. Made by :func:`share_sequences`."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, averaged_over: dist.ProcessGroup | None) -> None:
        self._model = model
        self._group = group
        self._averaging = averaged_over
        """The group over which the caller's own code, or DDP, averages gradients."""
        if averaged_over is None:
            model.register_forward_pre_hook(self._note_ddp)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSequences:
        """A copy of the model copies its hooks."""
        return self

    def split(self, loader: Iterable[dict[str, Any]], device: torch.device, whole: bool = False) -> Iterator[dict]:
        """Yield this rank's part of every sequence.

        The ranks of a group each read batches of their own, as with plain data parallelism; all of the group then work on the
        first rank's, the second's, and so on, until one of them has no more. Parts are as equal as they can be; any length will
        do.

        Args:
            loader: dicts with ``input_ids``, ``position_ids`` and ``labels``, each (b, s); ``labels[i]`` is the token
                after ``input_ids[i]``, or -100. What has no dimension 1 of s tokens goes to all ranks as it is.
            device: where the parts are wanted.
            whole: cut labels alone, for a model that reads more than text (images, audio), which takes whole sequences.

        Returns:
            The same dicts with (b, n), n = s / ranks, or one more on the first ranks.
        """
        return batches.split(loader, self._group, device, whole)

    def part(self, batch: dict[str, Any], whole: bool = False) -> dict[str, Any]:
        """Return this rank's part of a batch that all ranks of the group have read, as loaders give it to "cp" ranks.

        Args:
            batch, whole: as in :meth:`split`.

        Raises:
            MemoError: the ranks' labels differ.
        """
        decoder = decoders.get(self._model)
        return batches.part(batch, self._group, self._group if decoder is None else decoder.ranks.host_group, whole)

    def mean_loss(self, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over whole sequences, from every rank's mean over its part, weighted by the labels that count.

        Call its ``backward()``. The gradient that FSDP2, HSDP or DDP then makes of all ranks' is that of this mean, and its mean
        over the groups that work on other sequences: ranks that average over dp x sp divide by sp too often, so each rank's
        gradient is multiplied by sp. A divisor that was set (``set_gradient_divide_factor``) is made good, too.

        Args:
            loss: scalar, the mean over those of `labels` that are not -100; NaN if none counts.
            labels: this rank's part, each the token to predict at that position.

        Raises:
            MemoError: the gradients of a sequence's ranks are not added up, or nothing is known that does so.
        """
        return batches.mean_over_ranks(loss, labels, self._group, self._scale())

    def _scale(self) -> float:
        """Return the factor of this rank's gradient."""
        ranks = dist.get_process_group_ranks(self._group)
        found = reductions(self._model)
        if self._averaging is None and (name := beside_units(self._model)) is not None:
            raise MemoError(
                f"the ranks {ranks} share sequences, and FSDP2 does not have {name}: its gradient would be of this rank's part. "
                "Call fully_shard on the model, too, without ignored_params that are trained. If the loop averages gradients "
                "itself, give their ranks to share_sequences(…, averaged_over=mesh)"
            )
        if self._averaging is not None:
            found.add((tuple(over := dist.get_process_group_ranks(self._averaging)), len(over)))
        if not found and len(ranks) > 1:
            raise MemoError(
                f"the ranks {ranks} share sequences, and it is not known what adds up their gradients: neither fully_shard nor "
                "DistributedDataParallel has the model. If the loop averages them itself, give their ranks to "
                "share_sequences(…, averaged_over=mesh)"
            )
        for over, _ in found:
            if not set(ranks) <= set(over):
                raise MemoError(
                    f"the ranks {ranks} share sequences, but gradients are averaged over the ranks {list(over)} alone: each "
                    "would train on its part. Call fully_shard without a mesh (over all ranks), or with one of two "
                    'dimensions, mesh["dp", "sp"], whose first holds copies'
                )
        scales = {divisor * len(ranks) / len(over) for over, divisor in found}
        if len(scales) > 1:
            raise MemoError(
                f"FSDP2 divides gradients of some units otherwise than of others (ranks and divisors: {sorted(found)}), and a "
                "loss has one factor. Give all units the same mesh and gradient_divide_factor"
            )
        return scales.pop() if scales else 1.0

    def _note_ddp(self, module: nn.Module, args: tuple) -> None:
        if (around := DistributedDataParallel._get_active_ddp_module()) is not None:
            self._averaging = around.process_group


def make_parallel(model: nn.Module, group: dist.ProcessGroup, ulysses: int | None) -> Decoder:
    """Make a Hugging Face model sequence-parallel over a group; all ranks of the process call this together.

    Raises:
        MemoConfigError: more ranks trade heads than there are.
        MemoError: the model cannot be made sequence-parallel.
    """
    from ds_memo.hf.sequence import Decoder  # imports Transformers

    config = getattr(model, "config", None)
    config = None if config is None else config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)  # a state-space model has none
    if ulysses is not None and heads is not None and ulysses > heads:
        raise MemoConfigError(f"memo.ulysses_size: got {ulysses}; allowed: up to the model's {heads} attention heads")
    if ulysses is None:
        own, on_node = dist.get_process_group_ranks(group), ranks_on_node()
        inside = math.gcd(*Counter(rank // on_node for rank in own).values())
        key_heads = getattr(config, "num_key_value_heads", None) or heads or len(own)
        ulysses = solved(len(own), heads or len(own), key_heads, math.gcd(*agree.from_all_ranks(inside)))  # nodes may differ
    decoders[model] = found = Decoder(model, ranks_of(group, ulysses))
    note_sequence_group(model, group)
    return found


def refuse_inexact(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Refuse a model whose parts do not give what whole sequences give; all ranks of the process call this together.

    Args:
        forward: calls the model as training does.

    Raises:
        MemoError: the first module that differs, and by how much.
    """
    from ds_memo.hf import sequence_probe

    decoder = decoders[model]
    sequence_probe.refuse_inexact(model, forward, decoder.ranks.group, decoder.whole, decoder=decoder)


def _try_first(model: nn.Module) -> None:
    """Have the model's first forward begin with a probe: then its weights are where they train, in FSDP2's pieces.

    Only a hook of all modules comes before FSDP2's own, whichever was there first.
    """
    live, trying = weakref.ref(model), False

    def before(module: nn.Module, args: tuple) -> None:
        nonlocal trying
        if module is not live() or trying:
            return
        trying = True
        try:
            with _without_memo(module):
                refuse_inexact(module, module)
            hook.remove()
        finally:
            trying = False

    hook = register_module_forward_pre_hook(torch.compiler.disable(before))
    weakref.finalize(model, hook.remove)


@contextmanager
def _without_memo(model: nn.Module) -> Iterator[None]:
    """Take out what an attached model's session has put into it: it would run the probe's forwards in tiles."""
    with ExitStack() as stack:
        for module in model.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, Patched):
                while isinstance(forward, Patched):
                    forward = forward.plain  # type: ignore[assignment]
                stack.enter_context(changed(module, "forward", forward))
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = vars(module)[name]
                left = OrderedDict((key, hook) for key, hook in hooks.items() if not isinstance(hook, Patched))
                if len(left) < len(hooks):
                    stack.enter_context(changed(module, name, left))
        yield
