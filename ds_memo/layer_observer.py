"""What the engine tells of the layers that run, for whoever sorts memory requests by phase."""

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
    """A listener that does nothing."""

    def layer_begins(self, layer: int) -> None:
        pass

    layer_ends = layer_replays = layer_begins

    def interrupted(self) -> None:
        pass
