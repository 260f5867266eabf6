"""The passes of one model: what happens before and after each forward."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import nn

from ds_memo.autotune.probe_forward import TrainingPass
from ds_memo.distributed.topology import is_in_pieces
from ds_memo.memory.device import device_usage
from ds_memo.placement import Tiles
from ds_memo.profile.caught_call import AsCalled, as_it_is
from ds_memo.remat.diagnostics import has_compiled, within_compiled
from ds_memo.remat.undo import stacks_restored
from ds_memo.runtime import active_forward, conflicts
from ds_memo.runtime.session import Session
from ds_memo.shapes import shapes_of, tensors_in
from ds_memo.tiles.norms import TiledNorm, norms_beside
from ds_memo.units import GIB

LONG = 4096
"""Tokens from which norms outside the layers, and forwards without gradients, run in tiles of as many. An eager norm makes 5 to
10 copies of all hidden states."""


class Passes:
    """Follows the forwards of a session's model by hooks on it, until its patches are undone."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._gather_whole = session.ties.gather_whole
        """None: there is nothing more to be told."""
        self._frames_before = 0
        self._norms_tiled = False
        self._tiled_without_gradients = False
        inner, patches = within_compiled(model), session.patches  # dynamo is at work inside, and not yet around it
        patches.before_forward(inner, self._begins, self._compiled_begins, self._between_layers)
        patches.after_forward(inner, self._is_over, always=True, then=lambda callback: patches.compilers.beyond(callback))
        patches.after_forward(inner, self._ends)

    def _compiled_begins(self, callback: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Do as _begins where torch.compile was asked for the whole model: its layers will be called under this callback."""
        self._begins(module, args, kwargs, functools.partial(self._session.patches.compilers.forward, callback))

    def _between_layers(self, callback: Any) -> Any:
        """Return what dynamo compiles the pieces of this pass with, if layers will break its graph into pieces."""
        training = self._session.model().training and torch.is_grad_enabled()
        return self._session.patches.compilers.between(callback) if training else callback

    def _begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], as_called: AsCalled = as_it_is) -> None:
        session = self._session
        active_forward.begins(session)
        training = module.training and torch.is_grad_enabled()
        if training:
            session.slab.budget.pass_begins()
            session.engine.free_failed_graphs()
            session.patches.hold()
            if not session.passes:
                conflicts.refuse_fsdp1(module)
                if conflicts.is_offloaded():
                    session.warn(conflicts.OFFLOADED)
            compiled = as_called is not as_it_is or (not session.passes and has_compiled(module))
            if self._gather_whole is not None and compiled:
                self._gather_whole(session.modules())  # hooks inside a layer cannot be traced
                self._gather_whole = None
            with stacks_restored():
                place(session, module, args, kwargs, as_called)
        self._tile(module, training, session.config.tile_tokens != 0 and _tokens(args, kwargs) > LONG)
        self._plan(training, args, kwargs)
        self._frames_before = session.engine.traffic.frames

    def _plan(self, training: bool, args: tuple, kwargs: dict[str, Any]) -> None:
        """Tell the planned addresses which pass begins."""
        session, addresses, policy = self._session, self._session.addresses, self._session.policy
        if not training:
            addresses.leave_phase()
        elif policy.no_recompute:
            addresses.unplanned_pass_begins()
        elif addresses.install():  # not at attach: a model that is only evaluated (DPO's reference) leaves them to others
            is_last = session.ties.on_last_micro_batch
            shapes, last = shapes_of(args, kwargs), is_last is not None and is_last()
            addresses.pass_begins(shapes, len(session.layers) - 1, last, policy.placements_by_requests())

    def _tile(self, model: nn.Module, training: bool, is_long: bool) -> None:
        """Have what is outside the layers, and forwards without gradients, run in tiles where layers do, or the pass is long."""
        session, in_tiles = self._session, self._session.policy.tiles is not None
        if not self._norms_tiled and (in_tiles or is_long):
            self._norms_tiled = True
            for norm in norms_beside(model, [layer.name for layer in session.layers]):
                session.patches.forward(norm, TiledNorm(norm, self._norm_tokens, session.warn))
        if not self._tiled_without_gradients and (in_tiles or (is_long and self._may_tile_evaluation(model, training))):
            self._tiled_without_gradients = True
            for layer in session.layers:
                if (module := layer.module()) is not None:
                    session.patches.without_gradients(module, functools.partial(session.remat.run, layer))

    def _may_tile_evaluation(self, model: nn.Module, training: bool) -> bool:
        """Have a long forward without gradients run in tiles where no training pass came before it. Return True if it will.

        Under ZeRO-3 layers in tiles must be gathered whole from the same pass on, a check of tiles gathers by itself, and ranks
        may evaluate other lengths.
        """
        tiling = self._session.tiling
        if training or tiling is None or torch.is_grad_enabled() or is_in_pieces(model):
            return False
        tiling.without_gradients = Tiles(LONG)
        return True

    def _norm_tokens(self) -> int:
        """Return the tokens of a norm's tile: of a layer's, where that is shorter."""
        policy, tiling = self._session.policy, self._session.tiling
        tiles = policy.tiles if torch.is_grad_enabled() or tiling is None else tiling.without_gradients
        return min(tiles.tokens, LONG) if tiles else LONG

    def _is_over(self, module: nn.Module, args: tuple, output: Any) -> None:
        active_forward.ends(self._session)
        self._session.slab.budget.forward_over()
        # Without an output this forward raised. With one, an exception from before it may still be active in the caller.
        if output is None and module.training and isinstance(sys.exc_info()[1], torch.OutOfMemoryError):
            ran_out(self._session)

    def _ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        session, policy = self._session, self._session.policy
        frames, layers = session.engine.traffic.frames, len(session.layers)
        if not policy.layers_known and not layers and frames:
            session.warn(
                "ds_memo.checkpoint was called with functions of no module: such a call is not known again in the next pass, so "
                "alpha stays 0 and memo.alpha and memo.resident_layers count for nothing. Give it modules, or their bound methods"
            )
        if not policy.layers_known and layers:  # a model that calls ds_memo.checkpoint shows them as it runs
            policy.know_layers()
        if not (module.training and torch.is_grad_enabled()):
            return
        if policy.pass_solution:
            policy.in_flight.forward_ended(output)
        session.addresses.forward_ended()
        session.passes += 1
        if frames > self._frames_before or policy.no_recompute:
            session.tokens += math.prod(session.hidden_shape()[:-1])
        else:
            session.warn(
                f"{type(module).__name__} ran a training forward and none of its {layers} layers came through ds_memo: "
                "it has no effect. Name the layers that are called in memo.layers"
            )


def place(session: Session, model: nn.Module, args: tuple, kwargs: dict[str, Any], as_called: AsCalled = as_it_is) -> None:
    """Place the layer calls of the training pass that begins."""
    policy, tuner = session.policy, session.tuner
    policy.follow(None)
    if tuner and policy.layers_known:
        policy.in_flight.forward_begins()
        if tuner.profile is None and not tuner.gave_up:
            session.addresses.profile_begins()
        training_pass = TrainingPass(shapes_of(args, kwargs), model, args, kwargs, as_called)
        solution = tuner.solve(training_pass, session.layers, policy.in_flight)
        policy.follow(solution)


def ran_out(session: Session) -> None:
    """Say what can be done after the device refused memory to a training pass."""
    seen = device_usage(session.engine.device)
    has = session.config.device_memory_gib or (seen["total"] / GIB if seen else None)
    less = f"of less than {has:.4g}" if has else "that is smaller"
    session.warn(
        "a training pass ran out of device memory: head, loss, kernels and gaps between blocks took more than was left to "
        f"them. A memo.device_memory_gib {less} leaves them more; where layers keep next to nothing already, shorter "
        "sequences help, or more ranks to a sequence"
    )


def _tokens(args: tuple, kwargs: dict[str, Any]) -> int:
    return max((math.prod(tensor.shape[:2]) for tensor in tensors_in((args, kwargs)) if tensor.dim() > 1), default=0)
