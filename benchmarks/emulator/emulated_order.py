"""Accesses to overlapping bytes that nothing orders, found by vector clocks over the calls of an emulated process.

    with Unordered() as found:
        step()
    found.races         # pairs of accesses, in words

Each stream has a clock of the steps of all streams that are over before its next command. An event carries the clock of the
stream that it was recorded on. A stream that waits for it takes that clock over. So does the host when it waits for the event, or
asks and hears that it is over. A command also comes after all that the host knew when it issued it.

Copies over the link come from the emulator, with their addresses. Ops come from a dispatch mode, with the memory of their
arguments and results. Memory that copies have read or written counts, once freed, as written by the stream that it was allocated
on: the allocator may hand it out there at once. If the tensor was recorded on another stream, it does not. Then only the accesses
of the next owner count, as for memory that no copy has seen.

Exchanges of emulated ranks (emulated_ranks.py) are commands of their own streams, which read and write like copies.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import emulated_ranks
from benchmarks.emulated_calls import Call, Calls, caller
from benchmarks.emulated_time import run_inside
from ds_memo.estimate.kernels import FREE
from ds_memo.remat.op_policy import written_tensors

HOST = -1
VectorClock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Access:
    stream: int
    step: int
    write: bool
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} on stream {self.stream:#x}, step {self.step} ({self.what})"


class Memory:
    """The latest access of each stream to each byte, reads and writes apart."""

    def __init__(self) -> None:
        self._borders: list[int] = []
        self._latest: dict[int, dict[tuple[int, bool], Access]] = {}  # from this border to the next

    def ranges(self, begin: int, end: int) -> list[dict[tuple[int, bool], Access]]:
        """Return the parts that the bytes from `begin` to `end` consist of; an access is added to each."""
        first, last = self._cut(begin), self._cut(end)
        return [self._latest[border] for border in self._borders[first:last]]

    def _cut(self, at: int) -> int:
        index = bisect_left(self._borders, at)
        if index == len(self._borders) or self._borders[index] != at:
            self._latest[at] = dict(self._latest[self._borders[index - 1]]) if index else {}
            self._borders.insert(index, at)
        return index


class Unordered(TorchDispatchMode):
    """The checker described at the top of this file. Until it is entered it sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.races: dict[str, None] = {}
        """Pairs of accesses, each once."""
        self.checked = 0
        """Pairs of accesses of two streams to the same bytes, at least one of them a write."""
        self._clocks: dict[int, VectorClock] = {HOST: {}}
        self._events: dict[int, VectorClock] = {}
        self._memory = Memory()
        self._allocated_on: dict[int, int] = {}  # address of a living StorageImpl → stream
        self._recorded: set[int] = set()
        self._copied: list[int] = []
        """Addresses that copies began at, in order."""
        self._died: deque[tuple[int, int, int]] = deque()
        self._calls = ExitStack()

    def __enter__(self) -> Unordered:
        self._calls.enter_context(Calls(self._called))
        emulated_ranks.listeners.append(self._exchanged)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        emulated_ranks.listeners.remove(self._exchanged)
        self._calls.close()
        self._free_dead()

    def __str__(self) -> str:
        told = f"{self.checked:,} pairs of accesses on two streams, {len(self.races)} that nothing orders"
        return "\n".join([told, *self.races])

    # ---- order

    def _called(self, call: Call) -> None:
        self._free_dead()
        if call.name == "cudaEventRecord":
            self._events[call.what] = dict(self._clock(call.stream))
        elif call.name == "cudaStreamWaitEvent":
            _join(self._clock(call.stream), self._events.get(call.what, {}))
        elif call.name in ("cudaEventSynchronize", "cudaEventQuery"):
            _join(self._clocks[HOST], self._events.get(call.what, {}))
        elif call.name in ("cudaStreamSynchronize", "cudaStreamQuery"):
            _join(self._clocks[HOST], self._clock(call.stream))
        elif call.name in ("cudaDeviceSynchronize", "cudaFree"):
            for clock in list(self._clocks.values()):
                _join(self._clocks[HOST], clock)
        elif call.name in ("cudaMemcpyAsync", "cudaMemcpy"):
            what = f"copy of {call.amount} bytes, {' '.join(caller())}"
            source, target = ((at, at + call.amount) for at in (call.source, call.what))
            for at in (call.source, call.what):
                insort(self._copied, at)
            self._command(call.stream, [source], [target], what)
            if call.name == "cudaMemcpy":
                _join(self._clocks[HOST], self._clock(call.stream))

    def _exchanged(self, stream: int, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        reads, writes = map(_span, filter(_on_device, read)), map(_span, filter(_on_device, written))
        spans = [*reads], [*writes]
        for begin, _ in (*spans[0], *spans[1]):
            insort(self._copied, begin)
        self._command(stream, *spans, f"exchange, {' '.join(caller())}")

    def _clock(self, stream: int) -> VectorClock:
        """Return a stream's clock, which has all that the host knows."""
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[HOST])
        return clock

    # ---- accesses

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self._free_dead()
        if func.namespace == "ds_memo":
            return run_inside(self, func, args, kwargs)
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if _on_device(x)]
        if func is torch.ops.aten.record_stream.default:
            self._recorded.add(args[0].untyped_storage()._cdata)
            return out
        older = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tree_leaves(out) if _on_device(x) and x.untyped_storage()._cdata not in older]
        written = written_tensors(func, args, kwargs) if func._schema.is_mutable else []
        if func.is_view or func._overloadpacket in FREE:
            given = written = []
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:  # the emulator tells of it
            return out
        if not (given or made):
            return out
        stream = torch.cuda.current_stream().cuda_stream
        for tensor in made:
            self._follow(tensor, stream)
        written = [*made, *(x for x in written if _on_device(x))]
        self._command(stream, map(_span, given), map(_span, written), f"{func}, {' '.join(caller())}")
        return out

    def _command(self, stream: int, reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]], what: str) -> None:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        for write, spans in ((False, reads), (True, writes)):
            for begin, end in spans:
                self._access(clock, Access(stream, clock[stream], write, what), begin, end)

    def _access(self, clock: VectorClock, access: Access, begin: int, end: int) -> None:
        for latest in self._memory.ranges(begin, end):
            for earlier in latest.values():
                if earlier.stream != access.stream and (earlier.write or access.write):
                    self.checked += 1
                    if earlier.step > clock.get(earlier.stream, 0):
                        self.races[f"nothing orders {access} behind {earlier}"] = None
            latest[access.stream, access.write] = access

    # ---- lifetimes

    def _follow(self, tensor: torch.Tensor, stream: int) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._allocated_on:
            self._allocated_on[key] = stream
            weakref.finalize(storage, self._dies, key, storage.data_ptr(), storage.nbytes()).atexit = False

    def _dies(self, key: int, begin: int, nbytes: int) -> None:
        """Note it alone: this may run inside any other method."""
        stream = self._allocated_on.pop(key)
        if key in self._recorded:
            self._recorded.discard(key)
        else:
            self._died.append((stream, begin, begin + nbytes))

    def _free_dead(self) -> None:
        while self._died:
            stream, begin, end = self._died.popleft()
            first, last = (bisect_left(self._copied, at) for at in (begin, end))
            if first < last:
                del self._copied[first:last]
                self._command(stream, (), [(begin, end)], "freed")


def _join(clock: VectorClock, other: VectorClock) -> None:
    for stream, step in other.items():
        if step > clock.get(stream, 0):
            clock[stream] = step


def _on_device(x: Any) -> bool:
    return torch.is_tensor(x) and x.is_cuda and x.layout is torch.strided and x.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor's elements lie between."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
