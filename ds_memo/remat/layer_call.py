"""A layer call that came to memo, and what can run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ds_memo.placement import NO_RECOMPUTE, Placement, PlacementKind
from ds_memo.remat.layer import Layer

if TYPE_CHECKING:
    from ds_memo.remat.layer_host import LayerHost


class CannotRun(Exception):
    """A runner cannot run a layer call. The message says why. Nothing has come of the call yet, so another runner may."""


class CannotTile(CannotRun):
    """A layer cannot run in tiles."""


@dataclass
class LayerCall:
    """One call of a layer's forward. Partials are taken apart: `args` and `kwargs` are all that it is given."""

    layer: Layer
    forward: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    placement: Placement = NO_RECOMPUTE
    """Without gradients nothing is kept."""
    grads: bool = True
    """True if gradients are enabled."""
    preserve_rng_state: bool = True
    """True if the replay must draw the same random numbers as the forward."""
    verdict: Any = None
    """Found out by a runner's `refusal`, for its `run`."""

    def __post_init__(self) -> None:
        if isinstance(self.forward, partial):
            called = partial(self.forward, *self.args, **self.kwargs)  # partials of partials are one
            self.forward, self.args, self.kwargs = called.func, called.args, called.keywords

    @property
    def recomputes(self) -> bool:
        """True if a backward runs the call again, or a part of it."""
        return self.grads and self.placement.kind is not PlacementKind.NO_RECOMPUTE


class LayerRunner(Protocol):
    """One way to run layer calls."""

    def refusal(self, call: LayerCall, host: LayerHost) -> str | None:
        """Return why another runner must run a call; None: this one can. "": there is nothing to warn of."""

    def run(self, call: LayerCall, host: LayerHost) -> Any:
        """Run a call that was not refused.

        Raises:
            CannotRun: it turns out that another runner must.
        """


class Tiler(LayerRunner, Protocol):
    """Runs layer calls in tiles."""

    def ran_whole(self, call: LayerCall, out: Any, host: LayerHost) -> None:
        """Hear of a call that another runner ran, where the backward computes inputs of layers."""


class OwnForward(LayerRunner):
    """A layer's forward that runs calls of itself, and keeps what their backwards need: one that torch.compile compiled."""

    name: str
    """The compiler's, for messages."""
    plain: Callable[..., Any]
    """The same forward, uncompiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it and keep nothing."""

    def refused(self, layer: Layer) -> str | None:
        """Return why a layer runs uncompiled all the same; None: it does not."""

    def refuse(self, layer: Layer, why: str) -> None:
        """Have a layer run uncompiled from now on. `why` is the message of a CannotRun, as the end of "it …"."""
