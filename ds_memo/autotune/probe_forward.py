"""Probe forwards: which kinds of layers a pass calls, and with hidden states of which shapes.

One probe before the profile catches a call of each kind; later ones are run only where a pass' inputs do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ds_memo.distributed.agree import world_size
from ds_memo.distributed.topology import is_experts
from ds_memo.errors import MemoError
from ds_memo.profile.caught_call import AsCalled, CaughtCall, as_it_is, layer_calls
from ds_memo.profile.layer_kinds import kinds_of
from ds_memo.remat.layer import Layer
from ds_memo.remat.remat import Remat
from ds_memo.shapes import HiddenShapes, Shapes, hidden_shape

REMEMBERED = 64
"""Kinds of passes."""


class TrainingPass(NamedTuple):
    """A training forward that is about to begin."""

    kind: Shapes
    """Shapes of the inputs: passes of one kind have hidden states of one shape."""
    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    as_called: AsCalled = as_it_is
    """Returns a layer's forward and arguments as the pass will call it: compiled, if the model is."""


class Probe:
    """Runs forwards of one model up to the layer calls that it wants to see.

    Args:
        remat: runs its layers.
    """

    def __init__(self, remat: Remat, before: Callable[[], None]) -> None:
        self.kinds: list[int] = []
        """The kind of each layer, from the first probe on."""
        self._before = before
        self._remat = remat
        self._last = 0
        """The kind in the profile that came last in the profiled pass. It is the same on all ranks, for they probe together."""
        self._measured: Sequence[int] = ()
        """The kinds in the profile, in its order."""
        self._first: tuple[Shapes, HiddenShapes] = ((), ())
        """Inputs and hidden states of the profiled pass."""
        self._seen: dict[Shapes, HiddenShapes] = {}
        """What only a probe could tell."""

    def first(self, training_pass: TrainingPass, layers: Sequence[Layer]) -> dict[int, CaughtCall]:
        """Return a call of each kind that the forward calls, in the order in which they come.

        Args:
            layers: in the order of the model.

        Raises:
            MemoError: it calls none, or all without a token. Anything else that the forward raises, too.
        """
        self.kinds = kinds_of(layers)
        number = max(self.kinds) + 1
        # Ranks that each have some of the experts trade tokens in layers: where some have calls that others lack, all go on.
        to_the_end = number > 1 and world_size() > 1 and any(map(is_experts, training_pass.model.parameters()))
        calls = self._run(training_pass, lambda calls: len(calls) == number and not to_the_end)
        if not any(call.tokens for call in calls.values()):
            raise MemoError("the first batches have no tokens; begin with one that has")
        return calls

    def profiled(self, kind: Shapes, calls: Mapping[int, CaughtCall], measured: Sequence[int]) -> None:
        """Remember the pass that was profiled.

        Args:
            kind: of the pass.
            measured: the kinds of layers in the profile, in its order; all of them were called.
        """
        self._measured = measured
        self._last = [number for number in calls if number in measured][-1]
        self._first = kind, self.saw(kind, calls)

    def shapes(self, kind: Shapes) -> HiddenShapes | None:
        """Return the hidden states of a pass of this kind; None: only a probe can tell."""
        if not kind:  # no tensor was seen among the inputs: every pass looks like this
            return None
        if kind in self._seen:
            return self._seen[kind]
        first, shapes = self._first
        found = tuple(hidden_shape(first, shape, kind) for shape in shapes if shape)
        return found if all(found) else None

    def later(self, training_pass: TrainingPass) -> dict[int, CaughtCall]:
        """Return a call of each kind that a forward calls, up to the measured kind that came last in the profiled pass."""
        return self._run(training_pass, lambda calls: self._last in calls)

    def saw(self, kind: Shapes, calls: Mapping[int, CaughtCall]) -> HiddenShapes:
        """Remember and return the shapes of hidden states in a pass of this kind."""
        while len(self._seen) >= REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[kind] = tuple(calls[number].shape if number in calls else None for number in self._measured)
        return self._seen[kind]

    def _run(self, training_pass: TrainingPass, enough: Callable[[dict[int, CaughtCall]], bool]) -> dict[int, CaughtCall]:
        self._before()
        _, model, args, kwargs, as_called = training_pass
        return layer_calls(self._remat.instead, self._remat.engine.device, model, args, kwargs, self.kinds, enough, as_called)
