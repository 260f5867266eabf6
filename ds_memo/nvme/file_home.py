"""The home of frames whose host blocks go on to files.

    forward    behind a frame's last copy to the host (`sent`), its block is written to its extent. The host is a cache over the
               files: a written block stays until its memory is wanted, those of the oldest frames go first. If these are not
               enough (more forwards before a backward than were foreseen), others are written then.
    backward   blocks are read in the order of the backward, as far ahead as host memory has room, behind all copies issued so
               far: they may still use that memory. A frame's reload is issued once its block is read.

    in_host ─► writing ─► in_both ─► in_file ─► reading ─► in_both …    (`writing` to `refused`, `reading` to `in_file`,
                                                                         if that failed)

Compute never waits for files; the host does, before it issues a copy. It waits ahead of need only while compute still has all
work of the last call to do.
These states are of the block; the frame's own are those of ds_memo.swap.frame, and only the engine moves it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_memo.errors import MemoError
from ds_memo.nvme.direct_files import DirectFiles, DirectTransfer
from ds_memo.nvme.extents import Extent
from ds_memo.swap.frame import Frame
from ds_memo.swap.home import Home
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D, Streams

_NEXT = {
    "in_host": {"writing"},
    "writing": {"in_both", "refused"},
    "in_both": {"in_file"},
    "in_file": {"reading"},
    "reading": {"in_both", "in_file"},
}
_IDLE = ("swapping", "away", "done")
"""States of a frame whose block no copy needs any more, once it is written."""


@dataclass(eq=False)
class Filed:
    """A frame's block, and its bytes in files."""

    state: str = "in_host"
    extent: Extent | None = None
    transfer: DirectTransfer | None = None
    """The latest. None in state `reading`: it is being issued, or Ctrl-C came meanwhile."""


class FileHome(Home):
    """Files behind host memory; see :class:`ds_memo.swap.home.Home`.

    Args:
        streams, slab: those of the engine.
        files: take the blocks of the frames whose placement says so.
        warn: says something once and shows it in the report.
    """

    def __init__(self, streams: Streams, slab: HostSlab, files: DirectFiles, warn: Callable[[str], None]) -> None:
        self.files = files
        self._streams = streams
        self._slab = slab
        self._warn = warn
        self._frames = {state: _Frames(state) for state in _NEXT}
        self._no_space = False  # for extents, so far
        self._before_last = self._before_this = streams.mark(COMPUTE)
        """Events before the work of the last call that a backward came to, and before that of the present one."""

    # ---- forward

    def takes(self, frame: Frame) -> None:
        frame.filed = Filed()
        self._frames["in_host"].add(frame)
        if frame.placement.nvme:
            self._write(frame)

    # ---- backward

    def backward_comes(self) -> None:
        self.note_written()
        self._before_last, self._before_this = self._before_this, self._streams.mark(COMPUTE)

    def has(self, frame: Frame) -> bool:
        """Return True if a frame's block is in host memory, after waiting while compute has more work than the last call's.

        If the host waited until compute has none, the device would have nothing to do until the next kernel is launched.
        """
        filed = frame.filed
        if filed is None or filed.state not in ("in_file", "reading"):
            return True
        if filed.state == "in_file" or filed.transfer is None:
            return False
        over = self.files.wait_beside(filed.transfer, self._before_last)
        return over and filed.transfer.failure is None  # a failure is told to the backward of this frame

    def fetch(self, frame: Frame) -> None:
        filed = frame.filed
        if filed is None or filed.state not in ("in_file", "reading"):
            return
        if filed.state == "reading" and filed.transfer is None:
            self.wait(filed)
            self._drop_block(frame)
        if filed.state == "in_file":
            self._read(frame)
        self.wait(filed)
        if (failure := filed.transfer.failure) is not None:
            self._drop_block(frame)
            raise MemoError(
                f"frame {frame.name} could not be read back, and this backward is lost: {failure}; look at the drive (dmesg)"
            ) from failure
        self._move(frame, "in_both")

    def read_ahead(self, frame: Frame) -> None:
        """Read blocks of frames below, the next of the backward first, while host memory has room."""
        in_file, age = self._frames["in_file"], frame.age
        while (below := in_file.youngest_below(age)) is not None and self._slab.budget.left >= below.filed.extent.nbytes:
            try:
                self._read(below)
            except MemoError:  # the system refuses memory; `left` is less now
                if below.block is not None:
                    raise
                return

    def _read(self, frame: Frame) -> None:
        filed = frame.filed
        frame.block = self._slab.allocate(filed.extent.nbytes, f"frame {frame.name}, to be read from its file,")
        filed.transfer = None
        self._move(frame, "reading")
        # The block is new to this frame: copies of its earlier owner, in either direction, may still use the memory.
        filed.transfer = self.files.read(filed.extent, frame.block, (self._streams.mark(H2D), self._streams.mark(D2H)))

    # ---- host memory

    def make_room(self, enough: Callable[[], bool]) -> None:
        """Free host memory until it is enough: of written blocks, the oldest frames' first, then of those that are being written,
        of those that are read ahead, and of others, which are written now."""
        self.note_written()
        while not enough():
            if (frame := self._frames["in_both"].oldest()) is not None:
                self._drop_block(frame)
            elif (frame := self._frames["writing"].first()) is not None:
                self.wait(frame.filed)
                self.note_written()
            elif (frame := self._frames["reading"].oldest()) is not None:
                self.wait(frame.filed)
                self._drop_block(frame)
            elif (frame := self._frames["in_host"].oldest()) is None or not self._write(frame):
                return

    def _write(self, frame: Frame) -> bool:
        """Begin to write a frame's block; return False, after a warning, if the files have no space for it."""
        filed = frame.filed
        try:
            filed.extent = self.files.extent(frame.block.nbytes, f"frame {frame.name}")  # type: ignore[union-attr]  # it has one
        except MemoError as refusal:
            if not self._no_space:  # once: frames differ, and what is left
                self._warn(f"{refusal}. It stays in host memory")
            self._no_space = True
            return False
        # `sent` lies behind d2h's last copy to the block: the file's threads read no byte before it.
        filed.transfer = self.files.write(frame.block, filed.extent, (frame.sent,))  # type: ignore[arg-type]
        self._move(frame, "writing")
        return True

    def note_written(self) -> None:
        """Note the writes that are over, without waiting."""
        while (frame := self._frames["writing"].first()) is not None and self.files.done(frame.filed.transfer):
            self._have_written(frame)

    def _have_written(self, frame: Frame) -> None:
        filed = frame.filed
        if (failure := filed.transfer.failure) is None:
            self._move(frame, "in_both")
            return
        self._move(frame, "refused")
        extent, filed.extent = filed.extent, None
        self.files.free(extent)
        self._warn(f"a frame could not be written and stays in host memory: {failure}")

    def _drop_block(self, frame: Frame) -> None:
        """Free a block that is in a file, too. No transfer may use it any more."""
        self._move(frame, "in_file")
        frame.free_block(self._slab)

    # ---- both

    def wait(self, filed: Filed) -> None:
        """Wait until no transfer uses a frame's block."""
        if filed.transfer is None:
            self.files.finish()
        else:
            self.files.wait(filed.transfer, self._streams.mark(COMPUTE))

    def _move(self, frame: Frame, state: str) -> None:
        """Have a block go to another state. Raise MemoError if the diagram at the top of this file has no such step."""
        filed = frame.filed
        before = filed.state
        if state not in _NEXT[before]:
            raise MemoError(f"a block in files cannot go from '{before}' to '{state}'")
        filed.state = state
        if state in self._frames:
            self._frames[state].add(frame)
        self._frames[before].discard(frame)

    # ---- the end of frames

    def forget(self, filed: Filed) -> None:
        if filed.extent is not None:
            self.wait(filed)
            self.files.free(filed.extent)

    def free_lost(self, held: Sequence[Filed | None], blocks_lost: bool) -> None:
        known = {filed.extent for filed in held if filed is not None}
        lost = [extent for extent in self.files.extents() if extent not in known]
        if lost or blocks_lost:
            self.files.finish()  # transfers may still use them
        for extent in lost:
            self.files.free(extent)

    def close(self) -> None:
        self.files.close()


class _Frames:
    """Frames that are alive and whose blocks are in one state.

    Ctrl-C between two lines may leave one here that has gone on: its own state counts.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self._ages: list[int] = []
        self._frames: dict[int, weakref.ref[Frame]] = {}  # in the order in which they came

    def add(self, frame: Frame) -> None:
        self._frames[frame.age] = weakref.ref(frame)
        insort(self._ages, frame.age)

    def discard(self, frame: Frame) -> None:
        if self._frames.pop(frame.age, None) is not None:
            self._ages.remove(frame.age)

    def first(self) -> Frame | None:
        """Return the frame that came first."""
        while self._frames:
            if (frame := self._at(next(iter(self._frames)))) is not None:
                return frame
        return None

    def oldest(self) -> Frame | None:
        """Return the oldest frame whose block no copy uses."""
        for age in list(self._ages):
            if (frame := self._at(age)) is not None and frame.state in _IDLE:
                return frame
        return None

    def youngest_below(self, age: int) -> Frame | None:
        """Return the youngest frame that is older than this age."""
        while at := bisect_left(self._ages, age):
            if (frame := self._at(self._ages[at - 1])) is not None:
                return frame
        return None

    def _at(self, age: int) -> Frame | None:
        """Return a frame; forget one that is dead, or elsewhere."""
        frame = ref() if (ref := self._frames.get(age)) else None
        if frame is None or frame.filed.state != self._state:
            self._frames.pop(age, None)
            self._ages = [other for other in self._ages if other != age]
            return None
        return frame
