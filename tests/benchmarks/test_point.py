"""One point of speed, predictions and streams, tried on a CPU at tiny sizes."""

import contextlib
import types
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks import point, predict, speed, streams, timing
from benchmarks.rivals import PLANNED, RIVALS, Budget
from benchmarks.streams import Span
from ds_memo.errors import MemoError
from ds_memo.units import GIB

CPU = torch.device("cpu")


def run_point(folder, rivals, budget=None, visits=(2, 2), compare=False, **more):
    """Run a point of the small GPT at 48 tokens."""
    shape, budget = speed.shapes(CPU)["gpt7b"], budget or Budget(CPU, GIB)
    model = speed.build(shape, CPU)
    return point.run_point(model, shape, 48, rivals, budget, visits=visits, compare=compare, folder=folder, **more)


def test_what_fails_takes_no_rival_with_it(tmp_path, monkeypatch):
    """One that breaks, one that runs out of memory, and a part beside the rivals."""

    @contextlib.contextmanager
    def breaks(model, budget):
        raise ValueError("no such kernel")
        yield

    monkeypatch.setattr(point, "gradients", lambda *args: 1 / 0)
    broken = replace(RIVALS["none"], name="broken", install=breaks)
    found = run_point(tmp_path, [broken, RIVALS["paper"], RIVALS["none"]], Budget(CPU, 4096), compare=True)
    rows = found["rivals"]
    assert found["failures"] == [
        "gpt7b 48: broken broke: ValueError: no such kernel",
        "gpt7b 48: gradients: ZeroDivisionError: division by zero",
    ]
    assert "host memory" in rows["paper"]["out"] and [name for name in rows if "median_s" in rows[name]] == ["none"]


@pytest.mark.parametrize(
    ("error", "so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # cudaHostAlloc
        (MemoError("host memory: frame 3 needs 2 GiB"), True),
        (MemoError("device memory: frame 3 needs a buffer of 2 GiB to come back"), True),
        (MemoError("frame 3 cannot go from 'away' to 'done'"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_not_fitting(error, so):
    assert timing.does_not_fit(error) is so


def test_wrong_gradients_are_a_failure():
    """The negative control of the harness: a rival that halves a gradient."""
    from benchmarks.rivals import Installed, Rival
    from benchmarks.timing import Trainer

    @contextlib.contextmanager
    def halves(model, budget):
        parameter = next(iter(model.parameters()))
        hook = parameter.register_hook(lambda grad: grad / 2)
        yield Installed()
        hook.remove()

    shape = speed.shapes(CPU)["gpt7b"]
    trainer = Trainer(speed.build(shape, CPU), point.batch(shape, 48, CPU))
    found = point.gradients(trainer, [Rival("halves", "", halves)], Budget(CPU, GIB), {"halves": {}})
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


def test_a_point_whose_time_is_over_keeps_what_it_has(tmp_path, monkeypatch):
    """ds_memo and the rivals of its bars have their turn first; a turn that would end too late does not begin."""
    clock, order = 0.0, []
    monkeypatch.setattr(point, "time", types.SimpleNamespace(perf_counter=lambda: clock))

    def rival(name, takes_s):
        @contextlib.contextmanager
        def install(model, budget):
            nonlocal clock
            order.append(name)
            yield point.Installed()
            clock += takes_s

        return replace(RIVALS["none"], name=name, install=install)

    rivals = [rival("paper", 1), rival("save_on_cpu", 90), rival("none", 1), rival("last", 1), rival("hf_offload", 10)]
    found = run_point(tmp_path, rivals, until=101)
    assert order == ["none", "hf_offload", "paper", "save_on_cpu"]
    rows = found["rivals"]
    assert rows["last"]["out"] == "not tried: no time left" and "median_s" not in rows["last"]
    assert all("median_s" in rows[name] for name in order) and found["failures"] == []
    order.clear()
    clock = 0.0
    found = run_point(tmp_path, rivals[:4:2], until=2.5)
    assert order == ["none", "paper"]  # a second turn of either would end at 3


def counting(name, order, steps):
    @contextlib.contextmanager
    def install(model, budget):
        order.append(name)

        @contextlib.contextmanager
        def around():
            steps[name] = steps.get(name, 0) + 1
            yield

        yield point.Installed(around=around)

    warm_up = {"ds_memo, planned": 4, "paper": 2}.get(name, 1)
    return replace(RIVALS["none"], name=name, install=install, warm_up=warm_up)


def test_rivals_are_warmed_up_alike_and_every_other_turn_goes_backwards(tmp_path, monkeypatch):
    """On a card that is held to a power limit the first one would have a cool card every time."""
    order, steps = [], {}
    rivals = [counting(name, order, steps) for name in ("paper", "checkpoint", "none")]
    told = []

    def tell(found):
        told.append(sum("median_s" in row for row in found["rivals"].values()))

    found = run_point(tmp_path, rivals, visits=(3, 2), tell=tell)
    there = ["none", "checkpoint", "paper"]
    assert order == [*there, *there[::-1], *there]
    assert set(steps.values()) == {3 * (point.WARM_UP + 2) + 1}  # and one whose memory is counted
    assert all(len(row["samples_s"]) == 6 for row in found["rivals"].values())
    assert told == [1, 2, 3, 3, 3, 3, 3, 3, 3]


def test_a_later_turn_is_for_those_that_are_needed(tmp_path):
    rows = {name: {"turns_s": [10.0]} for name in "abcd"} | {"b": {"turns_s": [50.0], "out": "OutOfMemoryError"}}
    rivals = [replace(RIVALS["none"], name=name) for name in "abcd"]
    assert [rival.name for rival in point.held(rivals, rows, 25.0)] == ["a", "c"]


def test_a_device_that_is_lost_takes_no_numbers_with_it(tmp_path, monkeypatch):
    order = []
    rivals = [counting(name, order, {}) for name in ("none", "checkpoint")]

    def clear(device):
        if order[-1:] == ["checkpoint"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(point, "clear", clear)
    found = run_point(tmp_path, rivals, visits=(1, 2))
    assert "median_s" in found["rivals"]["none"]
    assert found["failures"] == ["gpt7b 48: RuntimeError: CUDA error: an illegal memory access was encountered"]


def test_streams_say_what_is_hidden():
    spans = [Span("compute", 0, 4), Span("compute", 3, 6), Span("compute", 8, 10), Span("d2h", 1, 3), Span("h2d", 5, 9)]
    found = streams.analyse(spans)
    assert found["span_s"] == 10 and found["compute_share"] == 0.8
    assert found["hidden_share"] == {"d2h": 1.0, "h2d": 0.5}


def test_streams_of_a_cuda_trace(tmp_path):
    """And they are drawn from the file that a machine without matplotlib has written."""
    pytest.importorskip("matplotlib")
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 4},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
    ]
    spans = streams.spans_of(events)
    assert [span.stream for span in spans] == ["compute", "d2h", "h2d"]
    streams.save(spans, "a step", file := tmp_path / "streams.json")
    file.with_suffix(".png").unlink()
    assert streams.main([str(file)]) == 0 and file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
def test_the_prediction_comes_from_the_solver_and_from_the_estimator(tmp_path):
    """For ranks that share a sequence; the test below has one rank."""
    shape = speed.shapes(CPU)["ulysses8"]
    trainer = timing.Trainer(speed.build(shape, CPU), point.batch(shape, 192, CPU))
    found = predict.predict(trainer, shape, 192, Budget(CPU, GIB, cache_dir=str(tmp_path)), tmp_path, hardware="h200")
    assert found["solver"]["layers_s"] > 0
    assert "why" not in found, found
    assert found["step_s"] > 0 and found["estimate"]["status"] == "ok"
    assert (tmp_path / "profile-ulysses8-192.json").exists()
    assert found["estimate"]["layout"]["sp"] == shape.ranks


@pytest.mark.processes
def test_the_prediction_keeps_to_the_device_budget(tmp_path):
    """The estimator is told what the solver had, and says what it says."""
    shape = speed.shapes(CPU)["gpt7b"]
    trainer = timing.Trainer(speed.build(shape, CPU), point.batch(shape, 96, CPU))
    said = [
        predict.predict(trainer, shape, 96, Budget(CPU, GIB, nbytes, cache_dir=str(tmp_path)), tmp_path, hardware="h200")
        for nbytes in (500_000, GIB)
    ]
    for found in said:
        assert "why" not in found and found["estimate"]["status"] == "ok"
        assert found["estimate"]["resident_layers"] == found["resident_layers"]
        assert found["estimate"]["alpha"] == pytest.approx(found["alpha"], abs=1e-3)
        assert found["step_s"] == pytest.approx(found["solver"]["layers_s"], rel=0.3)  # an optimizer beside tiny layers
    assert [found["estimate"]["binding"].startswith("everything fits") for found in said] == [False, True]
    assert said[0]["estimate"]["device_gib"] < said[1]["estimate"]["device_gib"]


@pytest.mark.slow
def test_the_prediction_is_told_before_anything_is_timed(tmp_path):
    told = []

    def tell(found):
        told.append((found["predicted"].get("alpha"), [len(row["samples_s"]) for row in found["rivals"].values()]))

    budget = Budget(CPU, GIB, 500_000, cache_dir=str(tmp_path))
    found = run_point(tmp_path, [RIVALS[PLANNED]], budget, visits=(1, 2), tell=tell)
    alpha = found["predicted"]["alpha"]
    assert told == [(alpha, [0]), (alpha, [2])] and alpha is not None
    assert found["device_budget"] == 500_000 and found["failures"] == []


@dataclass
class Profiled:
    ranks_per_sequence: int = 1


def test_the_solver_is_asked_when_its_answer_stays(tmp_path, monkeypatch):
    """The first step holds back half of the device."""
    answers, steps = [(0.0, 2), (0.5, 3), (0.5, 3), (1.0, 4)], []

    @contextlib.contextmanager
    def install(model, budget):
        def report():
            alpha, residents = answers[len(steps) - 1]
            return {"alpha": alpha, "resident_layers": residents, "layers_on_device": [*range(residents)]} | dict.fromkeys(
                ("binding", "predicted")
            )

        yield point.Installed(report=report, profile=lambda: Profiled())

    monkeypatch.setitem(RIVALS, PLANNED, replace(RIVALS["none"], name=PLANNED, install=install))
    shape = speed.shapes(CPU)["gpt7b"]
    trainer = types.SimpleNamespace(model=None, step=steps.append)
    found = predict.predict(trainer, shape, 48, Budget(CPU, GIB), tmp_path, hardware=None)
    assert found["alpha"] == 0.5 and found["resident_layers"] == 3 and found["steps_until_settled"] == len(steps) == 3
