"""Points of `speed`, their order and rivals, and the results that remain when a part breaks."""

import contextlib
import dataclasses
import json
import tarfile
import types

import pytest
import torch

from benchmarks import attention, rivals, speed
from benchmarks.rivals import RIVALS, Budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = ["gpt7b", "llama8b", "ulysses8"]


class Clock:
    """Stands in for a run: each point takes as many seconds, and nothing is computed."""

    def __init__(self, monkeypatch, point_s):
        self.now, self.points, self.point_s = 15.0, [], point_s
        self.failures, self.found = [], {}
        for name in ("build", "clear", "show", "claims"):
            monkeypatch.setattr(speed, name, lambda *arguments: [])
        monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=self.seconds))
        monkeypatch.setattr(speed, "run_point", self.run_point)
        monkeypatch.setattr(speed, "_kernels", lambda run, device, left: self.points.append(("attention", left)))

    def seconds(self):
        return self.now

    def attempt(self, name, part, *arguments):
        return part(*arguments)

    def save(self, **parts):
        pass

    def run_point(self, model, shape, length, rivals, budget, visits, compare, details, until, tell):
        self.now = min(until, self.now + self.point_s)
        self.points.append((shape.name, length, visits[0], compare))
        tell(found := {"length": length, "rivals": {}, "failures": []})
        return found


def measured(monkeypatch, tmp_path, point_s, lengths=None, names=ALL):
    clock = Clock(monkeypatch, point_s)
    points = speed.points_of(names, lengths, CUDA)
    speed.measure(clock, points, [], Budget(CUDA, 1 << 36), 420, True, tmp_path)
    *taken, kernels = clock.points
    assert kernels[0] == "attention" and clock.now + kernels[1] == 420 and kernels[1] >= speed.KERNELS_S
    assert len(clock.found["points"]) == len(taken) == len(points) - len(clock.found["dropped"])
    return taken


NAMED = [("gpt7b", 65536, 2, False), ("ulysses8", 65536, 1, False), ("gpt7b", 16384, 1, True), ("ulysses8", 131072, 1, False)]


@pytest.mark.parametrize("point_s, points", [(1000.0, 1), (150.0, 3), (95.0, 4), (1.0, 8)])
def test_the_points_that_the_bars_name_come_first(point_s, points, monkeypatch, tmp_path):
    """And llama8b from short to long, as far as the time goes."""
    taken = measured(monkeypatch, tmp_path, point_s)
    others = [("llama8b", length, speed.TURNS, length == 16384) for length in sorted(speed.shapes(CUDA)["llama8b"].lengths)]
    assert taken == [*NAMED, *others][:points]


def test_lengths_that_are_asked_for_are_no_bars_points(monkeypatch, tmp_path):
    assert measured(monkeypatch, tmp_path, 1.0, [16384], ["gpt7b"]) == [("gpt7b", 16384, speed.TURNS, True)]


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
    rivals = ["none", "checkpoint", "paper", "ds_memo, planned"]
    words = ["--device", "cpu", "--workloads", "gpt7b", "--host-gib", "0.1", "--out", str(tmp_path), "--budget-s", "0.1"]
    assert speed.main([*words, "--no-attention", "--rivals", *rivals]) == 0
    (path,) = tmp_path.glob("speed-cpu-*.json")
    found = json.loads(path.read_text())
    (point,) = found["points"]  # the first always runs
    assert [row["length"] for row in found["dropped"]] == [96]
    assert set(point["rivals"]) == set(rivals)
    for row in point["rivals"].values():
        assert len(row["samples_s"]) >= 4 and row["memory"]["device_peak"] > 0
    peak = {name: row["memory"]["device_peak"] for name, row in point["rivals"].items()}
    assert peak["checkpoint"] < peak["none"]
    assert point["gradients"]["failures"] == [] and 0 < point["gradients"]["bar"] < 1e-3
    archive = tmp_path / found["details"]
    assert sorted(tmp_path.iterdir()) == sorted([path, archive])
    with tarfile.open(archive) as details:
        assert "profile-gpt7b-48.json" in details.getnames()
    assert found["environment"]["torch"] == torch.__version__
