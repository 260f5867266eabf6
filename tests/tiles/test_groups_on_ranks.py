"""Layers that compute their inputs on ranks that share a sequence: logits and gradients are the stock model's on one rank.

Values are float64: see test_chain.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.tiles.layer import TiledCall
from ds_memo.tiles.tiling import Verdicts
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in
from tests.inside import inside
from tests.models import poisoned_memory
from tests.sequence.float64 import float64
from tests.tiles.rig import config, layers_of
from tests.tiles.test_chain import EXACT, build
from tests.tiles.test_chain_on_ranks import BATCHES, ONE, PACKED, run

LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "mixtral": {"num_hidden_layers": 4},
    "falcon_h1": {"num_hidden_layers": 4},
    "in_a_row": {"num_hidden_layers": 4},
    "lfm2": {"num_hidden_layers": 5, "layer_types": [*["conv"] * 3, *["full_attention"] * 2]},
    "qwen3_next": {"num_hidden_layers": 5, "layer_types": [*["linear_attention"] * 3, *["full_attention"] * 2]},
}
"""Where stripes begin or end between two layers, a group ends."""


def counting(patch: pytest.MonkeyPatch) -> Counter[bool]:
    """Count posts that run again from here on, by whether their results are stored."""
    posts: Counter[bool] = Counter()

    def counted(right: Any, self: Any, into: Any) -> None:
        posts[into._computes_input] += 1
        right(self, into)

    put_in(patch, TiledCall, "run_posts_again", counted)
    return posts


def check(patch: pytest.MonkeyPatch, name: str, batches: Any, tile: int, alpha: float, every: int, ulysses: int = 2) -> None:
    with patch.context() as inner:
        posts = counting(inner)
        distance, report = run(name, batches, tile, alpha, ulysses, LAYERS[name], input_every=every)
    assert distance < EXACT, (name, tile, alpha, every, ulysses, distance)
    assert report["tiles"]["not_tiled"] == {} and posts[True]


class OtherOps(nn.Module):
    """SiLU, with more tensors saved for its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()


class OtherNorm(nn.Module):
    """RMSNorm, with more tensors saved for its backward."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self._epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self._epsilon).sqrt()).exp().log()


def no_room(layer: Any, handle: Any) -> None:
    inside(handle).policy.has_room = lambda nbytes, planned=True: False


Change = Callable[[Any, Any], Any]
DEPARTURES: dict[str, tuple[Change, tuple[int, int], tuple[int, int]]] = {
    "other work in a post": (lambda layer, _: setattr(layer.mlp, "act_fn", OtherOps()), (8, 0), (8, 0)),
    "other work in a pre": (
        lambda layer, _: setattr(layer, "input_layernorm", OtherNorm(layer.input_layernorm)),
        (8, 0),
        (8, 0),
    ),
    "changes an output in place": (
        lambda layer, _: layer.register_forward_hook(lambda *given: given[-1].mul_(1.0)),
        (4, 0),
        (8, 2),
    ),
    "copies an output": (lambda layer, _: layer.register_forward_hook(lambda *given: given[-1].clone()), (4, 0), (8, 2)),
    "has no room": (no_room, (8, 8), (8, 4)),
}
"""By what one rank does alone, with a layer that computes its input, and by which the next one does.

    Posts that run in four steps, and those of them that this rank runs for others, if it departs in the first step, in the third.
"""


def depart(change: Change, from_step: int) -> tuple[float, list[str]]:
    """Take four steps, of which rank 1 departs in those from a number on. Return the largest distance, and the warnings."""
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build("llama", **LAYERS["llama"])
        want = ONE.apart(model)
        sequence.set_up(model, 2)
        handle = ds_memo.attach(model, config(16, 0.5, input_every=3))
        found = []
        for step in range(4):
            if step == from_step and dist.get_rank():
                change(layers_of(model)[2], handle)
            with poisoned_memory():
                found += ONE.in_parts(model).off(want)[:2]
        told = handle.report()["warnings"]
        handle.detach()
    return max(found), told


class TestTwoRanks(DistributedTest):
    world_size = 2
    exec_timeout = 300

    @pytest.mark.parametrize("name, tile, alpha, every, ulysses", [("llama", 16, 0.5, 3, 2), ("falcon_h1", 5, 0.0, 2, 1)])
    def test_same_as_whole(self, name, tile, alpha, every, ulysses, monkeypatch):
        check(monkeypatch, name, BATCHES[tile], tile, alpha, every, ulysses)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", LAYERS)
    @pytest.mark.parametrize("tile, ulysses", [(5, 2), (16, 1), (64, 2)])
    def test_everything(self, name, tile, ulysses, monkeypatch):
        for alpha in (0.0, 1.0):
            for every in (2, 3, 100):
                check(monkeypatch, name, BATCHES[tile], tile, alpha, every, ulysses)

    @pytest.mark.parametrize("departure", DEPARTURES)
    def test_one_rank_departs(self, departure, monkeypatch):
        """If its first call shows it, no rank computes that input. Later this one runs posts with the others."""
        change, *expected = DEPARTURES[departure]
        for from_step, (posts, for_others) in zip((0, 2), expected, strict=True):
            with monkeypatch.context() as patch:
                seen = counting(patch)
                distance, told = depart(change, from_step)
            assert distance < EXACT, (departure, from_step, distance)
            assert sum(seen.values()) == posts and seen[False] == for_others * dist.get_rank(), (departure, from_step, seen)
            assert not told or "it stores its input" in told[0]

    def test_controls(self, monkeypatch):
        with monkeypatch.context() as patch:
            put_in(patch, TiledCall, "take_hidden", lambda right, self, number, hidden: right(self, number, hidden * (1 + 1e-6)))
            assert run("llama", PACKED, 16, 0.5, 2, LAYERS["llama"], input_every=3)[0] > EXACT
        _set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)
        put_in(monkeypatch, Verdicts, "agree_on_input", lambda right, self, why: why)  # each rank for itself
        with pytest.raises(RuntimeError):
            depart(DEPARTURES["copies an output"][0], 2)
        dist.destroy_process_group()


@pytest.mark.slow
class TestFourRanks(DistributedTest):
    world_size = 4
    exec_timeout = 300

    def test_ulysses_and_ring(self, monkeypatch):
        check(monkeypatch, "llama", PACKED, 16, 1.0, 100)
        check(monkeypatch, "falcon_h1", BATCHES[5][1], 4, 0.0, 3)
        check(monkeypatch, "in_a_row", ONE, 8, 0.5, 2)
