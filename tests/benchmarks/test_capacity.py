"""The search for the longest length: how it goes down, when it ends, what it may claim."""

import json
import types

import pytest
import torch

from benchmarks import capacity, speed
from benchmarks.rivals import GIB, RIVALS, Budget

CPU = torch.device("cpu")


@pytest.mark.parametrize("limit", [100, 1000, 4097])
def test_the_search_ends_beside_the_limit(limit):
    search = capacity.Search(grain=8, start=64, most=1 << 20)
    tried = []
    for length in search.lengths():
        tried.append(length)
        search.learn(length, length <= limit)
    assert search.longest <= limit < search.shortest_that_fails
    assert search.shortest_that_fails - search.longest <= max(8, search.longest / 16)
    assert len(tried) == len(set(tried)) <= 16


def test_the_search_goes_down_when_the_first_length_does_not_fit():
    search = capacity.Search(grain=8, start=64, most=1 << 20)
    for length in search.lengths():
        search.learn(length, length <= 24)
    assert search.longest == 24
    nothing = capacity.Search(grain=8, start=64, most=1 << 20)
    for length in nothing.lengths():
        nothing.learn(length, False)
    assert nothing.longest == 0 and nothing.shortest_that_fails == 8


def test_a_length_that_fits_until_addresses_are_planned_does_not_fit(monkeypatch):
    """The search goes on in short probes, and the end of it is tried in full."""
    probes = []

    def probe(shape, length, rival, budget, model, warm_up):
        return {"length": length, "steps": warm_up + 1, "fits": length <= (96 if warm_up > 1 else 128)}

    monkeypatch.setattr(capacity, "probe", probe)
    capacity.search_here(speed.shapes(CPU)["gpt7b"], "ds_memo, planned", Budget(CPU, GIB), probes.append)
    assert {found["steps"] for found in probes[:-1] if found["length"] > 128} == {2}
    assert capacity.longest(probes)["length"] == 96 and probes[-1]["steps"] == RIVALS["ds_memo, planned"].warm_up + 1
    probes.clear()
    capacity.search_here(speed.shapes(CPU)["gpt7b"], "checkpoint", Budget(CPU, GIB), probes.append)
    assert capacity.longest(probes)["length"] == 128 and {found["steps"] for found in probes} == {2}


def test_ours_and_the_best_have_their_time_first(monkeypatch, tmp_path):
    clock, seen = 0.0, []
    monkeypatch.setattr(capacity, "time", types.SimpleNamespace(perf_counter=lambda: clock))

    def search(shape, rival, budget, seconds, device_bytes, folder):
        nonlocal clock
        seen.append((rival, budget.host_bytes, seconds))
        clock += 60
        return [{"length": 8, "fits": True, "step_s": 1.0}], None

    monkeypatch.setattr(capacity, "search_apart", search)
    shape, rivals = speed.shapes(CPU)["gpt7b"], ["ds_memo, planned", "checkpoint"]
    found = capacity.measure(shape, rivals, [2, 1], Budget(CPU, GIB), GIB, 240, tmp_path)
    assert seen == [(rivals[0], 2, 120), (rivals[0], 1, 90), (rivals[1], 2, 60), (rivals[1], 1, 60)]
    assert found["dropped"] == []


def test_checkpointing_trains_longer_than_nothing_in_the_same_bytes():
    shape = speed.shapes(CPU)["gpt7b"]
    budget = Budget(CPU, GIB, device_bytes=int(0.0008 * GIB))
    longest = {}
    for rival in ("none", "checkpoint"):
        probes = []
        capacity.search_here(shape, rival, budget, probes.append)
        longest[rival] = max(found["length"] for found in probes if found["fits"])
        assert any(not found["fits"] for found in probes)
    assert longest["checkpoint"] > 1.5 * longest["none"]


@pytest.mark.slow
def test_capacity_runs_each_rival_in_a_process(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path), "--rivals", "none", "ds_memo", "--device-gib", "0.001"]
    assert capacity.main([*words, "--host-gibs", "0.1"]) == 0
    (path,) = tmp_path.glob("capacity-cpu-*.json")
    found = json.loads(path.read_text())
    assert [row["rival"] for row in found["rivals"]] == ["none", "ds_memo"]
    assert all(row["longest"] for row in found["rivals"])


def found_length(rival, longest, early=None):
    return {"rival": rival, "longest": longest, "host_bytes": GIB, "ended_early": early}


def test_a_search_that_was_cut_off_claims_no_more_than_it_knows():
    ours, late = found_length("ds_memo, planned", 512), "no time left after 9 s"
    (claim,) = capacity.claims([ours, found_length("checkpoint", 1024), found_length("deepspeed", 64, late)])
    assert not claim["held"] and claim["value"] == 0.5 and claim["unfinished"] == ["deepspeed"]
    assert capacity.claims([ours, found_length("checkpoint", 64, late)]) == []
    (claim,) = capacity.claims([ours, found_length("checkpoint", 1024, late)])  # as long at least
    assert not claim["held"]
    assert capacity.claims([ours | {"ended_early": late}, found_length("checkpoint", 64)]) == []
