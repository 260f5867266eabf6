"""Files that host blocks are written to and read from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ds_memo.swap.host_slab import Block


@dataclass(frozen=True, eq=False)
class Extent:
    """Bytes `begin` to `begin` + `nbytes` of the space that the files make up: whole pages."""

    begin: int
    nbytes: int


class Transfer(Protocol):
    """One block on its way to the files or back."""

    failure: BaseException | None
    """Why it failed; None: it has not."""


class Files(Protocol):
    """The operations that the engine needs. Transfers of one direction are done in the order of issue."""

    stall_s: float
    """Seconds that `wait` has kept compute idle."""

    def extent(self, nbytes: int, wanted_by: str) -> Extent:
        """Allocate space. Raise MemoError if there is none."""

    def free(self, extent: Extent) -> None:
        """Free space. No transfer from or to it may be under way."""

    def extents(self) -> list[Extent]:
        """Return what is allocated now."""

    def write(self, block: Block, extent: Extent, after: tuple[Any, ...]) -> Transfer:
        """Write a block once these events of streams are over. The caller keeps it allocated meanwhile."""

    def read(self, extent: Extent, block: Block, after: tuple[Any, ...]) -> Transfer:
        """Read a block once these events of streams are over."""

    def done(self, transfer: Any) -> bool:
        """Return True if a transfer is over, or has failed."""

    def wait(self, transfer: Any, compute: Any) -> None:
        """Wait until a transfer is over or has failed. What lies behind `compute`, an event, counts as a stall."""

    def wait_beside(self, transfer: Any, compute: Any) -> bool:
        """Wait until a transfer is over or has failed, no longer than until `compute`, an event; return True if it is."""

    def finish(self) -> None:
        """Wait until no transfer is under way."""

    def close(self) -> None:
        """Finish what is under way, give the space back, end the threads."""
