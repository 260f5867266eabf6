"""Kinds of layers and keys of runs: settings count as well as parameters' shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.profile.layer_kinds import kinds_of, settings_digest
from ds_memo.remat.layer import Layer
from tests.models import Block, build


def layers_of(modules: list[nn.Module]) -> list[Layer]:
    return [Layer(index, f"layers.{index}", module) for index, module in enumerate(modules)]


def test_kinds() -> None:
    blocks = [Block(), Block(), Block().double(), Block()]
    blocks[3].up.weight.requires_grad_(False)
    assert kinds_of(layers_of(blocks)) == [0, 0, 1, 2]


@pytest.mark.parametrize("name, values", [("window", [8, 8, None, 8]), ("causal", [True, True, False, True])])
@pytest.mark.parametrize("inside", [False, True])
def test_settings_make_kinds(name: str, values: list[Any], inside: bool) -> None:
    blocks = [Block() for _ in values]
    for block, value in zip(blocks, values, strict=True):
        setattr(block.dropout if inside else block, name, value)
    assert kinds_of(layers_of(blocks)) == [0, 0, 1, 0]


@pytest.mark.parametrize(
    "name, values",
    [("layer_idx", [0, 1]), ("place", [0, 1, 2, 3, 4]), ("title", list("abcde")), ("_seen", [1, 2]), ("ds_id", [1, 2])],
)
def test_names_and_counters_make_none(name: str, values: list[Any]) -> None:
    """Names and counters differ in every layer, but not every layer is measured."""
    blocks = [Block() for _ in values]
    for block, value in zip(blocks, values, strict=True):
        setattr(block, name, value)
    assert set(kinds_of(layers_of(blocks))) == {0}


@pytest.mark.parametrize(
    "name, more",
    [
        ("llama", {"num_attention_heads": 2}),
        ("mistral", {"sliding_window": 16}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("llama", {"attn_implementation": "eager"}),
        ("llama", {"attention_dropout": 0.1}),
    ],
)
def test_what_shapes_do_not_tell(name: str, more: dict[str, Any]) -> None:
    """A cached profile of one is not used for the other."""

    def digest(**settings: Any) -> str:
        model = build(name, **settings)
        return settings_digest(layers_of([model.model.layers[1]])[0])

    assert digest() == digest() != digest(**more)


@pytest.mark.parametrize("attached", [False, True])
def test_a_forward_that_was_replaced(attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """TiledMLP and Liger replace forwards this way."""
    model = build("plain")

    def digest() -> str:
        handle = ds_memo.attach(model, {"alpha": 0.5}) if attached else None
        found = settings_digest(layers_of([model.blocks[1]])[0])
        if handle:
            handle.detach()
        return found

    before = digest()
    assert digest() == before
    stock = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: torch.cat([stock(self, half) for half in x.chunk(2)]))
    assert digest() != before
    monkeypatch.undo()
    monkeypatch.setattr(type(model.blocks[1]), "forward", lambda self, x: x + self.feed(x))
    assert digest() != before


def test_where_a_model_was_read_from_does_not_matter() -> None:
    digests = set()
    for place in ("here", "there"):
        model = build("llama")
        model.config._name_or_path = place
        model.model.layers[0].hook = torch.nn.functional.gelu
        digests.add(settings_digest(layers_of([model.model.layers[0]])[0]))
    assert len(digests) == 1
