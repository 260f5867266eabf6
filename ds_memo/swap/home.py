"""The home of host blocks: where they wait between the copies out and back.

The engine calls these methods as a frame goes through its states. This home leaves blocks in host memory;
:class:`ds_memo.nvme.file_home.FileHome` writes them on to files and reads them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ds_memo.swap.frame import Frame


class Home:
    """Host memory: nothing happens to a block."""

    def takes(self, frame: Frame) -> None:
        """Take a frame's block, behind the last copy to it (`frame.sent`)."""

    def backward_comes(self) -> None:
        """Note that a backward has come to its next frame, before work for it is issued."""

    def has(self, frame: Frame) -> bool:
        """Return True if a frame's block is in host memory, so that its reload can be issued ahead of need."""
        return True

    def fetch(self, frame: Frame) -> None:
        """Have a frame's block in host memory before its reload is issued. Raise MemoError if that fails."""

    def read_ahead(self, frame: Frame) -> None:
        """Begin to fetch what the backward will want after this frame."""

    def make_room(self, enough: Callable[[], bool]) -> None:
        """Free host memory whose bytes are elsewhere, too, until it is enough or none is left."""

    def forget(self, filed: Any) -> None:
        """Give up what a dead frame has elsewhere (`frame.filed`), once nothing uses its block."""

    def free_lost(self, held: Sequence[Any], blocks_lost: bool) -> None:
        """Free what is elsewhere and in no `filed` of a frame. Wait first if host blocks were lost, too: they may be in use."""

    def close(self) -> None:
        """Finish what is under way. May be called twice."""
