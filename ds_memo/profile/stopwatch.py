"""Points of the device's work and the seconds between them; and the seconds of a layer's GEMMs, attention and choices.

A GPU that was idle clocks higher than it can keep up: GEMMs on an H200 fell from 797 to 670 TFLOP/s within 0.12 s. So
work is measured behind SUSTAINED_S of work without a pause, and events of CUDA time it: nothing waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_memo.remat import op_policy
from ds_memo.remat.functions import ObservesFunctions, has_inner_tensors, tensors_in

REPEATS = 3
SUSTAINED_S = 0.4
"""Seconds of work before a measurement on a GPU."""
_of_meta: list[Callable[[], float]] = []


@contextmanager
def keeping_time(clock: Callable[[], float]) -> Iterator[None]:
    """Time the meta device, on which no kernel runs, by a clock of its own inside the block."""
    _of_meta.append(clock)
    try:
        yield
    finally:
        _of_meta.remove(clock)


def repeats(device: torch.device) -> int:
    """Return how often a measurement is repeated; the meta device's clock is exact."""
    return 1 if device.type == "meta" else REPEATS


def now(device: torch.device) -> Any:
    """Return the current point of the device's work."""
    if device.type == "meta":
        return _of_meta[-1]()
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two points that the device has passed."""
    return start.elapsed_time(end) * 1e-3 if isinstance(start, torch.Event) else end - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sustain(device: torch.device) -> None:
    """Have a GPU work for SUSTAINED_S without a pause. It is still at it when this returns.

    Products of random numbers take the power that training takes, those of ones do not. They are this rank's alone: a layer's
    ranks may wait for each other, and would run it equally often.
    """
    if device.type != "cuda" or not SUSTAINED_S:
        return
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device, generator=torch.Generator(device))
    begin, ends = now(device), list[Any]()
    while len(ends) < 2 or seconds_between(begin, ends[-2]) < SUSTAINED_S:
        for _ in range(50):
            torch.mm(x, x)
        ends.append(now(device))
        if len(ends) > 1:
            ends[-2].synchronize()  # there is work behind it


class Stopwatch(ObservesFunctions):
    """Time the GEMMs, attention and choices of a layer's forward, and attention in its backward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._ops: list[tuple[op_policy.OpKind, Any, Any]] = []
        self._backward: list[tuple[Any, Any]] = []
        self._in_forward = True
        self._start: Any = None
        self._end: Any = None
        self.attention_flops = 0
        self.attention_s = self.attention_backward_s = 0.0
        self.seconds: list[float] = []
        """Seconds of each op that a recipe lists, in order."""
        self.born: list[float] = []
        """End of each such op, as a share of the forward."""

    def now(self) -> Any:
        return now(self._device)

    def forward_over(self, start: Any) -> None:
        self._start, self._end = start, self.now()
        self._in_forward = False

    def read(self) -> None:
        """Wait for the device and set the attributes."""
        synchronize(self._device)
        forward_s = seconds_between(self._start, self._end)
        for kind, begin, end in self._ops:
            seconds = seconds_between(begin, end)
            self.seconds.append(seconds)
            self.born.append(min(1.0, seconds_between(self._start, end) / forward_s) if forward_s else 1.0)
            self.attention_s += seconds if kind is op_policy.OpKind.ATTENTION else 0.0
        self.attention_backward_s = sum(seconds_between(*times) for times in self._backward)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_inner_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._in_forward:
            kind = op_policy.kind_of(func)
            if kind in (op_policy.OpKind.PLAIN, op_policy.OpKind.MUTATES):
                return func(*args, **kwargs)
            begin = self.now()
            out = func(*args, **kwargs)
            self._ops.append((kind, begin, self.now()))
            if kind is op_policy.OpKind.ATTENTION:
                self._count_flops(args[0], args[1])
            return out
        if "backward" in (name := func.name()) and ("attention" in name or "attn" in name):
            begin = self.now()
            out = func(*args, **kwargs)
            self._backward.append((begin, self.now()))
            return out
        return func(*args, **kwargs)

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Time a function of `keep_whole` as attention; in the backward, time its node in the graph."""
        if not self._in_forward:
            return fn(*args, **kwargs)
        begin = self.now()
        out = fn(*args, **kwargs)
        self._ops.append((op_policy.OpKind.ATTENTION, begin, self.now()))
        tensors = tensors_in(args, kwargs)
        if len(tensors) > 1 and tensors[0].dim() > 2 < tensors[1].dim():
            self._count_flops(*tensors[:2])
        node = next((leaf.grad_fn for leaf in tensors_in(out) if leaf.grad_fn is not None), None)
        if node is not None:
            times: list[Any] = []
            node.register_prehook(lambda gradients: times.append(self.now()))
            node.register_hook(lambda made, gradients: self._backward.append((times.pop(), self.now())))
        return out

    def _count_flops(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """
        Args:
            query, key: (b, heads, s, d) or, flash-attn's, (b, s, heads, d)
        """
        self.attention_flops += 2 * query.numel() * max(key.shape[1:-1])
