"""Patches of an attached model's modules, and how they are undone."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_memo.hf.find_layers import fills_a_cache, is_huggingface_layer, is_huggingface_model
from ds_memo.runtime import conflicts

if TYPE_CHECKING:
    from ds_memo.compiled_layers.layers import Compilers

_MISSING = object()


class ModulePatches:
    """Replaces forwards and checkpoint functions, adds hooks, and undoes all of it."""

    def __init__(self) -> None:
        _keep_dynamo_out()
        self._undo: list[Callable[[], Any]] = []
        self._through_us: weakref.WeakKeyDictionary[nn.Module, Patched] = weakref.WeakKeyDictionary()
        """Hugging Face modules and the checkpoint function that they must call."""

    def layer(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Have every call of a layer come to ``run(forward, *args, **kwargs)``."""
        if is_huggingface_layer(module):
            self._checkpoint_with(module, run, functools.partial(self._run_compiled, run))
            for inner in module.modules():
                if inner is not module and is_huggingface_layer(inner):  # it is a part of this layer (Zamba2, Swin)
                    self._checkpoint_with(inner, _plainly)
        else:
            own = module.forward

            def compiled(callback: Any, *args: Any, **kwargs: Any) -> Any:
                return self._run_compiled(run, callback, own, *args, **kwargs)

            self._set(module, "forward", Patched(functools.partial(run, module.forward), module.forward, compiled))

    def _run_compiled(self, run: Callable[..., Any], callback: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a layer that dynamo reached under a callback: torch.compile was asked for the layer, or for what calls it."""
        forward, args, kwargs = self.compilers.forward(callback, fn, args, kwargs)
        return run(forward, *args, **kwargs)

    def without_gradients(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Have a layer's calls without gradients come to ``run(forward, *args, **kwargs)``, too. Only Hugging Face's do not.

        Where dynamo traces the call, nothing changes: compiled layers run whole.
        """
        if not is_huggingface_layer(module):
            return
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if torch.is_grad_enabled() else run(own, *args, **kwargs)

        self._set(module, "forward", Patched(forward, own, functools.partial(_under_dynamo, own)))

    @functools.cached_property
    def compilers(self) -> Compilers:
        from ds_memo.compiled_layers.layers import Compilers  # at need: it imports torch's compilers

        return Compilers()

    def forward(self, module: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
        """Have every forward of a module come to ``run(forward, *args, **kwargs)``; return what undoes this alone."""
        restore = self._set(module, "forward", Patched(functools.partial(run, module.forward), module.forward))

        def undo() -> None:
            self._undo.remove(restore)
            restore()

        return undo

    def model(self, model: nn.Module, run: Callable[..., Any]) -> None:
        """Have Hugging Face models in it know that they are checkpointed: else they fill a cache with the keys and values of all
        layers, at each replay again."""
        for module in model.modules():
            if is_huggingface_model(module):
                self._checkpoint_with(module, run)
                self.before_forward(module, conflicts.refuse_cache)
            if fills_a_cache(module):
                self.before_forward(module, conflicts.fill_no_cache)

    def activation_wrappers(self, model: nn.Module, layers: list[nn.Module]) -> None:
        """Have torch's wrappers that checkpoint or offload (Accelerate's for FSDP), around layers or inside them, just call what
        they wrap: memo sees to what is kept and what is computed again."""
        wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
        if wrappers is None:
            return
        parts = {part for layer in layers for part in layer.modules()}
        for module in model.modules():
            if isinstance(module, wrappers.ActivationWrapper) and not parts.isdisjoint(module.modules()):
                wrapped = module._checkpoint_wrapped_module
                self._set(module, "forward", Patched(wrapped, module.forward, functools.partial(_under_dynamo, wrapped)))

    def before_forward(
        self,
        module: nn.Module,
        hook: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        """Call ``hook(module, args, kwargs)``; ``compiled(callback, module, args, kwargs)`` where dynamo traces the call."""
        self.undo_with(module.register_forward_pre_hook(Patched(hook, nothing, compiled, then), with_kwargs=True).remove)

    def after_forward(
        self, module: nn.Module, hook: Callable[..., Any], always: bool = False, then: Callable[[Any], Any] | None = None
    ) -> None:
        """Call ``hook(module, args, output)``; `always`: also where the forward raised."""
        self.undo_with(module.register_forward_hook(Patched(hook, nothing, then=then), always_call=always).remove)

    def hold(self) -> None:
        """Keep memo in charge of training forwards after gradient_checkpointing_enable() or _disable()."""
        for module, function in self._through_us.items():
            if module._gradient_checkpointing_func is not function:
                conflicts.refuse_offload(module._gradient_checkpointing_func)
                module._gradient_checkpointing_func = function
            module.gradient_checkpointing = WITH_GRAD

    def undo_with(self, undo: Callable[[], Any], last: bool = False) -> None:
        """Call this too when everything is undone; `last`: after all that is there now."""
        self._undo.insert(0 if last else len(self._undo), undo)

    def undo(self) -> None:
        """Give everything back, the latest first."""
        while self._undo:
            self._undo.pop()()

    def _checkpoint_with(self, module: nn.Module, run: Callable[..., Any], compiled: Callable[..., Any] | None = None) -> None:
        function = Patched(run, _plainly, compiled)
        self._set(module, "gradient_checkpointing", WITH_GRAD)
        self._set(module, "_gradient_checkpointing_func", function)
        self._through_us[module] = function

    def _set(self, module: nn.Module, name: str, value: Any) -> Callable[[], None]:
        """Set an instance attribute so that what was there can be put back; return what does so."""
        before = module.__dict__.get(name, _MISSING)
        where = weakref.ref(module)
        setattr(module, name, value)

        def restore() -> None:
            target = where()
            if target is None:
                return
            if before is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, before)

        self._undo.append(restore)
        return restore


class _WithGrad:
    """True while gradients are enabled. Transformers asks "checkpointing and training?" and, if so, drops the cache of keys and
    values: a model that generates in its training mode would see nothing but its last token."""

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()

    def __reduce__(self) -> tuple:
        return bool, (True,)  # a copy is checkpointed as Transformers does it


WITH_GRAD = _WithGrad()


class Patched:
    """A call that memo puts into a module. A copy of the module, or a pickle of it, gets `plain` in its place.

    Dynamo does not trace it, nor what it calls.

    Args:
        compiled: called as ``compiled(callback, ...)`` in place of `call` where dynamo would have traced it.
        then: returns the callback that dynamo goes on with after the call, from the one before it. None: the same.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        plain: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        self.call = call
        self.plain = plain
        self.compiled = compiled
        self.then = then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("made without _keep_dynamo_out")

    def __reduce__(self) -> tuple:
        return _same, (self.plain,)


@functools.cache
def _keep_dynamo_out() -> None:
    """Once there is something to run: this imports torch's compiler, which launchers can do without."""
    from torch._C._dynamo.eval_frame import set_eval_frame  # both are listed in compiled_layers/torch_private.py,
    from torch._dynamo.decorators import skip  # which imports more than an uncompiled model needs

    def call(self: Patched, *args: Any, **kwargs: Any) -> Any:
        callback = set_eval_frame(None)
        if callback is None:
            return self.call(*args, **kwargs)
        try:  # False: dynamo runs what it has compiled, and compiles nothing
            if callback is False or self.compiled is None:
                return self.call(*args, **kwargs)
            return self.compiled(callback, *args, **kwargs)
        finally:
            set_eval_frame(callback if callback is False or self.then is None else self.then(callback))

    Patched.__call__ = skip(call)  # type: ignore[method-assign]
    call._torchdynamo_disable_msg = "ds_memo runs layers, and compiles each by itself"  # type: ignore[attr-defined]


def nothing(*args: Any) -> None:
    pass


def _under_dynamo(fn: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `fn` where dynamo traces it, as without memo."""
    from torch._C._dynamo.eval_frame import set_eval_frame

    set_eval_frame(callback)
    try:
        return fn(*args, **kwargs)
    finally:
        set_eval_frame(None)


def _same(value: Any) -> Any:
    return value


def _plainly(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
