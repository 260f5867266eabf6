"""The tuner: what is left open is found at the first training pass, kept to, cached, and lowered where copies are slow."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch

import ds_memo
from ds_memo.autotune import learning
from ds_memo.autotune.learning import Link, Totals
from ds_memo.memory.device import DeviceBudget
from ds_memo.placement import PlacementKind, spread
from ds_memo.profile.layer import measure
from ds_memo.runtime.passes import place as place_calls
from ds_memo.solve.memory import device_bytes
from ds_memo.solve.refusals import NothingFits
from ds_memo.swap import pinned_segments
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, Batch, assert_same, build, step
from tests.placements import kinds, sets, swapped_at
from tests.profile.test_bandwidth import Throttled

GIB = 1 << 30
LENGTH = 300
BATCH = Batch.random(2, LENGTH)
PLENTY, NONE = 1.0, 1e-6


pytestmark = pytest.mark.usefixtures("own_cache")


def attached(model: Any, **memo: Any) -> Any:
    return ds_memo.attach(model, {"enabled": True, "plan": {"enabled": False}, **memo})


@pytest.fixture(scope="module")
def costs() -> Any:
    """What a profile of the model says, so that budgets can be set to reach every regime."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        return costs_of(BATCH)


def costs_of(batch: Batch) -> Any:
    model = build("llama")
    handle = attached(model)
    with pytest.warns(ds_memo.MemoWarning, match="are not cached"):
        step(model, batch)
    run = inside(handle).policy.pass_solution.run
    handle.detach()
    return run


def budgets(run: Any, residents: float, host: float, buffers: str = "frame_bytes") -> dict[str, float]:
    """A device for `residents` frames while the others are swapped, a host for `host` of all rows."""
    one, again = run.layers[0], range(LAYERS) if buffers == "smallest_frame_bytes" else ()
    placed = kinds(LAYERS, on_device=spread(LAYERS, residents), attention_recomputed=again)
    device = device_bytes(run, placed, 1.0 if buffers == "frame_bytes" else 0.0)
    # What a step needs is measured anew in each run and must not depend on it to the byte.
    return {
        "device_memory_gib": (device + one.frame_bytes / 3) / GIB,
        "host_memory_gib": host * LAYERS * one.host_bytes(swapped_at(1.0)) / GIB,
    }


@pytest.mark.parametrize("name", ["llama", "plain"])
def test_everything_fits(name: str) -> None:
    """Plain training: no layer is checkpointed, and the result is stock's to the bit."""
    model = build(name)
    stock = copy.deepcopy(model)
    handle = attached(model)
    for number in range(2):
        batch = Batch.random(2, 40, seed=number)
        assert_same(step(model, batch), step(stock, batch), tolerance=0.0)
    report = handle.report()
    assert (report["checkpointing"], report["frames"], report["bytes_to_host"]) == (False, 0, 0)
    assert report["binding"].startswith("everything fits without checkpointing")
    assert report["warnings"] == []
    handle.detach()


@pytest.mark.slow
@pytest.mark.usefixtures("times_by_flops")
def test_predicted_bytes_are_those_of_whole_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1,024 rows on, those that are recomputed fill tiles of GEMM kernels. The solver's bytes know it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    batch = Batch.random(1, 1_100)
    run, model = costs_of(batch), build("llama", max_position_embeddings=2_048)
    handle = attached(model, tile_tokens=0, **budgets(run, 1, 0.5))
    with pytest.warns(ds_memo.MemoWarning, match="are not cached"):
        step(model, batch)
    report = handle.report()
    handle.detach()
    assert 0 < report["alpha"] < 1
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert report["host"]["slab"] == report["predicted"]["host_bytes"] <= report["host"]["budget"]
    exact = [sum(int(report["alpha"] * o.rows) * o.row_bytes if o.role == "gemm" else o.nbytes for o in run.layers[0].outputs)]
    assert min(report["stored_bytes_per_layer"]) < exact[0], "alpha splits no tile of rows"


@pytest.mark.usefixtures("times_by_flops")
@pytest.mark.parametrize(
    "residents, host, buffers, says",
    [
        (LAYERS, 5, "frame_bytes", None),
        (1, 5, "frame_bytes", None),
        (1, 0.3, "frame_bytes", None),
        (0, 0.12, "smallest_frame_bytes", "last resort: "),
    ],
    ids=["all resident", "swapped", "small host", "last resort"],
)
def test_predictions_are_what_is_counted(costs: Any, residents: int, host: float, buffers: str, says: str | None) -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, **budgets(costs, residents, host, buffers))
    for _ in range(2):
        assert_same(step(model, BATCH), step(stock, BATCH))
    report = handle.report()
    assert report["checkpointing"]
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert report["host"]["slab"] == report["predicted"]["host_bytes"] <= report["host"]["budget"]
    assert report["predicted"]["device_bytes"] <= report["profile"]["device_budget"]
    assert (report["attention_recomputed"] > 0) == (residents == 0)
    if residents == 0:  # the last resort: of what is swapped, nothing without attention comes back before it is wanted
        solution, traffic = inside(handle).policy.pass_solution.solution, inside(handle).engine.traffic
        assert sets(solution).without_gemms and report["layers_without_gemms"] == sorted(sets(solution).without_gemms)
        swapped = set(range(LAYERS)) - sets(solution).without_gemms
        assert traffic.frames_on_demand == 2 * len(swapped & sets(solution).attention_recomputed)
        assert traffic.frames_prefetched == 2 * len(swapped - sets(solution).attention_recomputed)
    if says:
        assert report["binding"].startswith(says)
    handle.detach()


def test_a_guess_of_what_is_to_come_refuses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step room is left for Adam's states, whatever optimizer comes: in 16 GiB more than all there is."""
    monkeypatch.setattr("ds_memo.autotune.budgets.states_to_come", lambda model, has_engine: 0 if has_engine else 1 << 60)
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model)
    assert_same(step(model, BATCH), step(stock, BATCH))
    assert handle.report()["binding"].startswith("last resort")  # as little as it can
    handle.detach()


@pytest.mark.parametrize("share, adam, fits", [(1.1, True, True), (0.9, False, False)])
def test_what_is_left_alone_is_there_for_a_pass_that_needs_it(
    costs: Any, monkeypatch: pytest.MonkeyPatch, share: float, adam: bool, fits: bool
) -> None:
    """As long as the head is not seen, half of the device is left alone, and room for Adam's states, whatever optimizer comes;
    but no pass that fits is refused for that."""
    least = device_bytes(costs, kinds(LAYERS, attention_recomputed=range(LAYERS)), 0.0)

    def budget(device: torch.device, given: float | None, to_come: int, headroom: float, lost: int = 0) -> DeviceBudget:
        free, withheld = int(share * least), int(share * least * headroom)
        states = free if headroom and adam else 0
        return DeviceBudget(max(0, free - withheld - states), free, withheld, "headroom", states)

    monkeypatch.setattr("ds_memo.autotune.budgets.device_budget", budget)
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model)
    if fits:
        assert_same(step(model, BATCH), step(stock, BATCH))
        predicted = handle.report()["predicted"]
        assert predicted["device_bytes"] <= max(least, share * least / 2)
        budget = predicted["device_budget"]
        assert budget["solved_for"] == predicted["device_bytes"] and budget["why"] == "nothing fits with headroom"
    else:
        with pytest.raises(NothingFits, match="device memory"):
            step(model, BATCH)
    handle.detach()


@pytest.mark.parametrize("memory, where", [("device_memory_gib", "device memory"), ("host_memory_gib", "host memory")])
def test_nothing_fits(costs: Any, memory: str, where: str) -> None:
    """An error before any layer ran, with numbers and ways out; the model trains on without memo."""
    model = build("llama")
    stock = copy.deepcopy(model)
    inputs = device_bytes(costs, [PlacementKind.FULL_RECOMPUTE] * LAYERS, 0.0)
    too_little = {"device_memory_gib": (inputs - costs.layers[0].nbytes("input") // 2) / GIB, "host_memory_gib": NONE}
    handle = attached(model, **{**too_little, memory: NONE})
    for _ in range(2):
        with pytest.raises(NothingFits, match=where) as caught:
            step(model, BATCH)
    assert "GiB are missing. What helps: " in str(caught.value)
    assert handle.report()["frames"] == 0
    handle.detach()
    assert_same(step(model, BATCH), step(stock, BATCH))


def test_what_is_configured_is_obeyed(costs: Any) -> None:
    for given in ({"alpha": 0.25}, {"resident_layers": 3}):
        model = build("llama")
        handle = attached(model, **{**budgets(costs, 3, 5), **given})
        step(model, BATCH)
        assert given.items() <= handle.report().items()
        handle.detach()


def test_another_length_is_solved_without_measuring(costs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr("ds_memo.profile.run.measure", lambda *args: measured.append(args[1]) or measure(*args))
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, **budgets(costs, 1, 5))
    seen = set()
    for length in (LENGTH, 40, 120, LENGTH):
        batch = Batch.random(2, length)
        assert_same(step(model, batch), step(stock, batch))
        report = handle.report()
        seen.add(report["checkpointing"])
        if report["checkpointing"]:
            assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    assert measured == [LENGTH]
    assert seen == {True, False}  # the short ones fit
    handle.detach()


# ---- between steps


def test_alpha_is_lowered_and_the_report_says_so(costs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls are made up: the schedule that they stand for is another one's business."""
    model = build("llama")
    handle = attached(model, **budgets(costs, 1, 5))
    pilot = inside(handle).tuner
    step(model, BATCH)
    fast = dataclasses.replace(pilot.profile, d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12)
    gemms = [dataclasses.replace(s, gemm_s=s.forward_s) for s in fast.kinds[0].samples]
    pilot._profiling.profile = dataclasses.replace(fast, kinds=(dataclasses.replace(fast.kinds[0], samples=tuple(gemms)),))
    pilot._solutions.clear()
    step(model, BATCH)
    before = handle.report()["alpha"]
    assert before == 1.0
    monkeypatch.setattr(Link, "measured", lambda *_: 1e-5)
    pilot._learn(Totals(1), comparable=True)
    step(model, BATCH)
    report = handle.report()
    assert report["alpha"] < before
    assert "alpha lowered from 1 to" in report["profile"]["changes"][0]
    assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
    handle.detach()


@pytest.mark.slow
@pytest.mark.parametrize("link, slow", [(1.5e7, True), (1e12, False)], ids=["slow link", "as profiled"])
def test_copies_that_are_slower_than_profiled(costs: Any, link: float, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps, copies and stalls. A busy test machine stalls too, so only half of a step counts as slow here."""
    monkeypatch.setattr(learning, "TOLERATED", 0.5)
    monkeypatch.setattr(learning, "WINDOW", 2)
    monkeypatch.setattr("ds_memo.runtime.session.streams_for", lambda device: Throttled(link, link))
    monkeypatch.setattr("ds_memo.profile.bandwidth.streams_for", lambda device: Throttled(1e9, 1e9))  # so that 1 % of it is slow
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, **budgets(costs, 0, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    alphas = []
    for _ in range(8):
        assert_same(step(model, BATCH), step(stock, BATCH))
        alphas.append(handle.report()["alpha"])
        optimizer.step()
    changes = handle.report()["profile"]["changes"]
    if slow:
        assert alphas[0] == alphas[3] > alphas[4] == alphas[7]
        assert len(changes) == 1 and re.match(r"alpha lowered from .* of the profiled bandwidth", changes[0])
    else:
        assert len(set(alphas)) == 1 and changes == []
    handle.detach()


# ---- the host refuses


class Refusing:
    """Fails the n-th block request, as a system without memory does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
        self.left = nth
        real = pinned_segments.mmap.mmap

        def mmap(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(12, "Cannot allocate memory")
            return real(*args, **kwargs)

        monkeypatch.setattr(pinned_segments.mmap, "mmap", mmap)


@pytest.mark.parametrize(
    "analysed, nth", everyday([(False, 0), (False, LAYERS - 1), (True, 1)], [(False, LAYERS - 1), (True, 1)])
)
def test_a_failure_at_every_slab_request(monkeypatch: pytest.MonkeyPatch, nth: int, analysed: bool) -> None:
    """In the first step, which analyses layers, or a later one: calls without room are recomputed, and nothing leaks."""
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 0, "plan": {"enabled": False}})
    if analysed:
        step(model, BATCH)
        inside(handle).engine.drain()
        inside(handle).slab.pool.release()  # or its blocks are used again
    with monkeypatch.context() as patch:
        Refusing(patch, nth)
        model.zero_grad()
        with pytest.warns(ds_memo.MemoWarning, match="layer calls are recomputed .*: the system refused"):
            assert_same(step(model, BATCH), step(copy.deepcopy(stock), BATCH))
    inside(handle).engine.drain()
    assert (inside(handle).slab.used, inside(handle).slab.size) == (
        0,
        sum(free.nbytes for free in inside(handle).slab.pool._free_ranges),
    )
    assert len(inside(handle).slab.pool._free_ranges) == nth
    model.zero_grad()
    assert_same(step(model, BATCH), step(stock, BATCH))
    handle.detach()
    assert inside(handle).slab.size == 0


def test_after_a_refusal_the_tuner_asks_for_less(costs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, resident_layers=0, **budgets(costs, 0, 5))
    place_calls(inside(handle), model, (), {"inputs_embeds": BATCH.embeds, "labels": BATCH.labels})
    asked = handle.report()["predicted"]["host_bytes"]
    with monkeypatch.context() as patch:
        Refusing(patch, LAYERS - 1)
        with pytest.warns(ds_memo.MemoWarning, match="layer calls are recomputed .*: the system refused"):
            step(model, BATCH)
    model.zero_grad()
    assert_same(step(model, BATCH), step(stock, BATCH))
    report = handle.report()
    assert report["predicted"]["host_bytes"] <= 0.76 * asked
    assert "the system refused more" in report["profile"]["changes"][0]
    handle.detach()


# ---- ranks


# ---- ablation


@pytest.mark.parametrize("ablation", ["full_recompute", "full_swap"])
def test_ablations(ablation: str) -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = attached(model, ablation=ablation)
    for _ in range(2):
        assert_same(step(model, BATCH), step(stock, BATCH))
    report = handle.report()
    if ablation == "full_recompute":
        assert (report["alpha"], report["resident_layers"], report["bytes_to_host"]) == (0.0, 0, 0)
        assert report["attention_recomputed"] == 2 * LAYERS
        assert report["gemm_flops_recomputed_fraction"] > 0.6
    else:
        assert (report["alpha"], report["resident_layers"], report["gemm_flops_recomputed_fraction"]) == (1.0, 2, 0.0)
    handle.detach()
    with pytest.raises(ds_memo.MemoConfigError, match=r"memo\.ablation: got .* beside memo\.alpha"):
        attached(model, ablation=ablation, alpha=0.5)
