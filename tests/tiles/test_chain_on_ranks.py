"""Layers without attention in tiles on ranks that share a sequence: logits and gradients are the stock model's on one rank.

Values are float64: see test_chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.sequence.carry import Carry
from ds_memo.tiles import chain
from ds_memo.tiles.chain import ChainedCall
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in
from tests.models import poisoned_memory
from tests.sequence.float64 import float64
from tests.sequence.test_padding import Padded
from tests.sequence.whole_and_parts import Batch, part, whole
from tests.tiles.rig import config
from tests.tiles.test_chain import EXACT, FAMILIES, FAULTS, build

WRONG = 1e-3
ONE = Batch(((75,), (75,)))
"""No tile length divides a part, and there is padding."""
PACKED = Batch(((13, 1, 18, 43), (32, 43)))
"""Documents that begin inside a tile, and with a stretch of two tiles of 16."""
LONG, LONG_PACKED = Batch(((139,),)), Batch(((40, 88, 11),))
"""Two tiles of 64 tokens to a rank. The third document begins with the second stretch."""


def run(name: str, batch: Any, tile: int, alpha: float, ulysses: int = 2) -> tuple[float, dict[str, Any]]:
    """Return the largest relative distance of logits or a gradient from the stock model's, of all ranks, and the report."""
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(name)
        want = batch.outcome(model) if isinstance(batch, Padded) else batch.apart(model)
        sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
        handle = ds_memo.attach(model, config(tile, alpha))
        found = []
        for _ in range(2):
            with poisoned_memory():
                found += batch.in_parts(model).off(want)[:2]
        report = handle.report()
        handle.detach()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, max(found))
    return max(everywhere), report


def check(name: str, batch: Any, tile: int, alpha: float, ulysses: int = 2) -> None:
    distance, report = run(name, batch, tile, alpha, ulysses)
    assert distance < EXACT, (name, tile, alpha, ulysses, distance)
    assert report["tiles"]["not_tiled"] == {}
    assert report["tiles"]["layers"] == list(range(report["layers"]))
    assert report["tiles"]["striped"]


def halo_short_by_one(right: Callable[..., Any], *args: Any) -> torch.Tensor:
    """Between the ranks of a stretch."""
    halo = right(*args)
    return torch.cat([halo[:, :1] * 0, halo[:, 1:]], 1)


def as_one_document(right: Callable[..., Any], *args: Any) -> Any:
    return right(*args[:5], False)


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_same_as_whole(self):
        """The delta rule among documents; Mamba-2 around a ring; a convolution alone."""
        check("qwen3_next", PACKED, 16, 0.5)
        check("nemotron_h", ONE, 23, 1.0, ulysses=1)
        check("lfm2", PACKED, 5, 0.0)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("tile", [5, 16, 23, 64])
    def test_every_family(self, name, tile):
        """A tile of 64 tokens holds no part of a shorter sequence."""
        for alpha in (0.0, 1.0):
            for batch in (LONG, LONG_PACKED) if tile == 64 else (ONE, PACKED):
                check(name, batch, tile, alpha, ulysses=1 if alpha else 2)

    @pytest.mark.slow
    def test_tiles_shorter_than_a_halo(self):
        """A part of 5 tokens has tiles of 2, and a convolution reaches over 3."""
        check("nemotron_h", Batch(((10,), (4, 6))), 2, 0.0)

    @pytest.mark.slow
    def test_padding(self):
        """Some ranks have a mask, others none."""
        check("qwen3_next", Padded((7, -5)), 8, 0.5)
        check("qwen3_next", Padded((30, -40)), 8, 0.5, ulysses=1)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["falcon_h1", "recurrent_gemma"])
    def test_run_whole(self, name):
        distance, report = run(name, ONE, 16, 0.0)
        assert distance < EXACT
        reasons = set(report["tiles"]["not_tiled"].values())
        assert any("share a sequence" in why for why in reasons), reasons

    @pytest.mark.slow
    def test_without_gradients(self):
        with float64(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = build("nemotron_h").eval()
            want = PACKED.apart_logits(model)
            sequence.set_up(model, 2)
            handle = ds_memo.attach(model, config(16))
            with poisoned_memory():
                got = model(input_ids=part(PACKED.tokens), position_ids=part(PACKED.positions), use_cache=False).logits
            report = handle.report()
        torch.testing.assert_close(whole(got), want, rtol=EXACT, atol=EXACT)
        assert report["tiles"]["striped"] and not report["tiles"]["not_tiled"] and report["bytes_to_host"] == 0

    def test_faults_are_seen(self, monkeypatch):
        """Each is put in behind the check of the layers, which sees the first ones, too."""
        faults = {
            **FAULTS,
            "tokens stay as they lie": (chain, "move", lambda right, x, *how: x),
            "documents are not seen": (ChainedCall, "_run_tile", as_one_document),
        }
        for fault, how in faults.items():
            with monkeypatch.context() as patch:
                put_in(patch, *how)
                distance, report = run("nemotron_h", PACKED, 16, 0.0)
            assert report["tiles"]["striped"] and not report["tiles"]["not_tiled"], fault
            assert distance > WRONG, (fault, distance)

    @pytest.mark.slow
    def test_the_check_sees_a_halo_between_ranks(self, monkeypatch):
        put_in(monkeypatch, Carry, "_halo", halo_short_by_one)
        distance, report = run("nemotron_h", ONE, 16, 0.0)
        assert distance < EXACT and not report["tiles"]["striped"], "the layers run whole"
        assert any("other outputs" in why for why in report["tiles"]["not_tiled"].values())


@pytest.mark.slow
class TestFourRanks(DistributedTest):
    world_size = 4

    def test_ulysses_and_ring_and_ranks_without_heads(self):
        """Kimi's mixers have two heads here."""
        check("kimi_linear", PACKED, 5, 0.5)
        check("qwen3_next", ONE, 8, 0.0)
