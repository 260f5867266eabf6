"""Shared by tests of races: play a random schedule, or tell a story, over given streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.host_slab import HostSlab
from tests.swap import scenarios
from tests.swap.mutants import engine_without
from tests.swap.ordered import OrderedStreams, OrderError
from tests.swap.rig import attached
from tests.swap.schedules import Setup

SHOWS_IN_GRADIENTS = {
    "about_to_change: self.streams.wait(COMPUTE, frame.copied.get(index) or self.streams.mark(D2H))": scenarios.change_in_place,
    "bring_back: self.streams.wait(COMPUTE, frame.back)": scenarios.train,
    "_let_go: self.streams.wait(COMPUTE, frame.sent)": scenarios.train,
}
"""Waits whose absence shows in a story's numbers. On a CPU compute is over when a call returns, so a missing wait for compute
does not. Some others only guard memory that the stories never reuse."""


@contextmanager
def racing(
    setup: Setup, streams: Any, engine: type[SwapEngine] = SwapEngine, slab: type[HostSlab] = HostSlab, **more: Any
) -> Iterator[Any]:
    """Attach a schedule's model over `streams`.

    Args:
        more: settings besides the schedule's.
    """
    watching = streams if isinstance(streams, OrderedStreams) else nullcontext()
    with watching, attached(setup.model, streams, {**setup.config, **more}, engine, slab) as memo:
        yield memo


def tell(
    story: Any,
    streams: Any,
    engine: type[SwapEngine] = SwapEngine,
    slab: type[HostSlab] = HostSlab,
    attach: Callable[..., Any] = attached,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """Train as a story says; return its results."""
    model = scenarios.stack(story)
    watching = streams if isinstance(streams, OrderedStreams) else nullcontext()
    config = {"alpha": 0.5, "resident_layers": scenarios.RESIDENTS.get(story, 0), **more}
    with watching, attach(model, streams, config, engine=engine, slab=slab) as memo:
        return story(memo, model, scenarios.batches())


def noticed(wait: str, **more: Any) -> bool:
    """Return True if the checker objects to an engine without this wait."""
    mutant = engine_without(wait)
    for story in scenarios.STORIES:
        checker = OrderedStreams()
        try:
            tell(story, checker, mutant, **more)
            checker.verify()
        except OrderError:
            assert checker.violations
        if checker.violations:
            return True
    return False
