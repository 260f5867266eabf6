"""Compiled layers in the situations that training brings, against compiled stock."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.compiled_layers import ops
from ds_memo.placement import stored_rows
from tests.compiled_layers.rig import TOLERANCE, compiled, recompilations, run, worst
from tests.inside import inside, kinds_of_recipes, recipe_of
from tests.models import HIDDEN, Batch, Block, Outcome, Toy, build, gradients
from tests.remat.test_around_layers import CallsCheckpoint

CONFIG = {"alpha": 0.5, "resident_layers": 1}


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Return compiled stock, compiled memo and its handle."""
    torch._dynamo.reset()
    options = options or {"backend": "aot_eager"}
    stock = compiled(copy.deepcopy(model), **options)
    return stock, model, ds_memo.attach(compiled(model, **options), CONFIG)


def retained(model: nn.Module) -> Outcome:
    """A second backward through the same graph."""
    batch = Batch.random(2, 17)
    with torch._functorch.config.patch(donated_buffer=False):
        loss = model(inputs_embeds=batch.embeds, labels=batch.labels).loss
        loss.backward(retain_graph=True)
        loss.backward()
    return Outcome(loss.detach(), gradients(model))


def test_a_second_backward() -> None:
    torch.manual_seed(0)
    stock, model, handle = pair(Toy())
    for _ in range(2):
        got, want = retained(model), retained(stock)
        assert worst(got, want) <= TOLERANCE
    del got, want
    assert ops.calls_alive() == 0
    report = handle.report()
    assert report["bytes_to_host"] > 0 and report["attention_recomputed"] == 0 and not report["warnings"]


class Drops(Block):
    """Random numbers are drawn once: the backward has the forward's masks."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class Lora(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, 2 * HIDDEN, bias=False)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(x)
        return self.down(torch.nn.functional.gelu(self.up(y) + self.b(self.a(y))))


@pytest.mark.parametrize(
    "block, backend", [(Lora, "aot_eager"), (Drops, "aot_eager"), pytest.param(Drops, "inductor", marks=pytest.mark.slow)]
)
def test_blocks(block: type[Block], backend: str) -> None:
    torch.manual_seed(0)
    stock, model, handle = pair(Toy(block), backend=backend)
    for _ in range(2):
        batch = Batch.random(2, 17)
        assert worst(run(model, batch), run(stock, batch)) <= TOLERANCE
    assert handle.report()["attention_recomputed"] == 0


def test_a_kept_tensor_that_is_changed_after_the_layer() -> None:
    """As in stock, it is an error."""
    torch.manual_seed(0)
    model = Toy()
    torch._dynamo.reset()
    ds_memo.attach(compiled(model, backend="aot_eager"), {"alpha": 0.5, "resident_layers": 0})
    x = torch.randn(2, 17, HIDDEN, requires_grad=True)
    hidden = x * 2
    out = model.blocks[1](model.blocks[0](hidden))
    hidden.add_(1)
    with pytest.raises(ds_memo.MemoError, match=r"was changed in place after the layer ran"):
        out.sum().backward()


def test_models_that_call_checkpoint_themselves() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CallsCheckpoint()
    stock = copy.deepcopy(model)
    model.checkpoint = ds_memo.checkpoint
    model.compile(backend="aot_eager")
    handle = ds_memo.attach(model, CONFIG, layers=())
    for _ in range(2):
        batch = Batch.random(2, 17)
        assert worst(run(model, batch), run(stock, batch)) <= TOLERANCE
    assert set(kinds_of_recipes(handle)) == {"CompiledRecipe"}


@pytest.mark.slow
@pytest.mark.parametrize("name, backend", [("llama", "inductor"), ("plain", "aot_eager")])
def test_solved(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without alpha the layers are profiled as they run, and solved for. Llama's take keywords."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of before
    model, stock = compiled(build(name), "model", backend=backend), build(name)
    handle = ds_memo.attach(model, {"device_memory_gib": 0.002, "host_memory_gib": 1})
    batch = Batch.random(2, 96)

    def run_steps() -> None:
        for _ in range(3):
            assert worst(run(model, batch), run(stock, batch)) <= TOLERANCE

    again = recompilations(run_steps)
    assert all(name.startswith("memo_") for *_, name in again)  # nothing of the profile is compiled
    profile = inside(handle).tuner.profile
    assert [kind["compiled_by"] for kind in profile.key["kinds"]] == [backend]
    assert all("torch.compile compiles it" in kind.not_tiled for kind in profile.kinds if len(kind.samples) > 1)
    outputs = [output for kind in profile.kinds for output in kind.samples[-1].outputs]
    assert {output.role for output in outputs} == {"input", "gemm", "attention"}
    assert not any("cannot be" in warning or "do not keep" in warning for warning in handle.report()["warnings"])


class Product(nn.Module):
    """Its layer reads a part of its input that no frame can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))])

    def forward(self, x: torch.Tensor, changed: bool) -> torch.Tensor:
        part = x[..., ::2]
        out = self.layers[0](part)
        if changed:
            with torch.no_grad():
                part.mul_(0.5)
        return out


@pytest.mark.parametrize("changed", [False, True])
def test_an_input_outside_of_the_frame_is_watched_for_changes(changed: bool) -> None:
    model = Product()
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=["layers.0"])
    model.layers[0].compile(backend="aot_eager")
    loss = model(torch.randn(2, 512, 128), changed).pow(2).mean()
    with pytest.raises(ds_memo.MemoError, match="was changed in place after") if changed else nullcontext():
        loss.backward()


def test_a_function_of_no_module_runs_uncompiled_and_says_so() -> None:
    class Model(Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ds_memo.checkpoint(lambda y: y.sin() @ y.transpose(-1, -2), self.layers[0](x))

    model = Model()
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=["layers.0"])
    model.compile(backend="aot_eager")
    with pytest.warns(ds_memo.MemoWarning, match="belongs to no module"):
        model(torch.randn(2, 512, 64)).pow(2).mean().backward()


@pytest.mark.parametrize("rows, stored", [(1000, 300), (4096, 1152)])
def test_rows_are_split_as_in_uncompiled_layers(rows: int, stored: int) -> None:
    model = Product()
    handle = ds_memo.attach(model, {"alpha": 0.3, "resident_layers": 0}, layers=["layers.0"])
    model.layers[0].compile(backend="aot_eager")
    model(torch.randn(1, rows, 128), False).pow(2).mean().backward()
    kept = [slot.rows for slot in recipe_of(handle).layout.kept]
    assert stored in kept and stored_rows(0.3, rows) == stored
