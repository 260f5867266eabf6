"""ds_memo.initialize on one CPU rank: what deepspeed.initialize gives, trained the same, with less kept."""

from __future__ import annotations

import base64
import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from tests.deepspeed import engines
from tests.deepspeed.engines import MEMO, ds_config, start, train
from tests.everyday import everyday
from tests.inside import inside
from tests.models import LAYERS, Batch, Block, Toy, build

deepspeed = engines.deepspeed
pytestmark = engines.ON_ONE_CPU_RANK

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("stage, dtype", everyday([(0, FP32), (1, BF16), (3, FP32)], [(0, FP32), (1, BF16)]), ids=str)
def test_trains_as_without_memo(stage: int, dtype: torch.dtype) -> None:
    """test_matrix.py has every stage and dtype, on two ranks."""
    plain = start(ds_config(stage, dtype))
    assert not hasattr(plain, "memo")
    want = train(plain, dtype)
    engine = start(ds_config(stage, dtype, memo=MEMO))
    got = train(engine, dtype)
    assert got[:2] == want[:2]  # before the first step of the optimizer: to the bit
    assert got == pytest.approx(want, rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert want[-1] != want[0]

    report = ds_memo.report(engine)
    assert report == ds_memo.report(engine.memo)
    assert (report["layers"], report["resident_layers"], report["alpha"]) == (LAYERS, 1, 0.5)
    assert report["frames"] == 6 * LAYERS
    assert report["bytes_to_host"] == report["bytes_from_host"] > 0
    half_of_three_layers = 0.5 * 3 / 4 * 7 / 9  # of whose FLOPs the last product, which is never wanted, has 2/9
    assert report["gemm_flops_recomputed_fraction"] == pytest.approx(half_of_three_layers)
    assert report["attention_recomputed"] == 0
    assert 0 < report["host"]["peak_used"] <= report["host"]["slab"] <= report["host"]["budget"]
    assert report["step_s"] is None  # of three steps none is settled: the third was planned
    assert report["warnings"] == []
    json.dumps(report)
    engine.memo.detach()


@pytest.mark.slow
def test_a_plain_module_under_zero_3() -> None:
    """Its layers' own parameters must be gathered in the replay as well."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.scale = nn.Parameter(torch.rand(64) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) * self.scale

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Toy(Scaled)

    want = train(start(ds_config(3), model=model()))
    engine = start(ds_config(3, memo=MEMO), model=model())
    assert train(engine) == pytest.approx(want, rel=1e-5)
    assert engine.memo.report()["bytes_to_host"] > 0
    engine.memo.detach()


@pytest.mark.slow
def test_leaf_modules_of_zero_3(tmp_path: Path) -> None:
    """Experts, by default: a hook at the end of their backward has gradients reduced, and a profile has none to reduce."""
    model = build("mixtral")
    engine = start(ds_config(3, memo={"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}), model=model)
    assert any(deepspeed.utils.z3_leaf_module(module) for module in model.modules())
    assert train(engine) == pytest.approx(train(start(ds_config(3), "mixtral")), rel=1e-5)
    assert engine.memo.report()["warnings"] == []
    engine.memo.detach()


@pytest.mark.parametrize("stage", everyday([2, 3], [2]))
def test_tiled_mlps(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's TiledMLP adds to gradients inside a backward, and its hooks count them: a profile must give it others."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(stock, self, x, 3, list(self.parameters()))

    stock = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    want = train(start(ds_config(stage)))
    engine = start(ds_config(stage, memo={"enabled": True, "plan": {"enabled": False}, "cache_dir": str(tmp_path)}))
    assert train(engine) == pytest.approx(want, rel=1e-5)
    assert engine.memo.report()["profile"] is not None
    engine.memo.detach()


def test_the_signature_is_deepspeeds() -> None:
    assert inspect.signature(ds_memo.initialize) == inspect.signature(deepspeed.initialize)
    assert ds_memo.initialize.__name__ == "initialize"


@pytest.mark.parametrize(
    "how, why", [("frozen", "none of its parameters requires a gradient"), ("evaluated", "has an optimizer")]
)
def test_an_engine_that_takes_no_steps_is_left_alone(how: str, why: str, capsys: pytest.CaptureFixture) -> None:
    """A reference model: frozen, or started without an optimizer as TRL does."""
    model = build("llama").eval()
    optimizer = None
    if how == "frozen":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.requires_grad_(False)
    ours = ds_memo.initialize(model=model, optimizer=optimizer, config=ds_config(memo=MEMO))[0]
    assert not hasattr(ours, "memo") and model.model.layers[0].gradient_checkpointing is False
    assert f"leaves this LlamaForCausalLM alone: {why}" in capsys.readouterr().err.replace("neither the call nor the JSON ", "")
    trained = start(ds_config(memo=MEMO))  # and its addresses are planned all the same
    train(trained)
    ours(input_ids=torch.arange(9)[None])
    report = trained.memo.report()
    assert report["active"] and report["plan"] and report["warnings"] == []
    trained.memo.detach()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_that_is_stepped_without_its_engine(stage: int) -> None:
    """As Lightning's Fabric does. A scheduler of torch's wraps the step of torch's optimizers."""

    def train_without(config: dict[str, Any]) -> tuple[list[float], Any]:
        engine = start({**config, "gradient_accumulation_steps": 1})
        if isinstance(engine.optimizer, torch.optim.Optimizer):
            torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)
        losses = []
        for number in range(4):
            batch = Batch.random(2, 17, torch.float32, seed=number)
            loss = engine(inputs_embeds=batch.embeds, labels=batch.labels).loss
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine

    want, _ = train_without(ds_config(stage))
    got, engine = train_without(ds_config(stage, memo=MEMO))
    assert got == pytest.approx(want, rel=1e-5)
    report = engine.memo.report()
    assert report["step_s"] and report["plan"]["hits"]
    engine.memo.detach()
    assert "step" not in vars(engine.optimizer)


@pytest.mark.parametrize("stage", [0, 2])
def test_another_engine_of_the_same_model(stage: int) -> None:
    """The first one was dropped; DeepSpeed's hooks on the model keep it alive. Stock trains so, and memo the same."""
    model = build("llama")
    stock = copy.deepcopy(model)
    first = start(ds_config(stage, memo=MEMO), model=model)
    losses = train(first, steps=1)
    with pytest.warns(ds_memo.MemoWarning, match="another engine had this LlamaForCausalLM: it runs without memo from now on"):
        second = start(ds_config(stage, memo=MEMO), model=model)
    losses += train(second, steps=1)
    want = [loss for _ in range(2) for loss in train(start(ds_config(stage), model=stock), steps=1)]
    assert losses == pytest.approx(want, rel=1e-5)
    assert ds_memo.report(second)["active"]
    with pytest.raises(ds_memo.MemoError, match="detached"):
        ds_memo.report(first)
    second.memo.detach()


def test_a_section_that_does_not_say_enabled() -> None:
    with pytest.warns(ds_memo.MemoWarning, match='runs without memo: the "memo" section does not say "enabled": true'):
        engine = start(ds_config(memo={"alpha": 0.5}))
    assert not hasattr(engine, "memo")


@pytest.mark.parametrize("name", ["Memo", "memmo"])
def test_a_misspelled_section(name: str) -> None:
    with pytest.warns(ds_memo.MemoWarning, match=f'has a section "{name}". Did you mean "memo"'):
        engine = start(ds_config() | {name: {"enabled": True}})
    assert not hasattr(engine, "memo")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_destroyed_engine_gives_everything_back(stage: int) -> None:
    """Its host memory, the addresses and the model, which another engine may train on; stock's may, and so it is compared."""

    def two_engines(config: dict[str, Any]) -> list[float]:
        model = build("llama")
        losses = train(first := start(config, model=model), steps=1)
        first.destroy()
        if hasattr(first, "memo"):
            assert inside(first.memo).slab.size == 0
        losses += train(second := start(config, model=model), steps=1)
        if hasattr(first, "memo"):
            assert inside(second.memo).addresses.installed and second.memo.report()["warnings"] == []
        second.destroy()
        return losses

    assert two_engines(ds_config(stage, memo=MEMO)) == pytest.approx(two_engines(ds_config(stage)), rel=1e-5)


def test_an_engine_without_memo_has_no_report() -> None:
    with pytest.raises(ds_memo.MemoError, match=r'DeepSpeedEngine is not under ds_memo.*"enabled": true'):
        ds_memo.report(start(ds_config(memo={**MEMO, "enabled": False})))


@pytest.mark.parametrize("how", ["dict", "path", "base64", "config_params", "args"])
def test_where_the_config_may_come_from(how: str, tmp_path: Path) -> None:
    config = ds_config(memo=MEMO)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    model = build("llama")
    given: dict[str, Any] = {
        "dict": {"config": config},
        "path": {"config": str(file)},
        "base64": {"config": base64.urlsafe_b64encode(file.read_bytes()).decode()},
        "config_params": {"config_params": config},
        "args": {"args": SimpleNamespace(deepspeed_config=str(file), local_rank=0)},
    }[how]
    engine = ds_memo.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **given)[0]
    assert engine.memo.report()["layers"] == LAYERS
    engine.memo.detach()


def offloading() -> nn.Module:
    model = build("llama")
    model.gradient_checkpointing_enable(offload=True)
    return model


def pipeline() -> nn.Module:
    from deepspeed.pipe import PipelineModule

    return PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1)


CHECKPOINTING = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
REFUSED: list[tuple[dict[str, Any], Callable[[], nn.Module], str]] = [
    ({"memo": {"enabled": True, "nonsense": 2}}, Toy, r"memo\.nonsense: unknown key"),
    (
        {"memo": {"enabled": True, "resident_layers": LAYERS + 1}},
        Toy,
        rf"memo\.resident_layers: got {LAYERS + 1}; allowed: .* from 0 to {LAYERS}",
    ),
    ({}, lambda: nn.Sequential(nn.Linear(4, 4)), "layers are not known"),
    ({}, pipeline, "pipeline parallelism runs its own checkpointing"),
    ({}, offloading, r'"offload": True} does what memo does in another way; remove one'),
    ({"compile": {"deepcompile": True}}, Toy, r"compile\.deepcompile compiles the layers.*remove it or memo"),
    *(
        ({"activation_checkpointing": {key: True}}, Toy, rf"activation_checkpointing\.{key} does what memo does")
        for key in CHECKPOINTING
    ),
]


@pytest.mark.usefixtures("not_started")
@pytest.mark.parametrize("section, make, said", REFUSED)
def test_what_is_refused_before_deepspeed_starts(section: dict[str, Any], make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ds_memo.MemoError, match=said):
        start(ds_config(**{"memo": MEMO, **section}), model=make())


def test_monitors_are_told(tmp_path: Path) -> None:
    """DeepSpeed's CSV monitor gets one line per optimizer step."""
    engine = start(ds_config(memo=MEMO, csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"}))
    train(engine, steps=2)
    written = {file.stem: file.read_text().splitlines() for file in (tmp_path / "run").iterdir()}
    for name in ("alpha", "resident_layers", "bytes_to_host", "bytes_from_host", "stall_s"):
        assert len(written[f"Train_Samples_memo_{name}"]) == 3, written.keys()  # a head and two steps
    assert written["Train_Samples_memo_alpha"][-1].endswith(",0.5")
    engine.memo.detach()


@pytest.mark.parametrize("stage", everyday([2, 3], [2]))
def test_two_engines_that_take_turns(stage: int) -> None:
    """An actor and its critic: all of the host for each, planned addresses for both, and the losses of stock."""

    def both(config: dict[str, Any]) -> tuple[list[float], list[Any]]:
        engines = [start(config, name) for name in ("llama", "gpt2")]
        return [loss for _ in range(3) for engine in engines for loss in train(engine, steps=1)], engines

    losses, engines = both(ds_config(stage, memo={**MEMO, "host_memory_gib": 1 / 64}))
    for engine in engines:
        report = engine.memo.report()
        assert report["host"]["budget"] == 1 << 24 and report["active"] and report["warnings"] == []
        assert inside(engine.memo).addresses.installed
    assert inside(engines[0].memo).slab.size == max(inside(engine.memo).slab.peak_used for engine in engines)
    assert losses == pytest.approx(both(ds_config(stage))[0], rel=1e-5)
    for engine in engines:
        engine.destroy()
