"""Where functions that mix tokens are caught: the globals of models' Python files, and hooks of the modules that call them.

A caught function is the original unless a hook says that its module has a part of a sequence (`_ds_memo_parts`), or its layer
runs in tiles.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.remat.shared_changes import Undo, for_good, need
from ds_memo.remat.undo import Undoing
from ds_memo.sequence import exchange
from ds_memo.sequence.carry import Carry
from ds_memo.sequence.mixers import CONVOLUTIONS, FUSED, SCANS, WHOLE, Spread, convolution, fitting, scan
from ds_memo.sequence.parts import SequenceParts, parts_of

_MODELS = "transformers.models."
_METHODS = ("_rnn_scan",)
_FUNCTIONS = {*SCANS, *CONVOLUTIONS, *FUSED}
_OURS = "_ds_memo_caught"
CAUGHT: Counter[str] = Counter()
"""How often each function ran on parts, in this process."""


class _UnderWay(threading.local):
    """The modules with hooks whose forward runs, the innermost last, and the parts of each; None: not parallel."""

    carry: Carry | None = None
    """What the tile that runs was given and leaves."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, Any]] = []

    @property
    def parts(self) -> SequenceParts | None:
        noted = self.modules[-1][1] if self.modules else None
        return noted if isinstance(noted, SequenceParts) else None


_UNDER_WAY = _UnderWay()
_INSTEAD: dict[str, Callable[..., Any]] = {}
"""For all threads: backwards run layers again in autograd's."""


def catch_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Make the mixers of a decoder run on parts where they are given some; return those modules.

    A mixer is a module whose class calls a caught function, an nn.Conv1d over tokens, or a class that runs on all tokens.
    """
    found = []
    for module in decoder.modules():
        if type(module).__name__ in WHOLE:
            _hook(module, _enter_whole, _leave_whole, for_good, with_kwargs=True)
        elif isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            _hook(module, _enter_convolution, _leave_convolution, for_good)
        elif any([_catch(cls, for_good) for cls in type(module).__mro__]):
            _hook(module, _enter, _leave, for_good)
        else:
            continue
        found.append(module)
    return found


def calls_mixers(layer: nn.Module, undo_with: Callable[[Undo], Any] = for_good) -> bool:
    """Catch the functions that a layer's classes call, and hook its causal convolutions; return whether there are any.

    Args:
        undo_with: is given what puts all of it back, unless another model still needs it.
    """
    convolutions = [part for part in layer.modules() if isinstance(part, nn.Conv1d) and 0 < _reach(part) == part.padding[0]]
    for module in convolutions:
        _hook(module, _enter_convolution, _leave_convolution, undo_with)
    caught = [_catch(cls, undo_with) for cls in {cls for module in layer.modules() for cls in type(module).__mro__}]
    return bool(convolutions) or any(caught)


class Carrying(Undoing):
    """Have caught functions run on a tile inside the block. See :class:`Carry`."""

    __slots__ = ("_carry",)

    def __init__(self, given: Sequence[torch.Tensor] | None, stretch: SequenceParts | None = None) -> None:
        super().__init__(functools.partial(setattr, _UNDER_WAY, "carry", _UNDER_WAY.carry))
        self._carry = Carry(given, stretch)

    def __enter__(self) -> Carry:
        super().__enter__()
        _UNDER_WAY.carry = self._carry
        return self._carry


@contextmanager
def kernels_instead(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Have caught functions run these in the block, by the names in the tables, in place of their own: where no GPU is."""
    before = dict(_INSTEAD)
    _INSTEAD.update(kernels)
    try:
        yield
    finally:
        _INSTEAD.clear()
        _INSTEAD.update(before)


def _hook(
    module: nn.Module,
    enter: Callable[..., Any],
    leave: Callable[..., Any],
    undo_with: Callable[[Undo], Any],
    with_kwargs: bool = False,
) -> None:
    def change() -> Undo | None:
        if enter in module._forward_pre_hooks.values():
            return None
        entering = module.register_forward_pre_hook(enter, with_kwargs=with_kwargs)
        leaving = module.register_forward_hook(leave, always_call=True)

        def undo() -> None:
            entering.remove()
            leaving.remove()

        return undo

    need(module, change, undo_with)


# ---- functions


def _catch(cls: type, undo_with: Callable[[Undo], Any]) -> bool:
    """Catch what a class's Python file has; return whether its functions call any of it."""
    if not cls.__module__.startswith(_MODELS):
        return False
    source = sys.modules[cls.__module__]
    for owner in (source, cls):
        need(owner, functools.partial(_replace, owner), undo_with)
    return not _called(cls).isdisjoint({*_known(source), *_METHODS})


def _replace(owner: types.ModuleType | type) -> Undo | None:
    """Put caught functions in the place of those that the tables know; return how that is undone, if any was there."""
    found = {name: vars(owner)[name] for name in _known(owner) if not hasattr(vars(owner)[name], _OURS)}
    ours = {name: _around(getattr(value, "__name__", name), value) for name, value in found.items()}
    for name, value in ours.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name, value in found.items():
            if vars(owner).get(name) is ours[name]:
                setattr(owner, name, value)

    return undo if found else None


def _known(owner: types.ModuleType | type) -> list[str]:
    """Return the names by which a Python file calls functions of the tables, or a class its own methods."""
    if isinstance(owner, type):
        return [name for name in _METHODS if name in vars(owner)]
    return [name for name, value in vars(owner).items() if callable(value) and getattr(value, "__name__", None) in _FUNCTIONS]


@functools.cache
def _called(cls: type) -> frozenset[str]:
    """Return the names that a class's functions mention."""
    return frozenset(name for value in vars(cls).values() for name in _names_in(value))


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names that a function's code mentions, that of functions inside it, too."""
    codes = [inspect.unwrap(value).__code__] if isinstance(value, types.FunctionType) else []
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _around(known: str, function: Callable[..., Any]) -> Callable[..., Any]:
    run = convolution if known in CONVOLUTIONS else scan

    @functools.wraps(function)
    def on_parts(*args: Any, **kwargs: Any) -> Any:
        inner = _INSTEAD.get(known, function)
        if _UNDER_WAY.carry is not None:
            return _UNDER_WAY.carry.run(known, inner, args, kwargs)
        parts = _UNDER_WAY.parts
        if parts is None:
            return inner(*args, **kwargs)
        if known in FUSED:
            return None
        CAUGHT[known] += 1
        return run(known, inner, args, kwargs, parts)

    setattr(on_parts, _OURS, True)
    return on_parts


# ---- hooks


def _parts_of(module: nn.Module) -> SequenceParts | None:
    """Return the parts that a module is in; None inside a module that runs on all tokens."""
    inside_whole = any(type(outer).__name__ in WHOLE for outer, _ in _UNDER_WAY.modules)
    return None if inside_whole else parts_of(module)


def _enter(module: nn.Module, args: Any) -> None:
    _UNDER_WAY.modules.append((module, _parts_of(module)))


def _leave(module: nn.Module, args: Any, out: Any) -> None:
    _left(module)


def _left(module: nn.Module) -> Any:
    """Return what the module's entrance noted; None if it never came so far (another hook raised before)."""
    modules = _UNDER_WAY.modules
    return modules.pop()[1] if modules and modules[-1][0] is module else None


def _reach(module: nn.Conv1d) -> int:
    """Return the tokens before its own that an output depends on."""
    return (module.kernel_size[0] - 1) * module.dilation[0]


def _enter_convolution(module: nn.Conv1d, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
    """Give an nn.Conv1d that is called outright (RecurrentGemma) this rank's tokens, or a tile's, behind their halo."""
    (x,), reach, carry, parts = args, _reach(module), _UNDER_WAY.carry, _parts_of(module)
    if carry is not None:
        x, gathered = carry.with_halo(x, reach)
        _UNDER_WAY.modules.append((module, gathered))
        return (x,)
    if parts is None:
        return None
    if module.padding[0] != reach or module.stride[0] != 1 or module.padding_mode != "zeros" or x.shape[-1] > parts.own:
        raise MemoError(
            f"an nn.Conv1d of {module.kernel_size[0]} taps got {x.shape[-1]} tokens with padding {module.padding[0]}; sequence "
            f"parallelism expects this rank's {parts.own} and padding {reach}, whose last outputs the model cuts off. "
            "Set sequence_parallel_size to 1, or report the model"
        )
    spread = Spread(x, reach, fitting(parts, x.shape[-1], "nn.Conv1d"))
    _UNDER_WAY.modules.append((module, spread.gathered))
    CAUGHT["nn.Conv1d"] += 1
    return (spread.x,)


def _leave_convolution(module: nn.Conv1d, args: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    gathered = _left(module)
    return None if gathered is None or out is None else gathered(out)


def _enter_whole(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Give a module all tokens, on every rank. The cost is that of a run on one rank."""
    parts = _parts_of(module)
    if parts is None:
        return None
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    parts = fitting(parts, hidden.shape[1], type(module).__name__)
    borders = [start for row in parts.documents for start in row if 0 < start < parts.unpadded]
    if borders:
        raise MemoError(
            f"{type(module).__name__} got packed documents (one begins at token {borders[0]}) and cannot keep them apart. "
            "Give it one document a row"
        )
    _UNDER_WAY.modules.append((module, (parts, hidden.shape[0])))
    CAUGHT[type(module).__name__] += 1
    return _each((args, kwargs), hidden.shape[0], parts.own, lambda x: exchange.gather(x, 1, parts))


def _leave_whole(module: nn.Module, args: Any, out: Any) -> Any:
    entered = _left(module)
    if entered is None or out is None:
        return None
    parts, batch = entered
    return _each(out, batch, parts.length, lambda x: parts.own_of(x, 1))


def _each(values: Any, batch: int, tokens: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the values with each tensor (b, tokens, …) changed."""
    if isinstance(values, tuple):
        return tuple(_each(value, batch, tokens, change) for value in values)
    if isinstance(values, dict):
        return {name: _each(value, batch, tokens, change) for name, value in values.items()}
    has_tokens = isinstance(values, torch.Tensor) and values.dim() > 1 and values.shape[:2] == (batch, tokens)
    return change(values) if has_tokens else values
