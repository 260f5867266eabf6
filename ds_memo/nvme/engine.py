"""The schedule of frames whose host blocks go on to files.

    forward    behind a frame's last copy to the host (`sent`), its block is written to its extent. The host is a cache over the
               files: a written block stays until its memory is wanted, those of the oldest frames go first. If these are not
               enough (more forwards before a backward than were foreseen), others are written then.
    backward   blocks are read in the order of the backward, as far ahead as host memory has room, behind all copies issued so
               far: they may still use that memory. A frame's reload is issued once its block is read.

    writing ─► in_both ─► in_file ─► reading ─► in_both …        (`reading` to `in_file` if that failed)

Compute never waits for files; the host does, before it issues a copy. It waits ahead of need only while compute still has all
work of the last call to do.
The frame's own states are those of ds_memo.swap.frame.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_memo.errors import MemoError
from ds_memo.nvme.file_protocol import Extent, Files, Transfer
from ds_memo.swap.engine import PendingFree, SwapEngine
from ds_memo.swap.frame import Frame
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D, Streams

if TYPE_CHECKING:  # not imported: the estimator runs the schedule without torch
    import torch

    from ds_memo.swap.host_slab import HostSlab

_NEXT = {"writing": {"in_both"}, "in_both": {"in_file"}, "in_file": {"reading"}, "reading": {"in_both", "in_file"}}
_IDLE = ("swapping", "away", "done")
"""States of a frame whose block no copy needs any more, once it is written."""


@dataclass(eq=False)
class Filed:
    """The file's side of a frame."""

    extent: Extent
    transfer: Transfer | None
    """The latest; None: one is being issued, or Ctrl-C came meanwhile."""
    indices: tuple[int, ...]
    """Those of the kept tensors that the block holds."""
    state: str = "writing"

    def move(self, state: str) -> None:
        """Go to another state. Raise MemoError if the diagram at the top of this file has no such step."""
        if state not in _NEXT[self.state]:
            raise MemoError(f"a block in files cannot go from '{self.state}' to '{state}'")
        self.state = state


class NvmeEngine(SwapEngine):
    """Moves the frames of one model, some of them on to files.

    Args:
        streams, slab, device: see :class:`ds_memo.swap.engine.SwapEngine`.
        files: take the blocks of the frames whose placement says so.
        warn: says something once and shows it in the report.
    """

    def __init__(self, streams: Streams, slab: HostSlab, device: torch.device, files: Files, warn: Callable[[str], None]) -> None:
        super().__init__(streams, slab, device)
        self.files = files
        self._warn = warn
        self._writing: deque[weakref.ref[Frame]] = deque()  # oldest first
        self._in_host = _ByAge()  # and in no file
        self._in_both = _ByAge()
        self._in_file = _ByAge()
        self._reading = _ByAge()
        self._refused = False  # extents, so far
        self._before_last = self._before_this = streams.mark(COMPUTE)
        """Events before the work of the last call that a backward came to, and before that of the present one."""
        slab.make_room = weakref.WeakMethod(self._make_room)

    # ---- forward

    def end(self, frame: Frame) -> None:
        super().end(frame)
        if frame.block is not None and not (frame.placement.nvme and self._write(frame)):
            self._in_host.add(frame)

    # ---- backward

    def bring_back(self, frame: Frame, then: Frame | None = None, again: bool = False) -> None:
        self._note_written()
        self._before_last, self._before_this = self._before_this, self.streams.mark(COMPUTE)
        super().bring_back(frame, then, again)
        self._read_ahead(frame.age)

    def _may_go_ahead(self, frame: Frame) -> bool:
        return super()._may_go_ahead(frame) and self._is_read(frame)

    def _reload(self, frame: Frame) -> None:
        filed = frame.filed
        if filed is not None and filed.state in ("in_file", "reading"):
            if filed.state == "reading" and filed.transfer is None:
                self._wait(filed)
                self._drop_block(frame)
            if filed.state == "in_file":
                self._read(frame)
            self._wait(filed)
            self._have_read(frame)
        super()._reload(frame)

    def _is_read(self, frame: Frame) -> bool:
        """Return True if a frame's block is in host memory, after waiting while compute has more work than the last call's.

        If the host waited until compute has none, the device would have nothing to do until the next kernel is launched.
        """
        filed = frame.filed
        if filed is None or filed.state in ("writing", "in_both"):
            return True
        if filed.state == "in_file" or filed.transfer is None:
            return False
        over = self.files.wait_beside(filed.transfer, self._before_last)
        return over and filed.transfer.failure is None  # a failure is told to the backward of this frame

    def _read_ahead(self, age: int) -> None:
        """Read blocks of frames below, the next of the backward first, while host memory has room."""
        while (frame := self._in_file.youngest_below(age)) is not None and self.slab.left >= frame.filed.extent.nbytes:
            try:
                self._read(frame)
            except MemoError:  # the system refuses memory; `left` is less now
                if frame.block is not None:
                    raise
                return

    def _read(self, frame: Frame) -> None:
        filed = frame.filed
        frame.block = self.slab.allocate(filed.extent.nbytes, f"frame {frame.name}, to be read from its file,")
        self._in_file.discard(frame)
        self._reading.add(frame)
        filed.transfer = None
        filed.move("reading")
        filed.transfer = self.files.read(filed.extent, frame.block, (self.streams.mark(H2D), self.streams.mark(D2H)))

    def _have_read(self, frame: Frame) -> None:
        """Use what was read. Raise MemoError if that failed; the block can be read again."""
        filed = frame.filed
        if (failure := filed.transfer.failure) is not None:
            self._drop_block(frame)
            raise MemoError(f"frame {frame.name} could not be read back, and this backward is lost: {failure}") from failure
        filed.move("in_both")
        self._reading.discard(frame)
        self._in_both.add(frame)
        frame.rows = {index: frame.layout.kept[index].rows_in(frame.block) for index in filed.indices}

    def _drop_block(self, frame: Frame) -> None:
        """Free a block that is in a file, too. No transfer may use it any more."""
        frame.filed.move("in_file")
        self._in_file.add(frame)
        self._in_both.discard(frame)
        self._reading.discard(frame)
        self._free_block(frame)

    # ---- host memory

    def _make_room(self, enough: Callable[[], bool]) -> None:
        """Free host memory until it is enough: of written blocks, the oldest frames' first, then of those that are being written,
        of those that are read ahead, and of others, which are written now."""
        self._note_written()
        while not enough():
            if (frame := self._in_both.oldest(_IDLE)) is not None:
                self._drop_block(frame)
            elif self._writing:
                self._wait_for_oldest_write()
            elif (frame := self._reading.oldest(_IDLE)) is not None:
                self._wait(frame.filed)
                self._drop_block(frame)
            elif (frame := self._in_host.oldest(_IDLE)) is None or not self._write(frame):
                return

    def _write(self, frame: Frame) -> bool:
        """Begin to write a frame's block; return False, after a warning, if the files have no space for it."""
        try:
            extent = self.files.extent(frame.block.nbytes, f"frame {frame.name}")
        except MemoError as refusal:
            if not self._refused:  # once: frames differ, and what is left
                self._warn(f"{refusal}. It stays in host memory")
            self._refused = True
            return False
        self._in_host.discard(frame)
        frame.filed = Filed(extent, self.files.write(frame.block, extent, (frame.sent,)), tuple(frame.rows))
        self._writing.append(weakref.ref(frame))
        return True

    def _note_written(self) -> None:
        """Note the writes that are over, without waiting."""
        while self._writing:
            frame = self._writing[0]()
            if frame is not None and frame.filed is not None and frame.filed.state == "writing":
                if not self.files.done(frame.filed.transfer):
                    return
                self._have_written(frame)
            self._writing.popleft()

    def _wait_for_oldest_write(self) -> None:
        frame = self._writing[0]()
        if frame is not None and frame.filed is not None:
            self._wait(frame.filed)
        self._note_written()

    def _have_written(self, frame: Frame) -> None:
        filed = frame.filed
        if (failure := filed.transfer.failure) is None:
            filed.move("in_both")
            self._in_both.add(frame)
            return
        frame.filed = None
        self.files.free(filed.extent)
        self._warn(f"a frame could not be written and stays in host memory: {failure}")

    def _wait(self, filed: Filed) -> None:
        """Wait until no transfer uses a frame's block."""
        if filed.transfer is None:
            self.files.finish()
        else:
            self.files.wait(filed.transfer, self.streams.mark(COMPUTE))

    # ---- the end of frames

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.files.close()
        finally:  # Ctrl-C came: wait again, for no block may be freed under a transfer
            self.files.close()
            super().close()

    def _defer_lost(self) -> None:
        held = {pending.filed.extent for pending in list(self._pending) if pending.filed is not None}
        held |= {frame.filed.extent for frame in self._alive() if frame.filed is not None}
        lost = [extent for extent in self.files.extents() if extent not in held]
        before = self.traffic.blocks_lost
        super()._defer_lost()
        if lost or self.traffic.blocks_lost > before:
            self.files.finish()  # transfers may still use them
        for extent in lost:
            self.files.free(extent)

    def _finish(self, pending: PendingFree) -> None:
        super()._finish(pending)
        if pending.filed is not None:
            self._wait(pending.filed)
            self.files.free(pending.filed.extent)

    def _alive(self) -> Iterator[Frame]:
        return (frame for ref in self._stack if (frame := ref()) is not None)


class _ByAge:
    """Frames that are alive, in the order of their begin."""

    def __init__(self) -> None:
        self._ages: list[int] = []
        self._frames: dict[int, weakref.ref[Frame]] = {}

    def add(self, frame: Frame) -> None:
        self._frames[frame.age] = weakref.ref(frame)
        insort(self._ages, frame.age)

    def discard(self, frame: Frame) -> None:
        if self._frames.pop(frame.age, None) is not None:
            self._ages.remove(frame.age)

    def oldest(self, states: tuple[str, ...]) -> Frame | None:
        """Return the oldest frame that is in one of these states."""
        for age in list(self._ages):
            if (frame := self._at(age)) is not None and frame.state in states:
                return frame
        return None

    def youngest_below(self, age: int) -> Frame | None:
        """Return the youngest frame that is older than this age."""
        while at := bisect_left(self._ages, age):
            if (frame := self._at(self._ages[at - 1])) is not None:
                return frame
        return None

    def _at(self, age: int) -> Frame | None:
        """Return a frame. One that is dead is forgotten."""
        frame = ref() if (ref := self._frames.get(age)) else None  # none: Ctrl-C came between two lines of this class
        if frame is None:
            self._frames.pop(age, None)
            self._ages.remove(age)
        return frame
