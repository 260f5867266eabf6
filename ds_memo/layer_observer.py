"""Layer events: `ds_memo.remat` runs the layers and tells its observers which layer runs."""

from __future__ import annotations

from typing import Protocol


class LayerObserver(Protocol):
    """Receives the events of one model. `layer` counts from 0, in the order of the model."""

    def layer_begins(self, layer: int) -> None:
        """Note that a layer's forward begins."""

    def layer_ends(self, layer: int) -> None:
        """Note that a layer's forward is over."""

    def layer_replays(self, layer: int) -> None:
        """Note that a layer's replay begins; its backward follows."""

    def interrupted(self) -> None:
        """Note that a layer's forward raised."""
