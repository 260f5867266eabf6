"""The passes of one model: what happens before and after each forward."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import nn

from ds_memo.autotune.probe_forward import TrainingPass
from ds_memo.memory.device import device_usage
from ds_memo.placement import Tiles
from ds_memo.profile.caught_call import AsCalled, as_it_is
from ds_memo.remat.diagnostics import has_compiled, within_compiled
from ds_memo.remat.undo import changed, stacks_restored
from ds_memo.runtime import active_forward, conflicts
from ds_memo.runtime.parts import Parts
from ds_memo.shapes import shapes_of, tensors_in
from ds_memo.tiles.norms import TiledNorm, norms_beside
from ds_memo.units import GIB

LONG = 4096
"""Tokens from which norms beside the layers run in tiles of as many (eager, one makes 5 to 10 copies of all hidden states), and
forwards without gradients."""


def _never() -> bool:
    return False


class Passes:
    """Follows the forwards of a model by hooks on it.

    Args:
        parts: the model's session.
    """

    def __init__(self, parts: Parts) -> None:
        self.count = 0
        """Training forwards that came to their end."""
        self.tokens = 0
        """Tokens in them."""
        self._parts = parts
        self._patches = parts.patches
        self._on_last_micro_batch = parts.ties.on_last_micro_batch or _never
        self._gather_whole = parts.ties.gather_whole
        """None: there is nothing more to be told."""
        self._frames_before = 0
        self._as_called: AsCalled = as_it_is
        self._norms_tiled = False
        self._tiles_came = False
        """True from the first pass in tiles on."""

    def follow(self, model: nn.Module) -> None:
        """Hook a model's forwards until the patches are undone."""
        inner = within_compiled(model)  # dynamo is at work there, and not yet around it
        self._patches.before_forward(inner, self._begins, self._compiled_begins, self._between_layers)
        self._patches.after_forward(inner, self._is_over, always=True, then=self._beyond_layers)
        self._patches.after_forward(inner, self._ends)

    def _begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        parts, addresses, policy = self._parts, self._parts.addresses, self._parts.policy
        active_forward.begins(parts)
        training = module.training and torch.is_grad_enabled()
        if training:
            parts.slab.budget.pass_begins()
            parts.engine.free_failed_graphs()
            self._patches.hold()
            if not self.count and conflicts.is_offloaded():
                parts.warn(conflicts.OFFLOADED)
            compiled = self._as_called is not as_it_is or (not self.count and has_compiled(module))
            if self._gather_whole is not None and compiled:
                self._gather_whole([layer.module() for layer in parts.layers])  # hooks inside a layer cannot be traced
                self._gather_whole = None
            with stacks_restored():
                self.place(module, args, kwargs)
        long = self._is_long(args, kwargs)
        if not self._norms_tiled and (policy.tiles is not None or long):
            self._tile_norms(module)
        if not self._tiles_came and (policy.tiles is not None or (long and self._tiles_unasked(module, training))):
            self._tiles_come()
        if not training:
            addresses.leave_phase()
        elif policy.no_recompute:
            addresses.unplanned_pass_begins()
        elif addresses.install():  # not at attach: a model that is only evaluated (DPO's reference) leaves them to others
            placements = policy.placements_by_requests()
            addresses.pass_begins(shapes_of(args, kwargs), len(parts.layers) - 1, self._on_last_micro_batch(), placements)
        self._frames_before = parts.engine.traffic.frames

    def _compiled_begins(self, callback: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Do the same where torch.compile was asked for the whole model: its layers will be called under this callback."""
        with changed(self, "_as_called", functools.partial(self._patches.compilers.forward, callback)):
            self._begins(module, args, kwargs)

    def _between_layers(self, callback: Any) -> Any:
        """Return what dynamo compiles the pieces of this pass with, if layers will break its graph into pieces."""
        training = self._parts.model().training and torch.is_grad_enabled()
        return self._patches.compilers.between(callback) if training else callback

    def _beyond_layers(self, callback: Any) -> Any:
        return self._patches.compilers.beyond(callback)

    def place(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Place the layer calls of the training pass that begins."""
        parts, policy, tuner = self._parts, self._parts.policy, self._parts.tuner
        policy.follow(None)
        if tuner and policy.layers_known:
            policy.in_flight.forward_begins()
            if tuner.profile is None and not tuner.gave_up:
                parts.addresses.profile_begins()
            training_pass = TrainingPass(shapes_of(args, kwargs), model, args, kwargs, self._as_called)
            solution = tuner.solve(training_pass, parts.layers, policy.in_flight)
            policy.follow(solution)

    def _is_long(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return True if an eager norm beside the layers would take more than its share, though layers fit whole."""
        tokens = (math.prod(tensor.shape[:2]) for tensor in tensors_in((args, kwargs)) if tensor.dim() > 1)
        return self._parts.config.tile_tokens != 0 and max(tokens, default=0) > LONG

    def _tiles_unasked(self, model: nn.Module, training: bool) -> bool:
        """Have a long forward without gradients run in tiles where no training pass came before it. Return True if it will.

        Under ZeRO-3 layers in tiles must be gathered whole from the same pass on, and ranks may evaluate other lengths.
        """
        tiling = self._parts.tiling
        if training or tiling is None or torch.is_grad_enabled() or any(hasattr(p, "ds_id") for p in model.parameters()):
            return False
        tiling.without_gradients = Tiles(LONG)
        return True

    def _tile_norms(self, model: nn.Module) -> None:
        """Have norms beside the layers run in tiles."""
        self._norms_tiled = True
        for norm in norms_beside(model, [layer.name for layer in self._parts.layers]):
            self._patches.forward(norm, TiledNorm(norm, self._norm_tokens, self._parts.warn))

    def _tiles_come(self) -> None:
        """Have layers without gradients run in tiles, too."""
        self._tiles_came = True
        parts = self._parts
        for layer in parts.layers:
            if (module := layer.module()) is not None:
                self._patches.without_gradients(module, functools.partial(parts.remat.run, layer))

    def _norm_tokens(self) -> int:
        """Return the tokens of a norm's tile: of a layer's, where that is shorter."""
        policy, tiling = self._parts.policy, self._parts.tiling
        tiles = policy.tiles if torch.is_grad_enabled() or tiling is None else tiling.without_gradients
        return min(tiles.tokens, LONG) if tiles else LONG

    def _is_over(self, module: nn.Module, args: tuple, output: Any) -> None:
        active_forward.ends(self._parts)
        self._parts.slab.budget.forward_over()
        # Without an output this forward raised. With one, an exception from before it may still be active in the caller.
        if output is None and module.training and isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            self.ran_out()

    def _ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        parts, policy = self._parts, self._parts.policy
        frames, layers = parts.engine.traffic.frames, len(parts.layers)
        if not policy.layers_known and not layers and frames:
            parts.warn(
                "ds_memo.checkpoint was called with functions of no module: such a call is not known again in the next pass, so "
                "alpha stays 0 and memo.alpha and memo.resident_layers count for nothing. Give it modules, or their bound methods"
            )
        if not policy.layers_known and layers:  # a model that calls ds_memo.checkpoint shows them as it runs
            policy.know_layers()
        if not (module.training and torch.is_grad_enabled()):
            return
        if policy.pass_solution:
            policy.in_flight.forward_ended(output)
        parts.addresses.forward_ended()
        self.count += 1
        if frames > self._frames_before or policy.no_recompute:
            self.tokens += math.prod(parts.hidden_shape()[:-1])
        else:
            parts.warn(
                f"{type(module).__name__} ran a training forward and none of its {layers} layers came through ds_memo: "
                "it has no effect. Name the layers that are called in memo.layers"
            )

    def ran_out(self) -> None:
        """Say what can be done after the device refused memory to a training pass."""
        parts = self._parts
        seen = device_usage(parts.engine.device)
        has = parts.config.device_memory_gib or (seen["total"] / GIB if seen else None)
        less = f"of less than {has:.4g}" if has else "that is smaller"
        parts.warn(
            "a training pass ran out of device memory: head, loss, kernels and gaps between blocks took more than was left to "
            f"them. A memo.device_memory_gib {less} leaves them more; where layers keep next to nothing already, shorter "
            "sequences help, or more ranks to a sequence"
        )
