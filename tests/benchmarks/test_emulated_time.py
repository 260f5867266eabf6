"""The emulator's clock, by CUDA's own calls and without torch; and what an op costs, on tensors without memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention as attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.emulated_process import compiled
from benchmarks.emulated_time import cost_s
from ds_memo.attention_kernel import CUDNN, FA3, FLASH
from ds_memo.estimate import hardware
from ds_memo.ops.library import cuda_headers

GB = 10**9
about = functools.partial(pytest.approx, abs=1e-4)
"""The host takes some microseconds for each launch."""


class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class Cuda:
    """Calls of the stand-in; times in seconds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.emulated_now.restype = ctypes.c_double
        library.emulated_host_waits.restype = ctypes.c_size_t
        library.emulated_links.argtypes = [ctypes.c_double] * 2
        library.emulated_floor.argtypes = [ctypes.c_double]
        library.emulated_driver.argtypes = [ctypes.c_double] * 3
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = library.cudaFree.argtypes = [ctypes.c_void_p]
        library.emulated_work.argtypes = [ctypes.c_void_p, ctypes.c_double]
        library.cudaLaunchKernel.argtypes = [ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        library.cudaMemsetAsync.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
        library.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        library.cudaStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
        library.cudaEventElapsedTime.argtypes = [ctypes.c_void_p] * 3
        for name in ("cudaEventQuery", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaStreamQuery"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        library.cudaEventRecord.argtypes = [ctypes.c_void_p] * 2
        library.emulated_links(float(GB), float(GB))
        self.device, self.host = self._memory("cudaMalloc"), self._memory("cudaHostAlloc", 0)

    def _memory(self, call: str, *more: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        assert getattr(self.library, call)(ctypes.byref(found), ctypes.c_size_t(4 * GB), *more) == 0
        return found

    def stream(self) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        assert self.library.cudaStreamCreateWithPriority(ctypes.byref(found), 0, 0) == 0
        return found

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        assert self.library.cudaEventCreate(ctypes.byref(found)) == 0
        self.library.cudaEventRecord(found, stream)
        return found

    def wait(self, stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        self.library.cudaStreamWaitEvent(stream, event, 0)

    def work(self, stream: ctypes.c_void_p, seconds: float) -> None:
        self.library.emulated_work(stream, seconds)

    def launch(self, stream: ctypes.c_void_p) -> None:
        self.library.cudaLaunchKernel(None, Dim3(1, 1, 1), Dim3(1, 1, 1), None, 0, stream)

    def to_host(self, stream: ctypes.c_void_p, nbytes: int, host: ctypes.c_void_p | None = None) -> None:
        self.library.cudaMemcpyAsync(host or self.host, self.device, nbytes, 2, stream)

    def to_device(self, stream: ctypes.c_void_p, nbytes: int) -> None:
        self.library.cudaMemcpyAsync(self.device, self.host, nbytes, 1, stream)

    def between(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        found = ctypes.c_float()
        self.library.cudaEventElapsedTime(ctypes.byref(found), first, second)
        return found.value * 1e-3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("no CUDA runtime headers: neither a toolkit nor the packages of a CUDA build of torch")
    return ctypes.CDLL(str(compiled(tmp_path_factory.mktemp("emulator"), headers)))


@pytest.fixture
def cuda(library: ctypes.CDLL) -> Iterator[Cuda]:
    yield (found := Cuda(library))
    library.emulated_floor(0.0)
    library.emulated_driver(0.0, 0.0, 0.0)
    library.cudaDeviceSynchronize()
    library.cudaFree(found.device)


def test_a_copy_beside_work_is_hidden_and_what_waits_for_it_is_not(cuda: Cuda) -> None:
    compute, copies = cuda.stream(), cuda.stream()
    began = cuda.event(compute)
    cuda.work(compute, 1.0)
    cuda.to_host(copies, 3 * GB)
    assert cuda.between(began, cuda.event(compute)) == about(1.0)
    cuda.wait(compute, cuda.event(copies))
    cuda.work(compute, 0.5)
    assert cuda.between(began, cuda.event(compute)) == about(3.5)


def test_each_direction_of_the_link_serves_one_copy_at_a_time(cuda: Cuda) -> None:
    first, second, back = cuda.stream(), cuda.stream(), cuda.stream()
    began = cuda.event(first)
    cuda.to_host(first, GB)
    cuda.to_host(second, GB)
    cuda.to_device(back, GB)
    ends = [cuda.between(began, cuda.event(stream)) for stream in (first, second, back)]
    assert ends == about([1.0, 2.0, 1.0])


def test_the_host_waits_where_cuda_makes_it_wait(cuda: Cuda) -> None:
    stream, library = cuda.stream(), cuda.library
    begin, waits = library.emulated_now(), library.emulated_host_waits()
    cuda.work(stream, 1.0)
    cuda.to_host(stream, GB)
    event = cuda.event(stream)
    assert library.cudaEventQuery(event) != 0 and library.cudaStreamQuery(stream) != 0
    assert library.emulated_now() == about(begin)
    library.cudaEventSynchronize(event)
    assert library.emulated_now() == about(begin + 2.0)
    assert library.emulated_host_waits() == waits + 1
    assert library.cudaEventQuery(event) == 0 and library.cudaStreamQuery(stream) == 0


FLOOR_S = 1e-4


def tiny_kernels_s(cuda: Cuda, kernels: int, seen: bool) -> float:
    """Return the seconds of kernels that do nearly nothing, queued behind one second of work.

    Args:
        seen: an op names their time; else they are launched, as Triton's are, and no op shows them.
    """
    stream = cuda.stream()
    cuda.work(stream, 1.0)
    began = cuda.event(stream)
    for _ in range(kernels):
        cuda.library.emulated_op()
        cuda.launch(stream)
        if seen:
            cuda.work(stream, 1e-9)
    return cuda.between(began, cuda.event(stream))


@pytest.mark.parametrize("seen", [True, False], ids=["ops", "Triton's"])
def test_a_step_of_many_tiny_kernels_takes_their_floors(cuda: Cuda, seen: bool) -> None:
    assert tiny_kernels_s(cuda, 1000, seen) < 0.02 * 1000 * FLOOR_S  # without them it is too short
    cuda.library.emulated_floor(FLOOR_S)
    assert tiny_kernels_s(cuda, 1000, seen) == pytest.approx(1000 * FLOOR_S, rel=1e-3)


def test_an_op_takes_its_time_or_the_floors_of_its_kernels(cuda: Cuda) -> None:
    cuda.library.emulated_floor(FLOOR_S)
    stream = cuda.stream()

    def op_s(seconds: float, kernels: int) -> float:
        cuda.work(stream, 1.0)
        began = cuda.event(stream)
        cuda.library.emulated_op()
        for _ in range(kernels):
            cuda.launch(stream)
        cuda.work(stream, seconds)
        return cuda.between(began, cuda.event(stream))

    close = functools.partial(pytest.approx, abs=1e-6)
    assert op_s(10 * FLOOR_S, 3) == close(10 * FLOOR_S)
    assert op_s(FLOOR_S / 2, 3) == close(3 * FLOOR_S)
    assert op_s(FLOOR_S / 2, 0) == close(FLOOR_S)  # a GEMM, whose launch the emulator does not see
    assert op_s(10 * FLOOR_S, 0) == close(10 * FLOOR_S)


# ---- costs


class Priced(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.machine = hardware.load("h200")
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seconds[func._schema.name.removeprefix("aten::")] = cost_s(func, args, kwargs or {}, result, self.machine)
        return result


def test_kernels_cost_their_flops_or_their_bytes() -> None:
    with FakeTensorMode(), Priced() as priced:
        x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
        x.t()
        x @ weight
        x + x.clone()
        x.narrow(0, 0, 4).sum()
        there = torch.empty(1024, 4096, dtype=torch.bfloat16)
        copied = cost_s(torch.ops.aten.copy_.default, (there, x), {}, there, priced.machine)
    machine, seen, nbytes = priced.machine, priced.seconds, 2 * 1024 * 4096
    moved = 1 / (machine.device_bandwidth * machine.device_bandwidth_efficiency)
    assert seen["mm"] == pytest.approx(2 * 1024 * 4096 * 4096 / (machine.peak * machine.gemm_efficiency))
    assert seen["clone"] == pytest.approx(2 * nbytes * moved) and seen["add"] == pytest.approx(3 * nbytes * moved)
    assert seen["empty"] == seen["t"] == seen["slice"] == 0
    assert copied == 0  # over the link, which is the emulator's matter


ROWS, WIDE = 1024, 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_products_costs_its_flops_and_the_bytes_of_the_sum(dtype: torch.dtype) -> None:
    machine, aten = hardware.load("h200"), torch.ops.aten
    with FakeTensorMode():
        dy, x = (torch.empty(ROWS, WIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        total = torch.empty(WIDE, WIDE, dtype=dtype, device="cuda")
        added, batches = (total, dy.t(), x), [t.unsqueeze(0) for t in (total, dy.t(), x)]
        calls = [(aten.addmm.out, added), (aten.addmm_.default, added), (aten.baddbmm_.default, batches)]
        calls += [(aten.addmm.dtype_out, (*added, dtype)), (aten.addmm.dtype, (*added, dtype))]
        found = {str(op): cost_s(op, args, {}, args[0], machine) for op, args in calls}
    flops_s = 2 * ROWS * WIDE * WIDE / (machine.peak * machine.gemm_efficiency)
    nbytes = 2 * dtype.itemsize * WIDE * WIDE  # read and written
    moved_s = nbytes / (machine.device_bandwidth * machine.device_bandwidth_efficiency)
    assert moved_s > 0.1 * flops_s  # it would not go unnoticed
    assert found == dict.fromkeys(found, pytest.approx(flops_s + moved_s))


@pytest.fixture
def active(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel behind PyTorch's flash ops."""
    if request.param == FA3:
        stand_in = SimpleNamespace(remove=lambda: None)
        monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: stand_in)
        attention.activate_flash_attention_impl("FA3")
    yield request.param
    attention.restore_flash_attention_impl(_raise_warn=False)


OPS = {
    "_scaled_dot_product_cudnn_attention": lambda q: (q, q, q, None, True, 0.0, True),
    "_scaled_dot_product_flash_attention": lambda q: (q, q, q, 0.0, True),
    "_flash_attention_forward": lambda q: (*[q.transpose(1, 2)] * 3, None, None, 2048, 2048, 0.0, True, False),
}


@pytest.mark.parametrize("active", [FLASH, FA3], indirect=True)
def test_each_op_of_attention_has_the_price_of_its_kernel(active: str) -> None:
    """A run that takes another kernel than it could shows it in its step."""
    with FakeTensorMode(), Priced() as priced:
        query = torch.empty(1, 4, 2048, 64, dtype=torch.bfloat16, device="cuda")
        for name, given in OPS.items():
            getattr(torch.ops.aten, name)(*given(query))
    flops, rates = 4 * 4 * 64 * 2048 * 2048 / 2, dict(priced.machine.attention_kernels)
    kernels = {name: CUDNN if "cudnn" in name else active for name in OPS}
    expected = {name: pytest.approx(flops / rates[kernel].forward, rel=1e-3) for name, kernel in kernels.items()}
    assert {name: seconds for name, seconds in priced.seconds.items() if name in OPS} == expected
    assert rates[FLASH].forward < 0.65 * rates[CUDNN].forward < 0.65 * rates[FA3].forward


@pytest.mark.parametrize("causal, kv_heads", [(True, 4), (False, 4), (True, 1)])
def test_attention_costs_its_pairs_whatever_heads_the_keys_have(causal: bool, kv_heads: int) -> None:
    shape = (1, 4, 2048, 64)
    with FakeTensorMode(), Priced() as priced:
        query = torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(1, kv_heads, 2048, 64, dtype=torch.bfloat16, device="cuda")
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, key, 0.0, causal)
    pairs = 2048 * 2048 / (2 if causal else 1)
    rate = priced.machine.attention_rates("flash").forward
    assert priced.seconds["_scaled_dot_product_flash_attention"] == pytest.approx(4 * 4 * 64 * pairs / rate)
