"""Ulysses sequence parallelism: DeepSpeed's own, set up from "sequence_parallel_size" in the DeepSpeed JSON.

Each rank of a group holds a part of every sequence; before attention an all-to-all trades parts of the sequence for heads, after
it another trades back (DeepSpeed: runtime/sequence_parallel/ulysses_sp.py). A replay runs both again, on all ranks alike.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ds_memo.deepspeed import sequence_probe
from ds_memo.deepspeed.documents import Attention, attention_within, without_gaps
from ds_memo.deepspeed.sequence_probe import FIELD
from ds_memo.distributed.topology import ranks_per_sequence
from ds_memo.errors import MemoConfigError, MemoError
from ds_memo.hf.attention import wrap_attention
from ds_memo.hf.rotary import seen_by_rotary
from ds_memo.profile.layer_call import is_shortened
from ds_memo.units import round_up

IGNORE = -100
"""Label of a token that does not count."""
_MASKS_WINDOWS = ("sdpa", "flex_attention")
"""Attention implementations that know a sliding window only through the mask, which Ulysses drops."""
_NEEDS_A_MASK = ("eager", "paged|eager")

_parallel: weakref.WeakKeyDictionary[nn.Module, _Attention] = weakref.WeakKeyDictionary()
"""Attention modules of models that are sequence-parallel."""


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


def check(size: int, model_config: Any, world_size: int, seq_length: int | None = None) -> None:
    """Refuse what cannot be split.

    Args:
        size: ranks that share a sequence.
        model_config: the Hugging Face configuration.
        world_size: ranks in all.
        seq_length: tokens of a whole sequence, where they are known.

    Raises:
        MemoConfigError: with the numbers.
    """
    model_config = model_config.get_text_config()
    heads = getattr(model_config, "num_attention_heads", None) or size  # a state-space model has none
    key_heads = getattr(model_config, "num_key_value_heads", None) or heads
    if world_size % size:
        raise MemoConfigError(f"{FIELD}: got {size}, but the {world_size} ranks of this run are no multiple of it")
    if heads % size:
        raise MemoConfigError(f"{FIELD}: got {size}, but the model's {heads} attention heads are no multiple of it")
    if key_heads % size and size % key_heads:
        raise MemoConfigError(
            f"{FIELD}: got {size}; the model's {key_heads} key and value heads must be a multiple of it or divide it"
        )
    if seq_length is not None and seq_length % size:
        raise MemoConfigError(
            f"{FIELD}: got {size}, but {seq_length} tokens do not split into {size} equal parts; "
            f"use {seq_length // size * size or size} or {round_up(seq_length, size)}"
        )


def set_up(model: nn.Module, size: int) -> ModuleType:
    """Make a Hugging Face model's attention sequence-parallel over groups of `size` neighbouring ranks.

    Other models in the process stay as they are. Every forward must then be given this rank's part of the tokens
    (:func:`split`) and their ``position_ids``.

    Returns:
        What ``deepspeed.initialize`` takes as ``mpu``.

    Raises:
        MemoConfigError: the numbers do not fit together.
        MemoError: the model cannot be made sequence-parallel.
    """
    name = _attention_name(model)
    if not dist.is_initialized():
        deepspeed.init_distributed()
    check(size, model.config, dist.get_world_size())
    _make_groups(size)
    attention = _Attention(name, model, parallel_state_sp.get_sequence_parallel_group())
    for module in model.modules():
        _parallel[module] = attention
    model.register_forward_pre_hook(attention.before_forward, with_kwargs=True)
    return parallel_state_sp


def refuse_inexact(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Refuse a sequence-parallel model whose parts do not give what whole sequences give; all ranks call this together.

    Args:
        model: made so by :func:`set_up`, or by DeepSpeed's own function, as Accelerate calls it. Another is left alone.
        forward: calls the model as training does.

    Raises:
        MemoError: the first module that differs, and by how much.
    """
    if (own := _parallel.get(model)) is not None:
        sequence_probe.refuse_inexact(model, forward, own.group, own.whole)
    elif (theirs := _registered_by_deepspeed(model)) is not None:
        name, before = _attention_name(model), dict(vars(theirs))
        theirs.seq_length_is_variable, theirs.disable_in_eval = True, False
        try:
            plain = functools.partial(_replaced, name, theirs.attn)
            sequence_probe.refuse_inexact(model, forward, theirs.process_group, plain, theirs.batch_size)
        finally:
            vars(theirs).update(before)


def _registered_by_deepspeed(model: nn.Module) -> UlyssesSPAttentionHF | None:
    """Return the attention that register_with_transformers has put in the table under this model's implementation, if any."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None or ranks_per_sequence() == 1:
        return None
    function = wrap_attention(name, lambda core: core)
    theirs = inspect.getclosurevars(function).nonlocals.get("uattn") if inspect.isfunction(function) else None
    return theirs if isinstance(theirs, UlyssesSPAttentionHF) else None


@contextmanager
def _replaced(name: str, attend: Attention) -> Iterator[None]:
    before = wrap_attention(name, lambda _: attend)
    try:
        yield
    finally:
        wrap_attention(name, lambda _: before)


def split(batches: Iterable[dict[str, Any]], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's part of every sequence, by DeepSpeed's UlyssesSPDataLoaderAdapter.

    The ranks of a group each read batches of their own; all of the group then work on the first rank's, the second's, and so on.

    Args:
        batches: dicts with ``input_ids``, ``position_ids`` and ``labels``, each (b, s); ``labels[i]`` is the token after
            ``input_ids[i]``, or -100.
        device: where the parts are wanted.

    Returns:
        The same dicts with (b, s / ranks).
    """
    # The adapter shifts what is called "labels" and loses the last one: ours are shifted already.
    aligned = ({**batch, "labels": batch["input_ids"], "aligned": batch["labels"]} for batch in batches)
    adapter = UlyssesSPDataLoaderAdapter(
        aligned,
        sp_rank=parallel_state_sp.get_sequence_parallel_rank(),
        sp_group=parallel_state_sp.get_sequence_parallel_group(),
        sp_world_size=parallel_state_sp.get_sequence_parallel_world_size(),
        device=device,
    )
    for part in adapter:
        del part["shift_labels"]
        part["labels"] = part.pop("aligned")
        yield {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in part.items()}


def mean_over_ranks(loss: torch.Tensor, labels: torch.Tensor, engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """The mean loss over whole sequences, from every rank's mean over its part, weighted by the labels that count.

    Its gradient, as `engine` reduces it, is the one without sequence parallelism, under every ZeRO stage. (The loss of
    DeepSpeed's tutorial, an all-gather that autograd follows, gives that under ZeRO-3 only; below, gradients are too large by
    the size of the group. Adam hides it, clipping does not.)

    Args:
        loss: scalar, the mean over those of `labels` that are not -100.
        labels: this rank's part, each the token to predict at that position.
        engine: what runs the backward.
    """
    count = (labels != IGNORE).sum()
    total = count.clone()
    group = parallel_state_sp.get_sequence_parallel_group()
    dist.all_reduce(total, group=group)
    share = torch.where(count > 0, loss, torch.zeros_like(loss)) * (count / total.clamp(min=1))
    return _SumOverRanks.apply(share, group, dist.get_world_size(group) if _divides_by_all_ranks(engine) else 1)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup, factor: int) -> torch.Tensor:
        ctx.factor = factor
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.factor, None, None


def _divides_by_all_ranks(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return True if gradients are divided by the number of all ranks, not of groups, as ZeRO-3's reduce-scatter does.

    Seen in DeepSpeed 0.19.8; should it learn of groups, its source will say so.
    """
    return engine.zero_optimization_stage() == 3 and not _reduce_scatter_knows_groups()


@functools.cache
def _reduce_scatter_knows_groups() -> bool:
    reduce_scatter = DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
    return "sequence_parallel" in inspect.getsource(reduce_scatter)


class _Attention:
    """Sequence-parallel attention of one model.

    Args:
        name: the attention implementation.
        model: the whole model.
        group: ranks that share a sequence.
    """

    def __init__(self, name: str, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._name = name
        self._core = _take_over(name)
        self._within = WeakTensorKeyDictionary()
        """Rows, and the attention over whole sequences, by the position_ids that a forward, and so its replay, gives layers."""
        self._layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
        self.group = group
        self.ranks = dist.get_world_size(group)
        self._by_shape: dict[tuple[int, ...], UlyssesSPAttentionHF] = {}
        self._rotary = seen_by_rotary(model.config.get_text_config())
        self._whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Attend on this rank alone: it has whole sequences."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """query (b, heads, s / ranks, head size), and the rest of Hugging Face's attention interface."""
        if self._whole:
            return self._core(module, query, key, value, attention_mask, *rest, **kwargs)
        length, window = query.shape[2] * self.ranks, _window(module, kwargs)
        if window is not None and window < length and self._name in _MASKS_WINDOWS:
            raise MemoError(
                f"{FIELD} {self.ranks}: the model attends to a window of {window} tokens of {length}, which "
                f'attn_implementation="{self._name}" knows from its mask alone, and Ulysses drops that. Use "flash_attention_2".'
            )
        if value.shape[-1] != key.shape[-1]:
            raise MemoError(
                f"{FIELD} {self.ranks}: {type(module).__name__} has keys of {key.shape[-1]} and values of {value.shape[-1]} "
                f'elements a head; DeepSpeed\'s Ulysses exchanges heads of one size. Use "{FIELD}": 1'
            )
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor):
            raise MemoError(
                f"{FIELD} {self.ranks}: {type(module).__name__} hands its attention function no position_ids, by which Ulysses "
                f'knows the documents of a sequence. Use "{FIELD}": 1'
            )
        if is_shortened(positions) and positions not in self._within:
            self._find_documents(positions, positions.expand(len(query), -1))
        rows, within = self._within.get(positions, (0, None))
        if self._name == "flex_attention" and attention_mask is None:
            within = self._core  # not causal, or there would be one
        elif within is not self._core and rows != len(query):
            within = None
        # The mask is of the part alone.
        out, weights = self._of_shape(query, key)(module, query, key, value, None, *rest, within=within, **kwargs)
        return out.unflatten(-1, (query.shape[1], -1)), weights  # as every attention function of Transformers returns it

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Find the documents of whole sequences, alike on all ranks of the group.

        Without position_ids the model would number each part's tokens from 0, and train on that without a word.
        """
        if module not in _parallel or self._whole:
            return None
        positions = kwargs.get("position_ids")
        if positions is None:
            tokens = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 1), None)
            length, rank = tokens.shape[1] if tokens is not None else 0, dist.get_rank(self.group)
            raise MemoError(
                f"{FIELD} {self.ranks}: the model was called without position_ids. Part {rank} of each sequence holds its "
                f"tokens {rank * length} to {(rank + 1) * length - 1} of {self.ranks * length}, and position_ids must say so. "
                "Let UlyssesSPDataLoaderAdapter or ds_memo.deepspeed.ulysses.split cut batches that have them."
            )
        if positions.dim() != 2:
            raise MemoError(
                f"{FIELD} {self.ranks}: position_ids have the shape {tuple(positions.shape)}; expected (rows, tokens). "
                "Ulysses knows positions of one axis; train models with more on whole sequences."
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise MemoError(
                f"{FIELD} {self.ranks}: the model was called with cu_seq_lens_q, but a rank holds a part of each sequence. "
                "Leave it out: position_ids that start again with each document say the same."
            )
        own = positions.clone(memory_format=torch.contiguous_format)  # the caller may write to theirs before a replay looks
        self._find_documents(own, own)
        return args, {**kwargs, "position_ids": own}

    def _find_documents(self, key: torch.Tensor, positions: torch.Tensor) -> None:
        """Find the documents of whole sequences, for layers that are given `key`.

        Args:
            positions: of this rank's part (b, s / ranks). A profile cuts the end of each part off: documents go on behind it.
        """
        on_host = torch.device("cpu") in self.group._device_types  # where it can, a collective that waits for no device
        shapes = self._gathered(torch.tensor(positions.shape, device="cpu" if on_host else positions.device)).tolist()
        if any(shape != shapes[0] for shape in shapes):
            ranks = dist.get_process_group_ranks(self.group)
            came = ", ".join(f"{rows} x {length} on rank {r}" for r, (rows, length) in zip(ranks, shapes, strict=True))
            raise MemoError(
                f"{FIELD} {self.ranks}: the ranks of a sequence came with parts of unequal size (rows x tokens: {came}); "
                "expected equal parts. Let UlyssesSPDataLoaderAdapter or ds_memo.deepspeed.ulysses.split cut batches"
            )
        parts = self._gathered(positions.contiguous())
        if self._rotary is not None:
            kind, seen = self._rotary
            lengths = (parts.amax(dim=(1, 2)) + 1).tolist()
            if len(set(map(seen, lengths))) > 1:
                raise MemoError(
                    f'{FIELD} {self.ranks}: frequencies of rotary embeddings of type "{kind}" depend on the length that a rank '
                    f"sees, and the parts of this sequence go up to {', '.join(map(str, lengths))}: each rank would take others. "
                    f'Use "{FIELD}": 1, or a rope_type without lengths ("yarn", "linear")'
                )
        whole = parts.transpose(0, 1).flatten(1)
        whole = without_gaps(whole) if is_shortened(key) else whole
        self._within[key] = len(whole), attention_within(self._name, self._core, whole)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks of the group (ranks, …)."""
        gathered = tensor.new_empty(self.ranks, *tensor.shape)
        dist.all_gather(list(gathered), tensor, group=self.group)
        return gathered

    def _attend(self, module: nn.Module, query: torch.Tensor, *args: Any, within: Attention | None, **kwargs: Any) -> Any:
        """Run between the all-to-alls: query (b, heads / ranks, s, head size), position_ids of whole sequences (b, s)."""
        shared = query.shape[1] // args[0].shape[1]
        if getattr(module, "num_key_value_groups", shared) != shared:  # functions repeat keys so often, and tiles give some heads
            module.num_key_value_groups = shared
        if within is None:  # the layer was given other position_ids than the model, or one row for all
            within = attention_within(self._name, self._core, kwargs["position_ids"].expand(len(query), -1))
        return within(module, query, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _Attention:
        """A copy of the model is not sequence-parallel, and copies its hooks."""
        return self

    def _of_shape(self, query: torch.Tensor, key: torch.Tensor) -> UlyssesSPAttentionHF:
        """One per batch size and number of heads, which it wants to know beforehand."""
        batch, heads, _, size = query.shape
        shape = batch, heads, key.shape[1], size
        if shape not in self._by_shape:
            self._by_shape[shape] = UlyssesSPAttentionHF(
                attn=self._attend,
                batch_size=batch,
                attn_head_count=heads,
                attn_head_size=size,
                kv_head_count=key.shape[1],
                num_hidden_layers=self._layers,
                process_group=self.group,
                seq_length_is_variable=True,
            )
            self._by_shape[shape].core_attn_implementation = self._name
        return self._by_shape[shape]


def _window(module: nn.Module, kwargs: Mapping[str, Any]) -> int | None:
    """Return the window of an attention call. A layer that does not state it (Phi-MoE) puts that of its model into the mask."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    return getattr(getattr(module, "config", None), "sliding_window", None) or None


@functools.cache
def _take_over(name: str) -> Attention:
    """Send what sequence-parallel models ask of this attention implementation through their :class:`_Attention`.

    Returns:
        The implementation that was there.
    """

    def around(core: Attention) -> Attention:
        @functools.wraps(core)
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _parallel.get(module, core)(module, *args, **kwargs)

        attend.ranks = lambda module: _parallel[module].ranks if module in _parallel else 1  # type: ignore[attr-defined]
        return attend

    return wrap_attention(name, around)


def _attention_name(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        raise MemoError(f"{FIELD}: {type(model).__name__} is no Hugging Face model; Ulysses needs one whose attention it knows")
    if name in _NEEDS_A_MASK:
        raise MemoError(
            f'{FIELD}: attn_implementation="{name}" needs a mask of length × length, which Ulysses drops; use "sdpa" or a flash'
        )
    return name


def _make_groups(size: int) -> None:
    """The process groups that DeepSpeed asks for; its own function makes them once per process."""
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=size)
        device = torch.device(get_accelerator().device_name())
        timeout = dist.group.WORLD._get_backend(device).options._timeout  # else a lost rank would be waited for half an hour
        for group in (parallel_state_sp.get_sequence_parallel_group(), parallel_state_sp.get_sequence_data_parallel_group()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    there = parallel_state_sp.get_sequence_parallel_world_size()
    if there != size:
        raise MemoError(f"{FIELD}: got {size}, but DeepSpeed's groups in this process are of {there} ranks; use one size")
