"""Functions that are saved ops: attention that no dispatch mode sees, such as compiled FlexAttention and flash-attn 4.

The modes see aten ops and custom ops, not what a compiled region or an autograd function with kernels of its own computes. A
replay would recompute that. A function given to :func:`keep_whole` is treated like attention: its outputs and what autograd
saves of it are kept. The replay passes them to autograd and does not call the function.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_memo.errors import MemoError
from ds_memo.remat.tensors import version_of
from ds_memo.remat.undo import stacks_restored


def keep_whole(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` wrapped so that a layer under memo keeps its results, and the replay does not call it.

    Use it for attention, and for other functions whose time is worth their results' memory: a compiled FlexAttention, an autograd
    function with kernels of its own. Outside such layers the wrapper only calls `fn`.

        flex = ds_memo.keep_whole(torch.compile(flex_attention))

    Args:
        fn: a function of tensors of any shapes; it may return them in tuples, lists and dicts. Parameters that its backward needs
            must be among its arguments, and it must not change an argument in place.

    Raises:
        MemoError: when the wrapper is called, if `fn` breaks one of these rules.
    """

    @functools.wraps(fn, updated=())  # not its attributes: dynamo would take its marks on a compiled function for ours
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, ObservesFunctions):
                with mode.paused():
                    return mode.run_function(fn, args, kwargs)
        return fn(*args, **kwargs)

    return run


def has_inner_tensors(types: Sequence[type]) -> bool:
    """Return True if an op of these operands runs other ops on tensors inside them, as torchao's fp8 tensors do.

    A mode answers NotImplemented, and then sees the ops inside. Not a DTensor's, whose first call runs more ops than later ones.
    """
    return any(hasattr(cls, "__tensor_flatten__") and cls.__name__ != "DTensor" for cls in types)


class SkipsCompiled(TorchDispatchMode):
    """A mode that leaves compiled functions compiled, and sees none of their ops. By default they would run op by op."""

    supports_higher_order_operators = True  # each arrives as one op; without this PyTorch refuses them

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    # PyTorch's own __enter__ and __exit__ also set flags of the whole process, which two threads would leave set.
    def __enter__(self) -> Any:
        _push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        if _get_current_dispatch_mode() is self:  # not where it was taken off, or Ctrl-C has left another mode
            _pop_torch_dispatch_stack(None)


class ObservesFunctions(SkipsCompiled, ABC):
    """A mode that receives the calls of `keep_whole` functions, and none of the ops inside."""

    @abstractmethod
    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``fn(*args, **kwargs)`` or supply its outputs. The mode is paused meanwhile."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take this mode, and those above it, off the stack inside the block; then put all back."""
        with stacks_restored():
            while _pop_torch_dispatch_stack(None) is not self:
                pass
            yield


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saved in a call, as a view of one that exists at the replay. Units: elements."""

    of_argument: bool
    """True for a view of an argument; else it is a view of what the call made."""
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Distance from the begin of the viewed tensor."""


@dataclass(frozen=True)
class FunctionCall:
    """Description of a call. A recipe has it where an op has its OpOverload."""

    name: str
    arguments: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    """Shape, stride and dtype of each tensor argument."""
    returns: TreeSpec
    differentiable: tuple[bool, ...]
    """Per returned leaf: True if it is a tensor that requires a gradient."""
    saved: tuple[Saved, ...]

    def __str__(self) -> str:
        return self.name

    def rebuild_saved(self, arguments: Sequence[torch.Tensor], made: Sequence[Any]) -> Iterator[torch.Tensor]:
        """Yield the saved tensors, as views of the replay's arguments and of what was kept."""
        for saved in self.saved:
            whole = (arguments if saved.of_argument else made)[saved.index].detach()
            if whole.shape == saved.shape and whole.stride() == saved.stride:
                yield whole
            else:
                yield whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)

    def rebuild_output(self, made: Sequence[Any]) -> Any:
        """Return the function's output, built from what was kept."""
        leaves = list(made[: len(self.differentiable)])
        which = [index for index, differentiable in enumerate(self.differentiable) if differentiable]
        if which and torch.is_grad_enabled():
            tensors = [leaves[index] for index in which]
            anchor = tensors[0].new_empty(0).requires_grad_()
            for index, tensor in zip(which, _Supplied.apply(anchor, *tensors), strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, self.returns)


class _Supplied(torch.autograd.Function):
    """Makes outputs require a gradient, so that autograd saves what later ops need. The replay's graph never runs backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)


@dataclass
class Ran:
    """A call of a `keep_whole` function that was observed."""

    out: Any
    call: FunctionCall
    arguments: list[torch.Tensor]
    made: tuple[Any, ...]
    """The returned leaves, then the other saved tensors that are views of no argument."""

    @property
    def extras(self) -> tuple[torch.Tensor, ...]:
        return self.made[len(self.call.differentiable) :]

    @property
    def saved_arguments(self) -> list[torch.Tensor]:
        """The arguments that autograd saved, or saved a view of."""
        return [self.arguments[saved.index] for saved in self.call.saved if saved.of_argument]


def refused(fn: Callable[..., Any], why: str) -> MemoError:
    """Return the error for a function that breaks a rule of `keep_whole`; `why` follows its name."""
    return MemoError(f"{name_of(fn)} was given to ds_memo.keep_whole, but {why}")


def name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments, and those that objects among them hold (FlexAttention's BlockMask)."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(trees):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            found += [value for value in vars(leaf).values() if isinstance(value, torch.Tensor)]
    return found


def described(
    fn: Callable[..., Any], out: Any, arguments: list[torch.Tensor], versions: list[int], saved: list[torch.Tensor]
) -> Ran:
    """Describe a call: find what each saved tensor is a view of.

    Args:
        versions: the arguments' versions before the call.
        saved: in autograd's order.

    Raises:
        MemoError: the call changed an argument in place.
    """
    if versions != versions_of(arguments):
        raise refused(fn, "changes an argument in place. Give it a copy, or let it return what it changed")
    leaves, spec = tree_flatten(out)
    made, parts = list(leaves), []
    for tensor in saved:
        part = _within(tensor, arguments, True) or _within(tensor, made, False)
        if part is None:
            part = Saved(False, len(made), tuple(tensor.shape), tensor.stride(), 0)
            made.append(tensor.detach())
        parts.append(part)
    differentiable = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    return Ran(out, FunctionCall(name_of(fn), shapes_of(arguments), spec, differentiable, tuple(parts)), arguments, tuple(made))


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return each tensor's version counter."""
    return [version_of(tensor) for tensor in tensors]


def _within(tensor: torch.Tensor, tensors: Sequence[Any], arguments: bool) -> Saved | None:
    """Return `tensor` as a view of the first of `tensors` that contains all its elements, else None."""
    if not torch._C._has_storage(tensor):
        return None
    for index, other in enumerate(tensors):
        if (
            isinstance(other, torch.Tensor)
            and torch._C._has_storage(other)
            and other.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            and other.dtype == tensor.dtype
        ):
            offset = tensor.storage_offset() - other.storage_offset()
            if offset >= 0 and offset + _reach(tensor) <= _reach(other):
                return Saved(arguments, index, tuple(tensor.shape), tensor.stride(), offset)
    return None


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of elements from the tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
