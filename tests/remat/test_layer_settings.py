"""A layer's settings: noted alike by C++ and by Python, and no change between a forward and its replay goes unnoticed."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.remat import follower, layer_state
from ds_memo.remat.layer_state import LayerState, is_same
from tests.models import Block


class Gathers(OrderedDict):
    """A table of parameters as ZeRO-3's, which gathers what is taken out of it."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} was gathered")


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.sizes = 1.5, [1, 2]
        self.adapter: str | None = "first"
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("none", None)
        self.up.register_forward_hook(lambda *_: None)
        self.up.register_forward_pre_hook(hook, with_kwargs=True)
        self.up.register_forward_hook(hook, prepend=True)  # moves to the front of an OrderedDict


def hook(*_: Any) -> None:
    pass


def gathers(layer: nn.Module) -> None:
    layer.up._parameters = Gathers(layer.up._parameters)


def replace_parameter(layer: nn.Module) -> None:
    layer.up._parameters["weight"] = nn.Parameter(layer.up.weight.detach())


def replace_buffer(layer: nn.Module) -> None:
    layer._buffers["count"] = layer.count.clone()


def plain_tensor(layer: nn.Module) -> None:
    weight = layer.up._parameters.pop("weight")
    layer.up.weight = weight.detach()


def reorder_hooks(layer: nn.Module) -> None:
    hooks = layer.up._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "flag": lambda layer: layer.down.eval(),
    "number": lambda layer: setattr(layer, "scale", 2.5),
    "equal number": lambda layer: setattr(layer, "scale", torch.tensor(1.5).item()),
    "list": lambda layer: setattr(layer, "sizes", [1, 2]),
    "adapter": lambda layer: setattr(layer, "adapter", None),
    "forward": lambda layer: setattr(layer.up, "forward", torch.relu),
    "attribute that goes": lambda layer: delattr(layer, "scale"),
    "attribute that goes for another": lambda layer: vars(layer).update(other=vars(layer).pop("scale")),
    "hook": lambda layer: layer.down.register_forward_pre_hook(hook),
    "hook that goes": lambda layer: layer.up._forward_hooks.popitem(),
    "order of hooks": reorder_hooks,
    "requires_grad": lambda layer: layer.up.weight.requires_grad_(False),
    "parameter": replace_parameter,
    "parameter's place": plain_tensor,
    "buffer": replace_buffer,
    "buffer that was none": lambda layer: layer._buffers.update(none=torch.zeros(1)),
}
IN_CPP = pytest.mark.skipif(follower.library() is None, reason="the library cannot be compiled here")


def held(layer: nn.Module) -> list[Any]:
    """Return ids of the layer's attributes, and of what is in their tables: of hooks in their order."""
    found: list[Any] = [parameter.requires_grad for _, parameter in layer.named_parameters()]
    for part in layer.modules():
        found.append({name: id(value) for name, value in vars(part).items()})
        tables = {name: table for name, table in vars(part).items() if isinstance(table, dict)}
        items = {name: [(key, id(value)) for key, value in table.items()] for name, table in tables.items()}
        found += [sorted(items.pop("_parameters")), items]
    return found


def noted_by_python(state: LayerState) -> list[Any]:
    with follower.in_python():
        return state.note()


@IN_CPP
@pytest.mark.parametrize("prepare", [lambda layer: None, gathers, *CHANGES.values()], ids=["as it is", "ZeRO-3", *CHANGES])
def test_cpp_notes_what_python_notes(prepare: Callable[[Any], Any]) -> None:
    layer = Layer()
    prepare(layer)
    state = LayerState("", layer)
    mine, pythons = follower.library().note_settings(state.parts, state.parameters), noted_by_python(state)
    assert mine is not None and len(mine) == len(pythons)
    assert all(one is other for one, other in zip(mine, pythons, strict=True))


@IN_CPP
@pytest.mark.parametrize("change", ["attribute that goes", "attribute that goes for another", "forward", "parameter's place"])
def test_cpp_leaves_the_unusual_to_python(change: str) -> None:
    layer = Layer()
    state = LayerState("", layer)
    CHANGES[change](layer)
    assert follower.library().note_settings(state.parts, state.parameters) is None
    assert is_same(state.note(), noted_by_python(state))


@pytest.mark.parametrize("way", [pytest.param("C++", marks=IN_CPP), "Python"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_goes_unnoticed(change: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower._Followed, "in_python", way == "Python")
    layer = Layer()
    state = LayerState("", layer)
    before, right = state.before(), held(layer)
    assert not before._others(state.note())
    CHANGES[change](layer)
    assert not is_same(state.note(), before._noted)
    changed = held(layer)
    assert changed != right
    with before.put_in():
        assert held(layer) == right
    assert held(layer) == changed


def test_it_shows_if_a_change_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_state, "is_same", lambda now, then: True)
    layer = Layer()
    before, right = LayerState("", layer).before(), held(layer)
    CHANGES["adapter"](layer)
    with before.put_in():
        assert held(layer) != right


@IN_CPP
def test_lists_leave_nothing_behind() -> None:
    layer = Layer()
    layer.adapter = "".join(["a ", "name"])
    state = LayerState("", layer)
    values = [layer.adapter, layer.sizes, layer.up.weight, layer.count, state.parts[0].attributes, vars(layer)]
    gc.collect()
    before = [sys.getrefcount(value) for value in values]
    for _ in range(10_000):
        state.note()
    layer.up._parameters.pop("weight")
    for _ in range(1_000):
        assert follower.library().note_settings(state.parts, state.parameters) is None
    layer.up._parameters["weight"] = values[2]
    assert [sys.getrefcount(value) for value in values] == before
