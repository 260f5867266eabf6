"""install(): deepspeed.initialize as others call it; deepspeed.checkpointing.checkpoint inside models."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.deepspeed import checkpoint_api as redirected
from ds_memo.integrations.install import uninstall
from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, deepspeed, ds_config, train
from tests.models import LAYERS, Batch, Block, Toy, build, step
from tests.processes import python

pytestmark = ON_ONE_CPU_RANK


@pytest.fixture(autouse=True)
def as_imported() -> None:
    """Engines of tests before have redirected deepspeed.checkpointing, which lasts."""
    redirected.give_back()


@pytest.fixture
def installed() -> Iterator[None]:
    ds_memo.install()
    yield
    uninstall()


def start(config: Any, model: nn.Module | None = None) -> Any:
    """As a script that knows only DeepSpeed."""
    model = model or build("llama")
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)[0]


def test_deepspeeds_own_initialize_obeys_memo(installed: None, capsys: pytest.CaptureFixture) -> None:
    ds_memo.install()  # again: nothing happens
    want = train(start(ds_config(memo={"enabled": False})), steps=2)
    capsys.readouterr()
    engine = start(ds_config(memo=MEMO))
    assert train(engine, steps=2) == pytest.approx(want, rel=1e-5)
    assert ds_memo.report(engine)["active"]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ds_memo is active: ")]
    assert len(lines) == 1 and lines[0].endswith("MiB went to the host in the first step (alpha 0.5, 1 of 4 layers resident)")
    engine.memo.detach()


def test_what_moves_from_the_second_step_on_is_told(installed: None, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """The first step has all layers on the device, and shows the memory of head and loss."""
    memo = {"enabled": True, "device_memory_gib": 3.4 / 1024, "cache_dir": str(tmp_path)}
    engine = start(ds_config(memo=memo))
    train(engine, steps=1, length=128)
    assert not engine.memo.report()["active"] and not [line for line in capsys.readouterr().err.splitlines() if "moved" in line]
    train(engine, steps=2, length=128)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ds_memo ")]
    moved = "2.3 MiB went to the host in the first two steps (alpha 1, 0 of 4 layers resident)"
    assert lines == [f"ds_memo is active: {moved}; device budget: 3.4 MiB of 3.4 MiB free"]
    engine.memo.detach()


EARLY = """
import functools
from deepspeed import initialize as start
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
"""


def test_names_that_were_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from deepspeed import initialize` at the top of a script, install() below; also in a module."""
    stock = deepspeed.initialize, deepspeed.checkpointing.checkpoint
    module, script = ModuleType("early"), {"__name__": "__main__", "__spec__": None}
    monkeypatch.setitem(sys.modules, "early", module)
    exec(EARLY, vars(module))
    exec(EARLY, script)  # as a runner does: in no sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        ds_memo.install()
    for names in (vars(module), script):
        assert names["start"] is ds_memo.initialize and names["checkpoint"] is deepspeed.checkpointing.checkpoint
        assert names["checkpoint"] is not stock[1]
    model = build("llama")
    engine = script["start"](model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds_config(memo=MEMO))[0]
    engine.memo.detach()
    uninstall()
    assert (module.start, module.checkpoint) == (script["start"], script["checkpoint"]) == stock
    assert ds_memo.initialize is not stock[0]


def test_modules_that_were_frozen_before() -> None:
    """gc.freeze(), as trainers call it for fewer pauses, hides a module's names from callers who ask the collector for them."""
    stock = deepspeed.initialize
    gc.freeze()
    ds_memo.install()
    assert deepspeed.initialize is ds_memo.initialize is not stock
    uninstall()
    assert deepspeed.initialize is stock


def test_a_config_without_the_section_is_told(installed: None) -> None:
    with pytest.warns(ds_memo.MemoWarning, match='its DeepSpeed configuration has no "memo" section'):
        start(ds_config())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        start(ds_config(memo={"enabled": False}))  # asked for


def test_a_section_for_configs_that_have_none() -> None:
    """As of scripts that make theirs by themselves; one of their own counts."""
    ds_memo.install(MEMO)
    try:
        engine = start(ds_config())
        assert engine.memo.report()["alpha"] == MEMO["alpha"]
        engine.memo.detach()
        assert not hasattr(start(ds_config(memo={"enabled": False})), "memo")
        with pytest.raises(ds_memo.MemoConfigError, match=r"memo\.alpha"):
            ds_memo.install({"alpha": 1.7})
        assert hasattr(start(ds_config()), "memo")
    finally:
        uninstall()
    ds_memo.install()
    try:
        with pytest.warns(ds_memo.MemoWarning, match='has no "memo" section'):
            start(ds_config())
    finally:
        uninstall()


def test_a_first_step_without_effect_is_told(installed: None) -> None:
    engine = start(ds_config(memo={**MEMO, "resident_layers": LAYERS}))
    with pytest.warns(ds_memo.MemoWarning, match="the first step moved no bytes, for 4 of 4 layers are resident"):
        train(engine, steps=1)
    assert not engine.memo.report()["active"]
    engine.memo.detach()


@pytest.mark.slow
def test_it_waits_for_the_scripts_own_import() -> None:
    """The script may set what deepspeed and torch read at their import; libraries ask before whether there is a deepspeed."""
    code = """
import ds_memo, sys, importlib.util
ds_memo.install(); ds_memo.install()
assert "deepspeed" not in sys.modules and "torch" not in sys.modules
spec = importlib.util.find_spec("deepspeed")
assert spec.origin.endswith("__init__.py") and spec.submodule_search_locations and spec.has_location
import deepspeed
from ds_memo.deepspeed import initialize as ours
assert deepspeed.initialize is ours.initialize is ds_memo.initialize
assert type(deepspeed.__loader__).__module__ != "ds_memo.integrations.install"
assert deepspeed.__spec__.loader is deepspeed.__loader__
assert "accelerate" not in sys.modules
import accelerate
from ds_memo.integrations import accelerate as seam
assert accelerate.Accelerator.prepare_model.__wrapped__ is seam._stock["prepare_model"]
waits = [type(finder).__module__ for finder in sys.meta_path if type(finder).__module__.startswith("ds_memo.")]
assert waits == ([] if "ray" in sys.modules else ["ds_memo.integrations.install"])
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# ---- models that call deepspeed.checkpointing.checkpoint


class Checkpointing(Toy):
    """Blocks in a list, checkpointed one by one, or in chunks by a closure as Megatron does."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)  # DeepSpeed's reentrant checkpoint gives layers no gradients if their input needs none
        self.chunk = chunk

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(inputs_embeds)

        def chunk_from(first: int) -> Any:
            def run(x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks[first : first + self.chunk]:
                    x = block(x)
                return x

            return run

        for first in range(0, len(self.blocks), max(1, self.chunk)):
            fn = chunk_from(first) if self.chunk else self.blocks[first]
            x = deepspeed.checkpointing.checkpoint(fn, x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Out", (), {"loss": loss})


class Hidden(nn.Module):
    """Blocks that find_layers does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.head = nn.Linear(64, 96)

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(inputs_embeds)
        for block in (self.first, self.second, self.third):
            x = deepspeed.checkpointing.checkpoint(block, x)
        return type("Out", (), {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())})


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_model_that_calls_deepspeeds_checkpoint(installed: None, chunk: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointing(chunk)

    want = train(start(ds_config(memo={"enabled": False}), model()), steps=2)
    engine = start(ds_config(memo={**MEMO, "plan": {"enabled": False}}), model())
    assert train(engine, steps=2) == pytest.approx(want, rel=1e-5)
    report = engine.memo.report()
    assert report["attention_recomputed"] == 0 and report["active"]
    extra = LAYERS // chunk if chunk else 0  # closures are looked into in the first forward
    assert report["frames"] <= 4 * LAYERS + extra and report["layers"] == LAYERS
    assert report["frames"] >= 3 * LAYERS
    engine.memo.detach()


def test_layers_that_only_the_model_knows(installed: None) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Hidden()

    with pytest.raises(ds_memo.MemoError, match=r"memo\.layers"):
        start(ds_config(memo=MEMO), model())
    want = train(start(ds_config(memo={"enabled": False}), model()), steps=2)
    for layers in ([], ["first", "second", "third"]):
        engine = start(ds_config(memo={**MEMO, "layers": layers}), model())
        assert train(engine, steps=2) == pytest.approx(want, rel=1e-5)
        report = engine.memo.report()
        assert report["layers"] == 3 and report["active"] and report["attention_recomputed"] == 0
        engine.memo.detach()


def test_other_models_keep_deepspeeds_checkpoint(installed: None) -> None:
    """And the negative control: without the redirection memo has no effect on such a model."""
    torch.manual_seed(0)
    other, batch = Hidden(), Batch.random(2, 9)
    want = step(other, batch)
    engine = start(ds_config(memo={**MEMO, "layers": []}), Hidden())
    train(engine, steps=1)
    frames = engine.memo.report()["frames"]
    got = step(other, batch)
    assert torch.equal(got.loss, want.loss) and engine.memo.report()["frames"] == frames
    redirected.give_back()
    with pytest.warns(ds_memo.MemoWarning, match="it has no effect"):
        train(engine, steps=1)
    assert engine.memo.report()["frames"] == frames
    engine.memo.detach()
