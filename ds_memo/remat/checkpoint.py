"""Run one layer so that it can be replayed: torch's non-reentrant checkpoint, with our two modes as its contexts."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.attention import SDPBackend
from torch.nn.utils import parametrize
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, _StopRecomputationError

from ds_memo.errors import MemoError
from ds_memo.layer_observer import LayerObserver
from ds_memo.placement import FULL_RECOMPUTE, Placement, PlacementKind
from ds_memo.remat import cudnn
from ds_memo.remat.analyse import Analyse
from ds_memo.remat.call import Call, Work
from ds_memo.remat.diagnostics import diagnose, has_compiled
from ds_memo.remat.inputs import DeviceInput, Lifted, analysing_pack, lift_keywords, recording_pack, unpack
from ds_memo.remat.layer_state import TOO_LARGE, LayerState, tensors_of
from ds_memo.remat.modes import inside_a_checkpoint, inside_a_layer, keep_dynamo_out, under_a_checkpoint
from ds_memo.remat.random_states import from_current_states
from ds_memo.remat.recipe import Observed, Recipe, make_recipe, remember
from ds_memo.remat.record import Record
from ds_memo.remat.replay import Replay
from ds_memo.remat.same_again import Samples
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.remat.undo import changed, stacks_restored
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame

_TIMES_LEFT = 3
"""Calls in a row that left their recipe, after which every call of the layer is analysed."""
_TIMES_ALIKE = 3
"""Such analyses in a row that found nothing new, after which the layer's recipes are followed once more."""
UNCOMPILED = "it {}, so it runs uncompiled, with the same memory and results"
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


LayerRun = Callable[["Layer", Callable[..., Any], tuple, dict[str, Any]], Any]
"""Runs ``fn(*args, **kwargs)`` as a layer."""


class Policy(Protocol):
    def placement(self, layer: Layer) -> Placement: ...

    def settle(self, layer: Layer, placement: Placement, whole_bytes: int, split_bytes: int) -> Placement:
        """Return the placement of a swapped call with alpha decided, now that the sizes are known.

        Args:
            whole_bytes: stored whatever alpha is.
            split_bytes: of which the share alpha is stored.

        Raises:
            MemoError: no alpha fits, or the one that is configured does not.
        """

    def has_room(self, nbytes: int) -> bool:
        """Return True if the host has room for `nbytes` of one layer call. If not, the call is fully recomputed."""


# ---- other ways to run a layer call. Remat asks them for a function that does, and runs it; they do not come back to Remat


class CannotCompile(Exception):
    """A layer cannot run compiled. The message says why, as the end of "it …"."""


class OwnForward(ABC):
    """A layer's forward that keeps what its backward needs by itself: one that torch.compile compiled."""

    name: str
    """The compiler's, for messages."""
    plain: Callable[..., Any]
    """The same forward, uncompiled."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it and keep nothing."""

    @abstractmethod
    def prepare(self, remat: Remat, layer: Layer, placement: Placement, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Return a function that runs it as a layer by its placement, which recomputes. Both raise CannotCompile."""

    @abstractmethod
    def refuse(self, layer: Layer, why: str) -> None:
        """Have a layer run uncompiled from now on. `why` is the message of a CannotCompile."""

    @abstractmethod
    def refused(self, layer: Layer) -> str | None:
        """Return why a layer runs uncompiled all the same; None: it does not."""


class CannotTile(Exception):
    """A layer cannot run in tiles. The message says why, for the user."""


class Tiler(Protocol):
    """Runs layer calls in tiles of tokens."""

    def prepare(
        self, remat: Remat, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement | None
    ) -> Callable[[], Any] | None:
        """Return a function that runs ``fn(*args, **kwargs)`` in tiles, or raises CannotTile; None: the call runs whole.

        Args:
            placement: None: without gradients, as calls with gradients last ran in tiles.
        """


class Layer:
    """One transformer block of a model, and the recipes of its calls.

    Args:
        index: its number among the model's layers.
        name: the user's name for it, e.g. ``model.layers.3``.
        module: None for a function that belongs to no module; each of its calls is analysed.
    """

    def __init__(self, index: int, name: str, module: nn.Module | None) -> None:
        self.index = index
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else lambda: None
        named = dict(module.named_parameters()) if module is not None else {}
        self.parameters, self._weights = list(named.values()), list(named)
        self.recipes: dict[Any, Recipe] = {}
        self.latest: Recipe | None = None
        self.times_left = 0
        """Calls that have left their recipe since the last call that followed one to its end."""
        self._times_alike = 0

    @functools.cached_property
    def state(self) -> LayerState | None:
        """None: it is a function."""
        module = self.module()
        return LayerState(self.name, module, self._weights) if module is not None else None

    @property
    def follows_recipes(self) -> bool:
        return self.times_left < _TIMES_LEFT

    def signature(self, args: tuple, placement: Placement) -> Any:
        """Return the key of a call's recipe: what the recipe depends on and is cheap to read.

        A call that differs in anything else leaves its recipe on the way.
        """
        tensors = tuple([(x.shape, x.dtype, x.requires_grad) for x in args if isinstance(x, torch.Tensor)])
        trained = tuple([parameter.requires_grad for parameter in self.parameters])
        cast = tuple([torch.get_autocast_dtype(device) for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)])
        return tensors, trained, self.module().training, cast, placement

    def remember(self, key: Any, recipe: Recipe) -> None:
        """Keep a recipe for later calls of its signature."""
        if not self.follows_recipes:
            self._times_alike = self._times_alike + 1 if recipe == self.recipes.get(key) else 0
            if self._times_alike == _TIMES_ALIKE:
                self.times_left = _TIMES_LEFT - 1  # on probation: one call that leaves its recipe ends it
        remember(self.recipes, key, recipe)


class Remat:
    """Runs the layers of one attached model.

    Args:
        engine: keeps what backwards need.
        policy: decides the placements.
        warn: warns the user.
        attention: the "memo" section's field. "cudnn" and "flash" are enforced here; flash-attn packages are the model's to call.
        observers: told which layer runs, in this order.
        tiler: None: layers run whole.
        aside: returns a context for what is run once for a signature, and not as a part of the pass.
        part_begins: told of each part of a layer in tiles. A profile measures them.
    """

    def __init__(
        self,
        engine: SwapEngine,
        policy: Policy,
        warn: Callable[[str], None],
        attention: str | None,
        observers: Sequence[LayerObserver] = (),
        tiler: Tiler | None = None,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        part_begins: Callable[[str], None] = lambda part: None,
    ) -> None:
        self.aside = aside
        self.part_begins = part_begins
        self.engine = engine
        self.policy = policy
        self.warn = warn
        self.work = Work()
        self.observers = observers
        keep_dynamo_out()
        self._sdpa = SDPA.get(attention)
        self._attention = attention
        self._tiler = tiler
        self._warned: set[tuple[type | None, str]] = set()
        self._instead: LayerRun | None = None

    def run(self, layer: Layer, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)`` and keep what its backward needs, as the policy says.

        Without gradients nothing is kept. Inside another layer's run, just call it.
        """
        return self.run_with(layer, fn, args, kwargs)

    def run_with(
        self, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve_rng_state: bool = True
    ) -> Any:
        """Do the same as :meth:`run`.

        Args:
            preserve_rng_state: True if the replay must draw the same random numbers as the forward.
        """
        if self._instead is not None:
            return self._instead(layer, fn, args, kwargs)
        if inside_a_layer():
            return fn(*args, **kwargs)
        if not torch.is_grad_enabled():
            with stacks_restored():
                return self._run_without_gradients(layer, fn, args, kwargs)
        if inside_a_checkpoint():  # it runs the layer twice whatever is kept, and both runs must be the same
            self.warn(
                "the model calls torch.utils.checkpoint, or its own, around its layers, so they are recomputed and ds_memo has "
                "no part in it. Leave that checkpoint out, or call ds_memo.checkpoint or deepspeed.checkpointing.checkpoint"
            )
            return fn(*args, **kwargs)
        if parametrize._cache_enabled:
            _refuse_cached_parameters(layer)
        with stacks_restored():
            placement = self.policy.placement(layer)
            if isinstance(fn, OwnForward) and placement.kind is not PlacementKind.NO_RECOMPUTE:
                try:
                    return self._observed(layer, fn.prepare(self, layer, placement, args, kwargs))
                except CannotCompile as reason:
                    why = str(reason)  # no traceback, which holds the arguments
                out = self._run_placed(layer, fn.plain, args, kwargs, placement, preserve_rng_state)
                fn.refuse(layer, why)  # not earlier: the layer's own errors are raised
                self.warn_of(layer, UNCOMPILED.format(why))
                return out
            return self._run_placed(layer, fn, args, kwargs, placement, preserve_rng_state)

    def instead(self, run: LayerRun) -> AbstractContextManager[None]:
        """Send every layer call inside the block to `run`."""
        return changed(self, "_instead", run)

    def _run_without_gradients(self, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._tiler is not None and not under_a_checkpoint(up_to=""):  # a reentrant one, whose second run is whole
            tiled = self._tiler.prepare(self, layer, fn, args, kwargs, None)
            if tiled is not None:
                with suppress(CannotTile):
                    return tiled()
        return fn(*args, **kwargs)

    def _run_placed(
        self,
        layer: Layer,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        placement: Placement,
        preserve_rng_state: bool,
    ) -> Any:
        recomputes = placement.kind is not PlacementKind.NO_RECOMPUTE
        if recomputes and self._tiler is not None:
            tiled = self._tiler.prepare(self, layer, fn, args, kwargs, placement)
            if tiled is not None:
                with suppress(CannotTile):
                    return self._observed(layer, tiled)
        lifted = lift_keywords(fn, args, kwargs)
        fn, replay = (functools.partial(self.with_kernel, layer, run) for run in (lifted.fn, lifted.replay))
        lifted = lifted._replace(fn=fn, replay=replay)
        if not (recomputes or placement.empty_frame):
            return lifted.fn(*lifted.args)
        if recomputes:
            return self._observed(layer, lambda: self._run_checkpointed(layer, placement, lifted, preserve_rng_state))
        return self._observed(layer, lambda: self._run_with_empty_frame(layer, placement, lifted))

    def _observed(self, layer: Layer, run: Callable[[], Any]) -> Any:
        """Call `run`, and notify the observers of its begin and end."""
        try:
            for observer in self.observers:
                observer.layer_begins(layer.index)
            out = run()
            for observer in self.observers:
                observer.layer_ends(layer.index)
        except BaseException:
            for observer in self.observers:
                observer.interrupted()
            raise
        return out

    def _run_checkpointed(self, layer: Layer, placement: Placement, lifted: Lifted, preserve_rng_state: bool) -> Any:
        key = layer.signature(lifted.args, placement) if layer.module() is not None else None
        recipe = layer.recipes.get(key) if layer.follows_recipes else None
        if recipe is not None and not (placement.kind.on_device or self.policy.has_room(recipe.layout.host_bytes)):
            return self._run_checkpointed(layer, FULL_RECOMPUTE, lifted, preserve_rng_state)
        frame = self.engine.begin(layer.name, placement)
        call = Call(layer.index, self.observers, self.engine, frame, recipe, self.work)
        if layer.state is not None:
            call.before = layer.state.before(learns=recipe is None and layer.follows_recipes)
            replay = lifted.replay
            if recipe is None and layer.follows_recipes:
                call.samples = Samples(functools.partial(self.warn_of, layer))
                replay = call.samples.around(replay)
            lifted = lifted._replace(replay=call.before.around(replay))
        nested = [value for value in lifted.args if not isinstance(value, torch.Tensor)]
        call.device_inputs = [DeviceInput(layer.name, tensor) for tensor in tensor_leaves((nested, lifted.bound))]
        givens = functools.partial(_givens, layer, (lifted.args, lifted.bound))
        mode: Analyse | Record
        if recipe is None:
            observed = Observed()
            self.work.analysed += key is not None and layer.follows_recipes
            mode, pack = Analyse(call, observed, givens()), analysing_pack(call, observed)
        else:
            layer.latest = recipe
            mode, pack = Record(call, givens, functools.partial(self._forget, layer)), recording_pack(call)
        try:
            if recipe is not None:
                self.engine.adopt(frame, recipe.layout)
            # These hooks see the layer's inputs only: inside, torch's checkpoint puts its own on top.
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = _checkpoint(lifted, preserve_rng_state, lambda: (mode, Replay(call)))
            if recipe is None:
                if call.before is not None:
                    for name in call.before.learn():
                        self.warn_of(layer, TOO_LARGE.format(name))
                self._settle(layer, key, call, observed)
            if mode.packs:
                self.work.gemm_flops += call.recipe.gemm_flops
                self.engine.end(frame)
        finally:
            if recipe is None:
                observed.forget()  # the graph's hooks refer to the mode, which would keep every output
            if frame.state == "recording":  # the layer raised, or no backward will ask for it
                self.engine.abort(frame)
        if call.recipe is recipe:
            layer.times_left = 0
        if frame.device or call.loose:
            for tensor in tensor_leaves(out):  # the caller may change it in place
                call.about_to_change(tensor)
        return out

    def _run_with_empty_frame(self, layer: Layer, placement: Placement, lifted: Lifted) -> Any:
        """Call a layer without recompute. With its empty frame, swapped frames below move as below a resident layer."""
        frame = self.engine.begin(layer.name, placement)
        try:
            out = lifted.fn(*lifted.args)
        except BaseException:
            self.engine.abort(frame)
            raise
        self.engine.end(frame)
        self.follow_backward(out, frame, functools.partial(self.backward_begins, layer.index, frame))
        return out

    def follow_backward(self, out: Any, frame: Frame, begins: Callable[[], None]) -> None:
        """Have other frames move as the backward of a call with an empty frame begins.

        Args:
            out: of the call.
            begins: called then. It makes the frame ready.
        """

        def reached(gradient: torch.Tensor) -> None:
            begins()
            self.engine.replayed(frame)

        if tensors := [tensor for tensor in tensor_leaves(out) if tensor.requires_grad]:
            register_multi_grad_hook(tensors, reached, mode="any")

    def backward_begins(self, layer: int, frame: Frame) -> None:
        """Notify the observers, and make the frame ready."""
        for observer in self.observers:
            observer.layer_replays(layer)
        self.engine.bring_back(frame)

    def _settle(self, layer: Layer, key: Any, call: Call, observed: Observed) -> None:
        """Make the recipe of a layer that was analysed, and keep this call's tensors by it."""
        frame = call.frame
        observed.note_hidden_writes()
        if frame.placement.kind.recomputes_attention:
            observed.recompute_attention()
        observed.close_over_inputs(all_rows_kept=frame.placement.alpha == 1.0)
        if observed.packs and not frame.resident:
            frame.placement = self.policy.settle(layer, frame.placement, *observed.sizes())
        recipe, tensors = make_recipe(observed, frame.placement.alpha)
        if not (frame.resident or self.policy.has_room(recipe.layout.host_bytes)):
            frame.placement, key = FULL_RECOMPUTE, None  # in this call alone: the next one is analysed
            observed.recompute_attention()
            observed.close_over_inputs(all_rows_kept=False)
            recipe, tensors = make_recipe(observed, 0.0)
        call.recipe = layer.latest = recipe
        if key is not None:
            layer.remember(key, recipe)
        self.diagnose(layer, recipe)
        if not recipe.packs:
            return
        call.keep_observed(observed, tensors)

    def _forget(self, layer: Layer) -> None:
        """Drop a layer's recipes after a call left one. If calls keep leaving (experts in a Python loop), analyse each."""
        layer.recipes.clear()
        layer.times_left += 1

    def diagnose(self, layer: Layer, recipe: Recipe) -> None:
        for reason in diagnose(layer.module(), recipe):
            self.warn_of(layer, f"{reason}.")

    def warn_of(self, layer: Layer, reason: str) -> None:
        """Warn of a layer, once per class of layers."""
        if (of := (type(layer.module()), reason)) not in self._warned:
            self._warned.add(of)
            self.warn(f"layer {layer.name}: {reason}")

    def with_kernel(self, layer: Layer, fn: Callable[..., Any], *args: Any, elements: int = 0) -> Any:
        """Call ``fn(*args)`` with the attention kernel that memo.attention names.

        Args:
            elements: of attention's largest tensor for all heads, where it runs for some of them.

        Raises:
            MemoError: PyTorch has no such kernel for this call.
        """
        if self._sdpa is not SDPBackend.FLASH_ATTENTION and any(map(cudnn.may_concern, args)):
            module = layer.module()
            if module is None or not has_compiled(module):  # Dynamo would compile it anew for the mode
                fn = functools.partial(cudnn.run, fn, functools.partial(self.warn_of, layer), elements)
        if self._sdpa is None:
            return fn(*args)
        with cudnn.by([self._sdpa]):
            try:
                return fn(*args)
            except RuntimeError as error:
                if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                    raise
                raise MemoError(
                    f'layer {layer.name}: memo.attention is "{self._attention}", but PyTorch has no such kernel for this call '
                    "(dtype, head size, mask, dropout or device). Leave memo.attention out to take what there is."
                ) from error


def _checkpoint(lifted: Lifted, preserve_rng_state: bool, context_fn: Callable[[], tuple]) -> Any:
    """Do what torch.utils.checkpoint.checkpoint(use_reentrant=False) does, through the generator beneath it.

    torch.distributed._composable does the same. Up to torch 2.11 the public function does not leave the forward's contexts when
    `fn` raises, until the traceback is dropped.
    """
    replay = functools.partial(_until_stopped, from_current_states(lifted.replay) if preserve_rng_state else lifted.replay)
    generator = _checkpoint_without_reentrant_generator(
        replay, preserve_rng_state, context_fn, "default", False, True, *lifted.args
    )
    try:
        next(generator)
        out = lifted.fn(*lifted.args)
        next(generator, None)  # leaves the contexts
    finally:
        generator.close()
    return out


def _until_stopped(replay: Callable[..., Any], *args: Any) -> Any:
    """Call ``replay(*args)``, and turn TorchScript's RuntimeError back into torch's _StopRecomputationError.

    torch raises that when the last saved tensor is recomputed. TorchScript replaces it inside a scripted function, such as
    Megatron's bias_dropout_add at the end of its layers.
    """
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    stopped = False

    def watched_pack(tensor: torch.Tensor) -> Any:
        nonlocal stopped
        try:
            return pack(tensor)
        except _StopRecomputationError:
            stopped = True
            raise

    with torch.autograd.graph.saved_tensors_hooks(watched_pack, unpack):
        try:
            return replay(*args)
        except RuntimeError:
            if stopped:
                raise _StopRecomputationError from None
            raise


def _refuse_cached_parameters(layer: Layer) -> None:
    """Raise MemoError for a layer with parametrized weights: whether a replay finds one cached decides what autograd saves, and a
    tile leaves one without a graph in the cache."""
    module = layer.module()
    named = () if module is None else module.named_modules()
    if (name := next((name for name, part in named if parametrize.is_parametrized(part)), None)) is not None:
        raise MemoError(
            f"layer {layer.name}: weights of {name or 'it'} are parametrized, and it was called under "
            "torch.nn.utils.parametrize.cached(). A backward runs the layer again and computes them anew: leave cached() out of "
            "training"
        )


def _givens(layer: Layer, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors that exist before a layer call: what the layer holds, and the arguments."""
    module = layer.module()
    return [*(tensors_of(module) if module is not None else ()), *tensor_leaves(arguments)]
