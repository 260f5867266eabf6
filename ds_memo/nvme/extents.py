"""Space inside files: which bytes are allocated."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Extent:
    """Bytes `begin` to `begin` + `nbytes` of the space that the files make up: whole pages."""

    begin: int
    nbytes: int


class Space:
    """Allocates extents: the first gap that is large enough. Between steps all are free, so gaps stay few."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that extents may lie in. The owner makes it larger."""
        self._gaps: list[tuple[int, int]] = []  # (begin, end), none next to another
        self._extents: dict[Extent, None] = {}

    @property
    def extents(self) -> list[Extent]:
        return list(self._extents)

    @property
    def missing_for(self) -> int:
        """Bytes of the last gap, if it ends where the space does: a larger space needs so many less."""
        begin, end = self._gaps[-1] if self._gaps else (0, -1)
        return end - begin if end == self.size else 0

    def grow(self, nbytes: int) -> None:
        """Add bytes at the end."""
        self._give(self.size, self.size + nbytes)
        self.size += nbytes

    def allocate(self, nbytes: int) -> Extent | None:
        """Return an extent; None: no gap is large enough."""
        for number, (begin, end) in enumerate(self._gaps):
            if end - begin >= nbytes:
                self._gaps[number : number + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                extent = Extent(begin, nbytes)
                self._extents[extent] = None
                return extent
        return None

    def free(self, extent: Extent) -> None:
        if extent not in self._extents:  # Ctrl-C came between this and its frame's letting go of it
            return
        del self._extents[extent]
        self._give(extent.begin, extent.begin + extent.nbytes)

    def _give(self, begin: int, end: int) -> None:
        for gap in [gap for gap in self._gaps if gap[0] == end or gap[1] == begin]:
            self._gaps.remove(gap)
            begin, end = min(begin, gap[0]), max(end, gap[1])
        insort(self._gaps, (begin, end))
