"""Models that Accelerate prepares, in this process; tests/integrations/test_scripts.py has scripts, DDP and FSDP2."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper, offload_wrapper

import ds_memo
from ds_memo.integrations import accelerate as seam
from ds_memo.integrations.install import uninstall
from ds_memo.runtime.attach import attached, handle_of
from tests.everyday import everyday
from tests.integrations.trainers import losses, trainer
from tests.models import LAYERS, VOCAB, Toy, build
from tests.processes import python

MEMO = {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}}
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "ACCELERATE_USE_DEEPSPEED")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process without a launcher, as Accelerate sees it, and no model left by another test."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    yield
    uninstall()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def installed() -> None:
    ds_memo.install(MEMO)


def prepared(model: nn.Module, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model.train(), optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    made, losses = torch.Generator().manual_seed(0), []
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            ids = torch.randint(VOCAB, (2, 33), generator=made)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stock(**options: Any) -> list[float]:
    """Return the losses without memo."""
    assert not seam._stock
    return train(*prepared(build("llama"), **options))


def test_what_is_prepared_is_attached(capsys: pytest.CaptureFixture) -> None:
    want, own = stock(gradient_accumulation_steps=2), Accelerator.prepare_model
    ds_memo.install(MEMO)
    ds_memo.install()  # again: nothing happens
    accelerator, model, optimizer = prepared(build("llama"), gradient_accumulation_steps=2)
    assert train(accelerator, model, optimizer) == want
    report = ds_memo.report(model)
    assert report["active"] and report["bytes_to_host"] == report["bytes_from_host"] and report["warnings"] == []
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ds_memo ")]
    assert len(lines) == 1 and lines[0].endswith("MiB went to the host in the first step (alpha 0.5, 1 of 4 layers resident)")
    uninstall()
    assert Accelerator.prepare_model is own


def test_without_the_seam_nothing_is_attached(installed: None) -> None:
    """The negative control."""
    seam.give_prepare_back()
    _, model, _ = prepared(build("llama"))
    with pytest.raises(ds_memo.MemoError, match="LlamaForCausalLM is not under ds_memo"):
        ds_memo.report(model)


@pytest.mark.parametrize(("precision", "mib"), [("no", 0.9), ("bf16", 0.45)])
def test_nothing_set_is_solved(precision: str, mib: float, tmp_path: Path) -> None:
    """Layers are measured under the autocast that Accelerate switches on inside the model's forward."""
    want = stock(mixed_precision=precision)
    AcceleratorState._reset_state(reset_partial_state=True)
    ds_memo.install({"device_memory_gib": mib / 1024, "cache_dir": str(tmp_path)})
    accelerator, model, optimizer = prepared(build("llama"), mixed_precision=precision)
    assert train(accelerator, model, optimizer) == pytest.approx(want, rel=1e-6)
    report = ds_memo.report(model)
    assert report["predicted"] is not None and report["active"] and report["warnings"] == []


@pytest.mark.parametrize("text", ['{"alpha": 0.25, "resident_layers": 2}', "file"])
def test_the_section_of_the_environment(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text == "file":
        text = str(tmp_path / "memo.json")
        (tmp_path / "memo.json").write_text('{"alpha": 0.25, "resident_layers": 2}')
    monkeypatch.setenv("DS_MEMO", text)
    ds_memo.install()
    _, model, _ = prepared(build("llama"))
    assert ds_memo.report(model)["alpha"] == 0.25
    uninstall()
    monkeypatch.setenv("DS_MEMO", "no.json")
    with pytest.raises(ds_memo.MemoConfigError, match=r"^DS_MEMO 'no.json': .*; expected JSON, quoted for the shell, or a file"):
        ds_memo.install()


def test_models_that_do_not_train(installed: None, capsys: pytest.CaptureFixture) -> None:
    """As DPO's reference; and one that is only evaluated before it trains."""
    accelerator, before = Accelerator(cpu=True), len(attached())
    reference, frozen = build("llama"), build("llama").requires_grad_(False)
    accelerator.prepare_model(reference, evaluation_mode=True)
    accelerator.prepare_model(reference, None, True)
    accelerator.prepare(frozen)
    assert len(attached()) == before
    told = capsys.readouterr().err.splitlines()
    assert told == [
        *2 * ["ds_memo leaves this LlamaForCausalLM alone: Accelerate prepared it for evaluation"],
        "ds_memo leaves this LlamaForCausalLM alone: none of its parameters requires a gradient",
    ]
    accelerator.prepare(reference)
    assert ds_memo.report(reference)["layers"] == LAYERS


def test_switched_off() -> None:
    ds_memo.install({"enabled": False})
    before = len(attached())
    prepared(build("llama"))
    assert len(attached()) == before


def test_a_model_whose_layers_are_not_known(installed: None) -> None:
    with pytest.warns(ds_memo.MemoWarning, match=r"^this Linear runs without memo: Linear has no Hugging Face .* Name them"):
        accelerator, model, _ = prepared(nn.Linear(4, 4))
    accelerator.backward(model(torch.ones(2, 4)).sum())


def test_two_models_and_a_second_prepare(installed: None) -> None:
    """Actor and critic; the Trainer prepares a model again for its second train()."""
    accelerator, actor, optimizer = prepared(build("llama"))
    critic = accelerator.prepare(build("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        assert accelerator.prepare(actor) is actor
        assert Accelerator(cpu=True).prepare_model(critic) is critic
    train(accelerator, critic, accelerator.prepare(torch.optim.SGD(critic.parameters(), lr=0.1)), steps=1)
    assert not ds_memo.report(actor)["frames"] and ds_memo.report(critic)["active"]
    train(accelerator, actor, optimizer, steps=1)
    assert ds_memo.report(actor)["active"]


def test_a_model_that_the_script_attached(installed: None) -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.25, "resident_layers": 0})
    prepared(model)
    assert ds_memo.report(model)["alpha"] == handle.config.alpha == 0.25
    handle.detach()


def test_what_accelerate_does_with_an_attached_model(installed: None, tmp_path: Path) -> None:
    before = len(attached())
    accelerator, model, optimizer = prepared(build("llama"), mixed_precision="bf16")
    ids = torch.randint(VOCAB, (1, 9))
    want = accelerator.unwrap_model(model).eval().generate(ids, max_new_tokens=4, do_sample=False)
    train(accelerator, model.train(), optimizer, steps=1)
    with torch.no_grad():
        model.eval()(input_ids=ids, labels=ids)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == want.shape
    train(accelerator, model.train(), optimizer, steps=1)
    assert accelerator.unwrap_model(model) is model
    accelerator.save_model(model, tmp_path)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    train(accelerator, model, optimizer, steps=1)
    assert ds_memo.report(model)["attention_recomputed"] == 0
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    assert len(attached()) == before


def offloaded(layer: nn.Module) -> nn.Module:
    return offload_wrapper(checkpoint_wrapper(layer))


@pytest.mark.parametrize(
    ("wrap", "inside"), everyday(itertools.product([checkpoint_wrapper, offloaded], [False, True]), [(offloaded, False)])
)
def test_torchs_activation_wrappers_are_taken_over(wrap: Any, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's for FSDP (activation_checkpointing, activation_checkpointing_offload) around layers; inside layers too."""

    def model() -> Toy:
        torch.manual_seed(0)
        made = Toy()
        for index, block in enumerate(made.blocks):
            if inside:
                block.up = wrap(block.up)
            else:
                made.blocks[index] = wrap(block)
        return made

    def trained(made: Toy) -> list[float]:
        accelerator, made, optimizer = prepared(made)
        losses, x = [], torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            loss = made(x, torch.arange(34).view(2, 17)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    runs, checkpoint = [], CheckpointWrapper.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(self)
        return checkpoint(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointWrapper, "forward", counted)
    want = trained(model())
    assert len(runs) == 3 * LAYERS
    runs.clear()
    ds_memo.install(MEMO)
    made = model()
    assert trained(made) == want and not runs
    report = ds_memo.report(made)
    assert report["active"] and report["attention_recomputed"] == 0 and report["warnings"] == []
    handle_of(made).detach()
    uninstall()
    trained(made)
    assert len(runs) == 3 * LAYERS


@pytest.mark.parametrize("key", ["tp_size", "cp_size"])
def test_parallelism_by_torch_is_left_alone(key: str, installed: None) -> None:
    accelerator, before = Accelerator(cpu=True), len(attached())
    accelerator.state.parallelism_config = ParallelismConfig(**{key: 2})  # two ranks would be needed to start with it
    with pytest.warns(ds_memo.MemoWarning, match=rf"this LlamaForCausalLM runs without memo: ParallelismConfig\({key}=2\) has"):
        seam._attach(accelerator, build("llama"), False)
    assert len(attached()) == before


def test_layers_on_several_devices_are_left_alone(installed: None) -> None:
    accelerator, before, spread = Accelerator(cpu=True, device_placement=False), len(attached()), build("llama")
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.warns(ds_memo.MemoWarning, match=r"layers are on several devices \(0, 1\), and memo takes one. Leave device_map"):
        accelerator.prepare(spread)
    assert len(attached()) == before


# ---- the Trainer


@pytest.mark.processes
def test_the_callback_is_loaded_when_asked_for() -> None:
    code = """
import sys, ds_memo, ds_memo.hf
assert "transformers" not in sys.modules and "torch" not in sys.modules
from ds_memo.hf import MemoCallback
import transformers
assert issubclass(MemoCallback, transformers.TrainerCallback)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("checkpointing", everyday([True, False], [True]))
def test_a_callback_of_the_trainer(checkpointing: bool, tmp_path: Path) -> None:
    from ds_memo.hf import MemoCallback

    want = trainer(tmp_path)
    want.train()
    callback = MemoCallback(MEMO)
    got = trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=1, gradient_checkpointing=checkpointing)
    got.train()
    assert losses(got) == losses(want) and len(losses(got)) == 3
    assert callback.report["active"] and callback.report["attention_recomputed"] == 0 and callback.report["warnings"] == []
    assert "memo_gib_to_host" not in want.state.log_history[0]
    logged = [entry["memo_gib_to_host"] for entry in got.state.log_history if "loss" in entry]
    assert 0 < logged[0] < logged[1] < logged[2] and got.state.log_history[0]["memo_alpha"] == 0.5
    with pytest.raises(ds_memo.MemoError, match="not under ds_memo"):
        ds_memo.report(got.model)
    got.train()  # attached again
    assert callback.report["active"]


def test_a_callback_after_a_training_that_was_interrupted(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from ds_memo.hf import MemoCallback

    class Interrupts(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model, callback = build("llama"), MemoCallback({**MEMO, "alpha": 0.25})
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [MemoCallback(MEMO), Interrupts()], model).train()
    assert handle_of(model).report()["alpha"] == 0.5
    trainer(tmp_path, [callback], model).train()
    assert callback.report["alpha"] == 0.25 and handle_of(model) is None


def test_where_another_library_has_wrapped_the_seam(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Accelerator.prepare_model
    monkeypatch.setattr(Accelerator, "prepare_model", lambda *args, **kwargs: own(*args, **kwargs))
    uninstall()
    assert handle_of(prepared(build("llama"))[1]) is None
    monkeypatch.undo()
    uninstall()


def test_a_callback_leaves_an_attached_model_alone(installed: None, tmp_path: Path) -> None:
    from ds_memo.hf import MemoCallback

    callback = MemoCallback({"alpha": 0.25, "resident_layers": 0})
    made = trainer(tmp_path, [callback])
    with pytest.warns(ds_memo.MemoWarning, match=r"under memo already, so \{'alpha': 0.25.* is not used"):
        made.train()
    assert callback.report is None and ds_memo.report(made.model)["alpha"] == 0.5


def test_evaluated_before_it_trains(installed: None, tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.evaluate()
    made.train()
    assert ds_memo.report(made.model)["active"]
