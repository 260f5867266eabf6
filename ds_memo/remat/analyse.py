"""Analyse: watch a layer's first forward of a signature to make its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ds_memo.remat import op_policy
from ds_memo.remat.call import Call, needs_right_operands, noticing_draws
from ds_memo.remat.functions import has_inner_tensors, refused
from ds_memo.remat.modes import NotingMode, under_a_checkpoint
from ds_memo.remat.op_policy import OpKind, kind_of
from ds_memo.remat.recipe import Observed, ObservedGemm, ObservedSavedOp, fingerprint
from ds_memo.remat.tensors import as_tuple, detached, storage_of, tensor_leaves

ALL_SO_FAR = -1
"""Sources of memory that a kernel PyTorch does not show may have filled: every GEMM up to the moment of the read."""
_MASK_BYTES = 64 << 20
"""Largest filled memory that is fingerprinted. Reading more takes longer than recognising a mask saves."""


@dataclass
class Filled:
    """Memory that an op filled with a constant, and that only dispatched ops have written to since (a router's mask)."""

    fingerprint: torch.Tensor
    sources: int = 0
    """Sources of what these ops wrote."""


class Analyse(NotingMode):
    """Watch a layer's first forward of a signature to find which outputs its backward depends on. Copy nothing before its end.

    Track the *sources* of each storage: the GEMMs whose outputs it was computed from. They reach back to the nearest GEMM or
    saved op, since those outputs can be supplied. A storage that no op returned (a compiled region's output, memory that NumPy
    made) may depend on everything computed before it was first observed.

    The set has two bits per GEMM. The lower bit: the GEMM may be a source, so the replay computes it. The upper bit: a choice by
    these values (of an expert) counts as a choice by the GEMM, whose rows are then not split.

    Args:
        observed: filled in by this mode.
        givens: tensors that existed before the call: what the layer holds, and its arguments.
    """

    def __init__(
        self,
        call: Call,
        observed: Observed,
        givens: Iterable[torch.Tensor],
    ) -> None:
        super().__init__()
        self.call = call
        self.observed = observed
        givens = list(givens)
        self._parameters = [tensor for tensor in givens if isinstance(tensor, nn.Parameter)]
        self._sources = {storage_of(tensor): 0 for tensor in givens}
        self._sources.pop(0, None)
        self._older = set(self._sources)  # storages that existed before the call
        # A weak reference keeps a storage's id from being reused: ZeRO-3 replaces parameters' storages as it gathers them.
        self._alive = [StorageWeakRef(tensor.untyped_storage()) for tensor in givens if storage_of(tensor)]
        self._weights = {storage_of(parameter) for parameter in self._parameters}
        self._weights.discard(0)
        self._without_tokens = set(self._weights)
        """Storages of parameters, constants, and what was computed from these alone."""
        self._blank: set[int] = set()  # made by an op for others to write to, and no op has yet
        self._filled: dict[int, Filled] = {}
        self._gemms: list[ObservedGemm] = []
        self._fresh: ObservedGemm | None = None  # the op before this one, views aside

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._sources.clear()
        self._blank.clear()
        self._filled.clear()
        self._weights.clear()
        self._without_tokens.clear()
        self._parameters.clear()
        self._alive.clear()
        self._gemms.clear()
        self._fresh = None

    @property
    def next_op(self) -> int:
        """Index of the recipe's next op."""
        return len(self.observed.ops)

    @property
    def packs(self) -> int:
        return self.observed.packs

    def attention_reached(self, reads: Iterable[torch.Tensor], supplied: Iterable[torch.Tensor]) -> None:
        """Cut a tile here: what was observed is its pre, attention reads these tensors, and the post is given those."""
        observed = self.observed
        observed.pre_ops = len(observed.ops)
        observed.pre_needs = observed.closed(observed.wanted, lambda gemm: gemm.splits and gemm.chosen_from)
        observed.pre_writes, observed.post_writes = observed.post_writes, False
        observed.wanted |= self._made_of_all(list(reads))
        for tensor in supplied:
            self._made(tensor, 0)

    def returned(self, output: torch.Tensor) -> None:
        """Note what the run of a tile returned. Call it inside the mode."""
        self.observed.post_needs = self.observed.closed(self.observed.post_needs | self._made_of(output), lambda gemm: False)

    def _note(self, tensor: torch.Tensor) -> None:
        self.observed.packs += 1
        self.observed.wanted |= self._made_of(tensor)
        if self.call.check is not None:
            self.call.check.sample(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_inner_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        kind = kind_of(func)
        if self.call.before is not None and (generator := kwargs.get("generator")) is not None:
            self.call.before.about_to_draw(generator)
        frame = self.call.frame  # None while a tile's recipe is made
        if frame is not None and (stream := self.call.engine.streams.current()) != frame.stream:
            frame.side_streams.add(stream)
        sources = self._made_of_all(args, kwargs)
        if self.observed.pre_ops:
            self.observed.post_needs |= sources
        if self._blank and kind is not OpKind.MUTATES and not func.is_view:
            self.observed.notes.hidden_kernels |= any(
                storage_of(tensor) in self._blank for tensor in tensor_leaves((args, kwargs))
            )
        fresh, self._fresh = self._fresh, self._fresh if func in op_policy.VIEWS else None
        if kind is OpKind.ATTENTION or kind is OpKind.CHOICE:
            return self._run_saved(kind, func, args, kwargs, sources)
        if kind is OpKind.MUTATES:
            sources = self._about_to_write(func, args, kwargs, sources, fresh)
        if needs_right_operands(kind, func, args, kwargs, lambda: self._older):
            self.observed.wanted |= sources
            self._choose_from(self._made_of_all(op_policy.chooses_by(func, args)))
        if func in op_policy.SOFTMAX and op_policy.materialises_scores(func, args[0]):
            self.observed.notes.softmax = str(func)
        out = func(*args, **kwargs)
        has_weight = self._follow_weights(kind, args, out)
        without_tokens = self._follow_constants(func, (args, kwargs), out)
        if fresh is not None and fresh.biased:
            fresh.fingerprint = fingerprint(fresh.out)
        if kind is OpKind.GEMM or has_weight:
            self._saw_gemm(func, args, out, sources, without_tokens)
        elif func in op_policy.BLANK:
            self._made_blank(func, out)
        else:
            self._made(out, sources)
            if kind is OpKind.BATCHED:
                self.observed.ops.append(ObservedSavedOp(func, (), sources, fingerprint(()), recomputed=True))
        if kind is OpKind.MUTATES and self._filled:
            self._have_written(op_policy.written_tensors(func, args, kwargs), sources)
        return out

    def _run_saved(self, kind: OpKind, func: Any, args: tuple, kwargs: dict, sources: int) -> Any:
        """Run attention or a router's choice. The replay supplies its outputs, so they have no sources."""
        out, state = noticing_draws(self.call.engine.device, func, args, kwargs)
        if state is not None:
            self.call.rng_after[len(self.observed.ops)] = state
        self.observed.notes.attention_ops += kind is OpKind.ATTENTION and under_a_checkpoint()
        outputs = tuple(detached(value) for value in as_tuple(out))
        self.observed.ops.append(ObservedSavedOp(func, outputs, sources, fingerprint(outputs)))
        if kind is OpKind.CHOICE:
            self._choose_from(sources)
        self._made(out, 0)
        return out

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self._fresh = None
        ran, state = noticing_draws(self.call.engine.device, self._watched, (fn, args, kwargs), {})
        call = ran.call
        if any(self._holds_a_parameter(storage_of(extra)) for extra in ran.extras):
            raise refused(fn, "its backward needs a parameter that is not among its arguments. Pass it")
        if state is not None:
            self.call.rng_after[len(self.observed.ops)] = state
        self.observed.notes.attention_ops += under_a_checkpoint()
        self.observed.packs += len(call.saved)
        if self.call.check is not None:
            self.call.check.skip(len(call.saved))
        self.observed.wanted |= self._made_of_all(ran.saved_arguments)
        outputs = tuple(detached(value) for value in ran.made)
        # If it is recomputed (the last resort), it may read more than its arguments: what it closes over.
        self.observed.ops.append(ObservedSavedOp(call, outputs, self._all_so_far, fingerprint(outputs)))
        self._made(ran.out, 0)
        return ran.out

    def _saw_gemm(self, func: Any, args: tuple, out: torch.Tensor, sources: int, without_tokens: bool) -> None:
        if self.call.before is not None:
            self.call.weights[len(self.observed.ops)] = self.call.weight_of(func, args)
        product, flops = out.detach(), op_policy.gemm_flops(func, args, out)
        self.observed.notes.gemm_flops += flops if under_a_checkpoint() else 0
        splits = op_policy.splits_by_rows(func, args, out)
        product = op_policy.as_rows(product) if splits else product
        gemm = ObservedGemm(func, tuple(out.shape), product, flops, sources, splits, fingerprint(product), without_tokens)
        self.observed.ops.append(gemm)
        if not op_policy.are_dense(args):  # never left out: an empty output like its operands would be sparse
            self.observed.wanted |= 1 << 2 * len(self._gemms)
        self._gemms.append(gemm)
        self._fresh = gemm if gemm.splits else None
        self._made(out, 0b11 << 2 * (len(self._gemms) - 1))

    def _about_to_write(self, func: Any, args: tuple, kwargs: dict, sources: int, fresh: ObservedGemm | None) -> int:
        """Prepare for an op that writes in place: the bias of the GEMM before, or a change that kept tensors must not see.

        Returns:
            The sources of the written tensors after the op.
        """
        written = op_policy.written_tensors(func, args, kwargs)
        if fresh is not None and not kwargs and op_policy.adds_bias_to(func, args, fresh.out):
            fresh.biased = True
        else:
            self.observed.post_writes = True
            for tensor in written:
                if self.call.before is not None:
                    self.call.before.about_to_write(tensor)
                self._about_to_change(tensor)
        if op_policy.overwrites_all(func, args):
            self._sources[storage_of(args[0])] = sources = self._made_of_all(args[1:], kwargs)
        for tensor in written:
            self._made(tensor, sources)
            self._blank.discard(storage_of(tensor))
        return sources

    def _choose_from(self, sources: int) -> None:
        self.observed.post_needs |= sources  # values that steer Python: also in the dead pre on the way to the post
        for bit, gemm in enumerate(self._gemms):
            gemm.chosen_from |= bool(sources >> 2 * bit + 1 & 1)

    def _follow_weights(self, kind: OpKind, args: tuple, out: Any) -> bool:
        """Return True for a batched product with a weight. A tensor computed from weights alone counts as a weight."""
        storages = [storage_of(tensor) for tensor in tensor_leaves(args)]
        if kind is OpKind.BATCHED:
            return any(storage in self._weights or self._holds_a_parameter(storage) for storage in storages)
        if storages and self._weights.issuperset(storages) and isinstance(out, torch.Tensor):
            self._weights.add(storage_of(out))
            self._alive.append(StorageWeakRef(out.untyped_storage()))
        return False

    def _follow_constants(self, func: Any, given: Any, out: Any) -> bool:
        """Return True if an op reads parameters and constants alone, and note so of its outputs."""
        constant = func not in op_policy.BLANK and self._without_tokens.issuperset(map(storage_of, tensor_leaves(given)))
        note = self._without_tokens.add if constant else self._without_tokens.discard
        for tensor in tensor_leaves(out):
            note(storage_of(tensor))
        return constant

    def _made_of(self, tensor: torch.Tensor) -> int:
        storage = storage_of(tensor)
        if not storage:  # sparse, and the like
            return self._all_so_far
        if self._sources.get(storage, ALL_SO_FAR) == ALL_SO_FAR and self._holds_a_parameter(storage):
            return 0
        if storage not in self._sources:
            self._made(tensor, self._all_so_far)
            self._older.add(storage)
            self.observed.notes.hidden_kernels = True
        sources = self._sources[storage]
        if sources != ALL_SO_FAR:
            return sources
        filled = self._filled.get(storage)
        if filled is None:
            return self._all_so_far
        with _disable_current_modes():  # autograd, which saves a tensor, calls this outside of the dispatch
            unchanged = torch.equal(filled.fingerprint, _of_all_bytes(tensor))
        if not unchanged:
            del self._filled[storage]
            self.observed.notes.hidden_kernels = True
            return self._all_so_far
        return self._all_so_far // 3 | filled.sources  # lower bits only: a kernel may have written the values that were there

    @property
    def _all_so_far(self) -> int:
        return (1 << 2 * len(self._gemms)) - 1

    def _made_blank(self, func: Any, out: torch.Tensor) -> None:
        """Note memory that an op made for others to write to."""
        self._made(out, ALL_SO_FAR)
        if func in op_policy.EMPTY and out.numel():
            self._blank.add(storage_of(out))
        if func in op_policy.FILLED and 0 < out.untyped_storage().nbytes() <= _MASK_BYTES:
            self._filled[storage_of(out)] = Filled(_of_all_bytes(out))

    def _have_written(self, written: Iterable[torch.Tensor], sources: int) -> None:
        for tensor in written:
            if (filled := self._filled.get(storage_of(tensor))) is not None:
                filled.fingerprint = _of_all_bytes(tensor)
                filled.sources |= sources

    def _holds_a_parameter(self, storage: int) -> bool:
        """Return True if a parameter lies there now: ZeRO-3 gathers parameters into fresh memory while the layer runs."""
        return any(storage_of(parameter) == storage for parameter in self._parameters)

    def _made_of_all(self, *trees: Any) -> int:
        sources = 0
        for tensor in tensor_leaves(trees):
            sources |= self._made_of(tensor)
        return sources

    def _made(self, out: Any, sources: int) -> None:
        for tensor in tensor_leaves(out):
            if storage := storage_of(tensor):
                if storage not in self._sources:
                    self._alive.append(StorageWeakRef(tensor.untyped_storage()))
                self._sources[storage] = self._sources.get(storage, 0) | sources

    def _about_to_change(self, tensor: torch.Tensor) -> None:
        """Copy what was observed of `tensor`, which the layer is about to change in place, so that its present value is kept."""
        storage = storage_of(tensor)

        def present_value(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or storage_of(value) != storage:
                return value
            self.observed.clones.append(value.clone())
            return self.observed.clones[-1]

        self.observed.inputs = [present_value(value) for value in self.observed.inputs]
        for op in self.observed.ops:
            if isinstance(op, ObservedGemm):
                op.out = present_value(op.out)
            else:
                op.outputs = tuple(present_value(value) for value in op.outputs)


def _of_all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the fingerprint of all memory that the tensor is a view of."""
    return fingerprint(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))
