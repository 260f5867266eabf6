"""The side that runners of layer calls ask: swap engine, observers, warnings, and the placement of a call. It knows no runner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.attention import SDPBackend

from ds_memo.attention_kernel import ASKED, FA3, FA4
from ds_memo.distributed.topology import units
from ds_memo.errors import MemoError
from ds_memo.layer_observer import LayerObserver
from ds_memo.placement import Placement, PlacementKind
from ds_memo.remat import attention_kernels, cudnn, follower
from ds_memo.remat.diagnostics import diagnose, has_compiled
from ds_memo.remat.gathered_params import gathered
from ds_memo.remat.layer import Layer
from ds_memo.remat.recipe import Recipe, SavedOp
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Policy(Protocol):
    def placement(self, layer: Layer) -> Placement: ...

    def decide_alpha(self, layer: Layer, placement: Placement, whole_bytes: int, split_bytes: int) -> Placement:
        """Return the placement of a swapped call with alpha decided, now that the sizes are known.

        Args:
            whole_bytes: stored whatever alpha is.
            split_bytes: of which the share alpha is stored.

        Raises:
            MemoError: no alpha fits, or the one that is configured does not.
        """

    def has_room(self, nbytes: int, planned: bool = True) -> bool:
        """Return True if the host has room for `nbytes` of one layer call.

        Args:
            planned: False: the call takes more than it was solved for.
        """


class Way(Enum):
    """How a call that keeps something on the host runs."""

    RECORDED = "recorded"
    COMPILED = "compiled"
    TILED = "tiled"


class Instead(NamedTuple):
    """Placements of calls that the host has no room for."""

    first: PlacementKind
    """A call whose sizes are new. It has run by then, except in tiles."""
    later: PlacementKind
    """A call whose recipe is known before it runs."""


WITHOUT_ROOM = {
    # Nothing of a first call is copied before its recipe is made, so all of it can be dropped. The next one is analysed again.
    Way.RECORDED: Instead(PlacementKind.FULL_RECOMPUTE, PlacementKind.FULL_RECOMPUTE),
    # The backward graph of a first call reads all that its forward graph has kept. A later call runs another graph.
    Way.COMPILED: Instead(PlacementKind.ON_DEVICE, PlacementKind.FULL_RECOMPUTE),
    # Sequences in tiles are long, and attention is most of their time: its output stays on the device.
    Way.TILED: Instead(PlacementKind.GEMMS_RECOMPUTED, PlacementKind.GEMMS_RECOMPUTED),
}


@dataclass
class Work:
    """Work of all forwards so far, and the part that ran again in backwards."""

    gemm_flops: int = 0
    """FLOPs of all recorded forwards."""
    gemm_flops_recomputed: int = 0
    """FLOPs of GEMMs that ran again in a backward: in replays, and under checkpoints inside layers."""
    attention_ops_recomputed: int = 0
    """Attention calls that ran twice: no kernel's output could be kept, the call had left its recipe, or the layer has a
    checkpoint of its own."""
    analysed: int = 0
    """Layer calls and tiles that were analysed so that later ones follow a recipe."""


class LayerHost:
    """Everything that runners of one model's layer calls may use.

    Args:
        engine: keeps what backwards need.
        policy: decides the placements.
        warn: warns the user.
        attention: the "memo" section's field. "cudnn" and "flash" are enforced here. FlashAttention-3 and 4 come first where
            they are active and not refused; flash-attn packages are the model's to call.
        observers: told which layer runs, in this order.
        isolated: returns a context for what is run once for a signature, and not as a part of the pass.
        part_begins: told of each part of a layer in tiles. A profile measures them.
        gather: gathers a layer that ZeRO-3 holds in pieces inside another layer's backward; None: that cannot be done.
    """

    def __init__(
        self,
        engine: SwapEngine,
        policy: Policy,
        warn: Callable[[str], None],
        attention: str | None,
        observers: Sequence[LayerObserver] = (),
        isolated: Callable[[], AbstractContextManager[None]] = nullcontext,
        part_begins: Callable[[str], None] = lambda part: None,
        gather: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    ) -> None:
        follower.library(warn)
        self.engine = engine
        self.warn = warn
        self.observers = observers
        self.isolated = isolated
        self.part_begins = part_begins
        self._gather = gather
        self.work = Work()
        self.policy = policy
        self._attention = attention
        self._sdpa = SDPA.get(attention)
        self.must_store: set[int] = set()
        """Indices of layers of which a call has not followed the layer below: later passes store their inputs."""
        self.attention_kernels: dict[str, str] = {}
        """Kernels of the layers' attention as far as PyTorch or the model took them, and why."""
        self._warned: set[tuple[type | None, str]] = set()

    # ---- placement

    def admit(
        self,
        layer: Layer,
        placement: Placement,
        way: Way,
        host_bytes: Callable[[Placement], int],
        sizes: tuple[int, int] | None = None,
        planned: bool = True,
    ) -> Placement:
        """Return the placement that a call gets: alpha is decided, and the host has room for it.

        Args:
            placement: by the policy. If nothing goes to the host, it stays.
            host_bytes: returns what a call with alpha decided takes.
            sizes: as the policy's `decide_alpha` takes them, if they are new; None: the recipe was made, and alpha is in it.
            planned: False: the call takes more than the policy expects.

        Raises:
            MemoError: no alpha fits, or the one that is configured does not.
        """
        if placement.kind.on_device:
            return placement
        if sizes is not None:
            placement = self.policy.decide_alpha(layer, placement, *sizes)
        if self.policy.has_room(host_bytes(placement), planned):
            return placement
        kind = WITHOUT_ROOM[way].later if sizes is None else WITHOUT_ROOM[way].first
        if kind is PlacementKind.GEMMS_RECOMPUTED and placement.kind.recomputes_attention:
            kind = PlacementKind.FULL_RECOMPUTE
        return Placement(kind, tiles=placement.tiles)

    # ---- events

    def observed(self, layer: Layer, run: Callable[[], Any]) -> Any:
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

    def replay_begins(self, layer: Layer, frame: Frame | None = None) -> None:
        """Notify the observers that a layer's replay begins, and make its frame ready; None: its frames come one by one."""
        for observer in self.observers:
            observer.layer_replays(layer.index)
        if frame is not None:
            self.engine.bring_back(frame)

    def follow_backward(self, out: Any, frame: Frame, begins: Callable[[], None]) -> None:
        """Have other frames move as the backward of a call with an empty frame begins.

        Args:
            out: of the call.
            begins: called then. It makes the frame ready.
        """

        def reached(gradient: Any) -> None:
            begins()
            self.engine.replayed(frame)

        if tensors := [tensor for tensor in tensor_leaves(out) if tensor.requires_grad]:
            register_multi_grad_hook(tensors, reached, mode="any")

    # ---- a layer inside another one's backward

    def can_gather(self, module: nn.Module) -> bool:
        """Return True if a layer that is in pieces can be gathered there."""
        return self._gather is not None or bool(units(module))

    def gathering(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a layer is gathered, if it is in pieces."""
        if units(module):
            return gathered(module)
        return nullcontext() if self._gather is None else self._gather(module)

    # ---- warnings

    def warn_of(self, layer: Layer, reason: str) -> None:
        """Warn of a layer, once per class of layers."""
        if (of := (type(layer.module()), reason)) not in self._warned:
            self._warned.add(of)
            self.warn(f"layer {layer.name}: {reason}")

    def diagnose(self, layer: Layer, recipe: Recipe) -> None:
        """Warn of a layer's new recipe, and note its attention kernels."""
        self.note_attention(recipe)
        for reason in diagnose(layer.module(), recipe):
            self.warn_of(layer, f"{reason}.")

    # ---- attention

    def note_attention(self, recipe: Recipe) -> None:
        for op in recipe.ops:
            if isinstance(op, SavedOp) and op.is_attention and (found := attention_kernels.taken(op.func)):
                self.attention_kernels[found[0]] = ASKED if found[0] == self._attention else found[1]

    def with_kernel(self, layer: Layer, fn: Callable[..., Any], *args: Any, elements: int = 0) -> Any:
        """Call ``fn(*args)`` with the attention kernel that memo.attention names.

        Args:
            elements: of attention's largest tensor for all heads, where it runs for some of them.

        Raises:
            MemoError: PyTorch has no such kernel for this call.
        """
        flash_first = self._attention in (None, FA3, FA4) and bool(attention_kernels.running())
        if flash_first or (self._sdpa is not SDPBackend.FLASH_ATTENTION and any(map(cudnn.may_concern, args))):
            module = layer.module()
            if module is None or not has_compiled(module):  # Dynamo would compile it anew for the mode
                fn = functools.partial(cudnn.run, fn, functools.partial(self.warn_of, layer), elements, flash_first)
            elif flash_first and self._attention is not None:
                with cudnn.by(cudnn.NOT_CUDNN):
                    return fn(*args)
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
