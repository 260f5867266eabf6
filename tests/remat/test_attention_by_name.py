"""Attention ops of other packages are known by their names: here CPU stand-ins have those names."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ds_memo
from ds_memo.remat.op_policy import ATTENTION_NAMES
from tests.models import HEADS, HIDDEN, LAYERS, Block, compare_with_stock
from tests.remat.situations import drive, toy

calls: list[str] = []


def stand_in(name: str) -> torch.library.CustomOpDef:
    """Causal attention over (b, s, heads, d) under another package's op name; returns the output and the log-sum-exp."""

    @torch.library.custom_op(name, mutates_args=(), device_types="cpu")
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(name)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out.transpose(1, 2).contiguous(), lse

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)

    def backward(ctx, grad, _):
        q, k, v, out, lse = ctx.saved_tensors
        q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(x.transpose(1, 2) for x in back(grad, q, k, v, out, lse, 0.0, True))

    forward.register_autograd(backward, setup_context=save)
    return forward


@pytest.mark.parametrize("name", sorted(ATTENTION_NAMES - {"ds_memo::attention"}))  # the estimator's, run by its own tests
def test_is_supplied_not_run_again(name):
    if importlib.util.find_spec(name.split("::")[0]):
        pytest.skip(f"{name} itself is installed")
    attention = stand_in(name)

    class Layer(Block):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            b, s, _ = x.shape
            q, k, v = (part.view(b, s, HEADS, -1) for part in F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, dim=-1))
            return self.o(attention(q, k, v)[0].reshape(b, s, HIDDEN))

    calls.clear()
    report = compare_with_stock(toy(Layer), drive, {"alpha": 0.5, "resident_layers": 1})
    assert len(calls) == 2 * 3 * LAYERS  # stock's forwards and ours, and nothing else
    assert report["attention_recomputed"] == 0 and not report["warnings"]


@pytest.mark.parametrize("length, wrong", [(2**16, False), (2**16 + 8, True)])
def test_the_memory_efficient_kernel_where_it_is_wrong(length, wrong):
    """A stand-in for the CUDA kernel; only its sizes matter here."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(
            "_scaled_dot_product_efficient_attention",
            lambda q, k, v, *rest, **more: (torch.zeros_like(q), torch.zeros(q.shape[:3]), torch.zeros(()), torch.zeros(())),
            "CPU",
        )

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv, self.o = nn.Linear(2, 6), nn.Linear(2, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q, k, v = self.qkv(x).unflatten(-1, (3, 1, 2)).permute(2, 0, 3, 1, 4)
                out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
                return self.o(out.transpose(1, 2).flatten(2))

        model = nn.Sequential(Layer(), Layer())
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=["0", "1"])
        model(torch.zeros(1, length, 2))
        said = handle.report()["warnings"]
        assert len(said) == wrong and all("memory-efficient attention, whose results past 65,536 tokens" in line for line in said)
        handle.detach()
    finally:
        library._destroy()
