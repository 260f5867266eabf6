"""A first batch that is much shorter than others: layers are measured once more, and nothing that fits is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ds_memo
from ds_memo.autotune import model_profile as profiling
from ds_memo.profile import run
from ds_memo.runtime.handle import MemoHandle
from tests.inside import inside
from tests.models import HIDDEN, Batch, Toy, assert_same, build, step

SHORT, LONG = Batch.random(1, 16), Batch.random(1, 512)
pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


@pytest.fixture(autouse=True)
def of_this_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, profiling):
        monkeypatch.setattr(module, "SHORTEST", 256)


def attached(model: Any, folder: Path, **memo: Any) -> MemoHandle:
    return ds_memo.attach(model, {"plan": {"enabled": False}, "cache_dir": str(folder), "device_memory_gib": 0.01, **memo})


def working(handle: MemoHandle) -> float:
    """Bytes that a replay and backward of a long batch are thought to need."""
    return inside(handle).tuner.profile.kinds[0].costs(1, 512).working.backward


def measured_again(handle: MemoHandle) -> list[str]:
    return [change for change in handle.report()["profile"]["changes"] if "again" in change]


@pytest.mark.slow
def test_a_short_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build("llama")
    handle = attached(model := build("llama"), tmp_path / "a")
    step(model, LONG)
    fresh = working(handle)
    handle.detach()

    handle = attached(model := build("llama"), tmp_path / "b")
    step(model, SHORT)
    far_off = working(handle)
    assert_same(step(model, LONG), step(stock, LONG))
    assert measured_again(handle) == ["measured LlamaDecoderLayer again, with 512 tokens: the first batches told too little"]
    assert far_off > 2 * fresh and working(handle) == pytest.approx(fresh, rel=0.01)
    for batch in (SHORT, LONG, SHORT):
        step(model, batch)
    assert len(measured_again(handle)) == 1
    handle.detach()

    monkeypatch.setattr(profiling.Profiling, "outgrown", lambda *args: False)  # the control
    handle = attached(model := build("llama"), tmp_path / "c")
    for batch in (SHORT, LONG):
        step(model, batch)
    assert working(handle) == far_off and not measured_again(handle)
    handle.detach()


@pytest.mark.parametrize("nothing", [(0, 16), (2, 0)], ids=["no sequence", "no token"])
def test_first_batches_without_tokens(tmp_path: Path, nothing: tuple[int, int]) -> None:
    """The profile waits for one with tokens."""
    model = Toy(lambda: nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)))
    stock = copy.deepcopy(model)
    handle = attached(model, tmp_path)
    empty = Batch.random(*nothing)
    for batch in (empty, SHORT, empty, SHORT):
        if batch is SHORT:
            assert_same(step(model, batch), step(stock, batch))
        else:  # the loss is a mean of nothing
            model(batch.embeds, batch.labels).logits.sum().backward()
            model.zero_grad()
    assert inside(handle).tuner.profile is not None and not inside(handle).tuner.gave_up
    handle.detach()
