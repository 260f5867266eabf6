"""Models of one process share the host: all of it in turns, a share each where passes of several are open at once."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.profile import run
from ds_memo.swap.host_budget import HostBudget
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.units import GIB
from tests.inside import inside
from tests.models import Batch, assert_same_grads, build, gradients

BATCH = Batch.random(4, 128)


HOST = 3 << 20
RESIDENTS_NONE = {"resident_layers": 0}
Three = tuple[list[nn.Module], list[nn.Module], list[Any]]


def pair(*sections: dict[str, Any], host: float = HOST) -> Three:
    """Return an actor and a critic, their stock twins, and their handles; the host holds what one wants to swap, and no more."""
    models = [build("llama"), build("gpt2")]
    stocks = [copy.deepcopy(model) for model in models]
    rest = {"host_memory_gib": host / GIB, "plan": {"enabled": False}}
    return models, stocks, [ds_memo.attach(model, section | rest) for model, section in zip(models, sections, strict=True)]


@pytest.fixture
def copies_hide(own_cache: Any, times_by_flops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is solved for takes all of the host."""
    monkeypatch.setattr(run.CopyBench, "rate", lambda *args: 1e11)


@pytest.fixture
def models(copies_hide: None) -> Three:
    return pair(RESIDENTS_NONE, RESIDENTS_NONE)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss


def test_models_that_take_turns_each_have_the_whole_host(models):
    actors, stocks, handles = models
    for _ in range(3):
        for model, stock in zip(actors, stocks, strict=True):
            loss_of(model).backward()
            loss_of(stock).backward()
            assert_same_grads(gradients(model), gradients(stock))
    for handle in handles:
        report = handle.report()
        assert report["host"]["budget"] == HOST and report["profile"]["changes"] == [] and report["warnings"] == []
        assert HOST / 2 < report["host"]["peak_used"] <= HOST
        assert report["alpha"] > 0
    assert inside(handles[0]).slab.size == max(inside(handle).slab.peak_used for handle in handles)


def test_passes_that_wait_together_have_a_part_each(models):
    actors, stocks, handles = models
    held = []
    for _ in range(4):
        (loss_of(actors[0]) + loss_of(actors[1])).backward()
        held.append([inside(handle).slab.peak_used for handle in handles])
        for model, stock in zip(actors, stocks, strict=True):
            loss_of(stock).backward()
            assert_same_grads(gradients(model), gradients(stock))
    assert held[0][1] == 0, "the first model had taken more than its part"
    for handle in handles:
        report = handle.report()
        assert report["host"]["budget"] == HOST // 2
        assert any("other models' passes wait for their backward at the same time" in c for c in report["profile"]["changes"])
        assert report["predicted"]["host_bytes"] <= HOST // 2
    assert 0 < inside(handles[1]).slab.peak_used <= HOST // 2 and inside(handles[0]).slab.size <= HOST


def test_without_shares_the_second_never_gets_any_host_memory(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the first model leaves nothing."""
    monkeypatch.setattr(HostBudget, "_at_once", lambda slab: [])
    actors, _, handles = models
    for _ in range(3):
        (loss_of(actors[0]) + loss_of(actors[1])).backward()
    assert inside(handles[0]).slab.peak_used > HOST / 2 and inside(handles[1]).slab.peak_used == 0
    with monkeypatch.context() as patch:
        patch.setattr(HostBudget, "reservation", property(lambda slab: slab.share))  # nor does the second look at what is held
        with pytest.raises(ds_memo.MemoError, match=r"host memory: .* beside .* GiB that other models hold"):
            (loss_of(actors[0]) + loss_of(actors[1])).backward()


def test_a_forward_in_another_thread_is_refused_while_one_runs(models) -> None:
    """With one line, and the one that runs goes on. In turns any thread may train."""
    actors, stocks, handles = models
    refused = []

    def intrude(*_: Any) -> None:
        refused.append(elsewhere.submit(loss_of, actors[1]).exception(60))

    with ThreadPoolExecutor(1, "elsewhere") as elsewhere:
        for _ in range(2):
            hook = actors[0].model.norm.register_forward_hook(intrude)
            loss = loss_of(actors[0])
            hook.remove()
            loss.backward()
            elsewhere.submit(loss_of, actors[1]).result(60).backward()
    said = "a training forward began in thread elsewhere_0 while one runs in thread MainThread that shares its host memory."
    assert len(refused) == 2 and all(isinstance(e, ds_memo.MemoError) and str(e).startswith(said) for e in refused)
    for model, stock in zip(actors, stocks, strict=True):
        for _ in range(2):
            loss_of(stock).backward()
        assert_same_grads(gradients(model), gradients(stock))
    assert [handle.report()["host"]["budget"] for handle in handles] == [HOST, HOST]


def test_who_is_left_has_the_whole_host_again(models) -> None:
    actors, stocks, handles = models
    for _ in range(3):
        (loss_of(actors[0]) + loss_of(actors[1])).backward()
    actor, stock, handle = actors.pop(0), stocks[0], handles.pop(0)
    before = handle.report()
    actor.zero_grad()
    del actors[:], handles[:]
    gc.collect()
    for _ in range(2):
        for model in (actor, stock):
            loss_of(model).backward()
    assert_same_grads(gradients(actor), gradients(stock))
    after = handle.report()
    handle.detach()
    assert (before["host"]["budget"], after["host"]["budget"]) == (HOST // 2, HOST)
    assert (before["profile"]["host_budget"], after["profile"]["host_budget"]) == (HOST // 2, HOST)
    assert after["alpha"] > before["alpha"] and after["predicted"]["host_bytes"] > HOST // 2
    assert inside(handle).slab.used == 0 and inside(handle).slab.peak_used > HOST // 2
    assert after["profile"]["changes"][-1].startswith("host budget raised to")


def test_passes_whose_alpha_is_configured_wait_together_where_they_fit() -> None:
    """Also where one needs more than half."""
    models, stocks, handles = pair(*[{"alpha": 0.5, **RESIDENTS_NONE}] * 2, host=3.5 * HOST / 3)
    batches = BATCH, Batch.random(1, 64)
    for _ in range(2):
        for both in (models, stocks):
            losses = [model(inputs_embeds=b.embeds, labels=b.labels).loss for model, b in zip(both, batches, strict=True)]
            sum(losses).backward()
        for model, stock in zip(models, stocks, strict=True):
            assert_same_grads(gradients(model), gradients(stock))
    assert inside(handles[0]).slab.peak_used > HOST * 3.5 / 3 / 2


def wait_together(models: list[nn.Module], stocks: list[nn.Module], second: Any, warned: bool) -> int:
    """Both forwards, then both backwards, with gradients as stock has them; the host's bytes that the second had meanwhile."""
    losses = loss_of(models[0]), warned_loss_of(models[1]) if warned else loss_of(models[1])
    held = inside(second).slab.used
    sum(losses).backward()
    for model, stock in zip(models, stocks, strict=True):
        loss_of(stock).backward()
        assert_same_grads(gradients(model), gradients(stock))
    return held


@pytest.mark.usefixtures("copies_hide")
def test_a_given_alpha_waits_while_another_model_holds_the_host() -> None:
    """The residents are open, and the device has no room for all: that pass does without memo.alpha, and says so."""
    alone = ds_memo.attach(critic := build("gpt2"), {"alpha": 0.05, "host_memory_gib": HOST / GIB, "plan": {"enabled": False}})
    loss_of(critic).backward()
    all_resident = alone.report()["predicted"]["device_bytes"]
    alone.detach()
    models, stocks, handles = pair(RESIDENTS_NONE, {"alpha": 0.05, "device_memory_gib": 0.95 * all_resident / GIB})
    alphas = []
    for number in range(3):
        wait_together(models, stocks, handles[1], warned=not number)
        alphas.append(handles[1].report()["alpha"])
    assert alphas == [0.0, 0.05, 0.05] and inside(handles[1]).slab.peak_used > 0
    assert len(handles[1].report()["warnings"]) == 1


@pytest.mark.usefixtures("copies_hide")
def test_a_configured_model_waits_while_another_one_holds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order: passes that find too little go without, with one warning, and the open model leaves it from then on."""
    models, stocks, handles = pair(RESIDENTS_NONE, {"alpha": 0.05, **RESIDENTS_NONE})
    held = [wait_together(models, stocks, handles[1], warned=not number) for number in range(4)]
    assert held[0] < held[1] == held[2] == held[3], held
    assert len(handles[1].report()["warnings"]) == 1 and handles[0].report()["warnings"] == []
    third = HostSlab(HOST, inside(handles[1]).slab.pool)
    block = third.allocate(HOST - PAGE, "a third")  # recipes are known by now
    collected: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *args: collected.append(1) or collect(*args))
    loss = loss_of(models[1])
    assert len(collected) <= 2, "as its pass began, and for its first layer, not for each"
    loss.backward()
    loss_of(stocks[1]).backward()
    assert_same_grads(gradients(models[1]), gradients(stocks[1]))
    third.free(block)
    third.close()


def warned_loss_of(model: nn.Module) -> torch.Tensor:
    with pytest.warns(ds_memo.MemoWarning, match=r"without memo.alpha 0.05: other models, or forwards before it, held"):
        return loss_of(model)
