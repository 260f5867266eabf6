"""Layers that cannot be compiled under memo run uncompiled, and one warning names the reason."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import ds_memo
from ds_memo.runtime import passes
from tests.compiled_layers.rig import compiled, layers_of, run
from tests.everyday import everyday
from tests.inside import kinds_of_recipes, recipe_of
from tests.models import HIDDEN, Batch, Block, Toy, assert_same, build, step
from tests.tiles import test_chain as hybrids


class Breaks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Counts(Block):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Wrapped(torch.Tensor):
    """A tensor around a tensor, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda tensor: tensor.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return Wrapped(out) if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default) else out


def quantised() -> nn.Module:
    block = Block()
    block.up.weight = nn.Parameter(Wrapped(block.up.weight.detach()))
    return block


REASONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "graph break": (Breaks, {"backend": "aot_eager"}, r"cannot be traced as one graph: .*graph_break.*test_fallbacks\.py, line"),
    "buffer": (Counts, {"backend": "aot_eager"}, r"changes an input or a buffer in place"),
    "subclass": (quantised, {"backend": "aot_eager"}, r"has tensor subclasses"),
    "backend": (Block, {"backend": "eager"}, r'is compiled with backend="eager", whose graphs memo cannot split'),
}


@pytest.mark.parametrize("reason", REASONS)
def test_runs_uncompiled(reason: str) -> None:
    torch._dynamo.reset()
    block, options, says = REASONS[reason]
    torch.manual_seed(0)
    model = Toy(block)
    eager = copy.deepcopy(model)
    config = {"alpha": 0.5, "resident_layers": 1}
    handle, uncompiled = ds_memo.attach(compiled(model, **options), config), ds_memo.attach(eager, config)
    batch = Batch.random(2, 17)
    with pytest.warns(ds_memo.MemoWarning, match=rf"layer blocks\.0: it {says}.*, so it runs uncompiled"):
        got = run(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        run(model, batch)
    assert_same(got, step(eager, batch))
    step(eager, batch)
    report, want = handle.report(), uncompiled.report()
    assert len(report["warnings"]) == 1
    for key in ("stored_bytes_per_layer", "bytes_to_host", "attention_recomputed", "gemm_flops_recomputed_fraction"):
        assert report[key] == want[key], key


def test_under_saved_tensor_hooks() -> None:
    """Hooks would copy the handle that owns the frame. Outside of them the layer is compiled again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Toy()
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(compiled(model, backend="aot_eager"), {"alpha": 0.5, "resident_layers": 1})
    batch = Batch.random(2, 17)
    with pytest.warns(ds_memo.MemoWarning, match="called under saved-tensor hooks"), torch.autograd.graph.save_on_cpu():
        got = run(model, batch)
    assert_same(got, step(stock, batch))
    run(model, batch)
    assert type(recipe_of(handle)).__name__ == "CompiledRecipe"


def test_one_layer_of_many() -> None:
    """The others stay compiled."""
    torch._dynamo.reset()
    model = Toy()
    model.blocks[1] = Breaks()
    handle = ds_memo.attach(compiled(model, backend="aot_eager"), {"alpha": 0.5, "resident_layers": 0}, layers=list(model.blocks))
    with pytest.warns(ds_memo.MemoWarning, match=r"layer blocks\.1: it cannot be traced"):
        run(model, Batch.random(2, 17))
    recipes = kinds_of_recipes(handle)
    assert recipes == ["CompiledRecipe", "Recipe", "CompiledRecipe", "CompiledRecipe"]


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize("name", everyday(["plain", "llama", "nemotron_h"], ["plain"]))
def test_tiles_are_refused_by_name(name: str) -> None:
    """Blocks, which memo calls; Transformers' layers, which call memo; and those of a hybrid."""
    torch._dynamo.reset()
    model = compiled((hybrids.build if name == "nemotron_h" else build)(name), backend="aot_eager")
    for key in ("tile_tokens", "input_every"):
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0, key: 16})
        with pytest.raises(ds_memo.MemoError, match=rf"memo\.{key}: layers in tiles run part by part.*leave layers uncompiled"):
            run(model, Batch.random(2, 17))
        handle.detach()


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.slow
def test_a_long_evaluation_leaves_layers_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled layers of Transformers come to memo from then on, without gradients too."""
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "LONG", 16)
    model = compiled(build("llama"), backend="aot_eager")
    handle = ds_memo.attach(model, {"resident_layers": 0})
    batch = Batch.random(2, 17)
    with torch.no_grad():
        model(inputs_embeds=batch.embeds)
    run(model, batch)
    assert set(kinds_of_recipes(handle)) == {"CompiledRecipe"} and not handle.report()["tiles"]


def test_a_layer_that_raises() -> None:
    """Its own error comes out, and the next step is right."""
    torch._dynamo.reset()
    model = Toy()
    stock = copy.deepcopy(model)
    ds_memo.attach(compiled(model, backend="aot_eager"), {"alpha": 0.5, "resident_layers": 0})
    batch = Batch.random(2, 17)
    run(model, batch)
    with pytest.raises(RuntimeError, match=r"normalized_shape|shape"):
        model(inputs_embeds=torch.randn(2, 17, HIDDEN + 1), labels=batch.labels)
    assert_same(run(model, batch), step(stock, batch))
    assert layers_of(model)[0]._compiled_call_impl is not None
