"""`OrderedFiles`: files whose transfers the happens-before checker of tests/swap/ordered.py follows.

Each transfer is a stream of its own: it comes behind the events that it is given, and behind all transfers that the host has
waited for before it was issued. What the host has waited for comes before everything that is issued later, on any stream. So the
first run shows a block that is freed, written or read under a transfer, and a transfer that uses a block under a copy.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ds_memo.nvme.direct_files import DirectFiles, DirectTransfer
from ds_memo.nvme.extents import Extent
from ds_memo.swap.host_slab import Block
from tests.swap.ordered import Access, Clock, OrderedStreams


class OrderedFiles:
    """The files described at the top of this file."""

    def __init__(self, inner: DirectFiles, checker: OrderedStreams) -> None:
        self._inner = inner
        self._checker = checker
        self._clocks: dict[DirectTransfer, Clock] = {}
        self._host: Clock = defaultdict(int)
        self._extents: dict[Extent, list[DirectTransfer]] = {}
        """Transfers from and to each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        return self._follow(self._inner.write(block, extent, after), block, extent, after)

    def read(self, extent: Extent, block: Block, after: tuple[Any, ...]) -> DirectTransfer:
        return self._follow(self._inner.read(extent, block, after), block, extent, after)

    def done(self, transfer: DirectTransfer) -> bool:
        over = self._inner.done(transfer)
        return self._heard(transfer) if over else over

    def wait(self, transfer: DirectTransfer, compute: Any) -> None:
        self._inner.wait(transfer, compute)
        self._heard(transfer)

    def wait_beside(self, transfer: DirectTransfer, compute: Any) -> bool:
        over = self._inner.wait_beside(transfer, compute)
        return self._heard(transfer) if over else over

    def finish(self) -> None:
        self._inner.finish()
        for transfer in list(self._clocks):
            self._heard(transfer)

    def close(self) -> None:
        self._inner.close()
        for transfer in list(self._clocks):
            self._heard(transfer)

    def free(self, extent: Extent) -> None:
        self._must_have_heard(extent, "freed")
        self._extents.pop(extent, None)
        self._inner.free(extent)

    def _follow(self, transfer: DirectTransfer, block: Block, extent: Extent, after: tuple[Any, ...]) -> DirectTransfer:
        checker, stream = self._checker, f"file {len(self._clocks) + len(self._host)}.{id(transfer)}"
        self._must_have_heard(extent, "used again")
        clock: Clock = defaultdict(int, self._host)
        for event in after:
            _join(clock, event.clock)
        clock[stream] = 1
        self._clocks[transfer] = clock
        self._extents.setdefault(extent, []).append(transfer)
        what = "write of a file" if transfer.writes else "read of a file"
        for piece in block.pieces:
            access = Access(stream, 1, not transfer.writes, piece.begin, piece.end, what)
            history = checker._history(piece.memory)
            for earlier in history.copies:
                if earlier.stream != stream and earlier.conflicts_with(access):
                    checker.checked += 1
                    if earlier.step > clock[earlier.stream]:
                        checker._found(earlier, access)
            history.copies.append(access)
        return transfer

    def _heard(self, transfer: DirectTransfer) -> bool:
        _join(self._host, self._clocks[transfer])
        for clock in self._checker._clocks.values():
            _join(clock, self._clocks[transfer])
        return True

    def _must_have_heard(self, extent: Extent, what: str) -> None:
        for transfer in self._extents.get(extent, []):
            clock = self._clocks[transfer]
            if any(self._host[stream] < step for stream, step in clock.items() if stream.startswith("file")):
                message = f"an extent is {what} under a transfer that the host has not waited for"
                self._checker.violations.append(message)
                raise AssertionError(message)


def _join(clock: Clock, other: Clock) -> None:
    for stream, step in other.items():
        clock[stream] = max(clock[stream], step)
