"""One point of `speed`, its bars and predictions, tried on a CPU at tiny sizes."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from benchmarks import claims, point, predict, speed, streams, timing
from benchmarks.rivals import PLANNED, RIVALS, Budget, Installed, Rival
from benchmarks.streams import Span
from benchmarks.timing import Trainer
from benchmarks.workloads import batch, build, shapes
from ds_memo.errors import MemoError
from ds_memo.units import GIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = shapes(CPU)["gpt7b"]


def run_point(rivals, budget=None, **more):
    """Run a point of the small GPT at 48 tokens."""
    return point.run_point(SHAPE, 48, rivals, budget or Budget(CPU, GIB), steps=2, **more)


def test_what_fails_takes_no_rival_with_it(monkeypatch):
    """One that breaks, one that runs out of memory, and a part beside the rivals."""

    @contextlib.contextmanager
    def breaks(model, budget, error):
        raise error
        yield

    monkeypatch.setattr(point, "gradients", lambda *args: 1 / 0)
    broken = Rival("broken", breaks, {"error": ValueError("no such kernel")})
    full = Rival("full", breaks, {"error": torch.OutOfMemoryError("CUDA out of memory")})
    found = run_point([broken, full, RIVALS["none"]], compare=True)
    rows = found["rivals"]
    assert found["failures"] == [
        "gpt7b 48: broken broke: ValueError: no such kernel",
        "gpt7b 48: gradients: ZeroDivisionError: division by zero",
    ]
    assert "out of memory" in rows["full"]["out"] and [name for name in rows if "median_s" in rows[name]] == ["none"]


@pytest.mark.parametrize(
    ("error", "so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # cudaHostAlloc
        (MemoError("host memory: frame 3 needs 2 GiB"), True),
        (MemoError("device memory: frame 3 needs a buffer of 2 GiB to come back"), True),
        (MemoError("frame 3 cannot go from 'away' to 'done'"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_counts_as_not_fitting(error, so):
    assert timing.does_not_fit(error) is so


def test_wrong_gradients_are_a_failure():
    """The negative control of the harness: a rival that halves a gradient."""

    @contextlib.contextmanager
    def halves(model, budget):
        parameter = next(iter(model.parameters()))
        hook = parameter.register_hook(lambda grad: grad / 2)
        yield Installed()
        hook.remove()

    trainer = Trainer(build(SHAPE, CPU), batch(SHAPE, 48, CPU))
    found = point.gradients(trainer, [Rival("halves", halves)], Budget(CPU, GIB), {"halves": {}})
    assert len(found["failures"]) == 1 and "halves" in found["failures"][0]


class Reports:
    """A rival that reports one solution after the other, the last one for ever."""

    def __init__(self, *changes):
        self.changes, self.steps = changes, 0

    def report(self):
        changes = self.changes[: self.steps + 1]
        return {"alpha": 1.0, "profile": {"changes": [c for c in changes if c]}, "stall_s": {"d2h": 0.0}, "plan": None}

    def take(self):
        self.steps += 1
        return [float(self.steps)]


def test_samples_of_a_setting_that_changed_are_dropped():
    rival = Reports(None, "alpha lowered")
    block = timing.timed(rival, CPU, rival.take, warm_up=rival.take)
    assert block.samples_s == [3.0] and block.dropped_s == [1.0] and block.settled
    rival = Reports(*range(1, 9))
    block = timing.timed(rival, CPU, rival.take, warm_up=rival.take)
    assert block.samples_s == [5.0] and block.dropped_s == [1.0, 3.0] and not block.settled


def test_rivals_are_warmed_up_alike_and_every_other_turn_goes_backwards():
    """On a card that is held to a power limit the first one would have a cool card every time."""
    order, steps = [], {}

    def counting(name):
        @contextlib.contextmanager
        def install(model, budget):
            order.append(name)

            @contextlib.contextmanager
            def around():
                steps[name] = steps.get(name, 0) + 1
                yield

            yield Installed(around=around)

        return Rival(name, install)

    found = run_point([counting(name) for name in ("alst", "checkpoint", "none")], turns=3)
    there = ["none", "checkpoint", "alst"]
    assert order == [*there, *there[::-1], *there]
    assert set(steps.values()) == {3 * (point.WARM_UP + 2) + 1}  # and one whose memory is counted
    assert all(len(row["samples_s"]) == 6 for row in found["rivals"].values())


def test_a_later_turn_is_for_those_that_are_needed():
    rows = {name: {"turns_s": [10.0]} for name in "abcd"} | {"b": {"turns_s": [50.0], "out": "OutOfMemoryError"}}
    rivals = [replace(RIVALS["none"], name=name) for name in "abcd"]
    assert [rival.name for rival in point.held(rivals, rows, 25.0)] == ["a", "c"]


def test_streams_of_a_cuda_trace():
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 4},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
    ]
    assert [span.stream for span in streams.spans_of(events)] == ["compute", "d2h", "h2d"]
    spans = [Span("compute", 0, 4), Span("compute", 3, 6), Span("compute", 8, 10), Span("d2h", 1, 3), Span("h2d", 5, 9)]
    found = streams.analyse(spans)
    assert found["span_s"] == 10 and found["compute_share"] == 0.8
    assert found["hidden_share"] == {"d2h": 1.0, "h2d": 0.5}


@pytest.mark.processes
def test_the_prediction_keeps_to_the_device_budget(tmp_path):
    """The estimator is told what the solver had, and says what it says."""
    trainer = Trainer(build(SHAPE, CPU), batch(SHAPE, 96, CPU))
    said = [
        predict.predict(trainer, 96, Budget(CPU, GIB, nbytes, cache_dir=str(tmp_path)), hardware="h200")
        for nbytes in (500_000, GIB)
    ]
    for found in said:
        assert "why" not in found and found["estimate"]["status"] == "ok"
        assert found["estimate"]["resident_layers"] == found["resident_layers"]
        assert found["estimate"]["alpha"] == pytest.approx(found["alpha"], abs=1e-3)
        assert found["step_s"] == pytest.approx(found["solver"]["layers_s"], rel=0.3)  # an optimizer beside tiny layers
    assert [found["estimate"]["binding"].startswith("everything fits") for found in said] == [False, True]


# ---- bars


def bars_of(length=65536, **rows):
    """Bars of rows by name, with _ for what no keyword has: seconds of a step, or a row."""
    found = {}
    for name, row in rows.items():
        row = row if isinstance(row, dict) else {"median_s": row}
        found[name.replace("ds_memo_", "ds_memo, ")] = {"samples_s": [row["median_s"]] * 4, "memory": {}} | row
    return {claim["claim"]: claim for claim in claims.claims({"length": length, "rivals": found})}


def test_bars_hold_and_miss():
    good = bars_of(none=1.0, checkpoint=1.3, deepspeed=1.3, ds_memo_planned=1.0)
    assert good and all(claim["held"] for claim in good.values())
    bad = bars_of(none=1.0, checkpoint=1.0, deepspeed=1.1, ds_memo_planned=1.05)
    assert bad and not any(claim["held"] for claim in bad.values())


@pytest.mark.parametrize("noise, margin, held", [(0.0, 0.0, False), (0.01, 0.014, True), (0.2, claims.MOST_NOISE, True)])
def test_a_rival_that_is_faster_by_less_than_noise(noise, margin, held):
    samples = [1.0 - noise / 2] * 2 + [1.0 + noise / 2] * 2
    rows = {"checkpoint": samples, "ds_memo_planned": [1.01 * s for s in samples]}
    found = bars_of(**{name: {"median_s": sum(row) / 4, "samples_s": row} for name, row in rows.items()})
    claim = found["step / best rival (checkpoint)"]
    assert claim["value"] == pytest.approx(1.01) and claim["bar"] == 1.0
    assert claim["margin"] == pytest.approx(margin, abs=1e-3) and claim["held"] is held


def with_plan(arena, reserved):
    memory = {"cuda_mallocs_per_step": 0, "cuda_frees_per_step": 0, "unplanned_peak": 10 * GIB}
    memory |= {"device_peak": reserved, "device_reserved_peak": reserved}
    return {"median_s": 1.0, "memory": memory, "report": {"plan": {"arena": arena}}}


def test_an_arena_that_is_too_large_misses():
    """With a plan, the arena is among the requested bytes; without one there is no such bar."""
    assert not any("reserved" in name for name in bars_of(ds_memo_planned=with_plan(arena=0, reserved=20 * GIB)))
    name = "reserved / requested without a plan, ds_memo, swapping"
    assert bars_of(ds_memo_swapping=with_plan(5 * GIB, 10.1 * GIB))[name]["held"]
    claim = bars_of(ds_memo_swapping=with_plan(10 * GIB, 15 * GIB))[name]
    assert claim["value"] == 1.5 and not claim["held"]


def test_ours_without_a_plan_does_not_stand_in_for_ours_with_one():
    rows = {name: {"samples_s": [1.0] * 4, "median_s": 1.0, "memory": {}} for name in ("none", "checkpoint", "ds_memo")}
    out = {"samples_s": [], "turns_s": [3.0], "out": "OutOfMemoryError: CUDA out of memory"}
    (claim,) = claims.claims({"length": 65536, "rivals": rows | {PLANNED: out}})
    assert claim["claim"] == "ds_memo, planned did not run" and not claim["held"] and claim["value"] is None
    assert claim["why"] == out["out"]


# ---- whole runs


def test_the_points_that_the_bars_name_come_first():
    """And llama8b from short to long."""
    points = [(of.shape.name, of.length, of.turns, of.compare) for of in speed.points_of(["gpt7b", "llama8b"], None, CUDA)]
    assert points[:2] == [("gpt7b", 65536, 2, False), ("gpt7b", 16384, 1, True)]
    assert [length for name, length, *_ in points[2:] if name == "llama8b"] == sorted(shapes(CUDA)["llama8b"].lengths)
    ((name, length, turns, compare),) = [
        (of.shape.name, of.length, of.turns, of.compare) for of in speed.points_of(["gpt7b"], [16384], CUDA)
    ]
    assert (name, length, turns, compare) == ("gpt7b", 16384, speed.TURNS, True)


@pytest.mark.slow
def test_speed_measures_a_point_and_drops_what_the_time_does_not_hold(tmp_path):
    rivals = ["none", "checkpoint", "ds_memo, planned"]
    words = ["--device", "cpu", "--workloads", "gpt7b", "--host-gib", "0.1", "--out", str(tmp_path), "--budget-s", "0.1"]
    assert speed.main([*words, "--rivals", *rivals]) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    (only,) = found["points"]  # the first always runs
    assert [row["length"] for row in found["dropped"]] == [96] and "unfinished" not in found
    assert set(only["rivals"]) == set(rivals)
    peak = {name: row["memory"]["device_peak"] for name, row in only["rivals"].items()}
    assert peak["checkpoint"] < peak["none"]
    assert only["gradients"]["failures"] == [] and 0 < only["gradients"]["bar"] < 1e-3
    assert found["environment"]["torch"] == torch.__version__


@pytest.mark.processes
def test_a_run_that_is_ended_amid_a_point_leaves_the_turns_before(monkeypatch, tmp_path):
    @contextlib.contextmanager
    def ends(model, budget):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(RIVALS, "checkpoint", replace(RIVALS["checkpoint"], install=ends))
    words = ["--device", "cpu", "--workloads", "gpt7b", "--lengths", "48", "--host-gib", "0.1", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        speed.main([*words, "--rivals", "none", "checkpoint"])
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    assert found["unfinished"] and "median_s" in found["points"][0]["rivals"]["none"] and found["points"][0]["claims"] == []
