"""Layers that the user compiles: each is compiled by itself, once for each kind of placement.

    SWAPPED, SWAPPED_ATTENTION_RECOMPUTED           rows go to the host through the swap engine
    ON_DEVICE, GEMMS_RECOMPUTED, FULL_RECOMPUTE     autograd saves what stays, and the frame is empty
    NO_RECOMPUTE, or without gradients              as the user compiled it

A layer that cannot be traced as one graph runs uncompiled, and a warning says why.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_memo.compiled_layers import ops
from ds_memo.compiled_layers.backends import name_of, partitioned
from ds_memo.compiled_layers.compiled_call import CompiledCall
from ds_memo.compiled_layers.partition import CannotCompile
from ds_memo.compiled_layers.torch_private import (
    CANNOT_COMPILE,
    MARK_OF_ANY_SIZE,
    BackendCompilerFailed,
    innermost_backend,
    is_traceable_wrapper_subclass,
)
from ds_memo.errors import MemoError
from ds_memo.placement import Placement, PlacementKind
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import LayerCall, OwnForward
from ds_memo.remat.layer_host import LayerHost, Way
from ds_memo.remat.tensors import tensor_leaves

HOOKS = "is called under saved-tensor hooks (activation offloading), which would move the handle of its frame"
TILES = "{}: layers in tiles run part by part, which torch.compile does not know; leave the key out, or leave layers uncompiled"


class CompiledLayers:
    """Compiles layers by one backend.

    Args:
        backend: what torch.compile was asked for.
    """

    def __init__(self, backend: Any) -> None:
        ops.define_joins()
        self.backend = backend
        self._compiled: dict[tuple[Any, Any], Callable[..., Any]] = {}
        """By function and kind of placement."""
        self.refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        """Layers that run uncompiled, and why."""

    def function(self, fn: Callable[..., Any], kind: PlacementKind) -> Callable[..., Any]:
        """Return `fn`, a plain function, compiled for a kind of placement.

        Raises:
            CannotCompile: the backend cannot be used.
        """
        key = fn, kind
        if key not in self._compiled:
            dynamic = getattr(self.backend, "dynamic", None)
            if kind is PlacementKind.NO_RECOMPUTE:
                made = torch.compile(fn, backend=self.backend, dynamic=dynamic)
            else:
                backend, options = partitioned(self.backend, kind)
                made = torch.compile(
                    _with_code_of_its_own(fn, kind), backend=backend, options=options or None, dynamic=dynamic, fullgraph=True
                )
            self._compiled[key] = made
        return self._compiled[key]


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _with_code_of_its_own(fn: Callable[..., Any], kind: PlacementKind) -> Callable[..., Any]:
    """Return a function that calls `fn`, with code of its own.

    Dynamo counts recompilations by code: those of one placement do not count for another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_name=f"memo_{kind.name.lower()}")
    return types.FunctionType(code, call.__globals__, code.co_name, call.__defaults__, call.__closure__)


class CompiledForward(OwnForward):
    """A layer's forward that the user asked to compile. Called directly, it runs as the user compiled it.

    Args:
        fn: a plain function: a method's module is the first argument of a call.
    """

    def __init__(self, compiled: CompiledLayers, fn: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.name = name_of(compiled.backend)
        self.plain = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled.function(self.plain, PlacementKind.NO_RECOMPUTE)(*args, **kwargs)

    def refuse(self, layer: Layer, why: str) -> None:
        if (module := layer.module()) is not None and why != HOOKS:  # hooks may be gone in the next call
            self.compiled.refused[module] = why

    def refused(self, layer: Layer) -> str | None:
        return self.compiled.refused.get(layer.module()) if layer.module() is not None else "belongs to no module"

    def refusal(self, call: LayerCall, host: LayerHost) -> str | None:
        if call.placement.tiles is not None:
            raise MemoError(TILES.format("memo.tile_tokens" if call.placement.tiles.input_every == 1 else "memo.input_every"))
        if (why := self.refused(call.layer)) is not None:
            return why
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return HOOKS
        module = call.layer.module()
        parameters = () if module is None else module.parameters()  # as they are now: FSDP2 has gathered them
        if any(map(is_traceable_wrapper_subclass, (*parameters, *call.args, *call.kwargs.values()))):
            return "has tensor subclasses (DTensor, quantised weights) among its inputs or parameters"
        return None

    def run(self, call: LayerCall, host: LayerHost) -> Any:
        layer, placement = call.layer, call.placement
        arguments = (*call.args, *call.kwargs.values())
        key = layer.signature(arguments, placement), self.plain
        recipe = layer.recipes.get(key)
        if recipe is not None:
            host_bytes = recipe.layout.host_bytes
            placement = host.admit(layer, placement, Way.COMPILED, lambda _: host_bytes)
            if placement is not call.placement:
                key = layer.signature(arguments, placement), self.plain
        fn = functools.partial(self.compiled.function(self.plain, placement.kind), *call.args, **call.kwargs)
        return host.observed(layer, functools.partial(self._run, layer, placement, key, fn, host))

    @staticmethod
    def _run(layer: Layer, placement: Placement, key: Any, fn: Callable[..., Any], host: LayerHost) -> Any:
        frame = host.engine.begin(layer.name, placement)
        call = CompiledCall(host, layer, frame, key)
        try:
            ops.begins(call)
            out = host.with_kernel(layer, fn)
            if call.needs_backward:
                call.keep()
                host.engine.end(frame)
        except CANNOT_COMPILE as error:
            if call.needs_backward or call.recipe is not None:  # its graph ran
                raise
            raise CannotCompile(reason_of(error)) from error
        finally:
            ops.ends(call)
            if frame.state == "recording":  # the layer raised, or no backward will ask for it
                host.engine.abort(frame)
        if call.native:
            host.follow_backward(out, frame, call.backward_begins)
        else:
            for tensor in tensor_leaves(out):  # the caller may change it in place
                host.engine.about_to_change(frame, tensor)
        return out


class AnyLength:
    """A callback of dynamo that compiles for any size at once, as ``dynamic=True`` does.

    Layers break the model's graph into pieces. With sizes fixed at first, a new length would compile each piece again. Layers
    are compiled as the user asked: AOTAutograd marks outputs of any size, and the marks would reach them.

    Args:
        inner: the callback that compiles.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = self._torchdynamo_orig_backend = inner  # dynamo keeps compiled code by the innermost of such a chain

    def __call__(self, *frame: Any) -> Any:
        with torch._dynamo.config.patch(assume_static_by_default=False):
            return self.inner(*frame)

    @staticmethod
    def unmark(arguments: Any) -> None:
        for tensor in tensor_leaves(arguments):
            vars(tensor).pop(MARK_OF_ANY_SIZE, None)


class Compilers:
    """The backends that one model's layers are compiled by. Each torch.compile of a layer makes its own, mostly equal ones."""

    def __init__(self) -> None:
        self._all: list[CompiledLayers] = []

    def forward(self, callback: Any, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict]:
        """Return a layer's forward, as it is compiled, and its arguments.

        Args:
            callback: dynamo's, under which the layer is called.
            fn: a function, a bound method, or a partial of one.
        """
        while not isinstance(fn, types.FunctionType):
            if isinstance(fn, functools.partial):
                args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
            elif isinstance(fn, types.MethodType):
                args, fn = (fn.__self__, *args), fn.__func__
            elif isinstance(fn, nn.Module):
                args, fn = (fn, *args), _call
            else:
                break
        if isinstance(callback, AnyLength):
            callback.unmark((args, kwargs))
        return CompiledForward(self._of(callback), fn), args, kwargs

    @staticmethod
    def between(callback: Any) -> Any:
        """Return the callback under which dynamo compiles what lies between layers, in place of the model's."""
        chosen = getattr(innermost_backend(callback), "dynamic", None)
        return callback if chosen is not None or isinstance(callback, AnyLength) else AnyLength(callback)

    @staticmethod
    def beyond(callback: Any) -> Any:
        """Return the model's callback again."""
        return callback.inner if isinstance(callback, AnyLength) else callback

    def _of(self, callback: Any) -> CompiledLayers:
        backend = innermost_backend(callback)
        for compiled in self._all:
            if compiled.backend == backend:
                return compiled
        self._all.append(CompiledLayers(backend))
        return self._all[-1]


def reason_of(error: Exception) -> str:
    """Return why a layer cannot be compiled, as the end of "it …"."""
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    if isinstance(error, CannotCompile):
        return str(error)
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    stack = getattr(error, "real_stack", None)
    where = f" ({Path(stack[-1].filename).name}, line {stack[-1].lineno})" if stack else ""
    return f"cannot be traced as one graph: {what}{where}"
