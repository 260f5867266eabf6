"""LazyLogits: a tensor with the shape of the logits that holds hidden states.

An op that ops.py knows is recorded, or runs tile by tile. Any other op gets real values, with a warning, and nothing that it does
is lost:

- It writes to the logits, or hands out their memory: they and all that share it are real from then on.
- It only reads them: it gets the values of these rows, for this once.

Ops are caught by their Python function, so autograd sees them on the values. An op that comes past that is caught below autograd,
where values are all that it needs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from ds_memo.errors import MemoError
from ds_memo.logits.lazy_value import HeadInputs, LazyValue, PerRow, results
from ds_memo.logits.nodes import NO_WHOLE_GRADIENT, Derive, Follow, OutputHead, Reduce, Whole, identity
from ds_memo.logits.shared_memory import Memory, View
from ds_memo.remat.autocast import autocast_as, autocast_now
from ds_memo.remat.gathered_params import is_fsdps
from ds_memo.remat.tensors import storage_of, tensor_leaves, version_of
from ds_memo.units import GIB

_NATIVE = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "dim_order"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_same_size", "is_contiguous", "has_names"),
    *("__len__", "__hash__", "__format__"),
)
"""Methods that ask for no value."""
_VALUES = ("T", "mT", "H", "mH", "real", "imag", "data")
"""Properties that are tensors of values."""
_ADDRESSES = ("data_ptr", "untyped_storage", "storage", "__dlpack__", "numpy", "__array__")
_GEOMETRY = (
    *("as_strided_", "set_", "resize_", "resize_as_", "transpose_", "swapaxes_", "swapdims_", "t_", "squeeze_", "unsqueeze_"),
)
_IN_PLACE = {name for name in dir(operator) if name.startswith("__i")} - {"__index__", "__inv__", "__invert__"} | {"__setitem__"}
OTHER_STRIDES = "{} of lazy logits, which take no other memory and strides in place. Clone them first"
Handler = Callable[..., Any]
handlers: dict[str, Handler] = {}
"""By a function's name: ``handler(func, name, *args, **kwargs)``; NotImplemented: not this use of it. ops.py fills it."""
in_place: set[Handler] = set()
"""Those that record changes in place."""
of_any: set[Handler] = set()
"""Those whose first argument may be another tensor."""


class LazyLogits(torch.Tensor):
    """Logits that are not computed.

    Args:
        memory: what they are, together with all that shares their memory.
        rows: what they are computed from.
        how: how they are made from others. None: they are all of the memory.
        stride: theirs, where they are not contiguous.
    """

    memory: Memory
    inputs: HeadInputs
    how: View | None
    marks: int
    """Changes in place that were recorded. PyTorch has counted more: an autograd.Function has marked others."""
    taken: tuple[Any, Any]
    """x and key, if they are ``x[key]``."""
    _made: tuple[int, LazyValue]
    _real: torch.Tensor | None

    @staticmethod
    def __new__(cls, memory: Memory, inputs: HeadInputs, how: View | None = None, stride: Any = None) -> LazyLogits:
        content = memory.content if how is None else how.content(how.of.content)
        self = torch.Tensor._make_wrapper_subclass(cls, content.shape, strides=stride, dtype=content.dtype, device=content.device)
        self.memory, self.inputs, self.how = memory, inputs, how
        self._made, self._real, self.marks, self.taken = (memory.changes, content), None, 0, (None, None)
        memory.lazy.append(TensorWeakRef(self))
        return self

    @property
    def content(self) -> LazyValue:
        """The content as of now."""
        if self.how is None:
            return self.memory.content
        if self._made[0] != self.memory.changes:
            self._made = self.memory.changes, self.how.content(self.how.of.content)
        return self._made[1]

    @property
    def is_real(self) -> bool:
        return self.memory.values is not None

    @property
    def owner(self) -> LazyLogits:
        """Those of all the memory, of which these are a view."""
        return self if self.how is None else self.how.of.owner

    @property
    def real_tensor(self) -> torch.Tensor:
        """The tensor that is in these logits' place once their memory has values."""
        if self._real is None:
            values = self.memory.values
            assert values is not None
            with torch._C.DisableTorchFunctionSubclass():
                trained = self.requires_grad and not (self.how and self.is_leaf)
            with torch.inference_mode(_is_inference(values)), torch.set_grad_enabled(trained):
                self._real = values if self.how is None else self.how.values(self.how.of.real_tensor)
                if self.how is None or (trained and not self._real.requires_grad):  # a history of its own
                    self._real = Whole.apply(self, self.content, self._real)
        return self._real

    def compute(self, op: str) -> torch.Tensor:
        """Return their values without a graph."""
        if self.is_real:
            return self.memory.values.detach() if self.how is None else self.how.values(self.how.of.compute(op))
        _warn_of_whole(self, op)
        return self.content.shaped(results(self.content, self.inputs, identity, ())[0])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if not args and "input" in kwargs:
            kwargs = kwargs.copy()
            args = (kwargs.pop("input"),)
        if name in ("__get__", "__set__"):
            plain, name = func.__self__.__name__ not in _VALUES, func.__self__.__name__
        else:
            plain = name in _NATIVE or (name == "requires_grad_" and args[0].requires_grad)
        if plain and isinstance(args[0], LazyLogits):
            return func(args[0].real_tensor, *args[1:], **kwargs) if args[0].is_real else _native(func, args, kwargs)
        _refuse(func, name)
        if name == "register_hook":
            return _hook(func, args, kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, args, kwargs)
        own = [value for value in tree_leaves((args, kwargs)) if isinstance(value, LazyLogits)]
        for logits in own:
            _check(logits)
        if name == "__setitem__" and _is_in_its_place(*args):
            return None
        if any(logits.is_real for logits in own):
            found = func(*_with(_real_ones, args), **_with(_real_ones, kwargs))
            for logits in own:
                if logits.is_real and logits.real_tensor.shape != _native(torch.Tensor.size, (logits,), {}):
                    raise MemoError(OTHER_STRIDES.format(f"{name}(out=…)"))
                _follow(logits.memory, counts=_is_in_place(name))
            return args[0] if _is_in_place(name) and found is not None and args and isinstance(args[0], LazyLogits) else found
        targets = _written(func, name, args, kwargs)
        handler = handlers.get(name.strip("_"))
        if handler not in of_any and not (args and isinstance(args[0], LazyLogits)):
            handler = None
        if _is_in_place(name):
            handler = handler if targets and handler in in_place else None
        elif targets or "out" in kwargs:
            handler = None
        if handler is not None and (found := handler(func, name.strip("_"), *args, **kwargs)) is not NotImplemented:
            return found
        if not targets:
            return _read(func, name, args, kwargs)
        for logits in targets:
            _realize(logits, name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("detach", "alias", "view_as"):
            return alias(args[0])
        if _written(func, name, args, kwargs):
            raise MemoError(f"'{func}' writes to lazy logits where autograd does not see it. Clone them first")

        def values(logits: LazyLogits) -> torch.Tensor:
            return logits.compute(name)

        return func(*_with(values, args), **_with(values, kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        node = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn is not None else ""
        return f"LazyLogits({tuple(self.shape)}, {self.dtype}{node})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _realize(self, "copy or pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_realize(self, "deepcopy"), memo)


def call_head(content: LazyValue, inputs: HeadInputs, parameters: list[torch.Tensor], hidden_NH: torch.Tensor) -> LazyLogits:
    """Return the logits of a call of the head."""
    return OutputHead.apply(lambda content: LazyLogits(Memory(content), inputs), content, hidden_NH, *parameters)


def derive(logits: LazyLogits, content: LazyValue) -> LazyLogits:
    """Return logits with memory of their own, of a content that was made from theirs."""
    return Derive.apply(lambda: LazyLogits(Memory(replace(content, chosen={})), logits.inputs), logits)


def view_of(how: View, stride: Any) -> LazyLogits:
    """Return logits that share the memory of others."""
    logits = how.of
    graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(logits.is_inference()), torch.set_grad_enabled(graph):
        view = Derive.apply(lambda: LazyLogits(logits.memory, logits.inputs, how, stride), logits)
        if logits.requires_grad and not graph:
            view.requires_grad = True  # a leaf, as PyTorch has it
    return view


def alias(logits: LazyLogits) -> LazyLogits:
    """Return logits with the same memory and no history."""
    view = logits.how
    if view is not None:
        view = view._replace(values=lambda whole: logits.how.values(whole).detach())
    return LazyLogits(logits.memory, logits.inputs, view, _native(torch.Tensor.stride, (logits,), {}))


def change(logits: LazyLogits, new: LazyValue, trains: bool) -> Any:
    """Record a change in place.

    Args:
        new: what they shall be.
        trains: True if that has a graph.

    Returns:
        The logits; NotImplemented where the graph or the rows do not allow it.
    """
    memory, owner, trained = logits.memory, logits.owner, logits.requires_grad
    each = logits
    while each.how is not None:
        each = each.how.of
        if each.requires_grad != trained:
            return NotImplemented
    others = any(other.requires_grad for other in memory.aliases() if other.how is None and other is not owner)
    seen = trained and torch.is_grad_enabled() and not logits.is_leaf
    if others or trained != seen or trained < trains or (new.dtype, new.vocabulary) != (logits.dtype, logits.shape[-1]):
        return NotImplemented
    memory.about_to_change()
    if not memory.change(new):
        return NotImplemented
    torch.autograd.graph.increment_version(logits)
    logits.marks = _version(logits)
    for each in memory.aliases() if trained else ():  # a gradient that comes now is one of other logits than before
        if each.requires_grad:
            Derive.apply(lambda each=each: each, each)
            each.marks = _version(each)
    return logits


def by_row(
    logits: LazyLogits, fn: PerRow, *arguments: torch.Tensor, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Return ``fn(values, *arguments)`` of each row, in the leading dimensions of the logits."""
    found = Reduce.apply(logits, under_autocast(fn), arguments, device)
    return tuple(part.reshape((*logits.content.leading, *part.shape[1:])) for part in found)


def under_autocast(fn: PerRow) -> PerRow:
    """Return `fn` under the autocast of now, whenever it is called."""
    states = autocast_now()

    def run(*arguments: Any) -> Any:
        with autocast_as(states):
            return fn(*arguments)

    return run


def _refuse(func: Any, name: str) -> None:
    """Raise MemoError for what logits without memory and gradient cannot do."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MemoError(
            f"{name}() of lazy logits under a transform of torch.func (vmap, grad, jvp), which does not know them. Set "
            'memo.kernels.cross_entropy to "whole"'
        )
    if name in _GEOMETRY or (name == "data" and func.__name__ == "__set__"):
        raise MemoError(OTHER_STRIDES.format(name))
    if name in ("retain_grad", "requires_grad_"):
        raise MemoError(NO_WHOLE_GRADIENT.format(f"{name}()"))


def _native(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _with(values: Callable[[LazyLogits], Any], tree: Any) -> Any:
    return tree_map_only(LazyLogits, values, tree)


def _real_ones(logits: LazyLogits) -> torch.Tensor:
    return logits.real_tensor if logits.is_real else logits


def _check(logits: LazyLogits) -> None:
    if _version(logits) != logits.marks:
        raise MemoError("an autograd.Function marked lazy logits as changed (mark_dirty). Give it a clone of them")


def _is_inference(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.is_inference()


def _version(logits: LazyLogits) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return version_of(logits)


def _hook(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Register a hook: all gradients of logits as they are now must come to it, and none of those before a change in place."""
    logits, memory = args[0], args[0].memory
    if is_fsdps(args[1]):  # it gathers once a gradient comes, and returns that as it is
        return _native(func, args, kwargs)
    if logits.is_real and not memory.has_changed:
        raise MemoError(f"a hook on lazy logits that '{memory.op}' has made real. Register it before")
    if memory.joined:
        raise MemoError("a hook on lazy logits that were joined with others by cat or stack. Register it before")
    if memory.changes or logits.is_real:
        return func(_realize(logits, func.__name__), *args[1:], **kwargs)
    memory.hooked = True
    return _native(func, args, kwargs)


def _differentiate(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run autograd.grad or autograd.backward."""
    if any(isinstance(leaf, LazyLogits) for leaf in tree_leaves((args[1:2], kwargs.get("inputs")))):
        raise MemoError(NO_WHOLE_GRADIENT.format(func.__name__))
    args, kwargs = _with(_real_ones, args), _with(_real_ones, kwargs)
    return _native(func, args, kwargs)


def _is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_in_its_place(logits: Any, key: Any, value: Any) -> bool:
    """Return True for what ``x[key] += 1`` does at its end: it puts ``x[key]``, which has changed, where it is."""
    return isinstance(value, LazyLogits) and value.taken[0] is logits and value.taken[1] is key and value.owner is logits.owner


def _written(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> list[LazyLogits]:
    """Return the logits that a function writes to, or whose address it hands out."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written: Any = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    elif name in _ADDRESSES or _is_in_place(name) or kwargs.get("inplace"):
        written = args[0] if args else next(iter(kwargs.values()))
    else:
        written = kwargs.get("out")
    return [value for value in tree_leaves(written) if isinstance(value, LazyLogits)]


def _realize(logits: LazyLogits, op: str) -> torch.Tensor:
    """Have these logits, and all that share their memory, be real from now on."""
    memory, owner = logits.memory, logits.owner
    if not logits.is_real:
        memory.about_to_change()
        memory.op = op
        with torch.inference_mode(all(_is_inference(each) for each in memory.aliases())):
            memory.values = owner.compute(op).contiguous()
        memory.first = version_of(memory.values)
        _follow(memory, counts=False)
    return logits.real_tensor


def _follow(memory: Memory, counts: bool) -> None:
    """Have the history of real logits be that of their real tensors, after each change.

    Args:
        counts: True if PyTorch counts it as a change of the logits. Else what has saved them may still go on.
    """
    if memory.values is None or memory.followed == (version := version_of(memory.values)):
        return
    memory.followed = version
    for each in memory.aliases():
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError):
            # PyTorch refuses a part of split() and a view made without gradients, once their base has changed: at their next use
            if not each.is_leaf and each.real_tensor.requires_grad:
                with nullcontext() if counts else torch.autograd._unsafe_preserve_version_counter(each):
                    Follow.apply(each, each.real_tensor)
        each.marks = _version(each)


def _read(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function with values that live as long as it needs them."""
    made: list[tuple[LazyLogits, torch.Tensor, int]] = []

    def values(logits: LazyLogits) -> torch.Tensor:
        _warn_of_whole(logits, name)
        with torch.set_grad_enabled(logits.requires_grad):
            found = logits.content.shaped(Reduce.apply(logits, identity, (), None)[0])
        made.append((logits, found, version_of(found)))
        return found

    found = func(*_with(values, args), **_with(values, kwargs))
    results = {storage_of(out) for out in tensor_leaves(found)}
    for logits, given, version in made:
        if version_of(given) != version:
            raise MemoError(f"'{name}' wrote to a copy of lazy logits, which do not follow. Clone them first")
        if storage_of(given) in results:
            _realize(logits, name)
            return func(*args, **kwargs)
    return found


def _warn_of_whole(logits: LazyLogits, op: str) -> None:
    if logits.content.column:
        return
    gib = logits.numel() * logits.element_size() / GIB
    logits.content.head_call.warn(
        f"'{op}' needs whole logits, {gib:.3g} GiB of {logits.dtype}, which are made for it. Where that is too much, reduce them "
        "first by an op over the vocabulary (argmax, logsumexp, cross_entropy, gather), or take fewer rows"
    )
