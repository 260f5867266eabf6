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
from torch.autograd.graph import register_multi_grad_hook

from ds_memo.distributed import agree
from ds_memo.distributed.topology import is_experts, is_in_pieces, ranks_per_sequence, sharing_ranks
from ds_memo.errors import MemoError
from ds_memo.placement import FULL_RECOMPUTE, PlacementKind, Tiles
from ds_memo.remat.gathered_params import gathered
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import CannotTile, LayerCall
from ds_memo.remat.layer_host import LayerHost
from ds_memo.remat.modes import running_tiles, under_a_checkpoint
from ds_memo.remat.random_states import own_states, set_states
from ds_memo.remat.shared_changes import Undo
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.remat.undo import Undoing
from ds_memo.sequence.parts import PARTS
from ds_memo.spans import number_of_spans, spans
from ds_memo.tiles.check.probe import LEAST_TOKENS, probe
from ds_memo.tiles.check.refuse import refuse_call
from ds_memo.tiles.groups import Grouping, Member, compute_inputs
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
        self._grouping = Grouping()

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

    def refusal(self, call: LayerCall, host: LayerHost) -> str | None:
        """Return "" for a call that is one tile, or that cannot run in tiles: the user was told by then."""
        tiles = call.placement.tiles if call.grads else self.without_gradients
        if tiles is None or (call.grads and not call.recomputes):
            return ""
        if not call.grads and under_a_checkpoint(up_to=()):  # a reentrant one, whose second run is whole
            return ""
        self._latest = self.without_gradients = tiles
        layer, own = call.layer, OwnCall(call)
        hidden = hidden_states(own.args, own.kwargs)
        if own.module is None:
            return ""
        verdicts = self._layers.get(own.module)
        if verdicts is None:
            verdicts = self._layers[own.module] = Verdicts(layer, own.module, self._caught.callback)
        if verdicts.refused:
            return ""
        if not verdicts.are_as_long(hidden):
            return self._refuse(host, layer, "its ranks trade tokens for experts, and have other lengths")
        if tiles.input_every == 1 and _is_one_tile(hidden, tiles.tokens):
            return ""
        signature: Any
        why, arguments = "", None
        try:
            refuse_call(own.module, own.args, own.kwargs)
        except CannotTile as reason:
            signature = why = str(reason)
        if not why:
            arguments = Arguments(own.args, own.kwargs)
            signature = arguments.signature(masks=ranks_per_sequence(own.module) == 1), own.module.training
            if not call.grads and (trained := (signature[0], True)) in verdicts.tiled:
                signature = trained
            if not call.grads and signature not in verdicts.tiled and (others := arguments.others):
                what = f"it gets a {others[0]}, which a check would change. For an evaluation pass use_cache=False"
                return self._refuse(host, layer, what)
        if signature not in verdicts.tiled:
            with host.isolated(), torch.inference_mode(False), running_tiles():
                verdicts.judge(signature, own, arguments, why)
        tiled = verdicts.tiled[signature]
        if isinstance(tiled, str):
            return self._refuse(host, layer, tiled)
        if not call.grads and tiled.shapes.draws and any(part.training for part in own.module.modules()):
            return ""  # whole layers draw random numbers as the model does without memo
        call.verdict = own, arguments, verdicts, signature
        return None

    def run(self, call: LayerCall, host: LayerHost) -> Any:
        if not call.grads:
            return self._run(call, host)
        return host.observed(call.layer, functools.partial(self._run, call, host))

    def _run(self, call: LayerCall, host: LayerHost) -> Any:
        own, arguments, verdicts, signature = call.verdict
        tiled, layer = verdicts.tiled[signature], call.layer
        placement = call.placement if call.grads else replace(FULL_RECOMPUTE, tiles=self.without_gradients)
        tokens = placement.tiles.tokens  # type: ignore[union-attr]
        before = layer.state.before()  # type: ignore[union-attr]

        def in_tiles(arguments: Arguments) -> Any:
            cut = spans(*arguments.size, tokens)
            return TiledCall(tiled, own.forward, arguments, cut, placement, host, before, self._grouping).run()

        states = own_states(host.engine.device) if call.grads else []
        try:
            out = own.run(in_tiles, arguments)
        except CannotTile as reason:
            set_states(states)
            verdicts.tiled[signature] = str(reason)
            self._refuse(host, layer, str(reason))
            verdicts.agree(str(reason), sure=False)
            raise
        self._refusals.pop(layer.name, None)
        return out

    def ran_whole(self, call: LayerCall, out: Any, host: LayerHost) -> None:
        """Enter a call that ran whole in its group. Other ranks may compute its input, and gather the layer below with this."""
        member, module = Member(call.layer), call.layer.module()
        below = self._grouping.latest
        may_follow = call.placement.kind is PlacementKind.SWAPPED_WITHOUT_INPUT and agree.world_size() > 1
        if may_follow and below is not None and below.layer.index == call.layer.index - 1:
            member.below = below
            tensors = [tensor for tensor in tensor_leaves(out) if tensor.requires_grad]
            if tensors and module is not None and is_in_pieces(module) and host.can_gather(module):

                def backward_begins(gradient: Any) -> None:
                    compute_inputs(member, host.gathering)
                    member.done = False  # for another backward

                register_multi_grad_hook(tensors, backward_begins, mode="any")
        self._grouping.ran(member)

    def _refuse(self, host: LayerHost, layer: Layer, reason: str) -> str:
        """Warn, and note the reason for the report. Nothing is left to tell then."""
        if self._refusals.get(layer.name) != reason:
            self._refusals[layer.name] = reason
            host.warn(f"{type(layer.module()).__name__} runs whole, not in tiles of memo.tile_tokens: {reason}")
        return ""


class Verdicts:
    """Verdicts on a layer's calls in tiles, by signature. Ranks that exchange tensors inside the layer have the same."""

    def __init__(self, layer: Layer, module: nn.Module, undo_with: Callable[[Undo], Any]) -> None:
        self._layer = layer
        self._undo_with = undo_with
        self.tiled: dict[Any, TiledLayer | str] = {}
        """A text says why such a call cannot run in tiles."""
        self.refused = False
        """True: a rank refused, and the layer runs whole on all of them for good."""
        self._why_stored: str | None = None
        """Why all of them store the layer's input, as its first call showed that could do without; "": they run the posts of the
        layer below. None: there was no such call."""
        self._trades_tokens = agree.world_size() > 1 and any(map(is_experts, module.parameters()))
        self._ranks = tuple(range(agree.world_size())) if self._trades_tokens else sharing_ranks(module)

    def are_as_long(self, hidden: Any) -> bool:
        """Return True unless ranks trade tokens for experts and have other sizes: each tile is a trade."""
        if not self._trades_tokens:
            return True
        sizes = list(hidden.shape[:2]) if is_dense(hidden) else []
        most = agree.greatest([*sizes, *(-size for size in sizes)])
        return most == [*sizes, *(-size for size in sizes)]

    def judge(self, signature: Any, call: OwnCall, arguments: Arguments, why: str) -> None:
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
                    shapes = probe(call.module, call.forward, arguments, self._undo_with)
            except CannotTile as reason:
                why = str(reason)
            self.agree(why, sure)
            exchanges = len(self._ranks) > 1
            self.tiled[signature] = TiledLayer(self._layer, call.module, shapes, self.agree, self.agree_on_input, exchanges)
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
        answers = [why] if self.refused or len(self._ranks) == 1 else self._answers(why, None if sure else agree.GRACE_S)
        for rank, reason in zip(self._ranks, answers, strict=False):
            if reason:
                self.refused = len(self._ranks) > 1
                raise CannotTile(why or f"{reason} (rank {rank})")

    def agree_on_input(self, why: str) -> str:
        """Return why no rank computes the layer's input by the layer below; "": all run its posts, also one that has a reason.

        Args:
            why: this rank's, in this call.
        """
        if len(self._ranks) == 1:
            return why
        if self._why_stored is None:
            answers = zip(self._ranks, self._answers(why, None), strict=True)
            self._why_stored = next((f"{reason} (rank {rank})" for rank, reason in answers if reason), "")
        return self._why_stored

    def _answers(self, why: str, wait_s: float | None) -> list[str]:
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


class OwnCall:
    """A layer call as one of the layer's own forward: it came to memo so, or as one of the layer with its hooks."""

    def __init__(self, call: LayerCall) -> None:
        self._called = call.forward, call.args, call.kwargs  # not the call, which refers to this object
        module, function = call.layer.module(), call.forward
        self.args, self.kwargs = call.args, call.kwargs if module is None else without_padding(module, call.kwargs)
        self.module: nn.Module | None = module
        """None: it is no method of the layer."""
        self.forward: Callable[..., Any] = function
        self._with_hooks = False
        if self.args and self.args[0] is module:
            self.args = self.args[1:]
            self.forward = functools.partial(function, module)
        elif function is module or getattr(function, "__self__", None) is module:
            self._with_hooks = module is not None and getattr(function, "__name__", "") != "forward"
            if self._with_hooks:
                forward: Any = module.forward  # type: ignore[union-attr]
                self.forward = getattr(forward, "plain", forward)  # what memo has put in its place would come back here
        else:
            self.module = None

    def run(self, run: Callable[[Arguments], Any], arguments: Arguments) -> Any:
        """Call `run` in place of the forward.

        Args:
            arguments: of the call. Where it goes through the layer's hooks, these may give others.
        """
        if not self._with_hooks:
            return run(arguments)
        module: Any = self.module
        own = vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(Arguments(args, without_padding(module, kwargs)))

        def put_back() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own

        with Undoing(put_back):
            module.forward = forward
            function, args, kwargs = self._called
            return function(*args, **kwargs)
