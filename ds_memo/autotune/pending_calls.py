"""Calls in flight: how often each layer is called before its backward begins.

Once, in most models. A layer that is used many times in one forward (ALBERT), and several forwards before one backward (a query
and its documents), leave as many frames at the same time, and each takes memory.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Any, NamedTuple

from torch.autograd.graph import register_multi_grad_hook

from ds_memo.shapes import tensors_in

_REMEMBERED = 8
"""Optimizer steps for which the most calls count."""


class InFlight(NamedTuple):
    """What there is at the same time, before a backward begins."""

    calls: int = 1
    """Calls of each layer."""
    forwards: int = 1
    """Forwards of the model."""


class _Forward:
    """Lives as long as the graph of a forward does: only the hook on its output holds it."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        """The most calls of one layer."""
        self.waits = True
        """For its backward to begin."""

    def backward_begins(self, gradient: Any) -> None:
        self.waits = False


class CallsInFlight:
    """Counts the calls of one model's layers."""

    def __init__(self) -> None:
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._here: Counter[int] = Counter()
        """In the running forward, by the layer's index."""
        self._by_step: deque[InFlight] = deque([InFlight()], maxlen=_REMEMBERED)
        """The most in each of the latest optimizer steps; the last item is of the running one."""
        self.earlier = 0
        """Calls of one layer in forwards before the running one that wait for their backward."""

    @property
    def most(self) -> InFlight:
        """Return the maximum over the last 8 steps."""
        return InFlight(*map(max, zip(*self._by_step, strict=True)))

    def forward_begins(self) -> None:
        waiting = [forward.calls for forward in self._forwards if forward.waits]
        self._here.clear()
        self.earlier = sum(waiting)
        self._see(InFlight(self.earlier + 1, len(waiting) + 1))

    def number(self, layer: int) -> int:
        """Return this call's index among pending calls of the layer."""
        number = self.earlier + self._here[layer]
        self._here[layer] += 1
        return number

    def forward_ended(self, output: Any) -> None:
        calls = max(self._here.values(), default=0)
        self._see(InFlight(self.earlier + calls))
        if tensors := [tensor for tensor in tensors_in(output) if tensor.grad_fn]:  # a parameter would keep the hook for good
            forward = _Forward(calls)
            self._forwards.add(forward)
            register_multi_grad_hook(tensors, forward.backward_begins, mode="any")

    def stepped(self) -> None:
        """Follow the end of an optimizer step."""
        self._by_step.append(InFlight())

    def _see(self, seen: InFlight) -> None:
        self._by_step[-1] = InFlight(*map(max, self._by_step[-1], seen))
