"""The simulator against the real engine on threads. tests/solve/test_sweep.py holds it against the solver's arithmetic."""

from itertools import pairwise

import pytest

from ds_memo.swap.engine import SwapEngine
from tests.estimate.threaded import Configuration, clear_configurations, measured_events, mismatch, predicted_events
from tests.everyday import everyday

TRIES = 4
"""A busy machine wakes a sleeper late now and then."""


def agree(configuration: Configuration, engine: type[SwapEngine] = SwapEngine, tries: int = TRIES) -> str | None:
    predicted = predicted_events(configuration.predicted())
    for _ in range(tries):
        wrong = mismatch(predicted, measured_events(configuration, engine)[0])
        if wrong is None:
            return None
    return wrong


@pytest.mark.parametrize("seed", everyday(clear_configurations(), clear_configurations()[::3], slow=[]))
def test_the_order_of_events_is_the_real_engines(seed):
    assert agree(Configuration.random(seed)) is None


def test_the_configurations_stall_in_both_directions():
    stalls = [Configuration.random(seed).predicted() for seed in clear_configurations()]
    assert sum(s.d2h_stall_s > 0 for s in stalls) >= 5
    assert sum(s.h2d_stall_s > 0 for s in stalls) >= 5
    assert sum(s.d2h_stall_s == s.h2d_stall_s == 0 for s in stalls) >= 1


class NoPrefetch(SwapEngine):
    """A schedule that is right, and slower."""

    def _next_below(self, frame):
        return None


class Impatient(SwapEngine):
    """An engine that frees a frame one layer too early."""

    def end(self, frame):
        super().end(frame)
        while self._leaving:
            self._let_go(self._leaving.popleft()())


@pytest.mark.slow
@pytest.mark.parametrize("other", [NoPrefetch, Impatient])
def test_another_schedule_is_told_apart(other):
    """Repeatedly, as no busy machine does."""
    assert any(agree(Configuration.random(seed), other, tries=3) for seed in clear_configurations()[:6])


def test_streams_do_one_thing_at_a_time_and_stalls_fill_computes_gaps():
    configuration = Configuration.random(3)
    simulated = configuration.predicted()
    for stream in ("compute", "d2h", "h2d"):
        spans = [span for span in simulated.spans if span.stream == stream]
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(spans))
    compute = [span for span in simulated.spans if span.stream == "compute"]
    assert sum(span.end - span.begin for span in compute) == pytest.approx(simulated.seconds)
