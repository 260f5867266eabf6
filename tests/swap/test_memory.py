"""Bytes stored and bytes left on the device: the bars of benchmarks/memory.py, on fewer layers and tokens."""

from __future__ import annotations

import pytest

from benchmarks.memory import SHAPES, Bench
from ds_memo.swap.engine import SwapEngine
from tests.everyday import everyday
from tests.faults import put_in

LAYERS, LENGTH = 5, 96


@pytest.fixture(scope="module", params=SHAPES)
def bench(request):
    return Bench(request.param, LAYERS, LENGTH)


@pytest.mark.parametrize("alpha, resident_layers", everyday([(0.0, 2), (0.125, 2), (0.5, 0), (1.0, 2)], [(0.125, 2)]))
def test_bars(bench, alpha, resident_layers):
    measured = bench.measure(alpha, resident_layers)
    assert not measured.misses()
    assert measured.stored
    assert 1 <= measured.buffers <= 2


def test_the_first_step_meets_the_bars_too(bench):
    assert not bench.measure(0.5, 2, step=1).misses()


def test_with_every_layer_resident_nothing_is_stored(bench):
    measured = bench.measure(0.5, LAYERS)
    assert (measured.stored, measured.buffers) == (0, 0)
    assert not measured.misses()
    assert measured.live < bench.plain.after_forward, "what is cheap to recompute is not kept even there"


def test_a_frame_that_is_not_let_go_is_noticed(bench, monkeypatch):
    hoard = []
    note = lambda right, engine, frame: (frame and hoard.append(dict(frame.device)), right(engine, frame))[1]  # noqa: E731
    put_in(monkeypatch, SwapEngine, "_let_go", note)
    assert any(miss.startswith("live") for miss in bench.measure(0.5, 0).misses())


def test_a_row_too_many_is_noticed(bench):
    measured = bench.measure(0.55, 0)
    measured.stored_bar = SHAPES[bench.shape].stored(0.5)
    assert any(miss.startswith("stored") for miss in measured.misses())
