"""The search for the longest length: order of lengths, end, claims."""

import contextlib
import json

import pytest
import torch

from benchmarks import capacity, results, speed
from benchmarks.rivals import RIVALS, Budget, Installed
from ds_memo.units import GIB

CPU = torch.device("cpu")


@pytest.mark.parametrize("start, stride", [(64, 2.0), (992, 1.25), (8, 1.25), (4096, 1.25)])
@pytest.mark.parametrize("limit", [100, 1000, 4097])
def test_the_search_ends_beside_the_limit(limit, start, stride):
    search = capacity.Search(grain=8, start=start, most=1 << 20, stride=stride)
    tried = []
    for length in search.lengths():
        tried.append(length)
        search.learn(length, length <= limit)
    assert search.longest <= limit < search.shortest_that_fails
    assert search.shortest_that_fails - search.longest <= max(8, search.longest / 16)
    assert len(tried) == len(set(tried)) <= (16 if stride == 2 else 4 if start == 992 and limit == 1000 else 30)


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


@pytest.mark.processes
def test_ours_and_the_best_have_their_time_first(monkeypatch, tmp_path):
    clock, seen = 0.0, []

    def search(shape, rival, budget, seconds, device_bytes, lengths=()):
        nonlocal clock
        seen.append((rival, budget.host_bytes, seconds, *lengths))
        clock += 60
        return [{"length": 8, "fits": True, "steps": 2, "step_s": 1.0, "gradient_norm": 2.0}], None

    monkeypatch.setattr(capacity, "search_apart", search)
    shape, rivals = speed.shapes(CPU)["gpt7b"], ["ds_memo, planned", "checkpoint"]
    run = results.Run("capacity", CPU, str(tmp_path))
    run.found |= {"rivals": [], "dropped": [], "claims": []}
    monkeypatch.setattr(run, "seconds", lambda: clock)
    capacity.measure(run, shape, rivals, [2, 1], Budget(CPU, GIB), GIB, 360)
    ours, other = rivals
    assert seen[:4] == [(ours, 2, 135), (ours, 1, 105), (other, 2, 75), (other, 1, 90)]
    assert seen[4:] == [(ours, 2, 60, 8), (ours, 1, 60, 8)]  # as fast where the other one ends?
    assert run.found["dropped"] == [] and len(run.found["claims"]) == 4
    assert all(claim["held"] for claim in run.found["claims"])


@pytest.mark.processes
def test_every_search_is_in_the_file_before_the_next_one(monkeypatch, tmp_path):
    run = results.Run("capacity", CPU, str(tmp_path))
    run.found |= {"rivals": [], "dropped": [], "claims": []}
    seen = []

    def search(shape, rival, *more):
        seen.append(json.loads(run.path.read_text()))
        if rival == "deepspeed":
            raise OSError("no process")
        return [{"length": 8, "fits": True, "steps": 2, "step_s": 1.0, "gradient_norm": 2.0}], None

    monkeypatch.setattr(capacity, "search_apart", search)
    rivals = ["checkpoint", "deepspeed", "hf_offload"]
    capacity.measure(run, speed.shapes(CPU)["gpt7b"], rivals, [GIB], Budget(CPU, GIB), GIB, 1000)
    assert [len(said.get("rivals", ())) for said in seen] == [0, 1, 2] and all(said["unfinished"] for said in seen)
    assert run.failures == ["capacity: deepspeed at 1 GiB: OSError: no process"]
    assert [row["longest"] for row in run.found["rivals"]] == [8, None, 8]
    assert run.finish() == 1 and "unfinished" not in json.loads(run.path.read_text())


def test_a_rival_that_leaves_gradients_out_shows():
    """cuDNN's attention once ran no backward in a rival of ours, which so was faster than the card can be."""

    def row(rival, **norms):
        probes = [{"length": int(at[1:]), "fits": True, "gradient_norm": norm} for at, norm in norms.items()]
        return {"rival": rival, "probes": [*probes, {"length": 99, "fits": False}]}

    rows = [row("alst", _8=2.0, _16=3.0), row("upipe", _8=2.02, _16=1.0), row("ds_memo", _16=3.01)]
    (failure,) = capacity.unlike(rows)
    assert "at 16 tokens: upipe 1; median 3" in failure
    assert capacity.unlike(rows[::2]) == []
    assert len(capacity.unlike([row("one", _8=float("nan")), row("two", _8=1.0)])) == 1


@pytest.mark.slow
def test_lengths_are_tried_by_every_rival_and_compared(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path / "found.json"), "--device-gib", "0.1", "--host-gibs", "0.1"]
    assert capacity.main([*words, "--rivals", "alst", "ds_memo, planned", "--lengths", "24", "16"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    for row in found["rivals"]:
        assert [probe["length"] for probe in row["probes"]] == [64, 24, 16] and row["longest"] == 64
        assert all(probe["gradient_norm"] > 0 for probe in row["probes"])
    assert [claim["claim"].split(",")[0] for claim in found["claims"]] == [
        "longest / longest of the rivals (alst)",
        "step / step of alst at 64 tokens",
    ]


@pytest.mark.parametrize("rival", ["paper", "paper, planned"])
def test_the_papers_program_gets_the_time_of_a_layer_at_the_length_that_is_tried(rival, monkeypatch):
    """Attention grows with the square of the length."""
    timed, given = [], []
    monkeypatch.setattr(capacity.Trainer, "layer_forward_s", lambda trainer, layers: float(trainer.ids.numel() ** 2))

    @contextlib.contextmanager
    def on(self, model, budget):
        given.append(budget.layer_forward_s)
        yield Installed()

    monkeypatch.setattr(type(RIVALS[rival]), "on", on)
    shape = speed.shapes(CPU)["gpt7b"]
    budget = Budget(CPU, GIB, device_bytes=int(0.0008 * GIB))
    capacity.search_here(shape, rival, budget, timed.append)
    assert given == [found["length"] ** 2 for found in timed] and len(set(given)) > 2


def test_lengths_that_are_asked_for_are_tried_in_full():
    found = []
    capacity.search_here(speed.shapes(CPU)["gpt7b"], "checkpoint", Budget(CPU, GIB, GIB), found.append, [24, 16])
    assert [(probe["length"], probe["fits"], probe["steps"]) for probe in found] == [(64, True, 2), (24, True, 2), (16, True, 2)]


@pytest.mark.slow
def test_capacity_runs_each_rival_in_a_process(tmp_path):
    words = ["--device", "cpu", "--out", str(tmp_path), "--rivals", "ds_memo", "--device-gib", "0.001"]
    assert capacity.main([*words, "--host-gibs", "0.1"]) == 0
    (path,) = tmp_path.glob("capacity-cpu-*.json")
    found = json.loads(path.read_text())
    (row,) = found["rivals"]
    assert row["rival"] == "ds_memo" and row["longest"]


def found_length(rival, longest, early=None):
    return {"rival": rival, "longest": longest, "host_bytes": GIB, "ended_early": early, "step_s": 1.0, "probes": []}


def test_a_search_that_was_cut_off_claims_no_more_than_it_knows():
    ours, late = found_length("ds_memo, planned", 512), "no time left after 9 s"
    claim, *_ = capacity.claims([ours, found_length("checkpoint", 1024), found_length("deepspeed", 64, late)])
    assert not claim["held"] and claim["value"] == 0.5 and claim["unfinished"] == ["deepspeed"]
    assert not any("longest" in claim["claim"] for claim in capacity.claims([ours, found_length("checkpoint", 64, late)]))
    (claim,) = capacity.claims([ours, found_length("checkpoint", 1024, late)])  # as long at least
    assert not claim["held"]
    (claim,) = capacity.claims([ours | {"ended_early": late}, found_length("checkpoint", 64)])
    assert not claim["held"] and claim["value"] is None and "cut off: no time left after 9 s" in claim["why"]
