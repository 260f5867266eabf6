"""The three streams of ds_memo.swap.stream_protocol, on CUDA and on a CPU.

`compute` runs the model; `d2h` and `h2d` run copies, each in the order of issue. On CUDA they are CUDA streams. On a CPU, compute
is the calling thread and the other two are real threads, so that tests can provoke every ordering bug without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ds_memo.errors import MemoError
from ds_memo.swap.stream_protocol import COMPUTE, D2H, H2D, Streams


def streams_for(device: torch.device) -> Streams:
    if device.type == "cuda" and torch.version.hip is None:
        return CudaStreams(device)
    if device.type in ("cpu", "meta"):
        return ThreadStreams()
    rocm = f" of ROCm {torch.version.hip}, where nothing was tried" if device.type == "cuda" else ""
    raise MemoError(f"ds_memo swaps on cuda and cpu devices; the layers are on {device}{rocm}. Train there without memo")


def use_device_of(streams: Streams) -> None:
    """Have a new thread call CUDA on the device of these streams.

    A thread begins on device 0. If it queries or frees an event there, CUDA makes a context of half a GiB on that device, and
    Python stands still meanwhile.
    """
    if isinstance(streams, CudaStreams):
        torch.cuda.set_device(streams.device)


_Copy = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""Tensors that must live until the copy is over, the number of bytes, and the addresses to copy to and from."""


class _ThreadEvent:
    __slots__ = ("done", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.done = threading.Event()


_CLOSED = "after the swap engine was closed, or in a process forked from the one that made it; attach the model there"
_DONE = _ThreadEvent(COMPUTE)
_DONE.done.set()


class ThreadStreams:
    """Streams of a CPU: compute is the calling thread; `d2h` and `h2d` are one daemon thread each.

    Passing work to another Python thread takes about 50 µs. So the next mark or wait hands over all copies since the last.
    """

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue] = {D2H: queue.SimpleQueue(), H2D: queue.SimpleQueue()}
        self._copies: dict[str, list[_Copy]] = {D2H: [], H2D: []}
        self._failures: list[tuple[str, BaseException]] = []
        self._stall = {D2H: 0.0, H2D: 0.0}
        self._threads = [
            threading.Thread(target=self._work, args=(name, q, self._failures), name=f"ds_memo-{name}", daemon=True)
            for name, q in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()
        # The threads refer to the queues only, so they end even if this object is never closed.
        self._stop = weakref.finalize(self, _stop, self._queues, self._copies, self._threads)
        _alive.add(self)

    @staticmethod
    def _work(name: str, work: queue.SimpleQueue, failures: list[tuple[str, BaseException]]) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while (item := work.get()) is not None:
            call, *args = item
            try:
                call(*args)
            except BaseException as failure:  # raised again in wait(), on the thread that can act on it
                failures.append((name, failure))
            del item, call, args  # an idle thread must not keep tensors alive

    def mark(self, stream: str) -> _ThreadEvent:
        if stream == COMPUTE:  # eager CPU ops are done when they return
            return _DONE
        event = _ThreadEvent(stream)
        self._hand_over(stream, event.done.set)
        return event

    def wait(self, stream: str, event: _ThreadEvent) -> None:
        if stream != COMPUTE:
            if not event.done.is_set():
                self._hand_over(stream, event.done.wait)
            return
        if not event.done.is_set():
            if not self._stop.alive:
                raise MemoError(f"waiting for a copy {_CLOSED}")
            begin = time.perf_counter()
            event.done.wait()
            self._stall[event.stream] += time.perf_counter() - begin
        if self._failures:
            stream, failure = self._failures[0]
            raise MemoError(f"a copy on the {stream} stream failed; look at the error behind this one: {failure!r}") from failure

    def done(self, event: _ThreadEvent) -> bool:
        return event.done.is_set()

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        if not self._stop.alive:
            raise MemoError(f"a copy was issued {_CLOSED}")
        # A tensor may have no memory (a wrapper, a fake). Here the error is the caller's alone. Had the copy failed on its
        # thread, every later wait would raise, also that of another model which shares the host memory.
        to, whence = dst.data_ptr(), src.data_ptr()
        if not (to and whence):
            raise MemoError(
                f"a copy between {dst.device} and {src.device}, where a tensor has no memory (a wrapper, a fake): leave its "
                "layer out of memo.layers"
            )
        # torch.jit.trace has tensors for numbers.
        self._copies[stream].append((dst, src, int(nbytes), int(to + dst_at), int(whence + src_at)))

    def _hand_over(self, stream: str, then: Callable[[], Any]) -> None:
        copies, self._copies[stream] = self._copies[stream], []
        self._queues[stream].put((_copy_all, copies, then))

    def current(self) -> None:
        return None

    def record(self, tensor: torch.Tensor, stream: Any) -> None: ...

    def stall_s(self) -> dict[str, float]:
        return dict(self._stall)

    def close(self) -> None:
        self._stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


_alive: weakref.WeakSet[ThreadStreams] = weakref.WeakSet()


def _forked() -> None:
    """Close all streams in a forked child, which has none of the threads."""
    for streams in _alive:
        streams._stop.detach()


os.register_at_fork(after_in_child=_forked)


def _copy_all(copies: list[_Copy], then: Callable[[], Any] = lambda: None) -> None:
    try:
        for _, _, nbytes, to, whence in copies:
            ctypes.memmove(to, whence, nbytes)
    finally:  # later waits would hang
        then()


_ending: list[threading.Thread] = []
"""Threads of streams and files that were closed or garbage-collected. They may still have copies to do."""


def finish_first(threads: list[threading.Thread]) -> None:
    """Have `finish_abandoned` wait for threads that are told to end."""
    _ending[:] = [*filter(threading.Thread.is_alive, _ending), *threads]


def _stop(
    queues: dict[str, queue.SimpleQueue],
    copies: dict[str, list[_Copy]],
    threads: list[threading.Thread],
) -> None:
    finish_first(threads)
    for stream, work in queues.items():
        work.put((_copy_all, copies[stream]))
        work.put(None)


def finish_abandoned(device: torch.device) -> None:
    """Wait for the copies of streams, and the transfers of files, that were never closed."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
    while _ending:
        _ending.pop().join()


def _join_ending() -> None:
    while _ending:
        _ending.pop().join(_LAST_S)


_LAST_S = 10.0
# At exit finalizers run in the opposite order, so this one is behind those that tell threads to end. A daemon thread that is
# still in PyTorch's code when the interpreter ends aborts the process ("terminate called without an active exception").
weakref.finalize(finish_first, _join_ending)


class _CudaEvent(torch.Event):
    """PyTorch's event in C++: a torch.cuda.Event takes twice as long to make and record."""

    stream: str


@functools.cache
def _copy_streams(device: torch.device) -> dict[str, torch.cuda.Stream]:
    """Return a device's copy streams, the same for all models and profiles of a process.

    CUDA has 32 pooled streams for each device, and hands them out in turns: one that is made late may be NCCL's.
    """
    return {D2H: torch.cuda.Stream(device), H2D: torch.cuda.Stream(device)}


@functools.cache
def _memcpy() -> Callable[..., int] | None:
    """Return cudaMemcpyAsync of the CUDA runtime that torch has loaded for all of the process; None: it hides its symbols."""
    try:
        memcpy = ctypes.CDLL(None).cudaMemcpyAsync
    except AttributeError:
        return None
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return memcpy


def bytes_of(tensor: torch.Tensor, at: int, nbytes: int) -> torch.Tensor:
    """Return a uint8 view of a tensor's memory, from byte `at` behind its first element on."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return memory.narrow(0, tensor.storage_offset() * tensor.itemsize + at, nbytes)


class CudaStreams:
    """Streams of CUDA: compute is the stream that is current at the call; `d2h` and `h2d` are two streams of our own.

    Every layer calls these methods a few dozen times. What takes torch long (its current stream, its stream context in Python,
    views of the bytes to copy) is kept or left out.
    """

    _MEASURED_AT_ONCE = 256

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # Objects of this model alone: a stream keeps, while it is entered, what to return to, and models may train in threads.
        self._copy_streams = {name: _same_stream(shared) for name, shared in _copy_streams(self.device).items()}
        self._memcpy = _memcpy()
        self._ways = {name: (kind, self._copy_streams[name].cuda_stream) for name, kind in ((H2D, 1), (D2H, 2))}
        """Last arguments of cudaMemcpyAsync: its cudaMemcpyKind, and the stream."""
        self._compute_streams: dict[int, torch.cuda.Stream] = {}
        """Those that were current so far, by their CUDA handle."""
        self._stall = {D2H: 0.0, H2D: 0.0}
        self._waits: deque[tuple[str, torch.Event, torch.Event]] = deque()
        self.noted: list[tuple[torch.Event, torch.Event]] | None = None
        """Where waits of compute are added, each with events before and behind it. None: nowhere."""

    def _compute(self) -> torch.cuda.Stream:
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self._compute_streams.get(handle)
        if stream is None:
            stream = self._compute_streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def mark(self, stream: str) -> _CudaEvent:
        event = _CudaEvent(self.device)
        event.stream = stream
        event.record(self._compute() if stream == COMPUTE else self._copy_streams[stream])
        return event

    def wait(self, stream: str, event: _CudaEvent) -> None:
        if stream != COMPUTE:
            event.wait(self._copy_streams[stream])
            return
        if event.query():  # what is issued from now on comes after it anyway; a wait would be timed as a stall
            return
        compute = self._compute()
        before, after = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        before.record(compute)
        event.wait(compute)
        after.record(compute)
        self._waits.append((event.stream, before, after))
        if self.noted is not None:
            self.noted.append((before, after))
        if len(self._waits) >= self._MEASURED_AT_ONCE:
            self._measure()

    def _measure(self) -> None:
        while self._waits and self._waits[0][2].query():
            stream, before, after = self._waits.popleft()
            self._stall[stream] += before.elapsed_time(after) * 1e-3

    def done(self, event: _CudaEvent) -> bool:
        return event.query()

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, dst_at: int = 0, src_at: int = 0) -> None:
        if (memcpy := self._memcpy) is None:
            with self._copy_streams[stream]:
                bytes_of(dst, dst_at, nbytes).copy_(bytes_of(src, src_at, nbytes), non_blocking=True)
        # The thread may be on another device: CUDA copies on the stream's.
        elif status := memcpy(dst.data_ptr() + dst_at, src.data_ptr() + src_at, nbytes, *self._ways[stream]):
            torch.cuda.check_error(status)

    def current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        # An event of the allocator on `stream` when the tensor is freed: only behind it the owner's stream gets the memory again.
        copies = self._copy_streams.get(stream)
        tensor.record_stream(copies or torch.cuda.ExternalStream(stream, self.device))

    def stall_s(self) -> dict[str, float]:
        self._measure()  # only what is over: training reads this now and then, and must not wait for the device
        return dict(self._stall)

    def close(self) -> None:
        for stream in self._copy_streams.values():  # the host is about to unlock memory that copies use
            stream.synchronize()


def _same_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return another object for the same stream of CUDA."""
    return torch.cuda.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
