"""One training step, timed, with the memory it took."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.rivals import Installed
from benchmarks.workloads import loss_of
from ds_memo.errors import MemoError
from ds_memo.profile.live import LiveBytes
from ds_memo.solve.refusals import NothingFits


def does_not_fit(error: BaseException) -> bool:
    """Return True if a rival ran out of memory. Host memory that CUDA cannot lock raises as any other CUDA error."""
    if isinstance(error, MemoError):  # others are misuse
        return isinstance(error, NothingFits) or str(error).startswith(("host memory:", "device memory:"))
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return isinstance(error, MemoryError)


class Trainer:
    """A model, its batch and an optimizer that changes nothing: every rival sees the same weights in every step."""

    def __init__(self, model: nn.Module, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        model.zero_grad()  # another Trainer's: taken from those one by one, large blocks would be split
        clear(ids.device)  # and cuBLAS has its workspaces before there are activations that they could lie between
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=ids.is_cuda)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def gradients(self, installed: Installed) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and a copy of every gradient."""
        self.optimizer.zero_grad(set_to_none=False)
        with installed.around():
            loss = loss_of(self.model, self.ids)
            loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def step(self, installed: Installed) -> None:
        self._backward(installed)
        self._update()

    def gradient_norm(self, installed: Installed) -> float:
        """Return the norm of all gradients of a step."""
        self._backward(installed)
        norm = float(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        self._update()
        return norm

    def _backward(self, installed: Installed) -> None:
        with installed.around():
            loss_of(self.model, self.ids).backward()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def update_s(self) -> float:
        """Return the seconds of the optimizer's part of a step."""
        return seconds(self._update, self.ids.device)

    def seconds(self, installed: Installed) -> float:
        """Return the seconds of one step; on CUDA between events on the stream."""
        return seconds(lambda: self.step(installed), self.ids.device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


class Memory:
    """Device and host bytes over a block of steps. On a CPU one more step is counted instead."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.memory.reset_peak_host_memory_stats()
            self._before = torch.cuda.memory_stats(device)

    def read(self, steps: int, step: Callable[[], Any]) -> dict[str, float]:
        """Peaks since the beginning.

        Args:
            steps: how many there were.
            step: runs one more, where no counter has watched.
        """
        if not self._cuda:
            with LiveBytes(self._device) as count:
                step()
            return {"device_peak": count.peak}
        after = torch.cuda.memory_stats(self._device)
        return {
            "device_peak": after["requested_bytes.all.peak"],
            "device_allocated_peak": after["allocated_bytes.all.peak"],
            "device_reserved_peak": after["reserved_bytes.all.peak"],
            "cuda_mallocs_per_step": (after["num_device_alloc"] - self._before["num_device_alloc"]) / steps,
            "cuda_frees_per_step": (after["num_device_free"] - self._before["num_device_free"]) / steps,
            "pinned_by_torch_peak": torch.cuda.memory.host_memory_stats().get("allocated_bytes.peak", 0),
        }


def placements(report: dict[str, Any]) -> tuple[Any, ...]:
    """Return the placement of a rival's layers, by its own report."""
    layers = (tuple(report.get(name) or ()) for name in ("layers_on_device", "layers_without_gemms", "layers_without_recompute"))
    return report.get("checkpointing"), report.get("alpha"), *layers


def served(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Count, between two reports of a plan, the requests with their address, and the others by reason.

    Args:
        before: empty where there was no plan yet.
    """
    of = before.get("misses", {})
    misses = {name: n - of.get(name, 0) for name, n in after["misses"].items()}
    return {"hits": after["hits"] - before.get("hits", 0), "misses": {name: n for name, n in misses.items() if n}}


def solution(report: dict[str, Any]) -> tuple[Any, ...]:
    """Return what speed and bytes depend on: placements, which ds_memo may change while it trains, and addresses."""
    profile, plan = report.get("profile") or {}, report.get("plan") or {}
    return (*placements(report), profile.get("changes"), plan.get("plans"), plan.get("arena"))


def clear(device: torch.device) -> None:
    """Free what one rival has left, so that the next finds nothing of it."""
    with torch.enable_grad():  # autograd holds on to a backward that raised until the next one
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def use_expandable(on: bool, device: torch.device) -> None:
    """Switch PyTorch's expandable segments. This affects later allocations only, so the cache is emptied first."""
    if device.type != "cuda":
        return
    clear(device)
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")  # torch.cuda's own is deprecated
