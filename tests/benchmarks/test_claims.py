"""Claims of the verbs; a bar that was not measured is not held."""

import pytest

from benchmarks import capacity, claims, planner
from ds_memo.units import GIB
from tests.benchmarks.test_capacity import found_length


def claims_of(length=65536, **rows):
    """Rows by name, with _ for what no keyword has: seconds of a step, or a row."""
    point = {}
    for name, row in rows.items():
        row = row if isinstance(row, dict) else {"median_s": row}
        point[name.replace("ds_memo_", "ds_memo, ")] = {"samples_s": [row["median_s"]] * 4, "memory": {}} | row
    return {claim["claim"]: claim for claim in claims.claims({"length": length, "rivals": point})}


def test_claims_hold_and_miss():
    good = claims_of(none=1.0, checkpoint=1.3, deepspeed=1.3, ds_memo_planned=1.0)
    assert good and all(claim["held"] for claim in good.values())
    bad = claims_of(none=1.0, checkpoint=1.0, deepspeed=1.1, ds_memo_planned=1.05)
    assert bad and not any(claim["held"] for claim in bad.values())


def test_no_checkpointing_is_no_rival_that_noise_could_let_win():
    """Where everything fits, ds_memo runs the same code; its cost has a bar of its own."""
    found = claims_of(none=1.0, checkpoint=1.3, ds_memo_planned=1.01)
    assert found["step / no checkpointing"]["held"]
    assert found["step / best rival (checkpoint)"]["value"] == pytest.approx(1.01 / 1.3)
    assert not any("best rival" in name for name in claims_of(none=1.0, ds_memo_planned=1.01))


def test_copies_have_their_bar_where_they_can_be_hidden():
    """At 64K by what attention takes; not in a shorter sequence, nor where the host is full and rows are recomputed."""
    name, slow = "step / no checkpointing, swapping", {"median_s": 1.1, "report": {"binding": "link: 3 of 8 GiB of host memory"}}
    assert not claims_of(none=1.0, ds_memo_swapping=slow)[name]["held"]
    assert name not in claims_of(length=16384, none=1.0, ds_memo_swapping=slow)
    full = slow | {"report": {"binding": "host memory: 8 of 8 GiB at alpha 0.3"}}
    assert name not in claims_of(none=1.0, ds_memo_swapping=full)
    assert not claims_of(length=16384, none=1.0, ds_memo_planned=1.1)["step / no checkpointing"]["held"]


@pytest.mark.parametrize("noise, margin, held", [(0.0, 0.0, False), (0.01, 0.014, True), (0.2, claims.MOST_NOISE, True)])
def test_a_rival_that_is_faster_by_less_than_noise(noise, margin, held):
    samples = [1.0 - noise / 2] * 2 + [1.0 + noise / 2] * 2
    rows = {"checkpoint": samples, "ds_memo_planned": [1.01 * s for s in samples]}
    found = claims_of(**{name: {"median_s": sum(row) / 4, "samples_s": row} for name, row in rows.items()})
    claim = found["step / best rival (checkpoint)"]
    assert claim["value"] == pytest.approx(1.01) and claim["bar"] == 1.0
    assert claim["margin"] == pytest.approx(margin, abs=1e-3) and claim["held"] is held


def with_plan(arena, reserved, unplanned=10 * GIB, calls=0):
    memory = {"cuda_mallocs_per_step": calls, "cuda_frees_per_step": 0, "unplanned_peak": unplanned}
    memory |= {"device_peak": reserved, "device_reserved_peak": reserved}
    return {"median_s": 1.0, "memory": memory, "report": {"plan": {"arena": arena}}}


def test_planned_addresses_are_claimed_only_where_there_is_a_plan():
    plain = with_plan(arena=0, reserved=20 * GIB)
    assert not any("cudaMalloc" in name or "reserved" in name for name in claims_of(ds_memo_planned=plain))
    found = claims_of(ds_memo_planned=plain, ds_memo_swapping=with_plan(arena=5 * GIB, reserved=10.1 * GIB))
    assert found["cudaMalloc and cudaFree a step, ds_memo, swapping"]["held"]
    assert found["reserved / requested without a plan, ds_memo, swapping"]["held"]


def test_an_arena_that_is_too_large_misses():
    """With a plan, the arena is among the requested bytes."""
    (claim,) = (
        c for n, c in claims_of(ds_memo_planned=1.0, ds_memo_swapping=with_plan(10 * GIB, 15 * GIB)).items() if "reserved" in n
    )
    assert claim["value"] == 1.5 and not claim["held"]
    report = {"plan": {"arena": 5}, "alpha": 0.5, "layers_on_device": [4, 5]}
    planned = {"cuda_mallocs_per_step": 0, "cuda_frees_per_step": 0, "device_reserved_peak": 15.0, "device_peak": 15.0}
    native = {"device_peak": 10.0, "report": report}
    calls, over = planner.claims({"native": native, "planned": planned | {"report": report}}, "here")
    assert calls["held"] and over["value"] == 1.5 and not over["held"]
    other = native | {"report": report | {"layers_on_device": [3, 4, 5]}}
    calls, over = planner.claims({"native": other, "planned": planned | {"report": report}}, "here")
    assert calls["held"] and over["value"] is None and not over["held"] and "other placements" in over["why"]


OUT = {"samples_s": [], "turns_s": [3.0], "out": "OutOfMemoryError: CUDA out of memory"}


def test_ours_without_a_plan_does_not_stand_in_for_ours_with_one():
    rows = {name: {"samples_s": [1.0] * 4, "median_s": 1.0, "memory": {}} for name in ("none", "checkpoint", "ds_memo")}
    point = {"length": 65536, "rivals": rows | {"ds_memo, planned": OUT}}
    (claim,) = claims.claims(point)
    assert claim["claim"] == "ds_memo, planned did not run" and not claim["held"] and claim["value"] is None
    assert claim["why"] == OUT["out"]
    assert (
        claims.claims({"length": 65536, "rivals": {name: OUT for name in rows} | {"ds_memo, planned": OUT}}) == []
    )  # nor did others
    assert claims.claims({"length": 65536, "rivals": rows}) == []  # it was not asked for


def test_what_a_rival_did_before_it_broke_is_no_claim():
    broke = {"samples_s": [1.0, 1.0], "out": "RuntimeError: boom", "memory": {}, "report": {"host": {"slab": 1, "budget": 2}}}
    assert [claim["claim"] for claim in claims.claims({"length": 16384, "rivals": {"ds_memo, swapping": broke}})] == []


def test_the_host_slab_of_ours_that_swaps_has_its_bar():
    def with_slab(slab):
        return {"median_s": 1.0, "report": {"host": {"slab": slab, "budget": 100}}}

    found = claims_of(none=1.0, ds_memo_planned=with_slab(0), ds_memo_swapping=with_slab(101))
    assert found["host slab / budget, ds_memo, planned"]["held"]
    assert not found["host slab / budget, ds_memo, swapping"]["held"]


def test_a_reserved_bar_without_its_measure_is_not_held():
    row = with_plan(5 * GIB, 5 * GIB)
    del row["memory"]["unplanned_peak"]
    claim = claims_of(ds_memo_swapping=row)["reserved / requested without a plan, ds_memo, swapping"]
    assert claim["value"] is None and not claim["held"] and "placements changed" in claim["why"]


@pytest.mark.parametrize("ways", [{}, {"planned": {"error": "exit 1: boom"}}])
def test_the_planners_bars_do_not_vanish_with_planned(ways):
    found = planner.claims(ways, "gpt7b, fixed length")
    assert len(found) == 2 and not any(claim["held"] for claim in found)
    assert all("planned did not run" in claim["why"] for claim in found)
    on_cpu = {"samples_s": [1.0], "report": {"plan": {"arena": 5}}}
    assert planner.claims({"native": on_cpu, "planned": on_cpu}, "here") == []  # nothing counts there


def test_ours_that_fits_nowhere_is_a_bar_missed():
    nowhere = found_length("ds_memo, planned", None)
    beside = [found_length("ds_memo", 60000), found_length("hf_offload", 50000)]
    (claim,) = capacity.claims([nowhere, *beside])
    assert not claim["held"] and claim["value"] is None and "no length fits" in claim["why"]
    assert capacity.claims(beside) == []  # it was not asked for


def test_as_long_is_not_as_fast():
    """Ten times as slow where the rival ends."""
    ours = found_length("ds_memo, planned", 60000) | {"at_rivals": [{"length": 50000, "fits": True, "step_s": 40.0}]}
    other = found_length("hf_offload", 50000) | {"step_s": 4.0}
    longer, slower = capacity.claims([ours, other])
    assert longer["held"] and longer["value"] == 1.2
    assert slower["claim"].startswith("step / step of hf_offload at 50000 tokens")
    assert slower["value"] == 10.0 and not slower["held"] and slower["bar"] == capacity.EQUALLY_FAST
    (_, late) = capacity.claims([ours | {"at_rivals": []}, other])
    assert not late["held"] and late["why"] == "no time left"
