"""Points of `speed`, their order and rivals, and the results that remain when a part breaks."""

import contextlib
import dataclasses
import json
import tarfile
import types

import pytest
import torch

from benchmarks import attention, point, rivals, speed, streams
from benchmarks.rivals import RIVALS, Budget
from benchmarks.workloads import step_flops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = ["gpt7b", "llama8b", "ulysses8"]


class Clock:
    """Stands in for a run: points take what they take at a rate, and nothing is computed."""

    def __init__(self, monkeypatch, flops):
        self.now, self.points, self.saved = 15.0, [], 0
        self.failures, self.found, self.flops = [], {}, flops
        for name in ("build", "clear", "show", "claims"):
            monkeypatch.setattr(speed, name, lambda *arguments: [])
        monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=self.seconds))
        monkeypatch.setattr(speed, "run_point", self.run_point)
        monkeypatch.setattr(speed, "_kernels", self.kernels)

    def seconds(self):
        return self.now

    def attempt(self, name, part, *arguments):
        return part(*arguments)

    def save(self, **parts):
        self.saved += 1

    def kernels(self, run, device, left):
        self.points.append(("attention", left))

    def run_point(self, model, shape, length, taking, budget, visits, compare, details, until, tell):
        step_s, (turns, steps) = step_flops(shape, length) / self.flops, visits
        names = [rival.name for rival in taking]
        recomputed = sum(1.03 if name in ("none", *rivals.OURS, rivals.SWAPPING) else 1.33 for name in names)
        self.now += 3 + step_s * (18 if compare else 10) + 0.5 * turns * len(names)
        self.now += step_s * recomputed * (turns * (point.WARM_UP + steps) + (5 if compare else 0))
        self.points.append((shape.name, length, turns, compare, names))
        rows = {name: {"samples_s": [step_s], "tflops": self.flops / 1e12} for name in names}
        return {"length": length, "rivals": rows, "failures": []}


def measured(monkeypatch, tmp_path, flops, lengths=None, names=ALL, budget_s=420):
    clock = Clock(monkeypatch, flops)
    points = speed.points_of(names, lengths, CUDA)
    speed.measure(clock, points, list(RIVALS.values()), Budget(CUDA, 1 << 36), budget_s, True, tmp_path)
    return clock


@pytest.mark.parametrize("flops", [4e14, 4.5e14, 5.5e14])
def test_the_points_that_the_bars_name_come_first(flops, monkeypatch, tmp_path):
    """The rate of an H200 is not known; gradients at 16K are compared at any rate."""
    clock = measured(monkeypatch, tmp_path, flops)
    *points, _ = clock.points
    named = [("gpt7b", 65536), ("ulysses8", 65536), ("gpt7b", 16384), ("ulysses8", 131072)]
    assert [row[:2] for row in points] == named[: len(points)] and len(points) >= (4 if flops > 4e14 else 3)
    assert [row[2] for row in points] == [2, 1, 1, 1][: len(points)]
    assert [row[3] for row in points] == [False, False, True, False][: len(points)]
    assert points[0][4] == list(point.NEEDED)
    assert all(row[4][:6] == list(point.NEEDED) for row in points)
    assert clock.now < 440 and points and clock.points[-1][0] == "attention"
    assert len(clock.found["dropped"]) + len(points) == 12 and clock.failures == []


def test_lengths_that_are_asked_for_have_all_rivals_and_turns(monkeypatch, tmp_path):
    clock = measured(monkeypatch, tmp_path, 4.5e14, [16384], ["gpt7b"])
    (what, kernels) = clock.points
    assert what[:4] == ("gpt7b", 16384, 3, True) and set(what[4]) == set(RIVALS)
    assert kernels[0] == "attention" and kernels[1] >= speed.KERNELS_S


def test_other_points_go_from_short_to_long_and_leave_time_for_kernels(monkeypatch, tmp_path):
    clock = measured(monkeypatch, tmp_path, 4.5e14, budget_s=3000)
    *points, kernels = clock.points
    others = [row[:2] for row in points[4:]]
    assert others[0] == ("llama8b", 16384) and len(others) >= 4
    assert others == sorted(others, key=lambda row: step_flops(speed.shapes(CUDA)[row[0]], row[1]))
    assert kernels[1] > 0


def run_speed(tmp_path, *more):
    words = ["--device", "cpu", "--workloads", "gpt7b", "--lengths", "48", "--host-gib", "0.1", "--out", str(tmp_path)]
    status = speed.main([*words, *more])
    (path,) = tmp_path.glob("speed-cpu-*.json")
    return status, json.loads(path.read_text())


@pytest.mark.processes
def test_without_a_row_of_ours_a_run_has_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(rivals.Rival, "missing", lambda rival: "deepspeed is not installed" if rival.needs else None)
    status, found = run_speed(tmp_path, "--no-attention", "--rivals", "none", "ds_memo, planned")
    assert status == 1 and found["failures"] == ["no row of ds_memo has samples: deepspeed is not installed"]
    assert "median_s" in found["points"][0]["rivals"]["none"]
    (claim,) = [claim for claim in found["points"][0]["claims"] if not claim["held"]]
    assert claim["claim"] == "ds_memo, planned did not run"


def breaks(*arguments):
    raise ValueError("boom")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "name", "failure"),
    [
        (attention, "kernels", "attention: ValueError: boom"),
        (attention, "picked", "attention 128: what PyTorch picks breaks: ValueError: boom"),
        (speed, "measure_bandwidth", "link: ValueError: boom"),
        (speed, "show", "gpt7b 48, printed: ValueError: boom"),
    ],
)
def test_what_breaks_beside_the_points_takes_none_with_it(module, name, failure, monkeypatch, tmp_path):
    monkeypatch.setattr(module, name, breaks)
    status, found = run_speed(tmp_path, "--rivals", "none")
    assert status == 1 and failure in found["failures"] and "unfinished" not in found
    assert "median_s" in found["points"][0]["rivals"]["none"]


@pytest.mark.processes
def test_a_run_that_is_ended_amid_a_point_leaves_the_turns_before(monkeypatch, tmp_path):
    @contextlib.contextmanager
    def ends(model, budget):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(RIVALS, "checkpoint", dataclasses.replace(RIVALS["checkpoint"], install=ends))
    with pytest.raises(KeyboardInterrupt):
        run_speed(tmp_path, "--no-attention", "--rivals", "none", "checkpoint")
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    assert found["unfinished"] and found["environment"]["torch"] == torch.__version__
    assert "median_s" in found["points"][0]["rivals"]["none"] and found["points"][0]["claims"] == []


@pytest.mark.slow
def test_speed_measures_a_point_and_drops_what_the_time_does_not_hold(tmp_path):
    rivals = ["none", "checkpoint", "paper", "ds_memo, swapping"]
    words = ["--device", "cpu", "--workloads", "gpt7b", "--host-gib", "0.1", "--out", str(tmp_path), "--budget-s", "0.1"]
    assert speed.main([*words, "--no-attention", "--rivals", *rivals]) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    (point,) = found["points"]  # the first always runs
    assert [row["length"] for row in found["dropped"]] == [96]
    assert set(point["rivals"]) | set(point["left_out"]) == set(rivals)
    for row in point["rivals"].values():
        assert len(row["samples_s"]) >= 4 and row["memory"]["device_peak"] > 0
    peak = {name: row["memory"]["device_peak"] for name, row in point["rivals"].items()}
    assert peak["checkpoint"] < peak["none"]
    assert point["gradients"]["failures"] == [] and 0 < point["gradients"]["bar"] < 1e-3
    assert point["streams"]["hidden_share"]["d2h"] is not None  # four of six layers went to the host
    archive = tmp_path / found["details"]
    assert sorted(tmp_path.iterdir()) == sorted([path, archive])
    with tarfile.open(archive) as details:
        assert "streams-gpt7b-48.json" in details.getnames()
        details.extract("streams-gpt7b-48.json", tmp_path, filter="data")
    assert streams.main([str(tmp_path / "streams-gpt7b-48.json")]) == 0
    assert found["environment"]["torch"] == torch.__version__
