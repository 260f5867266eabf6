"""Turns of the ways to allocate, and the file when the time is over."""

import json

import pytest
import torch

from benchmarks import planner, results
from benchmarks.rivals import Budget

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
WORKLOADS = ["gpt7b", "llama8b", "ulysses8"]


def run_on(clock, tmp_path, monkeypatch, way):
    run = results.Run("planner", CPU, str(tmp_path))
    monkeypatch.setattr(run, "seconds", lambda: clock[0])
    monkeypatch.setattr(planner, "run_way", way)
    planner.measure(run, WORKLOADS, Budget(CPU, 1), 420)
    return run


def test_planner_ends_when_its_time_is_over(tmp_path, monkeypatch):
    """Every way needs 31 s."""
    clock, limits = [0.0], []

    def way(shape, way, lengths, budget, seconds):
        limits.append(seconds)
        clock[0] += min(seconds, 31.0)
        return {"error": f"no time left after {seconds:.0f} s"} if seconds < 31 else {"error": "exit 1: boom"}

    run = run_on(clock, tmp_path, monkeypatch, way)
    assert clock[0] <= 420 and min(limits) >= planner.LEAST_S
    assert len(run.found["dropped"]) == 2 and len(run.failures) == 13
    *_, last = run.found["runs"]
    assert list(last["ways"]) == list(planner.WAYS) and last["ways"]["both"] == {"error": "no time left"}


def test_every_way_is_in_the_file_before_the_next_one(tmp_path, monkeypatch):
    seen = []

    def way(*arguments):
        (path,) = tmp_path.glob("planner-cpu-*.json")
        seen.append(sum(len(run["ways"]) for run in json.loads(path.read_text()).get("runs", ())))
        if len(seen) == 2:
            raise OSError("no process")
        return {"samples_s": [1.0], "hits": 1, "misses": {}, "report": {}}

    run = run_on([0.0], tmp_path, monkeypatch, way)
    assert seen == list(range(24))
    assert run.failures == ["planner: gpt7b, fixed length, planned: OSError: no process"]


def test_what_the_bars_compare_comes_first():
    assert list(planner.WAYS)[:2] == ["native", "planned"]


@pytest.mark.slow
def test_planner_runs_each_way_in_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "WAYS", {"planned": planner.WAYS["planned"]})
    assert planner.main(["--device", "cpu", "--out", str(tmp_path), "--host-gib", "0.1", "--workloads", "gpt7b"]) == 0
    (path,) = tmp_path.glob("planner-cpu-*.json")
    found = json.loads(path.read_text())
    assert [run["kind"] for run in found["runs"]] == ["fixed length", "three lengths"]
    assert all(run["ways"]["planned"]["hits"] for run in found["runs"])
