"""The streams: order within one, waits between them, failures, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque

import pytest
import torch

from ds_memo.errors import MemoError
from ds_memo.swap.streams import COMPUTE, D2H, H2D, CudaStreams, ThreadStreams, streams_for
from tests.swap.delayed import DelayedStreams

LONG_S = 30.0
"""Seconds. A test that waits this long hangs."""


class HeldStreams(ThreadStreams):
    """Streams whose copy threads pause until `release()` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = {name: threading.Event() for name in (D2H, H2D)}
        for name, gate in self.gates.items():
            self._queues[name].put((gate.wait, LONG_S))

    def release(self, *names: str) -> None:
        for name in names or self.gates:
            self.gates[name].set()


@pytest.fixture
def held():
    streams = HeldStreams()
    yield streams
    streams.release()
    streams.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def alive(streams: ThreadStreams) -> list[bool]:
    return [thread.is_alive() for thread in streams._threads]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LONG_S)
    return not any(thread.is_alive() for thread in threads)


# ---- both implementations


def test_there_and_back(device):
    streams = streams_for(device)
    source = torch.randn(1000, device=device)
    host = torch.empty(1000, pin_memory=device.type == "cuda")
    target = torch.empty(1000, device=device)
    streams.wait(D2H, streams.mark(COMPUTE))
    streams.copy(D2H, host, source, 4000)
    streams.wait(H2D, streams.mark(D2H))
    streams.copy(H2D, target, host, 4000)
    streams.wait(COMPUTE, streams.mark(H2D))
    assert torch.equal(target, source)
    assert streams.stall_s().keys() == {D2H, H2D}
    assert all(seconds >= 0 for seconds in streams.stall_s().values())
    streams.close()


def test_copies_of_one_stream_keep_their_order(device):
    streams = streams_for(device)
    host = torch.zeros(50_000, pin_memory=device.type == "cuda")
    sources = [torch.full((50_000,), float(value), device=device) for value in range(20)]
    streams.wait(D2H, streams.mark(COMPUTE))
    for source in sources:
        streams.copy(D2H, host, source, host.nbytes)
    streams.wait(COMPUTE, streams.mark(D2H))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert host.unique().tolist() == [19.0]
    streams.close()


def test_a_device_without_streams_is_refused():
    with pytest.raises(MemoError, match="cuda and cpu devices; the layers are on xpu"):
        streams_for(torch.device("xpu"))


def test_rocm_is_refused(monkeypatch):
    """Its devices are called cuda, too."""
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    with pytest.raises(MemoError, match=r"the layers are on cuda:0 of ROCm 7\.0\.2"):
        streams_for(torch.device("cuda", 0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_waits_for_a_busy_compute_stream():
    streams = CudaStreams(torch.device("cuda"))
    source = torch.zeros(1 << 20, device="cuda")
    host = torch.empty(1 << 20, pin_memory=True)
    torch.cuda._sleep(200_000_000)
    source.add_(1)
    streams.wait(D2H, streams.mark(COMPUTE))
    streams.copy(D2H, host, source, host.nbytes)
    streams.wait(COMPUTE, streams.mark(D2H))
    source.zero_()
    torch.cuda.synchronize()
    assert host.unique().tolist() == [1.0]
    assert streams.stall_s()[D2H] > 0
    streams.close()


class _Event:
    """A GPU event `at` seconds after its stream began; None: it has not completed."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: _Event) -> float:
        return (later.at - self.at) * 1e3


def test_asking_how_long_compute_waited_does_not_wait_for_the_device(monkeypatch):
    """Training reads it every few steps. After a wait the GPU would be idle until Python has issued more work."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the device was waited for"))
    streams = CudaStreams.__new__(CudaStreams)
    streams._stall = {D2H: 0.0, H2D: 0.0}
    after = _Event(None)
    streams._waits = deque([(D2H, _Event(1.0), _Event(1.5)), (H2D, _Event(2.0), after)])
    assert streams.stall_s() == {D2H: 0.5, H2D: 0.0}
    after.at = 4.0
    assert streams.stall_s() == {D2H: 0.5, H2D: 2.0}


# ---- threads


def test_a_stream_waits_for_what_it_is_told_to_alone(held):
    source, host, target, other = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.zeros(4)
    held.copy(D2H, host, source, 16)
    sent = held.mark(D2H)
    assert not sent.done.is_set() and host.tolist() == [0.0] * 4, "compute goes on"
    held.copy(H2D, other, source, 16)
    unasked = held.mark(H2D)
    held.wait(H2D, sent)
    held.copy(H2D, target, host, 16)
    back = held.mark(H2D)
    held.release(H2D)
    held.wait(COMPUTE, unasked)
    assert other.tolist() == [1.0] * 4 and not sent.done.is_set()
    time.sleep(0.02)
    assert not back.done.is_set(), "h2d overtook the d2h it was told to wait for"
    held.release(D2H)
    held.wait(COMPUTE, back)
    assert target.tolist() == [1.0] * 4


def test_waiting_counts_as_stall(held):
    held.copy(D2H, torch.zeros(4), torch.ones(4), 16)
    event = held.mark(D2H)
    wait = event.done.wait
    event.done.wait = lambda: (threading.Timer(0.05, held.release).start(), wait())  # no earlier than compute waits
    held.wait(COMPUTE, event)
    stall = held.stall_s()
    assert stall[D2H] > 0.02
    assert stall[H2D] == 0.0


@pytest.mark.parametrize("stream", [D2H, H2D])
def test_a_copy_that_fails_raises_where_compute_waits(stream, monkeypatch):
    """For whatever it waits: the error names the stream that it happened on."""
    streams = ThreadStreams()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", _fail)
        streams.copy(stream, torch.zeros(4), torch.zeros(4), 16)
        streams.mark(stream).done.wait(LONG_S)
    for other in (stream, D2H, H2D):
        with pytest.raises(MemoError, match=f"a copy on the {stream} stream failed") as caught:
            streams.wait(COMPUTE, streams.mark(other))
        assert caught.value.__cause__ is not None
    assert all(alive(streams)), "a failed copy must not end the thread: later waits would hang"
    streams.close()


def _fail(*arguments):
    raise RuntimeError("no")


def test_a_copy_without_memory_is_refused_and_does_no_harm():
    """The error is the caller's alone: what was issued before and comes later is copied."""
    streams, pairs = ThreadStreams(), [(torch.zeros(4), torch.ones(4)) for _ in range(2)]
    streams.copy(D2H, *pairs[0], 16)
    with pytest.raises(MemoError, match="a tensor has no memory"):
        streams.copy(D2H, torch.zeros(4), torch.zeros(4, device="meta"), 16)
    streams.copy(D2H, *pairs[1], 16)
    streams.wait(COMPUTE, streams.mark(D2H))
    assert all(torch.equal(host, source) for host, source in pairs)
    streams.close()


def test_close_finishes_what_was_issued_and_ends_the_threads():
    streams = DelayedStreams(0, delays_s=(2e-3,))
    assert all(thread.daemon for thread in streams._threads), "they do not keep the process"
    pairs = [(torch.zeros(8), torch.full((8,), float(n))) for n in range(10)]
    for host, source in pairs:
        streams.copy(D2H, host, source, 32)
    streams.close()
    assert all(torch.equal(host, source) for host, source in pairs)
    assert alive(streams) == [False, False]
    streams.close()
    with pytest.raises(MemoError, match="closed"):
        ThreadStreams.copy(streams, D2H, torch.zeros(1), torch.zeros(1), 4)
    with pytest.raises(MemoError, match="closed"):
        streams.wait(COMPUTE, streams.mark(D2H))


@pytest.mark.parametrize("cycle", [False, True])
def test_an_abandoned_object_ends_its_threads(cycle):
    streams = ThreadStreams()
    host, source = torch.zeros(8), torch.ones(8)
    streams.copy(D2H, host, source, 32)
    threads, gone = streams._threads, weakref.ref(streams)
    if cycle:
        streams.cycle = streams
    del streams
    if cycle:
        gc.collect()
    assert gone() is None, "its threads keep it alive"
    assert ended(threads)
    assert torch.equal(host, source), "what was issued is still done"


def test_a_forked_process_has_no_threads() -> None:
    """It gets an error. Else it would wait for ever."""
    streams = ThreadStreams()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = b"nothing"
        with contextlib.suppress(BaseException):
            try:
                streams.copy(D2H, torch.empty(1), torch.ones(1), 4)
            except MemoError as error:
                said = str(error).encode()
        os.write(writer, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"in a process forked from the one that made it" in os.read(reader, 1000)
    os.close(reader), os.close(writer)
    target = torch.zeros(1)
    streams.copy(D2H, target, torch.ones(1), 4)
    streams.wait(COMPUTE, streams.mark(D2H))
    assert target.item() == 1
    streams.close()


AT_EXIT = """
import threading, weakref
last = lambda: print([thread.name for thread in threading.enumerate() if "ds_memo" in thread.name])
weakref.finalize(last, last)  # made first, so it runs last
import torch
from ds_memo.swap.streams import ThreadStreams
streams, source = ThreadStreams(), torch.ones(1 << 24)
target = torch.empty_like(source)
for _ in range(50):
    streams.copy("d2h", target, source, source.nbytes)
streams.mark("d2h")
"""


@pytest.mark.processes
def test_copies_under_way_at_exit_end_before_the_interpreter() -> None:
    """A thread that was still in PyTorch's code then aborted the process, one time in ten."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
