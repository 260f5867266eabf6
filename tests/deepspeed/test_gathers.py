"""Layers in tiles under ZeRO-3: each is gathered once for its forward and once for its backward."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ds_memo
from tests.deepspeed import engines
from tests.deepspeed.engines import ds_config, start, train
from tests.everyday import everyday
from tests.models import Batch, Block, Toy, build
from tests.tiles.rig import assert_was_tiled, layers_of

deepspeed = engines.deepspeed
pytestmark = engines.ON_ONE_CPU_RANK

MEMO = engines.MEMO | {"plan": {"enabled": False}}
TILES = MEMO | {"tile_tokens": 5}
"""Eight tiles: two sequences of 17 tokens."""
AT_ONCE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""Parameters are gathered when they are needed, and released at once."""


def gathers(memo: dict[str, Any]) -> list[set[int]]:
    """Return how often parameters of a layer are gathered, in the forward and in the backward, in a second step."""
    config = ds_config(3, memo=memo)
    config["zero_optimization"] |= AT_ONCE
    engine = start(config)
    parameters, count = list(layers_of(engine.module)[1].parameters()), Counter[int]()

    def watch(parameter: Any) -> None:
        gather = parameter.all_gather_coalesced
        # DeepSpeed calls the first parameter's for a list of them.
        parameter.all_gather_coalesced = lambda those, **more: (count.update(p.ds_id for p in those), gather(those, **more))[1]

    def found() -> set[int]:
        seen = {count[parameter.ds_id] for parameter in parameters}
        count.clear()
        return seen

    for parameter in parameters:
        watch(parameter)
    for number in range(2):
        batch = Batch.random(2, 17, seed=number)
        count.clear()
        loss = engine(inputs_embeds=batch.embeds, labels=batch.labels).loss
        counts = [found()]
        engine.backward(loss)
        counts.append(found())
        engine.step()
    if "tile_tokens" in memo:
        assert_was_tiled(engine.memo.report(), 4)
    engine.memo.detach()
    return counts


@pytest.mark.parametrize("more", everyday([{}, {"alpha": 0.0, "resident_layers": 0, "head_groups": 2}], [{}]), ids=str)
def test_a_layer_in_tiles_is_gathered_once_for_each_pass(more: dict[str, Any]) -> None:
    assert gathers(TILES | more) == [{1}, {1}]


def test_a_whole_layer_is_gathered_again_after_its_replay() -> None:
    assert gathers(MEMO) == [{1}, {1, 2}]


def test_a_finished_engine_keeps_its_layers_whole() -> None:
    want = train(start(ds_config(3)))
    model = build("llama")
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=ds_config(3))[0]
    handle = ds_memo.attach(engine.module, {key: value for key, value in TILES.items() if key != "enabled"})
    with pytest.warns(ds_memo.MemoWarning, match="ZeRO-3 gathers its parameters module by module") as warned:
        assert train(engine) == pytest.approx(want, rel=1e-6)
    assert len([one for one in warned if issubclass(one.category, ds_memo.MemoWarning)]) == 1
    report = handle.report()
    assert report["tiles"]["layers"] == [] and report["bytes_to_host"] == report["bytes_from_host"] > 0
    assert len(report["tiles"]["not_tiled"]) == 4
    assert all("Let ds_memo.initialize make the engine" in why for why in report["tiles"]["not_tiled"].values())
    handle.detach()


class ByName(Toy):
    """Its blocks get hidden states by name."""

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x = inputs_embeds
        for block in self.blocks:
            x = block(hidden_states=x)
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Named(Block):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("name, frozen", everyday([("llama", 0), ("by name", 2)], [("by name", 2)]))
def test_hidden_states_that_need_no_gradient(name: str, frozen: int) -> None:
    """The first layer's, and those behind frozen layers: DeepSpeed would reduce a layer's gradients before its backward."""

    def engine(**memo: Any) -> Any:
        torch.manual_seed(0)
        model = build("llama") if name == "llama" else ByName(Named)
        for layer in layers_of(model)[:frozen]:
            layer.requires_grad_(False)
        return start(ds_config(3, **memo), model=model)

    want = train(engine())
    tiled = engine(memo=TILES)
    assert train(tiled) == pytest.approx(want, rel=1e-6)
    assert_was_tiled(tiled.memo.report(), 4)
    tiled.memo.detach()
