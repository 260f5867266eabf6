"""Wrong input is refused with a sentence that says what to do, and nothing is left half-done."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.hf.find_layers import find_layers
from ds_memo.swap.host_budget import shared_pool
from tests.models import HIDDEN, LAYERS, Batch, Block, Toy, assert_same, assert_same_grads, build, gradients, step
from tests.runtime.traces import fingerprint

BATCH = Batch.random(2, 17)
pytestmark = pytest.mark.usefixtures("no_thread_stays")


# ---- how the script was started


@pytest.mark.parametrize("memo", [{"enabled": True}, {"enabled": False}], ids=["with memo", "without"])
def test_no_launcher(memo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own error, which names a package for MPI, with the words that it lacks."""
    pytest.importorskip("deepspeed")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "memo": memo}
    said = r"mpi4py.* No launcher has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR for this.*: deepspeed train\.py, torchrun"
    with pytest.raises(ModuleNotFoundError, match=said):
        ds_memo.initialize(model=Toy(), config=config)


# ---- which layers


@pytest.mark.parametrize("arguments, said", [
    ((5, {}), r"model: got 5, expected a torch\.nn\.Module"),
    ((Toy(), {}, "blocks"), "layers: got blocks, expected a list of names or modules"),
    ((Toy(), {}, 5), "layers: got 5, expected a list"),
    ((Toy(), {}, None, "nowhere"), "device: got nowhere, expected a device that PyTorch has here"),
    ((Toy(), {}, None, 2.5), r"device: got 2\.5, expected a device"),
], ids=["model", "one name", "no list", "no device", "a number"])  # fmt: skip
def test_arguments_of_another_kind(arguments: tuple, said: str) -> None:
    with pytest.raises(ds_memo.MemoError, match=said):
        ds_memo.attach(*arguments)


def test_a_failed_attach_keeps_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor threads: neither waits for the garbage collector."""
    pool = shared_pool(1.0, torch.device("cpu"))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    model = Toy()
    monkeypatch.setattr(model, "register_forward_hook", fails)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="no more hooks") as caught:
            ds_memo.attach(model, {"host_memory_gib": 1})
        assert not pool.clients and caught
    finally:
        gc.enable()


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]))])
def test_no_layers(model: nn.Module) -> None:
    """Nor in a list of mixed classes."""
    before = fingerprint(model)
    with pytest.raises(ds_memo.MemoError, match=r"(?s)Sequential has no .*layers are not known.*attach\(model, config, layers="):
        ds_memo.attach(model, {})
    assert fingerprint(model) == before


def test_lists_of_one_length() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(3))
    model.decoder = nn.ModuleList(Block() for _ in range(3))
    with pytest.raises(ds_memo.MemoError, match="several lists of 3 layers: encoder, decoder"):
        ds_memo.attach(model, {})
    handle = ds_memo.attach(model, {}, layers=list(model.decoder))
    assert handle.report()["layers"] == 3
    handle.detach()


class Twice(nn.Module):
    """One layer, used four times, and stages of two layers each."""

    def __init__(self, stages: bool) -> None:
        super().__init__()
        blocks = [Block() for _ in range(4)] if stages else [Block()] * 4
        self.parts = nn.ModuleList(nn.ModuleList(blocks[i : i + 2]) for i in (0, 2)) if stages else nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            for block in part if isinstance(part, nn.ModuleList) else [part]:
                x = block(x)
        return x


@pytest.mark.parametrize("stages", [False, True])
def test_lists_of_lists_and_of_one_layer(stages: bool) -> None:
    model = Twice(stages)
    stock = copy.deepcopy(model)
    names = [name for name, _ in find_layers(model)]
    assert names == (["parts.0.0", "parts.0.1", "parts.1.0", "parts.1.1"] if stages else ["parts.0"])
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    x = torch.randn(2, 17, HIDDEN)
    for net in (model, stock):
        net(x).sum().backward()
    assert handle.report()["frames"] == 4 and handle.report()["bytes_to_host"]
    assert_same_grads(gradients(model), gradients(stock))
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


class AttentionAlone(NoGemm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.scale).unsqueeze(1)
        return x + F.scaled_dot_product_attention(y, y, y, is_causal=True).squeeze(1)


@pytest.mark.parametrize(
    "block, seen",
    [
        (MathAttention, r"layer blocks\.0: no attention kernel was seen.*aten\._softmax\.default"),
        (NoGemm, r"layer blocks\.0: no GEMM was seen in it, so each backward runs all of it, attention too, again"),
        (AttentionAlone, r"layer blocks\.0: no GEMM was seen in it, so each backward runs all of it but attention again"),
    ],
)
def test_layers_that_cost_more_than_they_should(block: type, seen: str) -> None:
    model = Toy(block)
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2})
    with pytest.warns(ds_memo.MemoWarning, match=seen):
        got = step(model, BATCH)
    assert_same(got, step(stock, BATCH))
    report = handle.report()
    assert len(report["warnings"]) == 1
    unknown = issubclass(block, NoGemm)
    assert (report["gemm_flops_recomputed_fraction"] is None) == unknown == ("GEMMs unknown" in str(report))
    assert report["attention_recomputed"] == (LAYERS if block is MathAttention else 0)
    handle.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Toy()
    stock = copy.deepcopy(model)
    for block in model.blocks:
        block.up.compile(backend="aot_eager")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    for _ in range(2):
        assert_same(step(model, BATCH), step(stock, BATCH))
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
