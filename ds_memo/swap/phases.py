"""Who is told which layer runs, so that memory requests can be told apart."""

from __future__ import annotations

from typing import Protocol


class Phases(Protocol):
    """Layers are numbered in the order of the model."""

    def layer_begins(self, layer: int) -> None:
        """A layer's forward."""

    def layer_ends(self, layer: int) -> None: ...

    def layer_replays(self, layer: int) -> None:
        """A layer's replay, which its backward follows."""

    def interrupted(self) -> None:
        """A layer raised."""


class NoPhases:
    """Nobody wants to know."""

    def layer_begins(self, layer: int) -> None:
        pass

    layer_ends = layer_replays = layer_begins

    def interrupted(self) -> None:
        pass
