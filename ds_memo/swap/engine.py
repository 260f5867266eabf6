"""The schedule: when a frame's rows leave the device and when they come back.

    forward   a kept output is copied out as soon as it exists (event on compute, d2h waits for it);
              compute waits for the copies of frame i when layer i+2 begins, and frame i's device memory is freed.
    backward  the replay of frame i+1 issues the reload of frame i into a fresh buffer, after compute's event at that point;
              the replay of frame i makes compute wait for it. Of frames that come back with a small first tensor
              alone two are on their way at once, so that the large one below them has twice as long.

Device bytes: the resident frames, two swapped frames on their way out, two buffers on their way back, never more. A buffer is
allocated on the compute stream when its reload is issued, and lives as long as a tensor refers to it. So frame i usually gets
the memory that frame i+2 has just freed, and a tensor that escaped (a hook, a cache) is never overwritten.

Host blocks are the home's (ds_memo.swap.home): they stay in host memory, or go on to files. The engine tells it of each step.

Nothing here computes. The same schedule stands in two more places:

    ds_memo.nvme.file_home   when host blocks are written to files and read back
    ds_memo.solve.schedule   its seconds as recurrences, for solver and estimator; tests/solve compares them with this engine on
                             streams and files that only keep time
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ds_memo.errors import MemoError
from ds_memo.placement import Placement
from ds_memo.swap.frame import Frame, Kept, Layout
from ds_memo.swap.home import Home
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D, Streams
from ds_memo.units import GIB


@dataclass
class Traffic:
    """Copies so far, and how the reloads were issued."""

    frames: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    frames_prefetched: int = 0
    """Reloads issued one frame ahead."""
    frames_on_demand: int = 0
    """Reloads issued when the backward already waited: its first frame, or an unexpected order."""
    blocks_lost: int = 0
    """Host blocks still allocated after their frame was gone, because its destructor was interrupted."""


class FrameRef(weakref.ref[Frame]):
    """A weak reference to a frame, and the frame's age, which outlives it."""

    __slots__ = ("age",)

    def __init__(self, frame: Frame) -> None:
        self.age = frame.age


class PendingFree(NamedTuple):
    """Memory of a dead frame, to be freed once its copies are over."""

    block: Block | None
    state: str
    sent: Any = None
    back: Any = None
    """Events behind the copies out and back; None if the frame was interrupted before them."""
    device: Mapping[int, torch.Tensor] = MappingProxyType({})
    slots: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Device tensors that copies may still read or write, and the streams that they were allocated on."""
    stream: Any = None
    buffer_stream: Any = None
    filed: Any = None
    """The home's side of the frame, which may still read or write the block."""
    late: Sequence[Block] = ()
    """Further blocks, and the event behind the copies to them."""
    sent_late: Any = None


class SwapEngine:
    """Moves the frames of one model. Its methods are called on the compute stream only; frames may die on any thread.

    Args:
        streams: compute, d2h and h2d.
        slab: host memory for the rows.
        device: where the layers run.
        home: where host blocks wait; absent: in host memory.
    """

    def __init__(self, streams: Streams, slab: HostSlab, device: torch.device, home: Home | None = None) -> None:
        self.streams = streams
        self.slab = slab
        self.device = device
        self.home = home or Home()
        self.traffic = Traffic()
        self._stack: list[FrameRef] = []  # swapped frames, oldest first
        self._leaving: deque[weakref.ref[Frame]] = deque()  # those whose device memory is not freed yet
        self._unsent: tuple[Frame, Kept, torch.Tensor, Any] | None = None  # kept, but its copy is not issued yet
        self._late: deque[tuple[torch.Tensor, Any]] = deque()  # on their way out in a backward, and the events behind them
        self._ahead: list[weakref.ref[Frame]] = []  # frames that were reloaded ahead
        self._pending: deque[PendingFree] = deque()
        self._closed = False
        slab.held_by(self)

    # ---- forward

    def begin(self, name: str, placement: Placement) -> Frame:
        """Open the frame of a layer that is about to run.

        Args:
            name: the layer's, for messages.
            placement: says if kept tensors stay on the device, and if the reload may be issued during the backward of the frame
                above. If not, compute waits for the reload.

        Raises:
            MemoError: the engine is closed.
        """
        if self._closed:
            raise MemoError(f"layer {name} was run after ds_memo was detached; run the forward again")
        self.drain()
        self._forget_dead()  # from earlier steps, or from dropped graphs
        self.let_go_but(1)
        self.traffic.frames += 1
        frame = Frame(name, placement, self.traffic.frames, self._defer)
        frame.stream = self.streams.current()
        return frame

    def adopt(self, frame: Frame, layout: Layout) -> None:
        """Set what a recording frame will keep, and allocate its host block."""
        frame.layout = layout
        if not frame.resident and layout.host_bytes:
            frame.block = self.slab.allocate(layout.host_bytes, f"frame {frame.name}")

    def keep(self, frame: Frame, kept: Kept, tensor: torch.Tensor) -> None:
        """Keep a tensor that compute has just produced. If the frame is swapped, its rows go to the host.

        The next call issues the copy, behind the event recorded here. So a tensor that the very next op changes in place can be
        cloned first. A tensor in another order of memory than the frame's is copied on the device first.
        """
        source = frame.device[kept.index] = kept.laid(tensor.detach())
        frame.versions[kept.index] = source._version
        if frame.block is None:  # it stays on the device
            return
        if (stream := self.streams.current()) != frame.stream:  # the layer computes on a stream of its own for a while
            frame.side_streams.add(stream)
            self.streams.record(source, D2H)
        self._send()
        self._unsent = (frame, kept, source, self.streams.mark(COMPUTE))

    def about_to_change(self, frame: Frame, tensor: torch.Tensor) -> None:
        """Preserve the present value of what is kept of `tensor`, which is about to be changed in place."""
        for index, source in list(frame.device.items()):
            if not torch._C._is_alias_of(source, tensor):
                continue
            unsent = self._unsent is not None and self._unsent[2] is source
            if not frame.resident and not unsent:
                # d2h may still read what compute is about to overwrite. The event is that of all copies so far; from the next
                # call on `changed_early` has one recorded behind this copy alone.
                frame.layout.changed_early.add(index)
                self.streams.wait(COMPUTE, frame.copied.get(index) or self.streams.mark(D2H))
                del frame.device[index]
                continue
            copy = frame.device[index] = source.clone()
            self._guard({index: copy}, frame.stream, D2H)
            frame.versions[index] = copy._version
            if unsent:
                self._unsent = (frame, frame.layout.kept[index], copy, self.streams.mark(COMPUTE))
            else:
                frame.changed.add(index)

    def end(self, frame: Frame) -> None:
        """Close a frame: its layer has run."""
        self._send()
        if frame.resident:
            frame.move("done")
            return
        frame.sent = self.streams.mark(D2H)
        frame.move("swapping")
        self._stack.append(FrameRef(frame))
        self._leaving.append(weakref.ref(frame))
        if frame.block is not None:
            self.home.takes(frame)

    def let_go_but(self, frames: int) -> None:
        """Free the device memory of all but the latest frames on their way out; compute waits for their copies."""
        while len(self._leaving) > frames:
            self._let_go(self._leaving.popleft()())

    def abort(self, frame: Frame) -> None:
        """Drop a frame once its copies are over: its layer raised, or it has no backward."""
        self._unsent = None
        if frame.stored:  # d2h may still read the device memory and write to the block, which both are freed here
            self.streams.wait(COMPUTE, self.streams.mark(D2H))
        frame.device.clear()
        frame.free_blocks(self.slab)
        frame.move("done")

    # ---- backward

    def bring_back(self, frame: Frame, then: Frame | None = None, again: bool = False) -> None:
        """Make a frame ready for its replay, and issue the reload of the frame below it.

        Args:
            then: the frame to reload instead.
            again: True if this backward will ask for `frame` once more.

        Raises:
            MemoError: the engine is closed, the layer's forward is not over, a kept tensor was changed in place, or the device
                has no memory for the buffer.
        """
        if self._closed:
            raise MemoError(
                f"frame {frame.name} is wanted by a backward after ds_memo was detached; detach after the last backward"
            )
        if frame.state == "recording":
            raise MemoError(
                f"layer {frame.name} runs a backward of its own (autograd.grad) inside its forward, before it can be replayed. "
                "Leave it out: ds_memo.attach(model, config, layers=[…])"
            )
        self.home.backward_comes()
        self.drain()
        self.let_go_but(0)
        self._let_go(frame)  # it is still there only if its tensors were changed in place: the error is raised again
        if frame.state == "returning" and frame.back is None:  # Ctrl-C came while its reload was issued
            self._send_away(frame)
        below = self._next_frames(frame) if then is None else [then]
        for ref in self._ahead:
            if (ahead := ref()) is not frame and ahead not in below:
                self._send_away(ahead)
        self._ahead = [ref for ref in self._ahead if ref() in below]
        if frame.resident:
            frame.check_unchanged()
            frame.move("ready")
        else:
            if frame.state in ("away", "done"):
                self.traffic.frames_on_demand += 1
                self._reload(frame)
            self.streams.wait(COMPUTE, frame.back)  # behind h2d's last copy to the buffer, which the replay reads
            self._guard(frame.slots, frame.buffer_stream, self.streams.current())
            for stream in frame.side_streams:  # the replay reads its part there
                self._record(frame.slots, stream)
            frame.move("ready")
        for later in below:
            if later.ahead and not later.resident and later.state in ("away", "done") and self.home.has(later):
                self.traffic.frames_prefetched += 1
                self._reload(later)
                self._ahead.append(weakref.ref(later))
        frame.replays += not again
        self.home.read_ahead(frame)

    def keep_late(self, frame: Frame, kept: Kept, tensor: torch.Tensor) -> None:
        """Store a tensor that the forward has left out, which compute has just produced, until `drop_late`.

        Raises:
            MemoError: the host has no room for it.
        """
        self.drop_late(frame)  # of a backward that has raised
        source = kept.laid(tensor.detach())
        block = frame.late[kept.index] = self.slab.allocate(kept.nbytes, f"frame {frame.name}, whose input was computed again,")
        self.streams.wait(D2H, self.streams.mark(COMPUTE))  # behind the kernel that has written it
        for memory, begin, at, nbytes in block.parts(0, kept.nbytes):
            self.streams.copy(D2H, memory, source, nbytes, begin, at)
        frame.sent_late = self.streams.mark(D2H)
        frame.stored.add(kept.index)
        self.traffic.bytes_to_host += kept.nbytes
        self._late.append((source, frame.sent_late))
        self.let_go_late_but(1)

    def let_go_late_but(self, tensors: int) -> None:
        """Free the device memory of all but the latest tensors that were stored late; compute waits for their copies."""
        while len(self._late) > tensors:
            self.streams.wait(COMPUTE, self._late[0][1])  # d2h reads until then what compute's next allocation may be given
            self._late.popleft()

    def drop_late(self, frame: Frame) -> None:
        """Free the blocks of what was stored late. Compute has waited for the reloads from them, if any."""
        if frame.late:  # maybe before any reload, or, after Ctrl-C, without an event
            sent, frame.sent_late = frame.sent_late, None
            self.streams.wait(COMPUTE, sent or self.streams.mark(D2H))
            frame.free_late(self.slab)

    def replayed(self, frame: Frame) -> None:
        """Close the replay. From here on the buffer lives as long as the replayed tensors that refer to it."""
        frame.move("done")
        frame.slots.clear()

    def give_up(self, frame: Frame) -> None:
        """Close a frame after a backward, also after one that raised: its graph may be run again."""
        if frame.state == "ready":
            self.replayed(frame)
        self._send_away(frame)  # it may have come back without what the next backward wants first

    # ---- both

    def free_failed_graphs(self) -> None:
        """Free, before a training forward begins, the memory that a backward which raised still holds.

        Autograd's queue keeps nodes of such a graph, and so their frames, alive until another backward runs (PyTorch 2.11 to
        2.13, also with torch.utils.checkpoint). So if frames are alive, run an empty backward.
        """
        if any(ref() is not None for ref in self._stack):
            with torch.enable_grad():
                torch.ones((), device=self.device, requires_grad=True).clone().backward()
        self.drain()
        self._defer_lost()
        self.drain()

    def close(self) -> None:
        """Finish all copies and free the host memory. Frames that are still alive can no longer be replayed."""
        if self._closed:
            return
        try:
            self.home.close()
        finally:  # Ctrl-C came: wait again, for no block may be freed under a transfer
            self.home.close()
            self._close()

    def _close(self) -> None:
        self._unsent = None
        try:  # device memory and blocks are freed below, which copies in both directions may still use
            self.streams.wait(COMPUTE, self.streams.mark(D2H))
            self.streams.wait(COMPUTE, self.streams.mark(H2D))
            self._late.clear()
            for ref in self._stack:
                if (frame := ref()) is not None:
                    frame.device.clear()
                    frame.slots.clear()
                    frame.free_blocks(self.slab)
            self._closed = True  # not earlier: a frame that dies meanwhile, on any thread, must be deferred
            self._defer_lost()
            self.drain()
        finally:
            self._closed = True
            self.streams.close()
        self.slab.close()

    def _send(self) -> None:
        if self._unsent is None:
            return
        frame, kept, source, produced = self._unsent
        self._unsent = None
        self.streams.wait(D2H, produced)  # an event on compute: d2h must not read before the kernel has written
        frame.stored.add(kept.index)
        for memory, begin, at, nbytes in frame.block.parts(kept.host_offset, kept.stored_bytes):  # type: ignore[union-attr]
            self.streams.copy(D2H, memory, source, nbytes, begin, at)
        if kept.index in frame.layout.changed_early:
            frame.copied[kept.index] = self.streams.mark(D2H)
        self.traffic.bytes_to_host += kept.stored_bytes

    def _let_go(self, frame: Frame | None) -> None:
        if frame is None or frame.state != "swapping":
            return
        self.streams.wait(COMPUTE, frame.sent)  # the memory goes back to compute, and d2h reads it until then
        self._guard(frame.device, frame.stream, D2H)
        frame.check_unchanged()
        frame.device.clear()
        frame.move("away")

    def _reload(self, frame: Frame) -> None:
        self.home.fetch(frame)
        wanted, nbytes = frame.layout.kept, frame.layout.buffer_bytes
        if frame.first_only and len(wanted) > 1:
            wanted, nbytes = wanted[:1], wanted[1].buffer_offset
        try:
            buffer = frame.layout.new_buffer(nbytes, self.device)
        except RuntimeError as refusal:  # torch.OutOfMemoryError is one; callers look for its text
            raise MemoError(
                f"device memory: frame {frame.name} needs a buffer of {nbytes / GIB:.3g} GiB to come back; "
                f"{refusal}. Lower memo.resident_layers, memo.device_memory_gib or the batch."
            ) from refusal
        frame.back, frame.buffer_stream = None, self.streams.current()
        frame.move("returning")
        # The allocator gave the buffer memory that work on compute may still read: h2d writes behind it.
        self.streams.wait(H2D, self.streams.mark(COMPUTE))
        if frame.late:
            self.streams.wait(H2D, frame.sent_late or self.streams.mark(D2H))  # d2h has written what h2d reads
        for kept in wanted:
            if kept.index not in frame.stored:  # the call left its recipe before it was kept
                continue
            slot = frame.slots[kept.index] = kept.slot_in(buffer)
            block, first, stored = frame.lies_in(kept)
            for memory, begin, at, nbytes in block.parts(first, stored):
                self.streams.copy(H2D, slot, memory, nbytes, at, begin)
            self.traffic.bytes_from_host += stored
        frame.back = self.streams.mark(H2D)

    def _send_away(self, frame: Frame | None) -> None:
        """Drop the buffer of a frame that was reloaded ahead but is not next after all. Otherwise there would be three."""
        if frame is not None and frame.state == "returning":
            # The buffer's memory goes back to compute, and h2d may still write to it.
            self.streams.wait(COMPUTE, frame.back or self.streams.mark(H2D))
            self._guard(frame.slots, frame.buffer_stream, H2D)
            frame.slots.clear()
            frame.move("away")

    def _guard(self, tensors: Mapping[int, torch.Tensor], allocated_on: Any, used_on: Any) -> None:
        """Protect tensors whose memory goes back to another stream than compute's present one, which has waited for its users."""
        if self.streams.current() != allocated_on:
            self._record(tensors, used_on)

    def _record(self, tensors: Mapping[int, torch.Tensor], stream: Any) -> None:
        for tensor in tensors.values():
            self.streams.record(tensor, stream)

    def _next_frames(self, frame: Frame) -> list[Frame]:
        """Return the frames to reload during the backward of this one: the next below it, and where both come small one more.

        So no more bytes are on the device than two buffers take.
        """
        below = self._next_below(frame)
        after = self._next_below(below) if below is not None and frame.comes_small and below.comes_small else None
        return [found for found in (below, after) if found is not None]

    def _next_below(self, frame: Frame) -> Frame | None:
        """Return the youngest older frame that backward has reached as often as this one, if any."""
        self._forget_dead()
        stack, age = self._stack, frame.age
        top = len(stack)
        if top and stack[-1].age > age:  # else it is the youngest, or resident
            top = bisect_left(stack, age, key=attrgetter("age"))
        for at in range(top - 1, -1, -1):
            below = stack[at]()
            if below is not None and below is not frame and below.replays == frame.replays:
                return below
        return None

    def _forget_dead(self) -> None:
        while self._stack and self._stack[-1]() is None:
            self._stack.pop()

    def _defer(self, frame: Frame) -> None:
        """Keep the memory of a frame that was garbage-collected, on any thread, until its copies are over.

        It must not wait, since it may run on a copy thread. `_drain` waits, on the compute stream.
        """
        held = frame.block is not None or frame.filed is not None or frame.late
        if not self._closed and (held or frame.state == "returning"):
            memory = frame.device, frame.slots, frame.stream, frame.buffer_stream
            late = [*frame.late.values()], frame.sent_late
            self._pending.append(PendingFree(frame.block, frame.state, frame.sent, frame.back, *memory, frame.filed, *late))

    def _defer_lost(self) -> None:
        """Defer blocks of frames that died without `_defer`: Ctrl-C inside a destructor, whose exceptions Python ignores."""
        pending = list(self._pending)
        alive = [frame for ref in self._stack if (frame := ref()) is not None]
        held = {one.block for one in pending} | {frame.block for frame in alive}
        held.update(*(one.late for one in pending), *(frame.late.values() for frame in alive))
        lost = [block for block in self.slab.blocks if block not in held]
        for block in lost:
            self.traffic.blocks_lost += 1
            self._pending.append(PendingFree(None, "returning"))  # copies of both directions may be under way
            self._pending.append(PendingFree(block, "recording"))
        self.home.free_lost([one.filed for one in pending] + [frame.filed for frame in alive], bool(lost))

    def drain(self) -> None:
        """Free the memory of dead frames whose copies are over, after making compute wait for them."""
        while self._pending:
            pending = self._pending.popleft()
            try:
                self._finish(pending)
            except BaseException:
                self._pending.appendleft(pending)
                raise
            for block in (pending.block, *pending.late):
                if block is not None:
                    self.slab.free(block)

    def make_room(self, enough: Callable[[], bool]) -> None:
        """Free blocks whose bytes are in files, until it is enough or none is left."""
        if not self._closed:
            self.home.make_room(enough)

    def _finish(self, pending: PendingFree) -> None:
        """Make compute wait for the copies of a dead frame, and the host for its transfers."""
        # The copy stream may still use what is freed: d2h reads the device memory and writes to the block, h2d the other way.
        if pending.state in ("recording", "swapping"):
            self.streams.wait(COMPUTE, pending.sent or self.streams.mark(D2H))
        elif pending.state == "returning":
            self.streams.wait(COMPUTE, pending.back or self.streams.mark(H2D))
        if pending.late:
            self.streams.wait(COMPUTE, pending.sent_late or self.streams.mark(D2H))
        self._guard(pending.device, pending.stream, D2H)
        self._guard(pending.slots, pending.buffer_stream, H2D)
        if pending.filed is not None:
            self.home.forget(pending.filed)
