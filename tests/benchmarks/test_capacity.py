"""The search for the longest length: where it ends, what counts as fitting, and its bars."""

import pytest
import torch

from benchmarks import capacity
from benchmarks.rivals import RIVALS, Budget
from benchmarks.workloads import shapes
from ds_memo.units import GIB

CPU = torch.device("cpu")


@pytest.mark.parametrize("start", [64, 992, 4096])
@pytest.mark.parametrize("limit", [24, 1000, 4097])
def test_the_search_ends_beside_the_limit(limit, start):
    search = capacity.Search(grain=8, start=start, most=1 << 20)
    tried = []
    for length in search.lengths():
        tried.append(length)
        search.learn(length, length <= limit)
    assert search.longest <= limit < search.shortest_that_fails
    assert search.shortest_that_fails - search.longest <= max(8, search.longest / 16)
    assert len(tried) == len(set(tried)) <= 16


def test_a_length_that_fits_until_addresses_are_planned_does_not_fit(monkeypatch):
    """The search goes on in short probes, and the end of it is tried in full."""
    probes = []

    def probe(shape, length, rival, budget, model, warm_up):
        return {"length": length, "steps": warm_up + 1, "fits": length <= (96 if warm_up > 1 else 128)}

    monkeypatch.setattr(capacity, "probe", probe)
    capacity.search_here(shapes(CPU)["gpt7b"], "ds_memo, planned", Budget(CPU, GIB), probes.append)
    assert {found["steps"] for found in probes[:-1] if found["length"] > 128} == {2}
    assert capacity.longest(probes)["length"] == 96 and probes[-1]["steps"] == RIVALS["ds_memo, planned"].warm_up + 1


def test_a_rival_that_leaves_gradients_out_shows():
    """cuDNN's attention once ran no backward in a rival of ours, which so was faster than the card can be."""

    def row(rival, **norms):
        probes = [{"length": int(at[1:]), "fits": True, "gradient_norm": norm} for at, norm in norms.items()]
        return {"rival": rival, "probes": [*probes, {"length": 99, "fits": False}]}

    rows = [row("alst", _8=2.0, _16=3.0), row("upipe", _8=2.02, _16=1.0), row("ds_memo", _16=3.01)]
    (failure,) = capacity.unlike(rows)
    assert "16 tokens: norm of all gradients: upipe 1; median 3" in failure
    assert capacity.unlike(rows[::2]) == []
    assert len(capacity.unlike([row("one", _8=float("nan")), row("two", _8=1.0)])) == 1
