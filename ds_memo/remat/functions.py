"""Functions that are kept whole: attention that no dispatch mode sees, such as FlexAttention when compiled, and flash-attn 4.

The modes see aten ops and custom ops, not what a compiled region or an autograd function with kernels of its own computes; a
replay would compute that again. A function that was given to :func:`keep_whole` is treated as attention is: what it returns and
what autograd saves of it are kept, and the replay hands autograd the same without calling it.
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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ds_memo.errors import MemoError


def keep_whole(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have `fn` run once for each call: in a layer under memo its results are kept, and the replay does not call it.

    For attention, and what else costs more time than its results take memory: a compiled FlexAttention, an autograd function with
    kernels of its own. Outside of such layers it is a plain call.

        flex = ds_memo.keep_whole(torch.compile(flex_attention))

    Args:
        fn: a function of tensors of any shapes; it may return them in tuples, lists and dicts. Parameters that its backward needs
            must be among its arguments, and it must not change an argument in place.

    Raises:
        MemoError: in a call of what is returned, where `fn` does not keep to that.
    """

    @functools.wraps(fn, updated=())  # not its attributes: dynamo would take what it left on a compiled function for ours
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, SeesFunctions):
                with mode.out_of_sight():
                    return mode.run_function(fn, args, kwargs)
        return fn(*args, **kwargs)

    return run


class BesideCompiled(TorchDispatchMode):
    """A mode under which compiled functions stay compiled: what they compute does not come to it. By default a mode would have
    them run op by op."""

    supports_higher_order_operators = True  # they come as one op; else PyTorch would refuse them here

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class SeesFunctions(BesideCompiled, ABC):
    """A mode that functions which are kept whole tell of their calls; none of the ops inside come to it."""

    @abstractmethod
    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``fn(*args, **kwargs)``, or do what stands for it. Called out of the mode's own sight."""

    @contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Inside, no op comes to this mode."""
        above: list[TorchDispatchMode] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        try:
            yield
        finally:
            for mode in (self, *reversed(above)):
                _push_mode(mode)


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd saved of a call, as a view of one that is there when it is replayed. In elements."""

    of_argument: bool
    """Of one of the arguments; else of what the call made."""
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From where the other one begins."""


@dataclass(frozen=True)
class FunctionCall:
    """What a call looked like. It stands in a recipe where an op has its OpOverload."""

    name: str
    arguments: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    """Shape, stride and dtype of each tensor among them."""
    returns: TreeSpec
    differentiable: tuple[bool, ...]
    """Of each leaf that it returned: whether it is a tensor that requires a gradient."""
    saved: tuple[Saved, ...]

    def __str__(self) -> str:
        return self.name

    def saved_again(self, arguments: Sequence[torch.Tensor], made: Sequence[Any]) -> Iterator[torch.Tensor]:
        """The saved tensors, of the replay's arguments and of what was kept."""
        for saved in self.saved:
            whole = (arguments if saved.of_argument else made)[saved.index].detach()
            if whole.shape == saved.shape and whole.stride() == saved.stride:
                yield whole
            else:
                yield whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)

    def returned_again(self, made: Sequence[Any]) -> Any:
        """What it returned, of what was kept."""
        leaves = list(made[: len(self.differentiable)])
        which = [index for index, differentiable in enumerate(self.differentiable) if differentiable]
        if which and torch.is_grad_enabled():
            tensors = [leaves[index] for index in which]
            anchor = tensors[0].new_empty(0).requires_grad_()
            for index, tensor in zip(which, _Supplied.apply(anchor, *tensors), strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, self.returns)


class _Supplied(torch.autograd.Function):
    """Outputs that require a gradient, so that autograd saves what is made of them. The replay's graph is never run backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)


@dataclass
class Ran:
    """A call that was watched."""

    out: Any
    call: FunctionCall
    arguments: list[torch.Tensor]
    made: tuple[Any, ...]
    """The leaves that it returned, and after them what else autograd saved and is part of no argument."""

    @property
    def extras(self) -> tuple[torch.Tensor, ...]:
        """Of `made`, what it did not return."""
        return self.made[len(self.call.differentiable) :]

    @property
    def saved_arguments(self) -> list[torch.Tensor]:
        """Those of which autograd saved something."""
        return [self.arguments[saved.index] for saved in self.call.saved if saved.of_argument]


def refused(fn: Callable[..., Any], why: str) -> MemoError:
    """
    Args:
        why: the end of a sentence that begins with its name.
    """
    return MemoError(f"{name_of(fn)} was given to ds_memo.keep_whole, but {why}")


def name_of(fn: Callable[..., Any]) -> str:
    """As users know it."""
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """The tensors in arguments, also those that an object among them holds (FlexAttention's BlockMask)."""
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
    """Find out where each saved tensor comes from.

    Args:
        versions: of the arguments, before the call.
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
    """Shape, stride and dtype of each."""
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """That change when a tensor is changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _within(tensor: torch.Tensor, tensors: Sequence[Any], arguments: bool) -> Saved | None:
    """`tensor` as a view of one of these, all of whose elements that one has, too."""
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
    """Elements from its first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
