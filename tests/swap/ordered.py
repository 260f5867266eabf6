"""A happens-before checker for the swap engine's schedule.

`OrderedStreams` stands in for any `Streams`. It keeps one vector clock per stream. For every storage that a copy touches, it
keeps which stream read or wrote which bytes at which step. Two accesses to the same bytes, at least one of them a write, must be
ordered by an event that was waited for. That they ran one after the other by chance does not count. So the first run on a CPU
shows a missing wait.

Compute's accesses come from a dispatch mode, one step per op, and from three rules about memory that only compute's order
governs. All three count as writes by compute: an allocation; the release of a storage's last tensor, since its next owner may
write there at once; and the allocation or release of a host block.

    checker = OrderedStreams()
    with checker:                      # sees compute's ops
        engine = SwapEngine(checker, checker.watch(HostSlab(...)), device)
        ...
    checker.verify()                   # raises what destructors found: a storage that died too early
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_memo.remat.op_policy import written_tensors
from ds_memo.swap.host_slab import Block, HostSlab
from ds_memo.swap.streams import COMPUTE, D2H, H2D, Streams, bytes_of

Clock = dict[str, int]
"""Finished steps of each stream."""


class OrderError(AssertionError):
    """Two accesses to the same bytes that no event orders."""


class Immediate:
    """Streams that copy at once, so that no queue keeps a tensor alive which the engine has dropped."""

    def mark(self, stream: str) -> str:
        return stream

    def wait(self, stream: str, event: str) -> None: ...

    def done(self, event: str) -> bool:
        return True

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        bytes_of(dst, dst_at, nbytes).copy_(bytes_of(src, src_at, nbytes))

    def current(self) -> None:
        return None

    def stall_s(self) -> dict[str, float]:
        return {D2H: 0.0, H2D: 0.0}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Access:
    stream: str
    step: int
    write: bool
    begin: int
    end: int
    """Bytes of the storage, end excluded."""
    label: str

    def conflicts_with(self, other: Access) -> bool:
        return (self.write or other.write) and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        verb = "write" if self.write else "read"
        return f"{self.stream} step {self.step}: {verb} of bytes {self.begin}..{self.end} ({self.label})"


@dataclass
class History:
    """The accesses to one storage."""

    copies: list[Access] = field(default_factory=list)
    compute: dict[tuple[bool, int, int], Access] = field(default_factory=dict)
    """The latest of each kind and range. An access that comes after it comes after the earlier ones too."""


class Event:
    def __init__(self, stream: str, inner: Any, clock: Clock) -> None:
        self.stream = stream
        self.inner = inner
        self.clock = clock


class OrderedStreams(TorchDispatchMode):
    """The checker described at the top of this file.

    Args:
        inner: the streams that copy. Streams with a queue (threads) keep sources alive a little longer, which may hide an early
            release.
    """

    def __init__(self, inner: Streams | None = None) -> None:
        super().__init__()
        self.inner = inner or Immediate()
        self.violations: list[str] = []
        self.checked = 0
        """Pairs of accesses that were checked."""
        self._clocks: dict[str, Clock] = {stream: defaultdict(int) for stream in (COMPUTE, D2H, H2D)}
        self._histories: dict[int, History] = {}  # address of a living StorageImpl → its past
        self._paused = 0
        self._late: deque[str] = deque()

    # ---- Streams

    def mark(self, stream: str) -> Event:
        self.verify()
        return Event(stream, self.inner.mark(stream), dict(self._clocks[stream]))

    def wait(self, stream: str, event: Event) -> None:
        self.inner.wait(stream, event.inner)
        clock = self._clocks[stream]
        for other, step in event.clock.items():
            clock[other] = max(clock[other], step)
        self.verify()

    def done(self, event: Event) -> bool:
        return self.inner.done(event.inner)

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        self.verify()
        self._step(stream)
        self._paused += 1
        try:
            self._access(stream, bytes_of(src, src_at, nbytes), False, "copy")
            self._access(stream, bytes_of(dst, dst_at, nbytes), True, "copy")
            self.inner.copy(stream, dst, src, nbytes, dst_at, src_at)
        finally:
            self._paused -= 1

    def current(self) -> None:
        return None

    def stall_s(self) -> dict[str, float]:
        return self.inner.stall_s()

    def close(self) -> None:
        self.inner.close()

    # ---- compute

    def watch(self, slab: HostSlab) -> HostSlab:
        """Follow the blocks of a slab. Return the slab."""
        allocate, free = slab.allocate, slab.free

        def watched_allocate(nbytes: int, wanted_by: str) -> Block:
            block = allocate(nbytes, wanted_by)
            self._step(COMPUTE)
            for piece in block.pieces:
                self._access(COMPUTE, piece.memory, True, f"block allocated for {wanted_by}")
            return block

        def watched_free(block: Block) -> None:
            self._step(COMPUTE)
            for piece in block.pieces:
                self._access(COMPUTE, piece.memory, True, "block freed")
            free(block)

        slab.allocate, slab.free = watched_allocate, watched_free
        return slab

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if func._schema.is_mutable:
            self._step(COMPUTE)
            written = written_tensors(func, args, kwargs)
            for tensor in given:
                self._access(COMPUTE, tensor, any(tensor is other for other in written), str(func))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        old = {_key(tensor) for tensor in given}
        made = _tensors(out)
        new = [tensor for tensor in made if _key(tensor) not in old]
        if made and not new:
            return out  # a view: nothing was touched
        self._step(COMPUTE)
        for tensor in given:
            self._access(COMPUTE, tensor, False, str(func))
        for tensor in new:
            self._access(COMPUTE, tensor, True, str(func))
        return out

    def verify(self) -> None:
        """Raise what was found while memory was being freed."""
        if self._late:
            raise OrderError(self._late.popleft())

    # ---- inside

    def _step(self, stream: str) -> None:
        self._clocks[stream][stream] += 1

    def _access(self, stream: str, tensor: torch.Tensor, write: bool, label: str) -> None:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return
        begin = tensor.storage_offset() * tensor.itemsize
        span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        access = Access(stream, self._clocks[stream][stream], write, begin, begin + span * tensor.itemsize, label)
        history = self._history(tensor)
        clock = self._clocks[stream]
        others = history.copies if stream == COMPUTE else [*history.copies, *history.compute.values()]
        for earlier in others:
            if earlier.stream != stream and earlier.conflicts_with(access):
                self.checked += 1
                if earlier.step > clock[earlier.stream]:
                    self._found(earlier, access)
        if stream == COMPUTE:
            history.compute[write, access.begin, access.end] = access
        else:
            history.copies.append(access)

    def _found(self, earlier: Access, later: Access) -> None:
        message = f"nothing orders {later} behind {earlier}"
        self.violations.append(message)
        raise OrderError(message)

    def _history(self, tensor: torch.Tensor) -> History:
        storage = tensor.untyped_storage()
        key = storage._cdata
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History()
            weakref.finalize(storage, self._died, key).atexit = False
        return history

    def _died(self, key: int) -> None:
        history = self._histories.pop(key)
        clock = self._clocks[COMPUTE]
        for access in history.copies:
            if access.step > clock[access.stream]:
                message = f"memory was freed by compute step {clock[COMPUTE]}, and nothing orders that behind {access}"
                self.violations.append(message)
                self._late.append(message)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors that an op takes or returns. torch's own pytrees take as long as all the rest here."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]
