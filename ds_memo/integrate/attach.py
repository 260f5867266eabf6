"""attach: put a model's layers under ds_memo, and take them out again."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ds_memo.config import MemoConfig, memo_config
from ds_memo.errors import MemoConfigError, MemoError, MemoWarning
from ds_memo.estimate.flops import mfu, peak_flops
from ds_memo.integrate import conflicts
from ds_memo.integrate.addresses import Addresses
from ds_memo.integrate.autopilot import Autopilot, Chosen, predicted
from ds_memo.integrate.kernels import use_kernels
from ds_memo.integrate.layers import find_layers, is_huggingface_layer, is_huggingface_model
from ds_memo.integrate.transformers import model_flops
from ds_memo.plan import Plan
from ds_memo.profile.lengths import shapes_of
from ds_memo.remat.checkpoint import SDPA, Layer, Remat, Setting
from ds_memo.remat.modes import inside_a_layer
from ds_memo.solve.homes import alpha_for_host, place_residents
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_memory import GIB, budget_bytes, ranks_on_node
from ds_memo.swap.numa import node_of
from ds_memo.swap.slab import HostSlab, memlock_binds
from ds_memo.swap.streams import streams_for

_attached: weakref.WeakKeyDictionary[nn.Module, Memo] = weakref.WeakKeyDictionary()
_MISSING = object()
FULL_RECOMPUTE = Setting(resident=True, alpha=0.0, keeps_attention=False)
"""As torch.utils.checkpoint: the input stays on the device, everything else is computed again."""
_SLACK_PER_FRAME = 1 << 16
"""Bytes that alignment and page rounding may add to a frame; only counts when alpha is worked out from the budget."""


def attach(
    model: nn.Module,
    config: Mapping[str, Any] | MemoConfig,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | None = None,
) -> Memo:
    """Put the layers of a plain module under ds_memo; no engine needed.

    Args:
        model: its layers are found by themselves: Hugging Face layers, else the longest ``nn.ModuleList`` of one class.
        config: the "memo" section.
        layers: names or modules, where they cannot be found; empty for a model that calls ``ds_memo.checkpoint`` itself.
        device: where the layers compute; absent: where the first parameter is.

    Returns:
        A handle with ``.detach()``, ``.report()`` and ``.config``.

    Raises:
        MemoConfigError: a value is refused.
        MemoError: already attached, or the layers are not known.
    """
    config = memo_config(config)
    if config.kernels.adam:
        raise MemoConfigError(
            "memo.kernels.adam: the optimizer is DeepSpeed's to make; use ds_memo.initialize, or make it yourself"
        )
    use_kernels(model, config)
    memo = attach_model(model, config, config.layers if layers is None else layers, device)
    memo.watch_optimizers()
    return memo


def attach_model(
    model: nn.Module,
    config: Mapping[str, Any] | MemoConfig,
    layers: Iterable[str | nn.Module] | None = None,
    device: torch.device | None = None,
) -> Memo:
    """As attach; whoever calls says when optimizer steps begin and end."""
    config = memo_config(config)
    if not config.enabled and "enabled" in config.model_fields_set:
        raise MemoConfigError("memo.enabled: got false; attach() was asked to put the model under ds_memo, so true or nothing")
    if model in _attached:
        raise MemoError(f"{type(model).__name__} is already attached; call .detach() on its handle first")
    found = find_layers(model, layers)
    for name, module in found:
        if any(module in memo._by_module for memo in _attached.values()):
            raise MemoError(
                f"layer {name} is already attached with another model that holds it; call .detach() on that handle first"
            )
    check_residents(config, len(found))
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    memo = _attached[model] = Memo(model, config, found, device)
    return memo


def check_residents(config: MemoConfig, layers: int) -> None:
    if layers and (config.resident_layers or 0) > layers:
        raise MemoConfigError(
            f"memo.resident_layers: got {config.resident_layers}; allowed: a whole number from 0 to {layers}, "
            "the number of layers of this model"
        )


def checkpoint(fn: Callable[..., Any], /, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Call ``fn(*args, **kwargs)`` as a layer of the attached model, in place of ``torch.utils.checkpoint.checkpoint``.

    Args:
        fn: a module, a bound method of one, or a partial of either keeps its identity between steps and is fast; any other
            function works but is analysed anew each time.
        use_reentrant: accepted for compatibility; the work is never done reentrantly.

    Raises:
        MemoError: no model is attached, or several are and none of them is in its forward.
    """
    return _current().run(fn, *args, **kwargs)


def report(engine_or_handle: Any) -> dict[str, Any]:
    """What ds_memo is set to and what it did, as a dict; see :meth:`Memo.report`.

    Args:
        engine_or_handle: an engine from ``ds_memo.initialize`` or a handle from ``ds_memo.attach``.

    Raises:
        MemoError: it was never put under ds_memo, or is detached.
    """
    memo = engine_or_handle if isinstance(engine_or_handle, Memo) else getattr(engine_or_handle, "memo", None)
    if not isinstance(memo, Memo):
        raise MemoError(
            f"{type(engine_or_handle).__name__} is not under ds_memo: report() takes an engine from ds_memo.initialize whose "
            'config has "memo": {"enabled": true}, or a handle from ds_memo.attach'
        )
    return memo.report()


def attached() -> list[Memo]:
    """All that are attached now."""
    return list(_attached.values())


def _current() -> Memo:
    running = [memo for memo in _attached.values() if memo.in_forward]
    candidates = running or list(_attached.values())
    if len(candidates) != 1:
        raise MemoError(
            f"ds_memo.checkpoint was called with {len(_attached)} models attached and {len(running)} of them in forward; "
            "it needs exactly one. Call ds_memo.attach(model, config, layers=()) before."
        )
    return candidates[0]


class Memo:
    """A model under ds_memo. Made by :func:`attach` and by ``ds_memo.initialize``."""

    def __init__(self, model: nn.Module, config: MemoConfig, layers: list[tuple[str, nn.Module]], device: torch.device) -> None:
        if config.ablation == "full_swap":
            residents = 2 if config.resident_layers is None else config.resident_layers
            config = config.model_copy(update={"alpha": 1.0, "resident_layers": residents})
        self.config = config
        self.in_forward = False
        self._on_last_micro_batch: Callable[[], bool] = lambda: False
        self._after_first_step: Callable[[Memo], None] = _nothing
        self.binding = "not known before the first forward"
        self.alpha_used = config.alpha
        self.warnings: list[str] = []
        self._model = weakref.ref(model)
        self._detached = False
        pinned = device.type == "cuda"
        budget = budget_bytes(config.host_memory_gib, ranks_on_node(), locked=pinned and memlock_binds())
        self.slab = HostSlab(budget, pinned, node_of(device))
        self.addresses = self._plan_addresses(device)
        self.engine = SwapEngine(streams_for(device), self.slab, device, self.addresses)
        self.remat = Remat(self.engine, self, self.warn, config.attention if config.attention in SDPA else None)
        self.layers = [Layer(index, name, module) for index, (name, module) in enumerate(layers)]
        self._by_module = weakref.WeakKeyDictionary(
            {module: layer for layer, (_, module) in zip(self.layers, layers, strict=True)}
        )
        self._layers_known = bool(self.layers)
        self.autopilot = self._make_autopilot(device)
        self._chosen: Chosen | None = None
        """For the running pass; None: what needs no profile."""
        self._passes = 0
        """Training forwards that came to their end."""
        self.residents = self._place()
        if config.ablation == "full_recompute":
            self.alpha_used = 0.0
            self.binding = "as configured: full recomputation, inputs stay on the device"
        self._restore: list[Callable[[], None]] = []
        self._through_us: weakref.WeakKeyDictionary[nn.Module, _Ours] = weakref.WeakKeyDictionary()
        """Hugging Face modules and the checkpoint function that they must call."""
        for layer, (_, module) in zip(self.layers, layers, strict=True):
            self._take_over(layer, module)
        for module in model.modules():
            if is_huggingface_model(module):  # or it fills a cache with the keys and values of all layers, at each replay again
                self._checkpoint_with(module, self.run)
        for name, module in layers[:1]:
            watch = _Ours(conflicts.MaskWatch(name, self.warn), _nothing)
            self._restore.append(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        for hook in (
            model.register_forward_pre_hook(_Ours(self._forward_begins, _nothing), with_kwargs=True),
            model.register_forward_hook(_Ours(self._forward_is_over, _nothing), always_call=True),
            model.register_forward_hook(_Ours(self._forward_ends, _nothing)),
        ):
            self._restore.append(hook.remove)
        self._frames_before = 0
        self._tokens = 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=21)
        """When the latest optimizer steps ended, and how many tokens this rank had seen by then."""

    # ---- the policy that remat asks

    def setting(self, layer: Layer) -> Setting:
        """See :class:`ds_memo.remat.checkpoint.Policy`."""
        if self._chosen is not None:
            return self._chosen.settings[layer.index]
        if self.config.ablation == "full_recompute":
            return FULL_RECOMPUTE
        return Setting(resident=layer.index in self.residents)

    def alpha(self, layer: Layer, whole_bytes: int, row_bytes: int) -> float:
        """See :class:`ds_memo.remat.checkpoint.Policy`."""
        swapped = max(1, len(self.layers) - len(self.residents))
        budget, alpha = self.slab.budget, self.config.alpha
        if alpha is None and not self._layers_known:
            alpha = 0.0  # how many layers will share the host shows in this forward
        slack = swapped * _SLACK_PER_FRAME if alpha is None else 0
        fits = alpha_for_host(budget - slack, swapped, whole_bytes, row_bytes)
        if fits < (alpha or 0.0):
            need = swapped * (whole_bytes + (alpha or 0.0) * row_bytes)
            way_out = f"memo.alpha of at most {int(fits * 1000) / 1000} fits" if fits >= 0 else "even memo.alpha 0 does not fit"
            raise MemoError(
                f"host memory: {swapped} swapped layers like {layer.name} need {need / GIB:.3g} GiB at alpha {alpha or 0.0}, "
                f"{budget / GIB:.3g} GiB are available to this rank; {way_out}. More memo.resident_layers, a larger "
                "memo.host_memory_gib, a smaller batch or more sequence-parallel ranks help too."
            )
        if alpha is None:
            alpha = fits
        reason = "as configured" if self.config.alpha is not None else "host memory" if alpha < 1 else "all rows fit the host"
        used = swapped * (whole_bytes + alpha * row_bytes)
        self.binding = f"{reason}: {used / GIB:.3g} of {budget / GIB:.3g} GiB of host memory at alpha {alpha:.3g}"
        self.alpha_used = alpha
        return alpha

    # ---- running

    def run(self, fn: Callable[..., Any], /, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
        module = module_of(fn)
        if module is None:
            layer = Layer(len(self.layers), getattr(fn, "__qualname__", type(fn).__name__), None)
        else:
            layer = self._by_module.get(module)
            if layer is None:
                layer = self._by_module[module] = Layer(len(self.layers), type(module).__name__, module)
                self.layers.append(layer)
        return self.remat.run_with(layer, fn, args, kwargs, preserve_rng_state)

    def owns(self, module: nn.Module) -> bool:
        """Whether a call of this module comes through memo by itself."""
        return module in self._by_module

    def warn(self, message: str) -> None:
        """Warn once and show it in the report."""
        if message not in self.warnings:
            self.warnings.append(message)
            warnings.warn(message, MemoWarning, stacklevel=3)

    def expect_steps(self, on_last_micro_batch: Callable[[], bool]) -> None:
        """Whoever calls tells of every optimizer step.

        Args:
            on_last_micro_batch: whether one will come after the present micro-batch.
        """
        self._on_last_micro_batch = on_last_micro_batch
        if self.addresses:
            self.addresses.steps_happen = True

    def on_first_step(self, say: Callable[[Memo], None]) -> None:
        """Call this once the first optimizer step is over."""
        self._after_first_step = say

    def step_begins(self) -> None:
        """An optimizer step begins."""
        if self.addresses:
            self.addresses.step_begins()

    def stepped(self) -> None:
        """An optimizer step is over."""
        if self.addresses:
            self.addresses.step_ends()
        if not self._steps and self._chosen is None:  # what was solved for has said itself what it does
            self._look_for_an_effect()
        if not self._steps:
            self._after_first_step(self)
        now = time.perf_counter()
        self._steps.append((now, self._tokens))
        if self.autopilot:
            self.autopilot.stepped(self._model(), self._passes, now)

    def _look_for_an_effect(self) -> None:
        """Warn of a first step in which memo moved nothing."""
        if not self.engine.traffic.frames:
            self.warn(
                f"memo has no effect: the first step is over and none of its {len(self.layers)} layers came through ds_memo. "
                "Was the model called, or only parts of it?"
            )
        elif not self.engine.traffic.bytes_to_host:
            self.warn(
                f"memo has no effect: the first step moved no bytes, for {len(self.residents)} of {len(self.layers)} layers are "
                "resident and keep everything on the device. Set a smaller memo.resident_layers, or train without memo"
            )

    def watch_optimizers(self) -> None:
        """Follow the steps of every torch optimizer that has a parameter of the model."""
        mine: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        memo = weakref.ref(self)  # the hooks are torch's, and must keep nothing alive

        def told(say: Callable[[Memo], None]) -> Callable[..., None]:
            def hook(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
                target = memo()
                model = target._model() if target else None
                if model is None:
                    return
                if optimizer not in mine:
                    own = set(map(id, model.parameters()))
                    mine[optimizer] = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
                if mine[optimizer]:
                    say(target)

            return hook

        for register, say in (
            (register_optimizer_step_pre_hook, Memo.step_begins),
            (register_optimizer_step_post_hook, Memo.stepped),
        ):
            handle = register(told(say))
            self._restore.append(handle.remove)
            weakref.finalize(self, handle.remove)

    @property
    def plan(self) -> Plan | None:
        """The plan of memory addresses that the latest training pass followed; None before there is one.

        ``ds_memo.plan.plan_to_json`` writes it, and ``ds-memo show`` draws what it wrote.
        """
        return self.addresses.plan if self.addresses else None

    def release_arena(self) -> int:
        """Give the arena of planned addresses back to PyTorch's allocator, for an evaluation that needs the memory, say.

        The next training forward takes it again.

        Returns:
            How many bytes that were; 0 if there is none.
        """
        return self.addresses.release_arena() if self.addresses else 0

    def on_detach(self, undo: Callable[[], Any]) -> None:
        self._restore.append(undo)

    def detach(self) -> None:
        """Give the model back as it was. Graphs made before can no longer be run backward."""
        if self._detached:
            raise MemoError("this handle is already detached")
        if inside_a_layer():
            raise MemoError("detach() was called while a layer runs; call it between two steps")
        self._detached = True
        while self._restore:
            self._restore.pop()()
        if self.addresses:
            self.addresses.close()
        model = self._model()
        if model is not None:
            _attached.pop(model, None)
        self.engine.close()

    def events(self, samples: int) -> list[tuple[str, float, int]]:
        """For DeepSpeed's monitors, after an optimizer step: name, value, and how many samples the run has seen."""
        report = self.report()
        values = {
            "alpha": report["alpha"],
            "resident_layers": report["resident_layers"],
            "bytes_to_host": report["bytes_to_host"],
            "bytes_from_host": report["bytes_from_host"],
            "stall_s": sum(report["stall_s"].values()),
            "mfu": report["mfu"],
        }
        return [(f"Train/Samples/memo_{name}", value, samples) for name, value in values.items() if value is not None]

    def report(self) -> dict[str, Any]:
        """What is set and what happened so far; bytes, seconds and counts of this rank.

        Raises:
            MemoError: after ``detach()``.
        """
        if self._detached:
            raise MemoError("this handle is detached; there is nothing to report. Attach the model again.")
        work, traffic = self.remat.work, self.engine.traffic
        step_s, tokens_per_s = _speed(self._steps)
        plain = self._chosen is not None and self._chosen.homes.plain
        return {
            "active": traffic.bytes_to_host > 0,
            "alpha": self.alpha_used,
            "resident_layers": len(self.residents),
            "binding": self.binding,
            "checkpointing": not plain,
            "layers": len(self.layers),
            "frames": traffic.frames,
            "bytes_to_host": traffic.bytes_to_host,
            "bytes_from_host": traffic.bytes_from_host,
            "stored_bytes_per_layer": [
                0 if plain or not layer.latest else layer.latest.layout.stored_bytes for layer in self.layers
            ],
            "gemm_flops_recomputed_fraction": work.gemm_flops_recomputed / work.gemm_flops if work.gemm_flops else 0.0,
            "attention_recomputed": work.attention_ops_recomputed,
            "host": {
                "budget": self.slab.budget,
                "slab": self.slab.size,
                "peak_used": self.slab.peak_used,
                "numa_node": self.slab.node.number if self.slab.node else None,
            },
            "stall_s": self.engine.streams.stall_s(),
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            "predicted": predicted(self._chosen) if self._chosen else None,
            "profile": self.autopilot.report() if self.autopilot else None,
            "plan": self.addresses.report() if self.addresses else None,
            "warnings": list(self.warnings),
        }

    # ---- inside

    def _make_autopilot(self, device: torch.device) -> Autopilot | None:
        """None where nothing is left open."""
        config = self.config
        if config.ablation is not None or (config.alpha is not None and config.resident_layers is not None):
            return None
        return Autopilot(config, self.layers, self.remat, self.slab, self.engine.streams, device, _past_us, self.warn)

    def _choose(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Have the homes for the training pass that begins."""
        self._chosen = None
        if self.autopilot and self._layers_known:
            self._chosen = self.autopilot.choose(shapes_of(args, kwargs), model, args, kwargs)
        if self._chosen is not None:
            homes = self._chosen.homes
            self.residents, self.alpha_used, self.binding = homes.residents, homes.alpha, homes.binding

    def _hidden_shape(self) -> tuple[int, ...]:
        """Shape of what last came into the first layer that is in use, normally (b, s, h); empty if that is not known."""
        if self._chosen is not None:
            return self._chosen.shape
        latest = next((layer.latest for layer in self.layers if layer.latest), None)
        kept = next((kept for kept in latest.inputs if kept), None) if latest else None
        return kept.shape if kept else (0,)

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        model, shape = self._model(), self._hidden_shape()
        if tokens_per_s is None or model is None or len(shape) != 3 or self.engine.device.type != "cuda":
            return None
        flops, peak = model_flops(model, shape[1]), peak_flops(torch.cuda.get_device_name(self.engine.device))
        return mfu(flops * tokens_per_s / shape[1], 1.0, 1, peak) if flops and peak else None

    def _place(self) -> frozenset[int]:
        wanted = 0 if self.config.ablation == "full_recompute" else self.config.resident_layers
        return place_residents(len(self.layers), 2 if wanted is None else wanted)

    def _take_over(self, layer: Layer, module: nn.Module) -> None:
        if is_huggingface_layer(module):
            self._checkpoint_with(module, functools.partial(self.remat.run, layer))
        else:
            self._set(module, "forward", _Ours(functools.partial(self.remat.run, layer, module.forward), module.forward))

    def _checkpoint_with(self, module: nn.Module, run: Callable[..., Any]) -> None:
        function = _Ours(run, _plainly)
        self._set(module, "gradient_checkpointing", True)
        self._set(module, "_gradient_checkpointing_func", function)
        self._through_us[module] = function

    def _hold(self) -> None:
        """gradient_checkpointing_enable() and _disable() after attach: memo stays in charge of training forwards."""
        for module, function in self._through_us.items():
            if module._gradient_checkpointing_func is not function:
                conflicts.refuse_offload(module._gradient_checkpointing_func)
                module._gradient_checkpointing_func = function
            module.gradient_checkpointing = True

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an instance attribute so that detach() can put back what was there."""
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

        self._restore.append(restore)

    def _plan_addresses(self, device: torch.device) -> Addresses | None:
        if not self.config.plan.enabled:
            return None
        try:
            return Addresses(device, self.config.plan, self.warn)
        except (MemoError, RuntimeError) as error:
            self.warn(f"memory addresses are not planned: {error}")
            return None

    def _forward_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.in_forward = True
        training = module.training and torch.is_grad_enabled()
        if training:
            self._hold()
            self._choose(module, args, kwargs)
        if self.addresses and (not training or (self._chosen is not None and self._chosen.homes.plain)):
            self.addresses.leave_phase()
        elif self.addresses:
            settings = self._chosen and self._chosen.settings
            self.addresses.pass_begins(shapes_of(args, kwargs), len(self.layers) - 1, self._on_last_micro_batch(), settings)
        self._frames_before = self.engine.traffic.frames

    def _forward_is_over(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.in_forward = False

    def _forward_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._layers_known and self.layers:  # a model that calls ds_memo.checkpoint itself shows them as it runs
            self._layers_known = True
            self.residents = self._place()
            for layer in self.layers:
                layer.recipes.clear()
        if not (module.training and torch.is_grad_enabled()):
            return
        if self.addresses:
            self.addresses.forward_ended()
        self._passes += 1
        if self.engine.traffic.frames > self._frames_before or (self._chosen is not None and self._chosen.homes.plain):
            self._tokens += math.prod(self._hidden_shape()[:-1])
        else:
            self.warn(
                f"{type(module).__name__} ran a training forward and none of its {len(self.layers)} layers came through ds_memo: "
                "it has no effect"
            )


class _Ours:
    """What we put into a module. A copy of the module, or a pickle of it, is a plain one: it gets `plain` in its place."""

    def __init__(self, call: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.call = call
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return _same, (self.plain,)


def _same(value: Any) -> Any:
    return value


def _plainly(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _nothing(*args: Any) -> None:
    pass


def _past_us(module: nn.Module) -> Callable[..., Any]:
    """How to call a layer as it would be called without us."""
    forward = module.__dict__.get("forward")
    return forward.plain if isinstance(forward, _Ours) else functools.partial(nn.Module.__call__, module)


def module_of(fn: Any) -> nn.Module | None:
    """The module that a call of `fn` runs: itself, or that of a bound method, through any partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _speed(steps: Iterable[tuple[float, int]]) -> tuple[float | None, float | None]:
    """Median seconds and tokens a second between the ends of steps; None before there are two."""
    gaps = [(now - then, tokens - before) for (then, before), (now, tokens) in itertools.pairwise(steps)]
    if not gaps:
        return None, None
    return statistics.median(seconds for seconds, _ in gaps), statistics.median(tokens / seconds for seconds, tokens in gaps)
