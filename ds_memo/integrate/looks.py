"""Looks into forwards: which kinds of layers a pass calls, and with hidden states of which shapes.

One before the profile, which catches a call of each kind; later ones only where a pass' inputs do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ds_memo.integrate.ranks import is_experts
from ds_memo.profile.agree import world_size
from ds_memo.profile.call import LayerCall, layer_calls
from ds_memo.profile.kinds import kinds_of
from ds_memo.profile.lengths import HiddenShapes, Shapes, hidden_shape
from ds_memo.remat.checkpoint import Layer, Remat

REMEMBERED = 64
"""Kinds of passes."""


class Looks:
    """Into the forwards of one model.

    Args:
        remat: runs its layers.
        layers: in the order of the model.
        measured: the kinds that are in the profile; grows.
    """

    def __init__(self, remat: Remat, layers: Sequence[Layer], measured: Sequence[int]) -> None:
        self.kinds: list[int] = []
        """Of each layer its kind; known from the first look on."""
        self._remat = remat
        self._layers = layers
        self._measured = measured
        self._last = 0
        """The kind that comes last in a forward."""
        self._first: tuple[Shapes, HiddenShapes] = ((), ())
        """Of the pass that was profiled."""
        self._seen: dict[Shapes, HiddenShapes] = {}
        """What only a look could tell."""

    def first(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[int, LayerCall]:
        """A call of each kind that the forward calls, in the order in which they come.

        Raises:
            MemoError: it calls none. Anything else that the forward raises, too.
        """
        self.kinds = kinds_of(self._layers)
        number = max(self.kinds) + 1
        # Ranks that each have some of the experts trade tokens in layers: where some have calls that others lack, all go on.
        to_the_end = number > 1 and world_size() > 1 and any(map(is_experts, model.parameters()))
        return self._look(model, args, kwargs, lambda calls: len(calls) == number and not to_the_end)

    def profiled(self, kind: Shapes, calls: dict[int, LayerCall]) -> None:
        """The pass of these calls was profiled.

        Args:
            kind: of the pass.
        """
        self._last = list(calls)[-1]
        self._first = (kind, self.saw(kind, calls))

    def shapes(self, kind: Shapes) -> HiddenShapes | None:
        """What a pass of this kind comes with; None: only a look can tell."""
        if not kind:  # no tensor was seen among the inputs: every pass looks like this
            return None
        found = self._seen.get(kind)
        if found is None:
            first, shapes = self._first
            found = tuple(shape and hidden_shape(first, shape, kind) for shape in shapes)
            if any(shape and not here for shape, here in zip(shapes, found, strict=True)):
                return None
        return (*found, *[None] * (len(self._measured) - len(found)))  # what came later was not called then

    def look(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[int, LayerCall]:
        """A call of each kind that a forward calls, as far as the one that came last in the first pass."""
        return self._look(model, args, kwargs, lambda calls: self._last in calls)

    def saw(self, kind: Shapes, calls: dict[int, LayerCall]) -> HiddenShapes:
        """What a pass of this kind comes with, by its calls."""
        while len(self._seen) >= REMEMBERED:
            del self._seen[next(iter(self._seen))]
        shapes = tuple(calls[number].shape if number in calls else None for number in self._measured)
        self._seen[kind] = shapes
        return shapes

    def _look(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], enough: Callable[[dict[int, LayerCall]], bool]
    ) -> dict[int, LayerCall]:
        return layer_calls(self._remat, model, args, kwargs, self.kinds, enough)
