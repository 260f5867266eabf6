"""Non-layer memory: the device bytes that a pass takes outside its layers."""

from __future__ import annotations

from ds_memo.ops.allocator import LogEvent
from ds_memo.plan.phases import LayerPass, PassPart
from ds_memo.planned_alloc.non_layer_memory import Most, NonLayerMemory, carry, largest, most_in, non_layer_memory
from tests.planned_alloc.test_request_log import events

SOLVED = {0: 10, 1: 20}, {0: 30, 1: 40}
"""Predicted bytes of the layers in the forward and in the backward."""


def test_the_most_of_one_phase() -> None:
    pass_ = events("embed +a100 | head +b10 -a +c50 -b +d70 +e9 | L1.b +f1000 -c -d -f | L0.b -e | step")
    assert most_in(PassPart.HEAD, pass_) == Most(peak=129, staying=9)
    assert most_in(PassPart.HEAD, pass_, passed_on=9) == Most(peak=129, staying=0)  # a gradient that is added to all the way down
    assert most_in(PassPart.HEAD, pass_, passed_on=70) == Most(peak=129, staying=9)  # one that the next layer uses up
    assert most_in(PassPart.HEAD, events("head +a9 +b9 | L1.b | L0.b -a -b"), passed_on=9) == Most(18, 9)
    assert most_in(LayerPass(1, backward=True), pass_) == Most(1000, 0)
    assert most_in(PassPart.REDUCE, pass_) is None
    assert most_in(PassPart.HEAD, events("head +a7 | L0.b -a | step")) == Most(7, 0)
    assert most_in(PassPart.HEAD, events("head +a7 | L0.b | step")) == Most(0, 0)  # a gradient
    assert most_in(PassPart.HEAD, events("head +a7 -a | L0.b | head +b9 -b | L0.b")) == Most(9, 0)  # the latest visit


def test_what_is_beyond_the_layers() -> None:
    """In each phase, the most alive at once less the predicted bytes; g is a gradient that lives until the step."""
    pass_ = events("embed +a5 | L0.f +b8 | L1.f +c12 | head +d50 -d +g3 | L1.b +e30 -e -c | L0.b +f50 -f +h6 -a -b | step -g -h")
    assert non_layer_memory(pass_, {}, 0, *SOLVED) == NonLayerMemory(
        head=47, staying=3, forward=5, backward=(36, 18), elsewhere=0
    )
    assert non_layer_memory(pass_, {}, 0, {}, {}) == NonLayerMemory(head=47, staying=3, forward=0, backward=(3,), elsewhere=0)
    assert non_layer_memory(events("L0.f +a5 | L0.b -a"), {}, 0, *SOLVED) is None


def test_what_is_still_there_counts_nowhere() -> None:
    """Optimizer states: the device has that much less free from now on."""
    pass_ = events("L0.f | L1.f | head +d50 -d | L1.b +g100 | L0.b +h100 -h | step -g +s1000")
    assert non_layer_memory(pass_, {}, 0, *SOLVED).backward == (170, 60)
    still = events("L0.f | L1.f | head +d50 -d | L1.b +g100 | L0.b +h100 -h | step +s1000")
    assert non_layer_memory(still, {}, 0, *SOLVED).backward == (70, 0)


def test_what_earlier_passes_left_behind() -> None:
    """Gradients of an accumulation's first micro-batch that the step frees; those that live on do not count."""
    carried: dict[int, int] = {}
    carry(carried, events("head +a50 -a | L0.b +b7 +c9", first_id=10))
    assert carried == {11: 7, 12: 9}
    pass_ = [*events("L0.f +a8 | L1.f | head | L1.b | L0.b -a | step"), LogEvent("free", None, 11, 0)]
    assert non_layer_memory(pass_, carried, 0, {0: 10}, {0: 10}).forward == 5
    assert non_layer_memory(pass_, {}, 0, {0: 10}, {0: 10}).forward == 0  # without the carried bytes it is not known


def test_other_streams_have_a_number_of_their_own() -> None:
    pass_ = events("head +a9 -a | L0.b +b20")
    side = [LogEvent("elsewhere", LayerPass(0, backward=True), id_, size) for id_, size in ((7, 100), (8, 30), (9, 1))]
    frees = [LogEvent("free", None, id_, 0) for id_ in (8, 7, 1)]
    seen = non_layer_memory([*pass_, *side[:2], *frees, *side[2:]], {}, 0, {}, {0: 15})
    assert seen == NonLayerMemory(head=9, staying=0, forward=0, backward=(5,), elsewhere=130)
    assert side[0] not in pass_ and most_in(PassPart.HEAD, [*side, *pass_]) == Most(9, 0)


def test_the_rank_that_has_most_counts() -> None:
    one, other = NonLayerMemory(1, 20, 3, (40, 5), 6), NonLayerMemory(10, 2, 30, (4, 50, 7), 60)
    assert largest([one, other]) == NonLayerMemory(10, 20, 30, (40, 50, 7), 60)
    assert largest([one]) == one
