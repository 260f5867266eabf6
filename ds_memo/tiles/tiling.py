"""Which layers of a model run in tiles, and why the others do not.

Ranks that share sequences (Ulysses) or GEMMs (AutoTP), or trade tokens for experts, exchange tensors inside a layer: other ones
in tiles than whole. They agree before a layer's first call in tiles, once more when its attention has run for the first time, and
at a call of a new signature. One refusal counts for all, for good. A rank that refuses alone later ends with an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_memo.distributed import agree
from ds_memo.distributed.topology import is_experts, ranks_per_sequence, sharing_ranks
from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, Placement, Tiles
from ds_memo.remat.checkpoint import CannotTile, Layer, Remat
from ds_memo.remat.gathered_params import gathered
from ds_memo.remat.modes import running_tiles
from ds_memo.remat.random_states import own_states, set_states
from ds_memo.remat.shared_changes import Undo
from ds_memo.remat.undo import Undoing
from ds_memo.sequence.parts import PARTS
from ds_memo.spans import number_of_spans, spans
from ds_memo.tiles.check.probe import LEAST_TOKENS, probe
from ds_memo.tiles.check.refuse import refuse_call
from ds_memo.tiles.layer import TiledCall
from ds_memo.tiles.recipes import TiledLayer
from ds_memo.tiles.slices import Arguments, hidden_states, is_dense


class Tiling:
    """Runs the layers of one attached model in tiles, where their placements say so and it can be.

    Args:
        tiles: of calls without gradients, until one with gradients has run in tiles. None: they run whole.
    """

    def __init__(self, tiles: Tiles | None = None) -> None:
        self.without_gradients = tiles
        """Tiles of calls without gradients: those of the latest call with gradients that was placed in tiles."""
        self._latest: Tiles | None = None
        """None: no placement has asked for tiles."""
        self._layers: weakref.WeakKeyDictionary[nn.Module, Verdicts] = weakref.WeakKeyDictionary()
        self._refusals: dict[str, str] = {}
        """By the layer's name, why its latest call could not run in tiles."""
        self._caught = ExitStack()

    def close(self) -> None:
        """Put back what was caught in the model and in Transformers."""
        self._caught.close()

    def report(self) -> dict[str, Any] | None:
        """Return what ``report()["tiles"]`` shows; None: no layer was asked to run in tiles."""
        if self._latest is None:
            return None
        now = [found for found in self._tiled_layers() if found.layer.name not in self._refusals]
        tiled, striped = {found.layer.index for found in now}, {found.layer.index for found in now if found.striped}
        refusals = dict(self._refusals)
        return {**self._latest._asdict(), "layers": sorted(tiled), "striped": sorted(striped), "not_tiled": refusals}

    @property
    def result_differs(self) -> bool:
        """True if the result of any layer's attention is not its kernel's output."""
        return any(found.result_differs for found in self._tiled_layers())

    def _tiled_layers(self) -> Iterator[TiledLayer]:
        return (found for verdicts in self._layers.values() for found in verdicts.tiled.values() if not isinstance(found, str))

    def prepare(
        self, remat: Remat, layer: Layer, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement | None
    ) -> Callable[[], Any] | None:
        """Return a function that runs a layer call in tiles; None: it is one tile, or cannot. See `remat.checkpoint.Tiler`."""
        tiles = self.without_gradients if placement is None else placement.tiles
        if tiles is None:
            return None
        self._latest = self.without_gradients = tiles
        call = LayerCall(fn, layer.module(), args, kwargs)
        hidden = hidden_states(call.args, call.kwargs)
        if call.module is None:
            return None
        verdicts = self._layers.get(call.module)
        if verdicts is None:
            verdicts = self._layers[call.module] = Verdicts(layer, call.module, self._caught.callback)
        if verdicts.refused:
            return None
        if not verdicts.are_as_long(hidden):
            self._refuse(remat, layer, call.module, "its ranks trade tokens for experts, and have other lengths")
            return None
        if _is_one_tile(hidden, tiles.tokens):
            return None
        signature: Any
        why = ""
        try:
            refuse_call(call.module, call.args, call.kwargs)
        except CannotTile as reason:
            signature = why = str(reason)
        if not why:
            arguments = Arguments(call.args, call.kwargs)
            signature = arguments.signature(masks=ranks_per_sequence() == 1), call.module.training
            if placement is None and (trained := (signature[0], True)) in verdicts.tiled:
                signature = trained
            if placement is None and signature not in verdicts.tiled and (others := arguments.others):
                what = f"it gets a {others[0]}, which a check would change. For an evaluation pass use_cache=False"
                self._refuse(remat, layer, call.module, what)
                return None
        if signature not in verdicts.tiled:
            with remat.aside(), torch.inference_mode(False), running_tiles():
                verdicts.judge(signature, call, why)
        tiled = verdicts.tiled[signature]
        if isinstance(tiled, str):
            self._refuse(remat, layer, call.module, tiled)
            return None
        if placement is None and tiled.shapes.draws and any(part.training for part in call.module.modules()):
            return None  # whole layers draw random numbers as the model does without memo
        placed = placement or replace(FULL_RECOMPUTE, tiles=tiles)

        before = layer.state.before()  # type: ignore[union-attr]

        def in_tiles(*args: Any, **kwargs: Any) -> Any:
            kwargs = without_padding(call.module, kwargs)
            hidden = hidden_states(args, kwargs)
            cut = spans(hidden.shape[0], hidden.shape[1], tiles.tokens)
            return TiledCall(tiled, call.forward, args, kwargs, cut, placed, remat, before).run()

        device = remat.engine.device
        states = [] if placement is None else own_states(device)

        def run() -> Any:
            try:
                out = call.run(in_tiles)
                self._refusals.pop(layer.name, None)
                return out
            except CannotTile as reason:
                set_states(states)
                verdicts.tiled[signature] = str(reason)
                self._refuse(remat, layer, call.module, str(reason))
                verdicts.agree(str(reason), sure=False)
                raise

        return run

    def _refuse(self, remat: Remat, layer: Layer, module: nn.Module, reason: str) -> None:
        if self._refusals.get(layer.name) == reason:
            return
        self._refusals[layer.name] = reason
        remat.warn(f"{type(module).__name__} runs whole, not in tiles of memo.tile_tokens: {reason}")


class Verdicts:
    """Verdicts on a layer's calls in tiles, by signature. Ranks that exchange tensors inside the layer have the same."""

    def __init__(self, layer: Layer, module: nn.Module, undo_with: Callable[[Undo], Any]) -> None:
        self._layer = layer
        self._undo_with = undo_with
        self.tiled: dict[Any, TiledLayer | str] = {}
        """A text says why such a call cannot run in tiles."""
        self.refused = False
        """True: a rank refused, and the layer runs whole on all of them for good."""
        self._trades_tokens = agree.world_size() > 1 and any(map(is_experts, module.parameters()))
        self._ranks = tuple(range(agree.world_size())) if self._trades_tokens else sharing_ranks(module)

    def are_as_long(self, hidden: Any) -> bool:
        """Return True unless ranks trade tokens for experts and have other sizes: each tile is a trade."""
        if not self._trades_tokens:
            return True
        sizes = list(hidden.shape[:2]) if is_dense(hidden) else []
        most = agree.greatest([*sizes, *(-size for size in sizes)])
        return most == [*sizes, *(-size for size in sizes)]

    def judge(self, signature: Any, call: LayerCall, why: str) -> None:
        """Find out if a new signature can run in tiles.

        Args:
            why: it is refused already.

        Raises:
            MemoError: other ranks do not see a new signature.
        """
        sure = not self.tiled
        try:
            self.agree(why, sure)  # a rank that refuses would be waited for in the check
            shapes = None
            try:
                with gathered(call.module):  # where Transformers (to 5.17) asks for a checkpoint outside of the layer's hooks
                    shapes = probe(call.module, call.forward, Arguments(call.args, call.kwargs), self._undo_with)
            except CannotTile as reason:
                why = str(reason)
            self.agree(why, sure)
            self.tiled[signature] = TiledLayer(self._layer, call.module, shapes, self.agree)
        except CannotTile as reason:
            self.tiled[signature] = str(reason)

    def agree(self, why: str, sure: bool) -> None:
        """Hear of other ranks' reasons to refuse the layer.

        Args:
            why: this rank's; empty: it has none.
            sure: True if the other ranks come, however late; else they may not have seen what this one has.

        Raises:
            CannotTile: some rank has one.
            MemoError: a rank has not come.
        """
        said = [why] if self.refused or len(self._ranks) == 1 else self._said(why, None if sure else agree.GRACE_S)
        for rank, reason in zip(self._ranks, said, strict=False):
            if reason:
                self.refused = len(self._ranks) > 1
                raise CannotTile(why or f"{reason} (rank {rank})")

    def _said(self, why: str, wait_s: float | None) -> list[str]:
        try:
            return agree.meet(why, self._ranks, wait_s)
        except agree.Absent as absent:
            own = why or "a call of a kind that is new to it"
            raise MemoError(
                f"layer {self._layer.name} runs in tiles on rank {absent.rank}, and on this one cannot go on so ({own}). Ranks "
                "that exchange tensors inside a layer must call it alike: give them the same hooks, mode and arguments, or set "
                "memo.tile_tokens to 0"
            ) from absent


def without_padding(module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out masks of padding where ranks share a sequence. Padding is a document there, and not every rank has any."""
    if vars(module).get(PARTS) is None:
        return kwargs
    masks = [name for name in kwargs if name.endswith("attention_mask")]
    return kwargs | {name: None for name in masks if isinstance(kwargs[name], torch.Tensor) and kwargs[name].dim() == 2}


def _is_one_tile(hidden: Any, tile_tokens: int) -> bool:
    """Return True for hidden states that are no longer than a tile, or too short to be cut."""
    if not is_dense(hidden) or hidden.dim() != 3:
        return False  # it will be refused
    return (
        hidden.shape[1] < LEAST_TOKENS
        or not hidden.numel()
        or number_of_spans(hidden.shape[0], hidden.shape[1], tile_tokens) == 1
    )


class LayerCall:
    """A call that came to memo: of a layer's forward, or of the layer with its hooks.

    Args:
        fn: a method of `module`, bound to it or with it as its first argument, and keywords bound or not.
        module: the layer.
    """

    def __init__(self, fn: Callable[..., Any], module: nn.Module | None, args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        called = functools.partial(fn, *args, **kwargs)  # partials of partials are one
        function: Any = called.func
        self.args, self.kwargs = called.args, called.keywords if module is None else without_padding(module, called.keywords)
        self.module: nn.Module | None = module
        """None: it is no method of the layer."""
        self.forward: Callable[..., Any] = function
        """The layer's own."""
        self._with_hooks = False
        if called.args and called.args[0] is module:
            self.args = called.args[1:]
            self.forward = functools.partial(function, module)
        elif function is module or getattr(function, "__self__", None) is module:
            self._with_hooks = module is not None and getattr(function, "__name__", "") != "forward"
            if self._with_hooks:
                forward: Any = module.forward  # type: ignore[union-attr]
                self.forward = getattr(forward, "plain", forward)  # what memo has put in its place would come back here
        else:
            self.module = None

    def run(self, forward: Callable[..., Any]) -> Any:
        if not self._with_hooks:
            return forward(*self.args, **self.kwargs)
        module: Any = self.module
        own = vars(module).get("forward")

        def put_back() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        with Undoing(put_back):
            module.forward = forward
            return self._fn(*self._args, **self._kwargs)
