"""Traces that repeat requests copy by copy: one copy is planned, and every tensor gets its counterpart's address."""

from __future__ import annotations

import random

import pytest

from ds_memo.plan import bilevel, plan_trace, repetition, verify
from ds_memo.plan.bilevel import Plan
from ds_memo.plan.errors import InvalidPlan
from ds_memo.plan.formats import make_trace
from ds_memo.plan.phases import LayerPass
from ds_memo.plan.trace import Request, Trace


def in_tiles(layers: int, tiles: int, seed: int = 0, ragged: bool = True, crossing: int = 1 << 20) -> Trace:
    """Return a trace of layers in tiles. A tile makes tensors that die in it, one or two tiles later, or in the backward.

    Args:
        ragged: True if the last tile is smaller.
        crossing: most bytes of a tensor that dies in a later tile.
    """
    draw = random.Random(seed)
    lives = [draw.choice(["here", "here", "here", "next", "third", "backward"]) for _ in range(24)]
    sizes = [draw.choice([0, 300, 700, 4096, 65536, 1 << 20]) for _ in lives]
    sizes = [min(size, crossing) if life in ("next", "third") else size for life, size in zip(lives, sizes, strict=True)]
    out: list[Request] = []
    marks = []

    def malloc(name: str, size: int) -> None:
        out.append(Request(name, size))

    def free(name: str) -> None:
        out.append(Request(name, None))

    for layer in range(layers):
        marks.append((LayerPass(layer, backward=False), len(out)))
        malloc(f"{layer} output", tiles << 16)
        for tile in range(tiles):
            part = 3 if ragged and tile == tiles - 1 else 1
            here: list[str] = []
            for k, (life, size) in enumerate(zip(lives, sizes, strict=True)):
                malloc(f"{layer} {tile} {k}", size // part)
                here += [f"{layer} {tile} {k}"] if life == "here" else []
                if len(here) > 3:
                    free(here.pop(k % 3))
                ago = {"next": 1, "third": 2}.get(life, 0)
                if ago and tile >= ago:
                    free(f"{layer} {tile - ago} {k}")
            for name in here:
                free(name)
        for k, life in enumerate(lives):
            for tile in range(tiles):
                if tile >= tiles - {"next": 1, "third": 2}.get(life, 0):
                    free(f"{layer} {tile} {k}")
    for layer in reversed(range(layers)):
        marks.append((LayerPass(layer, backward=True), len(out)))
        for tile in reversed(range(tiles)):
            for k in range(12):
                malloc(f"{layer} {tile} b{k}", (k + 1) << 12)
                if k:
                    free(f"{layer} {tile} b{k - 1}")
            for k, life in enumerate(lives):
                if life == "backward":
                    free(f"{layer} {tile} {k}")
            free(f"{layer} {tile} b11")
        free(f"{layer} output")
    return make_trace(out, marks)


def checked(trace: Trace) -> Plan:
    """Return the trace's plan, verified tensor by tensor, with every tensor once."""
    plan = plan_trace(trace, solver="greedy")
    buffers, offsets = [slot.buffer() for slot in plan.slots], [slot.offset for slot in plan.slots]
    assert verify.check(buffers, offsets, lower_bound=plan.lower_bound, capacity=plan.peak, alignment=512) is None
    fields = [(t.id, t.birth_phase, t.k, t.birth, t.death, t.death_phase, t.size) for t in trace.tensors() if t.size]
    assert [slot[:-1] for slot in plan.slots] == fields
    assert [(p.name, p.first, p.end) for p in plan.phases] == [(str(p.name), p.first, p.end) for p in trace.phases]
    return plan


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for repetition in small traces, too, and take its plan whatever it wastes."""
    monkeypatch.setattr(bilevel, "_MANY", 0)
    monkeypatch.setattr(bilevel, "_WASTE", 10.0)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("seed", range(12))
def test_every_tensor_of_every_tile_has_an_address_of_its_own(seed: int) -> None:
    trace = in_tiles(layers=3, tiles=12 + seed, seed=seed, ragged=seed % 2 == 0)
    plan = checked(trace)
    assert "copies of the same requests are planned as one" in plan.notes[0]
    short = repetition.shorten(trace, trace.columns())
    assert short is not None and len(short.trace.requests) < 0.7 * len(trace.requests)


def test_a_long_trace_is_planned_nearly_as_small_as_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bilevel, "_WASTE", 0.02)
    trace = in_tiles(layers=4, tiles=40, crossing=1 << 14)
    plan = checked(trace)
    assert "copies" in plan.notes[0] and plan.peak <= 1.02 * plan.lower_bound


@pytest.mark.usefixtures("any_size")
def test_nothing_to_repeat() -> None:
    draw = random.Random(0)
    requests = [Request(str(n), draw.randint(1, 1 << 20)) for n in range(400)]
    trace = make_trace([*requests, *(Request(str(n), None) for n in range(400))], [])
    assert repetition.shorten(trace, trace.columns()) is None
    assert not checked(trace).notes


def test_a_wasteful_copy_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles whose kept tensors die tile by tile make room for others; one copy does not show that."""
    monkeypatch.setattr(bilevel, "_MANY", 0)
    out: list[Request] = []
    for tile in range(40):
        out.append(Request(f"kept {tile}", 1 << 16))
        for k in range(16):
            out += [Request(f"{tile} {k}", 600 + k), Request(f"{tile} {k}", None)]
    for tile in range(40):
        out += [Request(f"new {tile}", 1 << 16), Request(f"kept {tile}", None)]
    out += [Request(f"new {tile}", None) for tile in range(40)]
    plan = checked(make_trace(out, []))
    assert plan.peak <= 1.02 * plan.lower_bound and not any("copies" in note for note in plan.notes)


# ---- negative controls


@pytest.mark.usefixtures("any_size")
def test_a_tensor_that_would_outlive_its_counterpart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition._Clock, "during", lambda clock, birth, death: (clock.tick[birth], clock.tick[birth] + 1))
    with pytest.raises(InvalidPlan, match="outlive their counterparts"):
        plan_trace(in_tiles(layers=2, tiles=8), solver="greedy")


@pytest.mark.usefixtures("any_size")
def test_tiles_that_would_share_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_turns", lambda life, period, left: life * 0 + 1)
    with pytest.raises(InvalidPlan, match=r"[1-9]\d* the next in their block"):
        plan_trace(in_tiles(layers=2, tiles=8), solver="greedy")
