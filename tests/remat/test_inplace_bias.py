"""A bias added in place right after its product (DeepSpeed's memory-efficient linear under ZeRO-3) is part of the GEMM."""

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn

import ds_memo
from tests.inside import gemms_of, inside, recipe_of


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in zero3_linear_wrap(x, self.qkv.weight, self.qkv.bias).chunk(3, dim=-1))
        y = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        up = zero3_linear_wrap(y, self.up.weight, self.up.bias)
        return y + zero3_linear_wrap(nn.functional.gelu(up), self.down.weight, self.down.bias)


class Model(nn.Module):
    def __init__(self, hidden: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("alpha, residents", [(0.0, 0), (0.3, 0), (0.3, 2), (1.0, 4)])
def test_same_gradients_and_no_copy_set_aside(alpha, residents, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    expected = gradients(model, x)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents})
    gradients(model, x)  # analysed
    hits = []

    def about_to_change(frame, tensor):
        storage = tensor.untyped_storage().data_ptr()
        hits.extend(source for source in frame.device.values() if source.untyped_storage().data_ptr() == storage)

    monkeypatch.setattr(inside(handle).engine, "about_to_change", about_to_change)
    for got, want in zip(gradients(model, x), expected, strict=True):
        assert (got - want).norm() <= 2e-6 * want.norm()
    gemms = gemms_of(handle)
    assert [gemm.biased for gemm in gemms] == [True, True, True]
    assert not hits  # no kept tensor was about to change, so none was set aside
    handle.detach()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_bias_that_was_read_before_in_a_later_call(alpha):
    """The ops and saved tensors are the same, but the recipe has the bias right after its product."""

    class Reads(Layer):
        early = False

        def forward(self, x):
            up = x.flatten(0, 1) @ self.up.weight.t()
            if self.early:
                double = up * 2
                up.add_(self.up.bias)
            else:
                up.add_(self.up.bias)
                double = up * 2
            return x + self.down(nn.functional.gelu(double)).view_as(x)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    model.layers = nn.ModuleList(Reads(32) for _ in range(3))
    expected = {}
    for Reads.early in (False, True):
        expected[Reads.early] = gradients(model, x)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": 1})
    for Reads.early in (False, True, True, False, True):
        for got, want in zip(gradients(model, x), expected[Reads.early], strict=True):
            assert (got - want).norm() <= 2e-6 * want.norm() + 1e-12
    handle.detach()


def test_a_bias_that_was_read_before_is_no_part_of_the_gemm():
    """Another op read the product before the bias came: the two values differ, and both are needed."""

    class Reads(Layer):
        def forward(self, x):
            flat = x.flatten(0, 1)
            up = flat @ self.up.weight.t()
            early = up.sigmoid()
            with torch.no_grad():
                up.add_(self.up.bias)
            return x + self.down(up * early).view_as(x)

    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList(Reads(32) for _ in range(3))
    x = torch.randn(2, 9, 32, requires_grad=True)
    expected = gradients(model, x)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    for _ in range(3):
        for got, want in zip(gradients(model, x), expected, strict=True):
            assert (got - want).norm() <= 2e-6 * want.norm() + 1e-12
    assert not any(op.biased for op in recipe_of(handle).ops)
    handle.detach()
