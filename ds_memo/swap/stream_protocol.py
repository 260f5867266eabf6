"""The streams that the schedule runs on. Imports no torch: the solver names them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

COMPUTE, D2H, H2D = "compute", "d2h", "h2d"


class Streams(Protocol):
    """The operations that the engine needs. An event is a point in one stream; stall statistics go by `event.stream`."""

    def mark(self, stream: str) -> Any:
        """Return an event that completes when all work issued to `stream` so far is done."""

    def wait(self, stream: str, event: Any) -> None:
        """Make `stream` start nothing issued from now on before `event` completes."""

    def done(self, event: Any) -> bool:
        """Return True if `event` is complete. Any thread may ask."""

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        """Copy bytes on `d2h` or `h2d`, whatever the dtypes are.

        The caller keeps `src` and `dst` alive until an event behind the copy. They have these bytes: it is not checked here.

        Args:
            dst_at, src_at: bytes from a tensor's first element on.
        """

    def current(self) -> Any:
        """Return a key of the stream that compute is on now: a model may compute on several."""

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """Have the allocator hand out a tensor's memory only behind what `stream`, a name or such a key, has by then.

        The allocator gives memory back to the stream that it was allocated on. It need not be told where that stream waits.
        """

    def stall_s(self) -> dict[str, float]:
        """Return the seconds that compute has waited for each copy stream, as far as its work is done. Never wait here."""

    def close(self) -> None:
        """Finish what was issued and release threads."""
