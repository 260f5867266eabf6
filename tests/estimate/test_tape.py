"""Requests of small layers, checked by hand."""

import pytest

from ds_memo.estimate.tape import INPUT, Op, Tape, most_alive

MLP = Tape(
    (
        Op("up", 4, (INPUT,), (INPUT,), kind="gemm"),
        Op("act", 4, ("up",), ("up",)),
        Op("down", 1, ("act",), ("act",), kind="gemm"),
        Op("out", 1, (INPUT, "down"), adds=True),
    )
)


def test_a_forward_frees_what_nothing_reads_again():
    assert MLP.forward(kept=()) == [
        *[("up", 4), ("act", 4), ("up", None), ("down", 1), ("act", None), ("out", 1), ("down", None)],
    ]


def test_what_is_kept_stays():
    assert [name for name, nbytes in MLP.forward(kept=("up",)) if nbytes is None] == ["act", "down"]


def test_what_autograd_saves():
    assert MLP.saved_bytes == 1 + 4 + 4


def test_a_replay_makes_what_is_not_given_and_no_more():
    """A sum, which saves nothing, reads down's output."""
    replayed = [name for name, nbytes in MLP.backward(given={INPUT, "up"}) if nbytes is not None]
    assert replayed == ["act", "d.act.down", "d.up.act", "d.input.up", "d.input.sum.up"]
    assert most_alive(MLP.backward(given={INPUT, "up"})) == 4 + 4  # then act goes, and d.up comes in its place
    assert most_alive(MLP.backward(given={INPUT})) == 4 + 4 + 4


def test_nothing_is_replayed_where_all_was_saved():
    assert next(name for name, nbytes in MLP.backward(given=(), replays=False) if nbytes) == "d.act.down"


def test_a_sums_gradient_is_one_memory():
    """The gradient of the layer's output is the caller's: it is neither made nor freed."""
    twice = Tape((Op("a", 2, (INPUT,), (INPUT,)), Op("b", 2, ("a",)), Op("out", 2, ("a", "b"), adds=True)))
    requests = twice.backward(given={INPUT})
    assert requests == [
        *[("d.a.b", 2), ("d.a.sum.b", 2), ("d.a.b", None)],
        *[("d.input.a", 2), ("d.a.sum.b", None), ("d.input.a", None)],
    ]


def test_temporaries_inside_and_python_names():
    op = Op("norm", 1, (INPUT,), inner=3, temporary=2, back=7)
    tape = Tape((op, Op("out", 1, ("norm",), ("norm",)), Op("end", 1, ("out",), holds=("norm",))))
    assert most_alive(tape.forward(kept=())) == pytest.approx(3 + 1)
    assert tape.forward(kept=())[-2:] == [("out", None), ("norm", None)]
    assert most_alive(tape.backward(given={INPUT})) == pytest.approx(
        3 + 1 + 7 + 1
    )  # norm, its gradient; temporaries; the input's
