"""The dispatch modes: Analyse (a layer's first forward), Record (its later forwards), Replay (before each backward).

They see every aten op of the layer, below autograd. Replay must follow the ops of its forward one by one; Analyse and Record note
what Replay will need.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_memo.errors import MemoError
from ds_memo.remat import keep
from ds_memo.remat.keep import Kind, kind_of
from ds_memo.remat.recipe import Gemm, Recipe, Seen, SeenGemm, SeenWhole, Whole, fingerprint
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame

ALL_SO_FAR = -1


@dataclass
class Work:
    """What replays cost so far."""

    gemm_flops: int = 0
    """Of all recorded forwards."""
    gemm_flops_recomputed: int = 0
    attention_ops: int = 0
    """Attention calls that were supplied."""
    attention_ops_recomputed: int = 0
    """Attention that ran again: no kernel that could be kept, or a call that left its recipe."""


class Call:
    """One layer call: its frame, its recipe, and what belongs to this call alone."""

    def __init__(self, engine: SwapEngine, frame: Frame, recipe: Recipe | None, work: Work) -> None:
        self.engine = engine
        self.frame = frame
        self.recipe = recipe
        self.work = work
        self.loose: dict[int, tuple[Any, ...]] = {}
        """Outputs of whole ops that are no stored tensor (ints, None, tiny tensors), by op index."""
        self.rng_after: dict[int, torch.Tensor] = {}
        """Generator state behind attention ops that drew from it: supplying their output skips the draw."""
        self.failure: BaseException | None = None
        """What the layer raised in its forward, on its way to the caller."""
        self.keywords: list[Any] = []
        """Tensors that the layer got by keyword; autograd does not watch over them."""
        self.altered: set[int] = set()
        """Whole ops whose loose outputs the layer changes in place, and will again in each replay."""

    def about_to_change(self, tensor: torch.Tensor) -> None:
        """Somebody is about to write to `tensor` in place: what is kept of it must keep its present value."""
        self.engine.about_to_change(self.frame, tensor)
        storage = _storage_of(tensor)
        for index, values in self.loose.items():
            if any(isinstance(value, torch.Tensor) and _storage_of(value) == storage for value in values):
                self.altered.add(index)
                self.loose[index] = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)

    def keep_whole(self, index: int, op: Whole, outputs: tuple[Any, ...]) -> None:
        """Keep the outputs of whole op `index`: stored ones in the frame, the others as they are."""
        for kept, value in zip(op.kept, outputs, strict=True):
            if kept is not None:
                self.engine.keep(self.frame, kept, value)
        self.loose[index] = tuple(
            None if kept is not None else _detached(value) for kept, value in zip(op.kept, outputs, strict=True)
        )

    def input_tensor(self, position: int) -> torch.Tensor:
        if self.frame.state != "ready":
            self.engine.bring_back(self.frame)
        return self.frame.tensor(self.recipe.inputs[position])


_inside = threading.local()


def inside_a_layer() -> bool:
    """Whether this thread is running a layer under one of the modes, so that a nested checkpoint is a plain call."""
    return getattr(_inside, "depth", 0) > 0


@functools.cache
def keep_dynamo_out() -> None:
    """Ops of a compiled region come to our modes with some backends; dynamo must not go on to compile the modes."""
    from torch._dynamo import trace_rules

    for module in ("ds_memo.swap", "ds_memo.remat.keep", "ds_memo.remat.modes", "ds_memo.remat.recipe"):
        trace_rules.add(module)


class _Mode(TorchDispatchMode):
    def __enter__(self) -> Any:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _inside.depth -= 1

    # Without this, every op would pass a wrapper that keeps dynamo out; keep_dynamo_out() does it once.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _NotingMode(_Mode):
    """A mode that also sees each tensor autograd saves, before the hook below it (torch's checkpoint) takes it."""

    _note: Callable[[torch.Tensor], None]

    def __enter__(self) -> Any:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def noting_pack(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return pack(tensor)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(noting_pack, unpack)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.__exit__(*exception)
        del self._hooks  # a circle through this object would keep the frame until the garbage collector comes by


class Record(_NotingMode):
    """Follow a recipe: send kept outputs on their way as they are born."""

    def __init__(self, call: Call, left_recipe: Callable[[], None]) -> None:
        super().__init__()
        self.call = call
        self._left_recipe = left_recipe
        self._next = 0
        self._packs = 0
        self._following = True
        self._awaits_bias: tuple[Gemm, torch.Tensor] | None = None
        self._left_out: dict[int, StorageWeakRef] = {}
        """Storages made of products that the replay will not compute; few, since those come last."""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        call, recipe = self.call, self.call.recipe
        if exception[0] is not None or self.call.failure is not None:
            call.engine.abort(call.frame)
            return
        complete = self._next == len(recipe.ops) and self._packs == recipe.packs and self._awaits_bias is None
        if self._following and not complete:
            self._leave()
        if self._packs:
            call.work.gemm_flops += call.recipe.gemm_flops
            call.engine.end(call.frame)
        else:
            call.engine.abort(call.frame)

    def _note(self, tensor: torch.Tensor) -> None:
        self._packs += 1
        if self._left_out and self._following and _storage_of(tensor) in self._left_out:
            self._leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = kind_of(func)
        if self._left_out and self._following:
            return self._watch_left_out(kind, func, args, kwargs or {})
        if kind is Kind.PLAIN:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._dispatch(kind, func, args, kwargs or {})

    def _watch_left_out(self, kind: Kind, func: Any, args: tuple, kwargs: dict) -> Any:
        """Follow what is made of products that the replay leaves out: nothing that is wanted may come to depend on them."""
        touched = self._reads_left_out(args) or (bool(kwargs) and self._reads_left_out(kwargs.values()))
        if touched and (keep.looks_at_values(func) or (kind is Kind.GEMM and self._computes_next())):
            self._leave()
        out = self._dispatch(kind, func, args, kwargs)
        if touched and kind is not Kind.GEMM and kind is not Kind.ATTENTION and kind is not Kind.CHOICE:
            self._leave_out(out)
            if kind is Kind.MUTATES:
                self._leave_out(keep.written_tensors(func, args, kwargs))
        return out

    def _reads_left_out(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if _storage_of(value) in self._left_out:
                    return True
            elif isinstance(value, (list, tuple)) and self._reads_left_out(value):
                return True
        return False

    def _computes_next(self) -> bool:
        """Whether the replay will compute rows of the product that comes now."""
        op = self.call.recipe.ops[self._next] if self._next < len(self.call.recipe.ops) else None
        return isinstance(op, Gemm) and op.wanted and op.rows < op.shape[0]

    def _leave_out(self, made: Any) -> None:
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and (storage := _storage_of(leaf)) and storage not in self._left_out:
                self._left_out[storage] = StorageWeakRef(leaf.untyped_storage())

    def _dispatch(self, kind: Kind, func: Any, args: tuple, kwargs: dict) -> Any:
        if kind is Kind.MUTATES:
            return self._change(func, args, kwargs)
        if kind is Kind.PLAIN or not self._following:
            return func(*args, **kwargs)
        if kind is Kind.GEMM:
            out = func(*args, **kwargs)
            op = self._expect(func, out)
            if op is not None and not op.wanted:
                self._leave_out(out)
            if op is not None and op.kept is not None:
                if op.biased:
                    self._awaits_bias = (op, out)
                else:
                    self.call.engine.keep(self.call.frame, op.kept, out)
            return out
        out, state = _noticing_draws(self.call.engine.device, func, args, kwargs)
        outputs = _as_tuple(out)
        op = self._expect(func, outputs)
        if op is not None and op.kept is not None:
            index = self._next - 1
            self.call.keep_whole(index, op, outputs)
            if state is not None:
                self.call.rng_after[index] = state
        return out

    def _change(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An op that writes in place: a bias that belongs to the GEMM before, or a change that kept tensors must not see."""
        if self._awaits_bias is not None:
            op, product = self._awaits_bias
            if keep.adds_bias_to(func, args, product) and not kwargs:
                self._awaits_bias = None
                out = func(*args)
                self.call.engine.keep(self.call.frame, op.kept, product)
                return out
            self._leave()
        for tensor in keep.written_tensors(func, args, kwargs):
            self.call.about_to_change(tensor)
        return func(*args, **kwargs)

    def _expect(self, func: Any, out: Any) -> Gemm | Whole | None:
        ops = self.call.recipe.ops
        op = ops[self._next] if self._next < len(ops) else None
        as_foreseen = op is not None and op.func is func and op.makes(out)
        if not as_foreseen or self._awaits_bias is not None:
            self._leave()
            return None
        self._next += 1
        return op

    def _leave(self) -> None:
        """This call does something else than the recipe says: from here on nothing more is kept or left out."""
        self._following = False
        followed = self._next - (self._awaits_bias is not None)  # a product without its bias was not kept
        self._awaits_bias = None
        self.call.recipe = self.call.recipe.without_shortcuts(followed)
        self._left_recipe()


class Analyse(_NotingMode):
    """Watch a layer's first forward of a kind: which outputs its backward depends on. Nothing leaves the device before the end.

    Dependence is tracked from storage to storage and only back to the nearest GEMM or whole op. A storage that comes from nowhere
    (a compiled region's output, memory that NumPy made) may be made of everything computed before it was first seen.

    Args:
        givens: tensors that were there before: the layer's parameters, buffers and arguments.
    """

    def __init__(self, call: Call, seen: Seen, givens: Iterable[torch.Tensor], finish: Callable[[Call, Seen], None]) -> None:
        super().__init__()
        self.call = call
        self.seen = seen
        self._finish = finish
        self._sources = {_storage_of(tensor): 0 for tensor in givens}  # storage → bit set of the GEMMs it was made of
        self._sources.pop(0, None)
        self._alive: list[StorageWeakRef] = []  # no address is used twice while we look
        self._gemms: list[SeenGemm] = []
        self._fresh: SeenGemm | None = None  # the op before this one, views aside

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._sources.clear()
        self._alive.clear()
        if exception[0] is not None or self.call.failure is not None:
            self.call.engine.abort(self.call.frame)
            return
        try:
            self.seen.note_unseen_writes()
            self._finish(self.call, self.seen)
        except BaseException:
            self.call.engine.abort(self.call.frame)
            raise
        finally:
            self.seen.forget()  # the graph's hooks lead here and would keep every output that was seen
            self._gemms.clear()
            self._fresh = None

    def _note(self, tensor: torch.Tensor) -> None:
        self.seen.packs += 1
        self.seen.wanted |= self._made_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        sources = self._made_of_all(args, kwargs)
        if kind is Kind.ATTENTION or kind is Kind.CHOICE:
            out, state = _noticing_draws(self.call.engine.device, func, args, kwargs)
            if state is not None:
                self.call.rng_after[len(self.seen.ops)] = state
            outputs = tuple(_detached(value) for value in _as_tuple(out))
            self.seen.ops.append(SeenWhole(func, outputs, sources, fingerprint(outputs)))
            if kind is Kind.CHOICE:
                for bit, gemm in enumerate(self._gemms):
                    gemm.chosen_from |= bool(sources >> bit & 1)
            self._fresh = None
            self._made(out, 0)
            return out
        fresh, self._fresh = self._fresh, self._fresh if func in keep.LOOKS else None
        if kind is Kind.MUTATES:
            if fresh is not None and not kwargs and keep.adds_bias_to(func, args, fresh.out):
                fresh.biased = True
            else:
                for tensor in keep.written_tensors(func, args, kwargs):
                    self._about_to_change(tensor)
            if keep.overwrites_all(func, args):
                self._sources[_storage_of(args[0])] = sources = self._made_of_all(args[1:], kwargs)
            for tensor in keep.written_tensors(func, args, kwargs):
                self._made(tensor, sources)
        if keep.looks_at_values(func):
            self.seen.wanted |= sources
        if keep.looks_like_attention(func):
            self.seen.softmax = str(func)
        out = func(*args, **kwargs)
        if kind is Kind.MUTATES and fresh is not None and fresh.biased:
            fresh.fingerprint = fingerprint(fresh.out)
        if kind is Kind.GEMM:
            product, flops = out.detach(), keep.gemm_flops(func, args, out)
            gemm = SeenGemm(func, product, flops, sources, keep.splits_by_rows(func, args, out), fingerprint(product))
            self.seen.ops.append(gemm)
            self._gemms.append(gemm)
            self._fresh = gemm if gemm.splits else None
            self._made(out, 1 << (len(self._gemms) - 1))
        else:
            self._made(out, ALL_SO_FAR if keep.is_blank(func) else sources)
        return out

    def _made_of(self, tensor: torch.Tensor) -> int:
        storage = _storage_of(tensor)
        if not storage:  # sparse, and the like
            return (1 << len(self._gemms)) - 1
        if storage not in self._sources:
            self._made(tensor, (1 << len(self._gemms)) - 1)
        sources = self._sources[storage]
        # A kernel that we cannot see may have filled this memory with anything computed so far.
        return (1 << len(self._gemms)) - 1 if sources == ALL_SO_FAR else sources

    def _made_of_all(self, *trees: Any) -> int:
        sources = 0
        for leaf in tree_leaves(trees):
            if isinstance(leaf, torch.Tensor):
                sources |= self._made_of(leaf)
        return sources

    def _made(self, out: Any, sources: int) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (storage := _storage_of(leaf)):
                if storage not in self._sources:
                    self._alive.append(StorageWeakRef(leaf.untyped_storage()))
                self._sources[storage] = self._sources.get(storage, 0) | sources

    def _about_to_change(self, tensor: torch.Tensor) -> None:
        """Set aside the present value of whatever was seen of a tensor that the layer changes in place."""
        storage = _storage_of(tensor)

        def aside(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or _storage_of(value) != storage:
                return value
            self.seen.set_aside.append(value.clone())
            return self.seen.set_aside[-1]

        self.seen.inputs = [aside(value) for value in self.seen.inputs]
        for op in self.seen.ops:
            if isinstance(op, SeenGemm):
                op.out = aside(op.out)
            else:
                op.outputs = tuple(aside(value) for value in op.outputs)


class Replay(_Mode):
    """Run the layer again: supply what was kept, compute missing rows straight into their slots, leave out what nobody reads."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __enter__(self) -> Replay:
        self._next = 0
        self._awaits_bias: tuple[torch.Tensor, int] | None = None
        for keyword in self.call.keywords:
            keyword.check()
        if self.call.frame.state != "ready":  # no input of the layer was swapped
            self.call.engine.bring_back(self.call.frame)
        recipe = self.call.recipe
        self.call.work.attention_ops_recomputed += recipe.softmax is not None and not recipe.attention_ops
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.call.engine.replayed(self.call.frame)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = kind_of(func)
        if kind is Kind.MUTATES and self._awaits_bias is not None:
            return self._add_bias(func, args)
        if kind is Kind.PLAIN or kind is Kind.MUTATES:
            return func(*args, **kwargs) if kwargs else func(*args)
        call, index = self.call, self._next
        if index >= len(call.recipe.ops):  # the forward left its recipe here
            call.work.attention_ops_recomputed += kind is Kind.ATTENTION
            return func(*args, **(kwargs or {}))
        self._next += 1
        op = call.recipe.ops[index]
        if op.func is not func:
            raise MemoError(
                f"layer {call.frame.name} did not repeat its forward: op {index} was {op.func}, now it is {func}. "
                "Layers under ds_memo must do the same work twice, as under torch.utils.checkpoint."
            )
        if kind is Kind.GEMM:
            return self._gemm(op, args, kwargs or {})
        if op.kept is None:
            call.work.attention_ops_recomputed += kind is Kind.ATTENTION
            return func(*args, **(kwargs or {}))
        return self._supply(index, op)

    def _gemm(self, op: Gemm, args: tuple, kwargs: dict) -> torch.Tensor:
        if not op.wanted:
            return keep.empty_output(op.func, args, op.shape)
        m, rows = op.shape[0], op.rows
        if m:
            self.call.work.gemm_flops_recomputed += op.flops * (m - rows) // m
        if op.kept is None:
            return op.func(*args, **kwargs)
        out = self.call.frame.tensor(op.kept)
        if rows < m:
            keep.compute_rows(op.func, args, kwargs, rows, out)
        if op.biased:
            self._awaits_bias = (out.detach(), rows)
        return out

    def _add_bias(self, func: Any, args: tuple) -> torch.Tensor:
        """The in-place bias of the GEMM before: stored rows have it already."""
        (product, rows), self._awaits_bias = self._awaits_bias, None
        if not keep.adds_bias_to(func, args, product):
            raise MemoError(
                f"layer {self.call.frame.name} did not repeat its forward: {func} came where a bias was added in place. "
                "Layers under ds_memo must do the same work twice, as under torch.utils.checkpoint."
            )
        product[rows:].add_(args[1])
        return args[0]

    def _supply(self, index: int, op: Whole) -> Any:
        state = self.call.rng_after.get(index)
        if state is not None:
            _generator(self.call.engine.device).set_state(state)
        self.call.work.attention_ops += kind_of(op.func) is Kind.ATTENTION
        loose, own = self.call.loose[index], _cloned if index in self.call.altered else _detached
        outputs = tuple(
            own(value) if kept is None else self.call.frame.tensor(kept) for kept, value in zip(op.kept, loose, strict=True)
        )
        return outputs if len(op.func._schema.returns) > 1 else outputs[0]


def _noticing_draws(device: torch.device, func: Any, args: tuple, kwargs: dict) -> tuple[Any, torch.Tensor | None]:
    """Run an op; its output, and the generator's state behind it if the op drew from it."""
    generator = _generator(device)
    before = generator.get_state()
    out = func(*args, **kwargs)
    after = generator.get_state()
    return out, None if torch.equal(before, after) else after


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _detached(value: Any) -> Any:
    """The autograd engine will tie `value` into the graph; keep a second look at the same memory instead."""
    return value.detach() if isinstance(value, torch.Tensor) else value
