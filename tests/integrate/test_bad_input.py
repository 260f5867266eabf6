"""Wrong input is refused with a sentence that says what to do, and nothing is left half-done."""

from __future__ import annotations

import copy
import gc
import threading
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.ops.builder import AllocatorBuilder
from tests.models import HIDDEN, LAYERS, Batch, Block, Toy, assert_same, assert_same_grads, build, gradients, step

BATCH = Batch.random(2, 17)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that attach might touch, of every module."""
    seen = {}
    for name, module in model.named_modules():
        state = {key: value for key, value in vars(module).items() if not key.startswith(("_parameters", "_buffers", "_modules"))}
        for key, value in state.items():
            seen[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return seen


def memo_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ds_memo")]


@pytest.fixture(autouse=True)
def no_threads_left() -> Any:
    before = set(memo_threads())
    yield
    gc.collect()
    for thread in set(memo_threads()) - before:
        thread.join(5)
        assert not thread.is_alive()


# ---- which layers


def test_no_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = fingerprint(model)
    with pytest.raises(ds_memo.MemoError, match=r"(?s)Sequential has no .*layers are not known.*attach\(model, config, layers="):
        ds_memo.attach(model, {})
    assert fingerprint(model) == before


def test_a_list_of_mixed_classes_is_not_the_layers() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
    with pytest.raises(ds_memo.MemoError, match="layers are not known"):
        ds_memo.attach(model, {})


def test_lists_of_one_length() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(3))
    model.decoder = nn.ModuleList(Block() for _ in range(3))
    with pytest.raises(ds_memo.MemoError, match="several lists of 3 layers: encoder, decoder"):
        ds_memo.attach(model, {})
    handle = ds_memo.attach(model, {}, layers=list(model.decoder))
    assert handle.report()["layers"] == 3
    handle.detach()


def test_a_name_that_is_no_module() -> None:
    model = build("llama")
    before = fingerprint(model)
    with pytest.raises(ds_memo.MemoError, match=r"'model\.layers\.9' is no module of LlamaForCausalLM"):
        ds_memo.attach(model, {}, layers=["model.layers.0", "model.layers.9"])
    with pytest.raises(ds_memo.MemoError, match="named twice"):
        ds_memo.attach(model, {}, layers=["model.layers.0", model.model.layers[0]])
    assert fingerprint(model) == before


# ---- what layers do


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(x)))


class MathAttention(NoAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.a(x) @ x.transpose(1, 2)).softmax(-1)
        return x + self.b(scores @ x)


class NoGemm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(x * self.scale)


@pytest.mark.parametrize(
    "block, seen",
    [
        (NoAttention, r"layer blocks\.0: no attention kernel was seen"),
        (MathAttention, r"layer blocks\.0: no attention kernel was seen.*aten\._softmax\.default"),
        (NoGemm, r"layer blocks\.0: no GEMM was seen"),
    ],
)
def test_layers_that_cost_more_than_they_should(block: type, seen: str) -> None:
    model = Toy(block)
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    with pytest.warns(ds_memo.MemoWarning, match=seen):
        got = step(model, BATCH)
    assert_same(got, step(stock, BATCH))
    assert len(handle.report()["warnings"]) == 1
    handle.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["layer", "wrapped layer", "layer's part", "model", "Hugging Face layer"])
def test_compiled(how: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build("llama") if how == "Hugging Face layer" else Toy()
    stock = copy.deepcopy(model)
    blocks = model.model.layers if how == "Hugging Face layer" else model.blocks
    if how == "wrapped layer":
        model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    for block in blocks:
        if how in ("layer", "Hugging Face layer"):
            block.compile(backend=backend)
        elif how == "layer's part":
            block.up.compile(backend=backend)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    run = torch.compile(model, backend=backend) if how == "model" else model
    for _ in range(2):
        want = step(stock, BATCH)
        torch.manual_seed(7)
        x = BATCH.embeds.clone().requires_grad_()
        loss = run(inputs_embeds=x, labels=BATCH.labels).loss
        loss.backward()
        grads = {name.replace("_orig_mod.", ""): grad for name, grad in gradients(model).items()}
        torch.testing.assert_close(loss.detach(), want.loss)
        for name, grad in want.grads.items():
            torch.testing.assert_close(grads.get(name, x.grad), grad, rtol=1e-4, atol=1e-6)
    handle.detach()
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_layer_that_inductor_compiled() -> None:
    """Nothing inside is seen, so all of it runs again, and that is said."""
    model = build("llama")
    stock = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile()
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    want = step(stock, BATCH)
    with pytest.warns(ds_memo.MemoWarning, match=r"layer model\.layers\.0: no GEMM was seen in it.*it is compiled"):
        step(model, BATCH)
    for _ in range(2):
        assert_same_grads(step(model, BATCH).grads, want.grads, 1e-5)  # fused kernels round differently
    handle.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
def test_a_part_that_inductor_compiled() -> None:
    """Its output comes from memory that no op was seen to allocate, and what it was made of must still be found."""

    class Compiled(NoAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(linear(self.a(x))))

    linear = torch.compile(lambda y: y * 0.5 + 1.0)
    torch.manual_seed(0)
    model = Toy(Compiled)
    stock = copy.deepcopy(model)
    want = step(stock, BATCH)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    for _ in range(3):
        assert_same(step(model, BATCH), want)
    handle.detach()


# ---- sizes


def test_host_budget_too_small() -> None:
    """The error comes with the first forward, names both sizes, and the model trains on without memo."""
    model = build("llama")
    stock = copy.deepcopy(model)
    before = fingerprint(model)
    handle = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 0, "host_memory_gib": 1e-4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ds_memo.MemoError, match=r"need [0-9.e-]+ GiB at alpha 1\.0, 0\.0001 GiB are available"):
        step(model, BATCH)
        optimizer.step()
    assert handle.slab.used == 0
    gradients(model)
    handle.detach()
    assert fingerprint(model) == before
    assert_same(step(model, BATCH), step(stock, BATCH))


def test_host_budget_too_small_for_any_alpha() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"resident_layers": 0, "host_memory_gib": 1e-5})
    with pytest.raises(ds_memo.MemoError, match=r"host memory: the inputs of 4 swapped layers alone need .* GiB are missing"):
        step(model, BATCH)
    handle.detach()
    handle = ds_memo.attach(model, {"alpha": 0.0, "resident_layers": 0, "host_memory_gib": 1e-5})
    with pytest.raises(ds_memo.MemoError, match=r"even memo\.alpha 0 does not fit"):
        step(model, BATCH)
    handle.detach()


def test_alpha_follows_from_the_budget() -> None:
    model = build("llama")
    stock = copy.deepcopy(model)
    probe = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 0})
    step(model, BATCH)
    everything = probe.report()["host"]["slab"]
    probe.detach()
    budget = int(everything * 0.7)
    handle = ds_memo.attach(model, {"resident_layers": 0, "host_memory_gib": budget / 2**30})
    assert_same(step(model, BATCH), step(stock, BATCH))
    report = handle.report()
    assert 0 <= report["alpha"] < 0.9
    assert report["host"]["slab"] == report["predicted"]["host_bytes"] <= budget
    handle.detach()


def test_alpha_follows_from_the_budget_where_the_model_calls_checkpoint() -> None:
    """How many layers there are shows only as they run: the first must not take everything."""

    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds
            for block in self.blocks:
                x = ds_memo.checkpoint(block, x) if torch.is_grad_enabled() else block(x)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    model, batch = Model(), Batch.random(2, 500)
    probe = ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 0}, layers=())
    step(model, batch)
    everything = probe.report()["host"]["slab"]
    probe.detach()
    handle = ds_memo.attach(model, {"resident_layers": 0, "host_memory_gib": everything * 0.7 / 2**30}, layers=())
    for _ in range(2):
        step(model, batch)
    report = handle.report()
    assert 0 <= report["alpha"] < 0.8
    assert report["predicted"]["host_bytes"] <= report["host"]["slab"] <= report["host"]["budget"] <= everything * 0.7
    handle.detach()


@pytest.mark.parametrize("value", [-1, LAYERS + 1, 2.0, True, "2"])
def test_resident_layers_out_of_range(value: Any) -> None:
    model = build("llama")
    before = fingerprint(model)
    with pytest.raises(ds_memo.MemoConfigError, match=r"memo\.resident_layers: got .*; allowed: a whole number from 0"):
        ds_memo.attach(model, {"resident_layers": value})
    assert fingerprint(model) == before


# ---- attaching and detaching


@pytest.mark.parametrize("name", ["llama", "gpt2", "plain"])
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


def test_double_attach() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {})
    with pytest.raises(ds_memo.MemoError, match=r"LlamaForCausalLM is already attached; call \.detach\(\)"):
        ds_memo.attach(model, {})
    step(model, BATCH)
    handle.detach()
    ds_memo.attach(model, {}).detach()


@pytest.mark.parametrize("outer_first", [True, False])
def test_attaching_a_part_of_an_attached_model(outer_first: bool) -> None:
    """Two handles over the same layers would each believe to own them."""
    model = build("llama")
    first, second = (model, model.model) if outer_first else (model.model, model)
    before = fingerprint(model)
    handle = ds_memo.attach(first, {})
    with pytest.raises(ds_memo.MemoError, match="already"):
        ds_memo.attach(second, {})
    handle.detach()
    assert fingerprint(model) == before


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
    with pytest.raises(ds_memo.MemoError, match="0 models attached"):
        ds_memo.checkpoint(model.model.layers[0], BATCH.embeds)


def test_report_of_something_else() -> None:
    with pytest.raises(ds_memo.MemoError, match="Linear is not under ds_memo"):
        ds_memo.report(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["llama", "plain"])
@pytest.mark.parametrize("trained", [False, True])
def test_threads_end_with_the_model(name: str, trained: bool) -> None:
    """Nobody called detach."""
    before = set(memo_threads())
    model = build(name)
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
        thread.join(5)
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


def test_offloaded_gradient_checkpointing_over_memo() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    model.gradient_checkpointing_enable(offload=True)
    with pytest.raises(ds_memo.MemoError, match=r'"offload": True} does what memo does in another way'):
        step(model, BATCH)
    handle.detach()


@pytest.mark.filterwarnings("error::ds_memo.errors.MemoWarning")
def test_a_forward_that_fails_early_is_not_warned_about() -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    with pytest.raises((IndexError, RuntimeError)) as caught:
        model(input_ids=torch.tensor([[10**6]]))
    assert not isinstance(caught.value, ds_memo.MemoError)
    assert handle.report()["warnings"] == []
    handle.detach()


@pytest.mark.parametrize("name", ["llama", "plain"])
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    """Weight averaging copies models after they were set up."""
    model = build(name)
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    twin = copy.deepcopy(model)
    frames = handle.report()["frames"]
    assert_same(step(twin, BATCH), step(stock, BATCH))
    assert handle.report()["frames"] == frames
    handle.detach()
    assert_same(step(twin, BATCH), step(stock, BATCH))


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(self: AllocatorBuilder, verbose: bool = False) -> None:
        raise RuntimeError("no compiler")

    model = build("llama")
    before = fingerprint(model)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(AllocatorBuilder, "load", cannot)
        warnings.simplefilter("error", ds_memo.MemoWarning)
        with pytest.raises(ds_memo.MemoWarning, match="memory addresses are not planned"):
            ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    assert fingerprint(model) == before
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2}).detach()


def test_a_warning_that_is_an_error_ends_one_forward() -> None:
    """The next one goes on without what the warning told of."""
    first, second = build("llama"), build("plain")
    stock = copy.deepcopy(second)
    handles = [ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1}) for model in (first, second)]
    batch = Batch.random(2, 17)
    step(first, batch)
    with warnings.catch_warnings(), pytest.raises(ds_memo.MemoWarning, match="memory addresses are not planned"):
        warnings.simplefilter("error", ds_memo.MemoWarning)
        step(second, batch)
    assert not handles[1].in_forward
    assert_same(step(second, batch), step(stock, batch))
    for handle in handles:
        handle.detach()
