"""Attaching and detaching: all of it or nothing, once for a model, and what is left without a detach."""

from __future__ import annotations

import copy
import gc
import types
import warnings
import weakref

import pytest

import ds_memo
from ds_memo.ops.allocator import Allocator
from ds_memo.runtime.active_forward import in_forward
from tests import architectures
from tests.inside import inside
from tests.models import Batch, Block, Toy, assert_same, build, step
from tests.runtime.traces import fingerprint, memo_threads

BATCH = Batch.random(2, 17)
pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.mark.parametrize("name", ["llama", "plain"])
def test_detach_puts_everything_back(name: str) -> None:
    model = build(name)
    if name == "llama":
        model.gradient_checkpointing_enable()  # memo takes its place and gives it back
    before = fingerprint(model)
    for _ in range(2):
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
        assert fingerprint(model) != before
        step(model, BATCH)
        handle.detach()
        assert fingerprint(model) == before
    assert not memo_threads()


def test_a_forward_of_ones_own_is_put_back() -> None:
    model = Toy()
    own = model.blocks[0].forward = types.MethodType(Block.forward, model.blocks[0])
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    assert model.blocks[0].forward is not own
    handle.detach()
    assert model.blocks[0].forward is own
    assert "forward" not in vars(model.blocks[1])


@pytest.mark.parametrize("first, second, said", [
    ("", "", r"LlamaForCausalLM is already attached; call \.detach\(\)"), ("", "model", "already"), ("model", "", "already"),
], ids=["twice", "its part", "what it is a part of"])  # fmt: skip
def test_double_attach(first: str, second: str, said: str) -> None:
    """Two handles over the same layers would each believe to own them."""
    model = build("llama")
    before = fingerprint(model)
    handle = ds_memo.attach(model.get_submodule(first), {})
    with pytest.raises(ds_memo.MemoError, match=said):
        ds_memo.attach(model.get_submodule(second), {})
    step(model, BATCH)
    handle.detach()
    assert fingerprint(model) == before
    ds_memo.attach(model.get_submodule(second), {}).detach()


def test_use_after_detach() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    handle.detach()
    with pytest.raises(ds_memo.MemoError, match="detached"):
        loss.backward()
    with pytest.raises(ds_memo.MemoError, match="detached"):
        handle.report()
    with pytest.raises(ds_memo.MemoError, match="detached"):
        ds_memo.report(handle)
    with pytest.raises(ds_memo.MemoError, match="already detached"):
        handle.detach()


@pytest.mark.parametrize("trained", [False, True])
def test_threads_end_with_the_model(trained: bool) -> None:
    """Nobody called detach."""
    before = set(memo_threads())
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    threads = set(memo_threads()) - before
    assert len(threads) == 2
    if trained:
        step(model, BATCH)
    gone = weakref.ref(model), weakref.ref(handle)
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.filterwarnings("error::ds_memo.errors.MemoWarning")
@pytest.mark.parametrize("call", ["gradient_checkpointing_enable", "gradient_checkpointing_disable"])
def test_gradient_checkpointing_switched_over_memo(call: str) -> None:
    """The Trainer switches it on before memo, other scripts after, and TRL off and on again around generation."""
    model = build("llama")
    want = step(copy.deepcopy(model), BATCH)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    getattr(model, call)()
    assert_same(step(model, BATCH), want)
    assert handle.report()["frames"] == 4 and handle.report()["bytes_to_host"] > 0
    handle.detach()


@pytest.mark.filterwarnings("ignore")
def test_layers_inside_layers_are_parts_of_these() -> None:
    """Zamba2's hybrid layers hold Mamba layers, which are neither counted nor checkpointed by themselves."""
    model = architectures.build("zamba2")
    stock, batch = copy.deepcopy(model), Batch.random(2, 17)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ds_memo.MemoWarning)
        handle = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 2})
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(step(model, batch), step(stock, batch), tolerance=1e-5)
    report = handle.report()
    assert [layer.name for layer in inside(handle).layers] == [f"model.layers.{number}" for number in range(6)]
    assert report["layers"] == report["frames"] == 6 and report["gemm_flops_recomputed_fraction"] == 0
    assert report["layers_on_device"] == [4, 5]
    handle.detach()


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    """Weight averaging copies models after they were set up."""
    model = build("llama")
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    twin = copy.deepcopy(model)
    frames = handle.report()["frames"]
    assert_same(step(twin, BATCH), step(stock, BATCH))
    assert handle.report()["frames"] == frames
    handle.detach()
    assert_same(step(twin, BATCH), step(stock, BATCH))


def test_a_warning_that_is_an_error_ends_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one goes on without what the warning told of."""

    def cannot(self: Allocator) -> None:
        raise RuntimeError("another allocator is in the way")

    monkeypatch.setattr(Allocator, "install", cannot)
    model = build("plain")
    stock, batch = copy.deepcopy(model), Batch.random(2, 17)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    with warnings.catch_warnings(), pytest.raises(ds_memo.MemoWarning, match="are not planned: another allocator"):
        warnings.simplefilter("error", ds_memo.MemoWarning)
        step(model, batch)
    assert in_forward() is None
    assert_same(step(model, batch), step(stock, batch))
    handle.detach()
