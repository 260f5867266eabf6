"""Gradients stay stock's whatever layers do inside, or a clear error says why not."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_memo
from tests.inside import gemms_of, inside
from tests.models import (
    HIDDEN,
    Batch,
    Block,
    Different,
    Outcome,
    Toy,
    assert_same,
    compare_with_stock,
    every_config,
    gradients,
    step,
)
from tests.remat.situations import BATCH, WAYS, Lines, compare, drive, every_way, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


class ChangesProducts(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.norm(x))
        y += self.bias
        y.mul_(2)
        F.relu_(y)
        z = self.b(y)
        z[:, 1:].add_(0.5)
        z = torch.tanh_(z)
        return x + self.c(z)


class ChangesItsOutput(Lines):
    """The layer returns a product, which its caller then changes in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(F.gelu(self.b(x)))
        return x.add_(1)


class ChangesItsInput(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.add_(1))
        return x + self.b(F.gelu(y))


class LooksAtValues(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.isinf().any():
            y = y.clamp(-1, 1)
        if y.sum() > 0:  # nothing saved depends on the product that decides
            return x + y
        return x - F.gelu(self.b(x))


class LooksWithoutSaving(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.c(x).mean()
        return x + F.gelu(self.a(x)) if gate.item() > 0 else x - torch.sigmoid(self.b(x))


class ChangesChoice(Lines):
    """A router that scales its top-k in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = self.a(x).softmax(-1).topk(2, -1)
        weights *= 2.5
        return x + self.b(x) * weights.sum(-1, keepdim=True)


class Strided(Lines):
    """Products with transposed, sliced and expanded operands, and one with a single column."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.transpose(0, 1)).transpose(0, 1)
        z = torch.addmm(x.flatten(0, 1), F.gelu(y).flatten(0, 1), self.b.weight, beta=0.5, alpha=2.0).view_as(x)
        w = self.c.weight @ x[:, :1].expand(-1, 3, -1).flatten(0, 1).T
        return F.silu(z) * torch.sigmoid(self.gate(x)) + w.sum() * 0.01


class NestedCheckpoint(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = torch_checkpoint(lambda t: self.b(F.gelu(t)), y, use_reentrant=self.reentrant)
        return x + self.c(F.silu(z))

    reentrant = False


class NestedReentrantCheckpoint(NestedCheckpoint):
    reentrant = True


class NestedMemoCheckpoint(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ds_memo.checkpoint(self.a, x) if any(ds_memo.runtime.attach._attached) else self.a(x)
        return x + self.c(F.silu(y))


class Sparse(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.eye(x.shape[1]).to_sparse()
        shift.copy_(torch.eye(x.shape[1]).roll(1, 0).to_sparse()).mul_(2.0)
        return x + torch.stack([torch.sparse.mm(shift, F.gelu(row)) for row in self.a(x)])


class Graph(Lines):
    """Tokens are mixed by a sparse left operand, whose rows cannot be split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.eye(x.shape[1]) + torch.eye(x.shape[1]).roll(1, 0)
        y = torch.stack([near.to_sparse() @ torch.sin(near.to_sparse_csr() @ row) for row in self.a(x)])
        skipped = torch.stack([(near.to_sparse_csr() @ row).view_as(row) for row in x])  # nothing saved depends on it
        return skipped + self.b(F.gelu(y))


class Branches(Lines):
    """The higher-order op of torch.cond, without its seconds of tracing. The modes see it as one op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            scale = torch.ops.higher_order.cond(self.b(x).sum() > 0, torch.sin, torch.cos, (y,))
        return x + self.c(F.gelu(y) * scale)


class TakesAnIndex(Lines):
    """A product that nothing else needs picks rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(10, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            index = (self.a(x)[..., 0].abs() * 3).clamp(max=9).nan_to_num(0).long()
        return x + self.table[index] + self.b(F.gelu(self.c(x)))


class SharesAProduct(Lines):
    """One product with several readers, a saved view of it, and a second product with the same weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = y[:, ::2].tanh().mean() + y.chunk(2, -1)[1].sigmoid().sum(-1, keepdim=True)
        return x + self.a(F.gelu(y)) * z


class FrozenBehindAProduct(Lines):
    """Autograd saves nothing between the two: rows of the second want the first for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c(F.gelu(self.b(self.a(x))))


@torch.jit.script
def dropped_and_added(x: torch.Tensor, residual: torch.Tensor, p: float) -> torch.Tensor:
    return residual + torch.nn.functional.dropout(x, p, True)


class EndsInTorchScript(Lines):
    """Like Megatron's layers, it saves the last tensor inside TorchScript. It is warmed up: the first calls save others."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(3):
            dropped_and_added(torch.randn(2, 3, HIDDEN, requires_grad=True), torch.randn(2, 3, HIDDEN, requires_grad=True), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropped_and_added(self.b(F.gelu(self.a(x))), x, 0.1)


LAYERS = [
    ChangesProducts, ChangesItsOutput, LooksAtValues, LooksWithoutSaving, ChangesChoice, Strided, NestedCheckpoint,
    NestedReentrantCheckpoint, NestedMemoCheckpoint, Sparse, Graph, TakesAnIndex, Branches, SharesAProduct, EndsInTorchScript,
    FrozenBehindAProduct,
]  # fmt: skip


@every_config
@pytest.mark.parametrize("block", LAYERS)
def test_layer(config: dict, block: type) -> None:
    compare_with_stock(toy(block), drive, config, steps=4)


@torch.jit.script
def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_an_error_inside_torchscript_is_no_end_of_a_replay() -> None:
    """TorchScript words both alike, without a text."""
    runs = itertools.count()

    class FailsAgain(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(F.gelu(self.a(x)))
            added(y.detach(), y.detach()[:, : 3 if next(runs) else None])
            return y.exp()

    ds_memo.attach(model := Toy(FailsAgain, layers=1), {"alpha": 0.5, "resident_layers": 0})
    with pytest.raises(RuntimeError, match="The following operation failed in the TorchScript interpreter"):
        step(model, Batch.random(2, 17))


@every_config
def test_layer_that_changes_its_input(config: dict) -> None:
    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(inputs_embeds * 1.0, labels)  # a leaf must not be changed

    torch.manual_seed(0)
    compare_with_stock(Model(ChangesItsInput), drive, config)


@every_config
def test_input_changed_after_the_layer(config: dict) -> None:
    """Plain autograd allows it if no op saved the input. Memo either has its own copy or refuses."""

    class Scale(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(F.gelu(x * 2))

    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds * 1.0
            for block in self.blocks:
                y = block(x)
                x.zero_()
                x = y
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    try:
        compare_with_stock(Model(Scale), drive, config)
    except Different:
        raise
    except (ds_memo.MemoError, RuntimeError) as error:
        assert "changed in place" in str(error) or "modified by an inplace operation" in str(error)


@every_config
@pytest.mark.parametrize("how", ["position", "keyword", "keyword beside a trained one", "tuple", "tuple by keyword"])
def test_shared_argument_changed_between_two_forwards(config: dict, how: str) -> None:
    """Stock no longer needs the mask when it changes. A replay would see the new one, so memo must refuse."""
    calls = {
        "position": lambda block, x, mask, trained: block(x, mask),
        "keyword": lambda block, x, mask, trained: block(x, mask=mask),
        "keyword beside a trained one": lambda block, x, mask, trained: block(x, mask=mask, trained=trained),
        "tuple": lambda block, x, mask, trained: block(x, (mask, mask)),
        "tuple by keyword": lambda block, x, mask, trained: block(x, mask=[(mask, mask)]),  # rotary tables in Hugging Face models
    }

    class Masked(Lines):
        def forward(self, x: torch.Tensor, mask: Any, trained: torch.Tensor | None = None) -> torch.Tensor:
            while not isinstance(mask, torch.Tensor):
                mask = mask[0]
            return x + self.b(F.gelu(self.a(x) * (mask * 1.0))) + (0 if trained is None else trained)

    class Model(Toy):
        def __init__(self) -> None:
            super().__init__(Masked)
            self.register_buffer("mask", torch.ones(17, 1))
            self.trained = nn.Parameter(torch.ones(()))

        def run_blocks(self, x: torch.Tensor, fill: float) -> torch.Tensor:
            self.mask.fill_(fill)
            for block in self.blocks:
                x = calls[how](block, x, self.mask, self.trained)
            return x

    def twice(model: nn.Module, number: int) -> Outcome:
        losses = [model(BATCH.embeds, BATCH.labels, fill=fill).loss for fill in (1.0, 2.0)]
        sum(losses).backward()
        return Outcome(sum(losses).detach(), gradients(model))

    with pytest.raises(ds_memo.MemoError, match="changed in place"):
        torch.manual_seed(0)
        compare_with_stock(Model(), twice, config)


@every_config
def test_other_work_behind_the_same_ops(config: dict) -> None:
    """The ops are the same, but nothing saved depends on another of the products."""

    class Switches(Lines):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            y, z = self.a(x), self.b(x)
            return x + (F.gelu(y * 2) + z * 1 if other else y * 1 + F.gelu(z * 2))

    compare_with_stock(toy(Switches), lambda model, number: step(model, BATCH, other=number % 2 == 1), config, steps=5)


@pytest.mark.parametrize("whole", ["attention", "function"])
def test_other_operands_of_attention_that_runs_again(whole: str) -> None:
    """The recomputed attention reads the product that nothing saved depended on."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)

    function = ds_memo.keep_whole(attend) if whole == "function" else attend

    class Switches(Lines):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            y, z = self.a(x), self.b(x)
            return x + x * function((z if other else y).detach()) + y + z

    config = {"ablation": "full_recompute"}
    compare_with_stock(toy(Switches), lambda model, number: step(model, BATCH, other=number % 2 == 1), config, steps=5)


@every_config
def test_another_number_of_experts_per_token(config: dict) -> None:
    class Routes(Lines):
        def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
            weights, _ = self.a(x).softmax(-1).topk(k, -1)
            return x + self.b(x) * weights.sum(-1, keepdim=True)

    compare_with_stock(toy(Routes), lambda model, number: step(model, BATCH, k=2 - number % 2), config, steps=4)


class Threshold(Lines):
    """Only tokens that a router selects pass through an expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(self.norm(x)))
        chosen = self.b(hidden)[..., 0] > 0
        out = x.clone()
        out[chosen] = out[chosen] + self.c(hidden[chosen])
        return out


class Chooses(Lines):
    how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c(type(self).how(x, self.b(torch.tanh(self.a(self.norm(x))))))


CHOICES = {
    "argmin": lambda x, scores: x * scores.argmin(-1, keepdim=True),
    "min": lambda x, scores: x * scores.min(-1).indices[..., None],
    "repeat_interleave": lambda x, scores: x * x.flatten(0, 1).repeat_interleave((scores > 0)[..., 0].flatten() + 1, 0).sum(0),
    "unique": lambda x, scores: x * (scores > 3).sum(-1).unique().numel(),
    "equal": lambda x, scores: x.sin() if torch.equal(scores, scores.clone()) else x.exp(),  # a NaN is not equal to itself
}


@pytest.mark.parametrize("block", [Threshold, *(type(name, (Chooses,), {"how": how}) for name, how in CHOICES.items())])
def test_what_chooses_is_kept_whole(block: type[Lines]) -> None:
    """Recomputed rows may differ in the last bit, and then other tokens would be chosen."""
    model = toy(block)
    compare_with_stock(model, drive, {"alpha": 0.5, "resident_layers": 0})
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    drive(model, 0)
    hidden, router, *_ = gemms_of(handle)
    if router.wanted:  # else nothing reads it, since the choice is supplied
        assert router.rows == router.shape[0] and hidden.rows == hidden.shape[0] // 2


# ---- routers that mask expert groups in zeroed memory (DeepSeek-V3, GLM-4.5)


EXPERTS, GROUPS = 8, 4


class Grouped(Block):
    """A block that chooses experts from two of four groups, like DeepSeek-V3; an expert is a scale."""

    fills = "nothing"
    """A second writer of the mask, which PyTorch does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(self.norm2(x).flatten(0, 1)).sigmoid()
        groups = scores.view(-1, GROUPS, EXPERTS // GROUPS).sum(-1)
        mask = torch.zeros_like(groups)
        if self.fills == "an unseen kernel":
            with _disable_current_modes(), torch.no_grad():
                mask.add_(groups > groups.mean(), alpha=0.5)
        mask.scatter_(1, groups.topk(2, dim=-1)[1], 1.0)
        allowed = mask.unsqueeze(-1).expand(-1, GROUPS, EXPERTS // GROUPS).reshape(-1, EXPERTS)
        chosen = scores.masked_fill(~allowed.bool(), 0.0).topk(2, dim=-1)[1]
        weights = scores.gather(1, chosen) * self.scales[chosen]
        return super().feed(x) * weights.sum(-1).view(*x.shape[:2], 1)


class Filled(Grouped):
    fills = "an unseen kernel"


def rows(model: nn.Module, alpha: float) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and kept rows of each GEMM of the first layer that the replay needs."""
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": 0})
    step(model, BATCH)
    found = [(op.shape, op.rows) for op in gemms_of(handle, -1) if op.wanted]
    handle.detach()
    return found


@every_config
@pytest.mark.parametrize("block", [Grouped, Filled])
def test_gradients_of_masked_groups(block: type[Grouped], config: dict[str, Any]) -> None:
    assert compare_with_stock(toy(block), drive, config)["attention_recomputed"] == 0


def test_only_the_router_is_kept_whole() -> None:
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    assert [kept for shape, kept in rows(toy(Grouped), 0.5) if shape[1] != EXPERTS] == [tokens // 2] * 4
    assert [kept for shape, kept in rows(toy(Grouped), 0.5) if shape[1] == EXPERTS] == [tokens]


def test_all_before_is_kept_whole_where_a_kernel_may_have_made_the_mask() -> None:
    """It left other values than the op that made the memory, so it may have read anything."""
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    before, behind = [tokens] * 3, [tokens // 2] * 2  # qkv, o, router; up, down
    assert [kept for _, kept in rows(toy(Filled), 0.5)] == before + behind


def test_glm() -> None:
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1, "pad_token_id": 0}
    experts = {"n_routed_experts": EXPERTS, "n_group": GROUPS, "topk_group": 2, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**sizes, **heads, **experts, moe_intermediate_size=32)).train()
    tokens = BATCH.embeds.shape[0] * BATCH.embeds.shape[1]
    assert [kept for shape, kept in rows(model, 0.5)[:4] if shape[0] == tokens] == [tokens // 2] * 4
    compare_with_stock(model, drive, {"alpha": 0.5, "resident_layers": 1})


# ---- a bias added in place right after its product (DeepSpeed's linear under ZeRO-3)


@pytest.mark.parametrize("alpha, residents", [(0.0, 0), (0.3, 0), (0.3, 2), (1.0, 4)])
def test_same_gradients_and_no_copy_set_aside(alpha, residents, monkeypatch):
    monkeypatch.setattr(F, "linear", zero3_linear_wrap)
    model = toy()
    expected = drive(model, 0)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents})
    drive(model, 0)  # analysed
    hits = []

    def about_to_change(frame, tensor):
        storage = tensor.untyped_storage().data_ptr()
        hits.extend(source for source in frame.device.values() if source.untyped_storage().data_ptr() == storage)

    monkeypatch.setattr(inside(handle).engine, "about_to_change", about_to_change)
    assert_same(drive(model, 0), expected)
    assert [gemm.biased for gemm in gemms_of(handle)] == [True] * 4
    assert not hits  # no kept tensor was about to change, so none was set aside


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_bias_that_was_read_before_in_a_later_call(alpha):
    """The ops and saved tensors are the same, but the recipe has the bias right after its product."""

    class Reads(Lines):
        def forward(self, x, early):
            up = x.flatten(0, 1) @ self.a.weight.t()
            if early:
                double = up * 2
                up.add_(self.a.bias)
            else:
                up.add_(self.a.bias)
                double = up * 2
            return x + self.b(F.gelu(double)).view_as(x)

    def reads(model, number):
        return step(model, BATCH, early=number in (1, 2, 4))

    compare_with_stock(toy(Reads), reads, {"alpha": alpha, "resident_layers": 1}, steps=5)


def test_a_bias_that_was_read_before_is_no_part_of_the_gemm():
    """Another op read the product before the bias came: the two values differ, and both are needed."""

    class Reads(Lines):
        def forward(self, x):
            up = x.flatten(0, 1) @ self.a.weight.t()
            early = up.sigmoid()
            with torch.no_grad():
                up.add_(self.a.bias)
            return x + self.b(up * early).view_as(x)

    config = {"alpha": 0.5, "resident_layers": 1}
    compare_with_stock(toy(Reads), drive, config)
    handle = ds_memo.attach(model := toy(Reads), config)
    drive(model, 0)
    assert not any(gemm.biased for gemm in gemms_of(handle))


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


@pytest.mark.parametrize("backward", [False, True])
@every_way("compiled")
def test_cached_parametrizations_are_refused(way: str, backward: bool) -> None:
    """A replay that finds a weight cached saves other tensors; a tile leaves one without a graph in the cache."""
    compare(toy(WeightNormed), drive, way)
    handle = ds_memo.attach(model := toy(WeightNormed), WAYS[way])
    before = step(model, BATCH)
    with parametrize.cached(), torch.no_grad():
        model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
    said = r"^layer blocks\.0: weights of up are parametrized, and it was called under torch\.nn\.utils\.parametrize\.cached"
    with pytest.raises(ds_memo.MemoError, match=said), parametrize.cached():
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        if backward:
            loss.backward()
    model.zero_grad()
    assert_same(step(model, BATCH), before)
    handle.detach()
