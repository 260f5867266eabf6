"""The optimizer steps of one model: warnings after the first, the time of each, and what is learned from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ds_memo.runtime.first_step_warnings import after_first_step
from ds_memo.runtime.optimizer_hooks import watch_optimizers
from ds_memo.runtime.parts import Parts
from ds_memo.runtime.passes import Passes
from ds_memo.runtime.throughput import Speed


class Steps:
    def __init__(self, parts: Parts, passes: Passes) -> None:
        self.speed = Speed()
        self._parts = parts
        self._passes = passes
        self._tell_what_moved = parts.ties.tell_what_moved

    def watch_optimizers(self) -> None:
        for end in watch_optimizers(self._parts.model, self, Steps.begins, Steps.ended):
            self._parts.patches.undo_with(end)

    @contextmanager
    def reduction(self) -> Iterator[None]:
        """Run an engine's reduction of gradients behind the backward."""
        self._parts.addresses.reduction_begins()
        try:
            yield
        finally:
            self._parts.addresses.leave_phase()

    def begins(self) -> None:
        for head in self._parts.heads:
            head.keep_values()
        self._parts.addresses.step_begins()

    def ended(self, applied: bool = True) -> None:
        """Follow the end of a step.

        Args:
            applied: False if gradients overflowed; optimizer states may not exist yet.
        """
        parts, tuner, policy = self._parts, self._parts.tuner, self._parts.policy
        parts.addresses.step_ends()
        if self.speed.before_first_step:
            for message in after_first_step(parts, self._passes.count):
                parts.warn(message)
        now = time.perf_counter()
        unsettled = parts.remat.work.analysed + parts.addresses.unsettled + (tuner.unsettled if tuner else 0)
        self.speed.stepped(now, self._passes.tokens, unsettled)
        if self._tell_what_moved is not None and self._tell_what_moved(parts):
            self._tell_what_moved = None
        if parts.drives and (message := parts.drives.stepped(now)) is not None:
            parts.warn(message)
        policy.in_flight.stepped()
        if tuner and applied:
            tuner.stepped(parts.model(), self._passes.count, policy.in_flight.most.calls, now)
