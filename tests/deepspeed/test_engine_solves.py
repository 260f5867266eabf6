"""What an engine leaves open is profiled and solved for: under ZeRO, once it gathers ahead, after steps that overflowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.autotune import model_profile as profiling
from ds_memo.autotune.budgets import Budgets
from ds_memo.profile import run
from tests.deepspeed import engines
from tests.deepspeed.engines import ds_config, start, train
from tests.everyday import everyday
from tests.models import Batch

pytestmark = engines.ON_ONE_CPU_RANK


@pytest.mark.parametrize("stage", everyday([0, 3], [0]))
def test_an_engine_chooses_by_itself(stage: int, tmp_path: Path) -> None:
    """Nothing but "enabled": the profile runs each layer under ZeRO, and leaves no gradient behind."""
    want = train(start(ds_config(stage)))
    memo = {"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}
    for device, checkpointing in ((None, False), (6e-4, True)):
        engine = start(ds_config(stage, memo=memo | ({"device_memory_gib": device} if device else {})))
        got = train(engine)
        assert got[:2] == want[:2]
        assert got == pytest.approx(want, rel=1e-5)
        report = engine.memo.report()
        assert report["checkpointing"] is checkpointing
        assert report["warnings"] == []
        assert report["stored_bytes_per_layer"] == report["predicted"]["stored_bytes_per_layer"]
        engine.memo.detach()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["an evaluation", "a pass without gradients", "short batches"])
def test_a_profile_once_zero_3_gathers_ahead(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows in which order layers come, and what it has under way to a layer cannot be used where that is measured alone."""
    monkeypatch.setattr(run, "SHORTEST", 128)
    monkeypatch.setattr(profiling, "SHORTEST", 128)

    def trained(engine: Any) -> list[float]:
        if before == "short batches":
            losses = train(engine)
        else:
            engine.train(before != "an evaluation")
            with torch.no_grad():
                losses = [engine(inputs_embeds=(batch := Batch.random(2, 17)).embeds, labels=batch.labels).loss.item()]
            engine.train()
        return losses + train(engine, length=80)

    want = trained(start(ds_config(3)))
    engine = start(ds_config(3, memo={"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}))
    assert trained(engine) == pytest.approx(want, rel=1e-5)
    report = engine.memo.report()
    assert report["profile"] and report["warnings"] == []
    assert any("again" in change for change in report["profile"]["changes"]) is (before == "short batches")
    engine.memo.detach()


def test_a_step_that_overflowed_shows_no_optimizer_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 skips its first steps. What the device has left is measured again after the first step that was none of those."""
    measured: list[bool] = []
    measure = Budgets.measure

    def noting(budgets: Budgets, model: nn.Module, has_engine: bool, stepped: bool) -> None:
        measured.append(stepped)
        measure(budgets, model, has_engine, stepped)

    monkeypatch.setattr(Budgets, "measure", noting)
    engine = start(ds_config(memo={"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}))
    monkeypatch.setattr(engine, "was_step_applied", lambda: False)
    train(engine, steps=2)
    assert measured == [False]
    monkeypatch.undo()
    monkeypatch.setattr(Budgets, "measure", noting)
    train(engine, steps=2)
    assert measured == [False, True]
    engine.memo.detach()
