"""Sums of weight gradients over tiles: right for every way in which a weight is used, and as exact as one GEMM in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from ds_memo.remat import follower
from ds_memo.remat.modes import running_tiles
from ds_memo.tiles import weight_gradients
from ds_memo.tiles.weight_gradients import GradientSums, see_products_of_zero3, weight_products

TILES = 64
WORST, WORST_OF_EXPERTS = 1.1, 1.5
"""Times the error of one dense product that the sum over tiles may have. Grouped products have no float32 output."""

Layer = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def as_in_a_tile() -> Iterator[None]:
    """ZeRO-3's linear, which an earlier test may have left in the place of PyTorch's, hides its products."""
    see_products_of_zero3()
    with running_tiles():
        yield


def operands(tokens: int = 64 * 64, m: int = 96, n: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and an output's gradient in bfloat16, with means that do not cancel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, m, generator=generator) + 0.1
    gradient = torch.randn(tokens, n, generator=generator) * 0.01 + 0.002
    return x.bfloat16(), gradient.bfloat16()


def ratio(layer: Layer = F.linear, *shapes: tuple[int, ...], outputs: int = 80) -> float:
    """Return the error of bfloat16 weights' gradients summed over 64 tiles, in errors of dense ones; the largest of the weights.

    Args:
        shapes: of the weights; by default that of F.linear.
        outputs: values of a token of the layer's output.
    """
    x, gradient = operands(n=outputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator).bfloat16() / 8 for shape in shapes or ((outputs, x.shape[1]),)]

    def whole(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [weight.to(dtype).requires_grad_() for weight in weights]
        return [*torch.autograd.grad(layer(x.to(dtype), *leaves), leaves, gradient.to(dtype))]

    sums = GradientSums([weight.requires_grad_() for weight in weights])
    for x_tile, gradient_tile in zip(x.chunk(TILES), gradient.chunk(TILES), strict=True):
        leaf = x_tile.clone().requires_grad_()
        sums.backward([layer(leaf, *weights)], [gradient_tile], [leaf])
    errors = []
    for tiled, dense, exact in zip(sums.take(), whole(torch.bfloat16), whole(torch.float32), strict=True):
        assert tiled.dtype == dense.dtype == torch.bfloat16
        errors.append(float((tiled.double() - exact).norm() / (dense.double() - exact).norm()))
    return max(errors)


def grouped(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's tokens by its weight, in one product. Tokens take turns."""
    experts = weights.shape[0]
    sorted_x = x.unflatten(0, (-1, experts)).transpose(0, 1)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * sorted_x.shape[1]
    out = torch._grouped_mm(sorted_x.flatten(0, 1), weights, offs=ends)
    return out.unflatten(0, (experts, -1)).transpose(0, 1).flatten(0, 1)


def mixtrals(implementation: str) -> Layer:
    """Return Mixtral's experts as a function of tokens and weights. A token's first numbers choose its experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=96, intermediate_size=64, num_local_experts=4)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        chosen = x.detach().float()[:, :4].topk(2)
        own = dict(zip(dict(experts.named_parameters()), weights, strict=True))
        return torch.func.functional_call(experts, own, (x, chosen.indices, chosen.values.softmax(-1).to(x.dtype)))

    return run


EXPERTS: dict[str, tuple[Layer, int, tuple[tuple[int, ...], ...]]] = {
    "a grouped product": (grouped, 80, ((4, 96, 80),)),
    "Mixtral's, grouped": (mixtrals("grouped_mm"), 96, ((4, 128, 96), (4, 96, 64))),
    "Mixtral's, one by one": (mixtrals("eager"), 96, ((4, 128, 96), (4, 96, 64))),
}


def test_64_tiles_are_as_exact_as_one_gemm() -> None:
    assert 0 < ratio() <= WORST


@pytest.mark.parametrize("name", EXPERTS)
def test_64_tiles_of_experts(name: str) -> None:
    layer, outputs, shapes = EXPERTS[name]
    assert 1 < ratio(layer, *shapes, outputs=outputs) <= WORST_OF_EXPERTS


def test_sums_in_bfloat16_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "_sum_dtype", lambda dtype: dtype)
    assert ratio() > 2 * WORST
    for layer, outputs, shapes in EXPERTS.values():
        assert ratio(layer, *shapes, outputs=outputs) > WORST_OF_EXPERTS


def test_products_that_are_rounded_before_they_are_summed_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM whose output is bfloat16, in a float32 sum."""
    monkeypatch.setattr(weight_gradients, "weight_products", lambda outputs, parameters: {})
    assert ratio() > WORST


def summed(layer: Layer, parameters: list[torch.Tensor], x: torch.Tensor, tile: int) -> list[Any]:
    """Return the gradients of the parameters and of `x` by tiles."""
    sums, of_x = GradientSums(parameters), []
    for part in x.split(tile):
        leaf = part.clone().requires_grad_()
        output = layer(leaf, *parameters)
        of_x.append(sums.backward([output], [torch.cos(part @ torch.ones(part.shape[1], output.shape[1]))], [leaf])[0])
    return [*sums.take(), torch.cat(of_x)]


def dense(layer: Layer, parameters: list[torch.Tensor], x: torch.Tensor) -> list[Any]:
    """Return the same by ordinary autograd over all tokens."""
    leaf = x.clone().requires_grad_()
    output = layer(leaf, *parameters)
    gradient = torch.cos(x @ torch.ones(x.shape[1], output.shape[1]))
    return [*torch.autograd.grad(output, [*parameters, leaf], gradient, allow_unused=True)]


LAYERS: dict[str, tuple[Layer, list[tuple[int, ...]], set[int]]] = {
    "linear": (lambda x, w: F.linear(x, w), [(5, 8)], {0}),
    "linear with a bias": (lambda x, w, b: F.linear(x, w, b), [(5, 8), (5,)], {0}),
    "GPT-2's": (lambda x, w, b: torch.addmm(b, x, w), [(8, 5), (5,)], {0}),
    "product": (lambda x, w: x @ w, [(8, 5)], {0}),
    "twice": (lambda x, w: F.gelu(F.linear(F.linear(x, w).tanh(), w)), [(8, 8)], {0}),
    "both ways": (lambda x, w: F.linear(x.tanh() @ w, w), [(8, 8)], {0}),
    "two weights": (lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b), [(6, 8), (5, 6)], {0, 1}),
    "from the left": (lambda x, w: (w @ x.T).T, [(5, 8)], set()),
    "a product and a norm": (lambda x, w: F.linear(x, w) + w.square().sum(), [(5, 8)], set()),
    "a slice": (lambda x, w: F.linear(x, w[1:]), [(6, 8)], set()),
    "scaled": (lambda x, w: F.linear(x, w * 2), [(5, 8)], set()),
    "a bias as matrix": (lambda x, w, b: torch.addmm(b, x, w), [(8, 5), (1, 5)], {0}),
    "addmm with factors": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=3.0), [(8, 5), (5,)], set()),
    "unused": (lambda x, w, unused: F.linear(x, w), [(5, 8), (5, 8)], {0}),
    "a weight times a weight": (lambda x, a, b: F.linear(x, a @ b), [(5, 6), (6, 8)], {1}),
    "cast": (lambda x, w: F.linear(x.double(), w.double()).float(), [(5, 8)], {0}),
    "frozen input": (lambda x, w: F.linear(x.detach(), w) + x.sum(1, keepdim=True), [(5, 8)], set()),
}


@pytest.mark.parametrize("way", [nullcontext, follower.in_python])
@pytest.mark.parametrize("tile", [3, 5, 17])
@pytest.mark.parametrize("name", LAYERS)
def test_every_use_of_a_weight(name: str, tile: int, way: Callable[[], AbstractContextManager[None]]) -> None:
    """Products are found; other uses of a weight leave its gradient to autograd."""
    with way():
        check_uses(name, tile)


def check_uses(name: str, tile: int) -> None:
    layer, shapes, products = LAYERS[name]
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    x = torch.randn(17, 8, generator=generator)
    assert set(weight_products([layer(x.requires_grad_(), *parameters)], parameters)) == products
    x = x.detach()
    for got, want in zip(summed(layer, parameters, x, tile), dense(layer, parameters, x), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert (got - want).norm() <= 2e-6 * want.norm()


def test_products_of_zero3s_linear_are_found() -> None:
    """Threads that run no tiles go on with ZeRO-3's."""
    parameters = [torch.ones(5, 8, requires_grad=True), torch.ones(5, requires_grad=True)]
    x = torch.ones(3, 8, requires_grad=True)
    assert set(weight_products([zero3_linear_wrap(x, *parameters)], parameters)) == {0}
    with ThreadPoolExecutor(1) as other:
        output = other.submit(zero3_linear_wrap, x, *parameters).result()
    assert output.grad_fn.name() == "LinearFunctionForZeroStage3Backward"


def test_no_hook_of_a_tile_stays() -> None:
    """A graph that runs backward twice adds twice."""
    weight, x = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    output = F.linear(x, weight)
    gradient = torch.randn(3, 5)
    with pytest.raises(RuntimeError):
        GradientSums([weight]).backward([output], [torch.randn(3, 4)], [x])
    (want,) = torch.autograd.grad(output, weight, gradient, retain_graph=True)
    sums = GradientSums([weight])
    sums.backward([output], [gradient], [x])
    torch.testing.assert_close(sums.take()[0], want)
    assert sums.take()[0] is None


def test_a_sum_shares_no_memory_with_the_first_gradient() -> None:
    sums = GradientSums([torch.zeros(4)])
    first = torch.ones(4)
    sums.add(0, first)
    sums.add(0, torch.full((4,), 2.0))
    assert torch.equal(first, torch.ones(4))
    assert torch.equal(sums.take()[0], torch.full((4,), 3.0))


def test_infinities_survive() -> None:
    """AMP's scaler looks for them."""
    weight, x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, 8, dtype=torch.bfloat16)
    sums = GradientSums([weight])
    for factor in (1.0, float("inf"), 1.0):
        leaf = x.clone().requires_grad_()
        sums.backward([F.linear(leaf, weight)], [torch.full((3, 5), factor, dtype=torch.bfloat16)], [leaf])
    assert torch.isinf(sums.take()[0]).all()
