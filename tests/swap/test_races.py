"""With late copies, and freed memory that loses its value, the gradients stay the same to the last bit.

The negative control: with any single wait taken out of the engine, the checker of ordered.py objects.
"""

from __future__ import annotations

import pytest
import torch

from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Kept
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.streams import ThreadStreams
from tests.everyday import everyday
from tests.swap import scenarios
from tests.swap.crumbs import Crumbs
from tests.swap.delayed import DelayedStreams
from tests.swap.mutants import engine_without, waits
from tests.swap.ordered import OrderedStreams
from tests.swap.races import SHOWS_IN_GRADIENTS, noticed, racing, tell
from tests.swap.rig import attached
from tests.swap.schedules import Setup, differing, play

SCHEDULES = 48
GROUPS = 6
ORDERED_SCHEDULES = 12
ACTIONS = 6


pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")


def run(seed: int, streams, engine: type[SwapEngine] = SwapEngine, slab: type[HostSlab] = HostSlab) -> dict[str, torch.Tensor]:
    setup = Setup(seed)
    with racing(setup, streams, engine, slab):
        return play(setup.model, seed, ACTIONS)


@pytest.mark.parametrize("group", everyday(range(GROUPS), [0]))
def test_random_schedules_with_late_copies_and_poisoned_memory(group):
    for seed in range(group, SCHEDULES, GROUPS):
        wrong = differing(run(seed, DelayedStreams(seed)), run(seed, ThreadStreams()))
        assert not wrong, f"schedule {seed}: {len(wrong)} results differ, first {wrong[0]}"


@pytest.mark.parametrize("group", everyday(range(4), [0]))
def test_random_schedules_are_ordered_by_events(group):
    for seed in range(group, ORDERED_SCHEDULES, 4):
        checker = OrderedStreams()
        ours = run(seed, checker)
        checker.verify()
        assert not checker.violations
        assert not differing(ours, run(seed, ThreadStreams()))


# ---- host blocks of many pieces


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_random_schedules_over_blocks_of_many_pieces(group):
    """Every kept tensor crosses borders, and its copies come late: every bit is the same."""
    crossed = Crumbs.crossed
    for seed in range(group, ORDERED_SCHEDULES, 4):
        reference = run(seed, ThreadStreams())
        checker = OrderedStreams()
        assert not differing(run(seed, DelayedStreams(seed, delays_s=(0.0, 1e-5, 1e-4)), slab=Crumbs), reference)
        assert not differing(run(seed, checker, slab=Crumbs), reference)
        checker.verify()
    assert Crumbs.crossed > crossed


# ---- stories that need one wait each


@pytest.mark.parametrize("story", scenarios.STORIES, ids=lambda story: story.__name__)
def test_stories(story):
    reference = tell(story, ThreadStreams())
    checker = OrderedStreams()
    assert not differing(tell(story, checker), reference)
    assert checker.checked > 100
    assert not checker.violations
    assert not differing(tell(story, DelayedStreams(0)), reference)


@pytest.mark.parametrize("residents", [0, 2])
def test_an_unused_reload_is_dropped_before_another_begins(residents):
    story = scenarios.abandon_reloads
    model = scenarios.stack(story)
    with attached(model, ThreadStreams(), {"alpha": 0.5, "resident_layers": residents}) as memo:
        engine, returning = memo.engine, []
        reload = engine._reload

        def counting(frame):
            reload(frame)
            returning.append(sum(ref() is not None and ref().state == "returning" for ref in engine._stack))

        engine._reload = counting
        story(memo, model, scenarios.batches())
    assert len(returning) > 8
    assert max(returning) == 1


@pytest.mark.parametrize("wait", waits())
def test_without_this_wait_the_checker_objects(wait):
    assert noticed(wait)


@pytest.mark.parametrize("wait", SHOWS_IN_GRADIENTS)
def test_without_this_wait_gradients_are_wrong(wait):
    story = SHOWS_IN_GRADIENTS[wait]
    late = DelayedStreams(0, delays_s=(3e-3,))
    assert differing(tell(story, late, engine_without(wait)), tell(story, ThreadStreams()))


# ---- how pieces are cut

RIGHT = Kept.pairs


def same_rows_for_each_piece(kept, host, tensor):
    rows = kept.rows_of(tensor)
    return [(part, rows[: part.numel()]) for part in host]


def no_second_piece(kept, host, tensor):
    return list(RIGHT(kept, host, tensor))[:1]


@pytest.mark.parametrize("wrong", everyday([same_rows_for_each_piece, no_second_piece], [same_rows_for_each_piece]))
def test_pieces_cut_wrongly_are_noticed(wrong, monkeypatch):
    story = scenarios.train
    reference = tell(story, ThreadStreams())
    assert not differing(tell(story, DelayedStreams(0), slab=Crumbs), reference)
    monkeypatch.setattr(Kept, "pairs", wrong)
    assert not differing(tell(story, DelayedStreams(0)), reference), "with one piece there is nothing to cut"
    assert differing(tell(story, DelayedStreams(0), slab=Crumbs), reference)
