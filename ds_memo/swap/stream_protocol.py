"""What the schedule needs of its streams. Imports no torch, so that a clock alone can be a stream, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

COMPUTE, D2H, H2D = "compute", "d2h", "h2d"


class Streams(Protocol):
    """What the engine needs. An event is a point in one stream; `event.stream` names it in stall statistics."""

    def mark(self, stream: str) -> Any:
        """An event that comes about when all work issued to `stream` so far is done."""

    def wait(self, stream: str, event: Any) -> None:
        """`stream` starts nothing issued from now on before `event` has come about."""

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy on `d2h` or `h2d`. The caller keeps `src` and `dst` alive until an event behind the copy."""

    def stall_s(self) -> dict[str, float]:
        """Seconds the compute stream has spent waiting for each copy stream, as far as its work is done; never waits itself."""

    def close(self) -> None:
        """Finish what was issued and release threads."""
