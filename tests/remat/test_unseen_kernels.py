"""Kernels that the dispatcher does not see; NumPy stands in for Triton. Gradients are stock's, and the warning names the op."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat.recipe import fingerprint
from tests import architectures
from tests.models import HIDDEN, Outcome, compare_with_stock, every_config, step
from tests.remat.situations import BATCH, Lines, drive, toy

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")


def calling(compute: Any) -> type[Lines]:
    """Return a layer whose kernel is `compute`, which makes three times its input."""

    class Kernel(torch.autograd.Function):
        forward = staticmethod(compute)
        backward = staticmethod(lambda ctx, grad: 3 * grad)

    class Calls(Lines):
        def thrice(self, x: torch.Tensor) -> torch.Tensor:
            return Kernel.apply(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(self.thrice(self.a(self.norm(x)))))

    return Calls


def _set(out: Any, x: Any) -> None:
    np.multiply(x, 3, out=out)


def _add(out: Any, x: Any) -> None:
    out[...] += 3 * x


def _multiply(out: Any, x: Any) -> None:
    out[...] *= 3 * x


def _into(make: Any, write: Any) -> Any:
    """Return a kernel that writes to memory which an op has made."""

    def compute(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = make(x.shape)
        write(out.numpy(), x.detach().numpy())
        return out

    return compute


MADE = [
    _into(torch.empty, _set),
    _into(lambda shape: torch.empty_permuted(shape, (0, 1, 2)), _set),
    _into(lambda shape: torch.arange(1.0).new_ones(shape), _multiply),
    _into(torch.zeros, _add),
]
ZEROED = _into(lambda shape: torch.empty(shape).zero_(), _add)


def _elsewhere(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(3 * x.detach().numpy())


def _in_place(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[...] *= 3  # as Liger's rotary embedding
    return x.view_as(x)


def _in_place_and_says_so(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[...] *= 3
    ctx.mark_dirty(x)
    return x


@every_config
@pytest.mark.parametrize("compute", [*MADE, ZEROED, _elsewhere, _in_place, _in_place_and_says_so])
def test_a_kernel_out_of_sight(config: dict, compute: Any) -> None:
    compare_with_stock(toy(calling(compute)), drive, config)


@pytest.mark.parametrize("compute", [*MADE, _elsewhere])
def test_it_is_told_where_it_may_be_attention(compute: Any) -> None:
    class Seen(calling(compute)):
        def thrice(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            out[..., 1:], out[..., 0] = 3 * x[..., 1:], 3 * x[..., 0]
            return out

    for block, warned in ((calling(compute), ["wrap its function in ds_memo.keep_whole"]), (Seen, [])):
        handle = ds_memo.attach(model := toy(block), {"alpha": 0.5, "resident_layers": 0})
        drive(model, 0)
        assert [line.rpartition(": ")[2] for line in handle.report()["warnings"]] == [f"{words}." for words in warned]
        handle.detach()


@torch.library.custom_op("ds_memo_tests::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, by: torch.Tensor) -> None:
    x.numpy()[...] *= by.item()


@every_config
def test_a_custom_op_that_changes_nothing_at_first(config: dict) -> None:
    """Its schema says what it writes, so fingerprints are not needed."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            ctx.by = by.clone()
            scale_(x, by)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple:
            return grad * ctx.by, None

    class Scales(Lines):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(Kernel.apply(self.a(self.norm(x)), self.by)))

    def drive(model: nn.Module, number: int) -> Outcome:
        for block in model.blocks:
            block.by.fill_(1.0 + number)
        return step(model, BATCH)

    compare_with_stock(toy(Scales), drive, config)


def test_a_write_out_of_sight_is_named() -> None:
    model = toy(calling(_in_place))
    ds_memo.attach(model, {"alpha": 1.0, "resident_layers": 2})
    # mm: DeepSpeed leaves its own linear in torch.nn.functional after a ZeRO-3 model was built in this process
    with pytest.warns(ds_memo.MemoWarning, match=r"layer blocks\.0: outputs of aten\.(add)?mm\.default were changed in place"):
        step(model, BATCH)


class _NumPyProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


class Unseen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NumPyProduct.apply(x, self.weight) + self.bias


@pytest.mark.parametrize("package", ["transformer_engine.pytorch", "of_ours"])
def test_modules_of_transformer_engine_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product by NumPy stands in for TransformerEngine's, beside one that is seen. The control: modules of another package."""
    monkeypatch.setattr(Unseen, "__module__", f"{package}.module.linear")

    class Mixed(Lines):
        def __init__(self) -> None:
            super().__init__()
            self.unseen = Unseen(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.tanh(self.unseen(torch.tanh(self.a(self.norm(x))))))

    report = compare_with_stock(toy(Mixed), drive, {"alpha": 0.5, "resident_layers": 0})
    named = ["modules of TransformerEngine" in warning for warning in report["warnings"]]
    assert named.count(True) == (package == "transformer_engine.pytorch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_a_fingerprint_changes_with_a_value(dtype: torch.dtype) -> None:
    """Tensors elsewhere do not count: memory-efficient attention returns its random seed on the host."""
    value = torch.ones(3, 5).to(dtype)
    before = fingerprint((value.T, None, 7))
    assert torch.equal(before, fingerprint((value.T, None, 7, torch.zeros(1, device="meta"))))
    value[2, 3] = 0
    assert not torch.equal(before, fingerprint((value.T, None, 7)))


# ---- a layer without an attention kernel is told what would help it


def said(model: nn.Module) -> tuple[list[str], int]:
    """Return the warnings of a step, and how often attention ran again."""
    ids = torch.randint(3, architectures.VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0, "plan": {"enabled": False}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, labels=ids).loss.backward()
    report = handle.report()
    handle.detach()
    return report["warnings"], report["attention_recomputed"]


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next"])
def test_layers_that_have_no_attention(name: str) -> None:
    """State spaces, convolutions, linear attention; Qwen3-Next's experts are chosen by a softmax."""
    assert said(architectures.build(name)) == ([], 0)


def test_values_that_are_not_as_wide_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-head latent attention is on sdpa, which has no kernel for it on a CPU. Equally wide, it has."""
    own: dict[str, Any] = architectures.OWN["deepseek_v3"]
    assert said(architectures.build("deepseek_v3")) == ([], 0)
    monkeypatch.setitem(architectures.OWN, "deepseek_v3", own | {"v_head_dim": 16})
    (warning,), again = said(architectures.build("deepseek_v3"))
    assert "though it calls scaled_dot_product_attention" in warning and "attn_implementation" not in warning
    assert again == architectures.LAYERS
