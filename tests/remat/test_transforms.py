"""An attached model inside torch.func's transforms, traces and FakeTensorMode does what stock does, and trains on afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, functionalize, grad, hessian, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import ds_memo
from ds_memo.errors import MemoWarning
from ds_memo.remat import follower
from tests.models import Mlp, gradients

X = torch.linspace(-1, 1, 64).view(4, 16)


def needs_grad() -> torch.Tensor:
    return X.clone().requires_grad_()


def of_parameters(model: nn.Module) -> torch.Tensor:
    found = grad(lambda parameters: functional_call(model, parameters, (X,)))(dict(model.named_parameters()))
    return torch.cat([value.flatten() for value in found.values()])


def of_input(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x), x)[0]

    return run


def in_fake_mode(model: nn.Module) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(X).requires_grad_()
        model(x).backward()
    return torch.tensor(x.grad.shape)


def exported(model: nn.Module) -> torch.Tensor:
    return torch.export.export(model, (X,)).module()(X * 0.3)


INSIDE: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "grad": lambda model: grad(model)(X),
    "grad of parameters": of_parameters,
    "vjp": lambda model: vjp(model, X)[1](torch.tensor(1.0))[0],
    "jvp": lambda model: jvp(model, (X,), (X,))[1],
    "jvp twice": lambda model: jvp(lambda x: jvp(model, (x,), (X,))[1], (X,), (X,))[1],
    "hessian": lambda model: hessian(model)(X),
    "vmap": lambda model: vmap(model)(torch.stack([X, 2 * X])),
    "vmap of a gradient": lambda model: vmap(grad(model))(torch.stack([X, 2 * X])),
    "functionalize": lambda model: functionalize(model)(needs_grad()),
    "jit.trace": lambda model: torch.jit.trace(model, (needs_grad(),), check_trace=False)(X * 0.3),
    "make_fx": lambda model: make_fx(of_input(model))(X)(X * 0.3),
    "export": exported,
    "fake tensors": in_fake_mode,
}


@pytest.fixture(params=["C++", "Python"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with follower.in_python() if request.param == "Python" else nullcontext():
        yield


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::ds_memo.errors.MemoWarning")
def test_as_stock(inside: Callable[[nn.Module], Any], steps_before: int, way: None) -> None:
    """A failed copy would fail every later step too, since no one knows whose bytes are missing."""
    model = Mlp()
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1, "plan": {"enabled": False}})
    for _ in range(steps_before):
        model(needs_grad()).backward()
    torch.testing.assert_close(inside(model), inside(stock))
    for each in (model, stock):
        each.zero_grad()
        each(needs_grad()).backward()
    assert handle.report()["bytes_to_host"] > 0
    torch.testing.assert_close(gradients(model), gradients(stock))
    handle.detach()


def test_it_is_told() -> None:
    model = Mlp()
    handle = ds_memo.attach(model, {"alpha": 0.5, "plan": {"enabled": False}})
    with pytest.warns(MemoWarning, match="as without ds_memo"):
        vmap(model)(torch.stack([X, X]))
    assert handle.report()["bytes_to_host"] == 0
    handle.detach()
