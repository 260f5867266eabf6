"""Layers with mixers in tiles on ranks that share a sequence: logits and gradients are the stock model's on one rank.

Values are float64: see test_chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_memo
from ds_memo.deepspeed import sequence
from ds_memo.sequence import striped
from ds_memo.sequence.carry import Carry
from ds_memo.sequence.parts import SequenceParts
from ds_memo.tiles import attention
from ds_memo.tiles.tile_runs import TileRuns
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in
from tests.models import poisoned_memory
from tests.sequence.float64 import float64
from tests.sequence.test_padding import Padded
from tests.sequence.whole_and_parts import Batch, part, whole
from tests.tiles.rig import config
from tests.tiles.test_chain import EXACT, FAMILIES, FAULTS, assert_was_tiled, build

WRONG = 1e-3
ONE = Batch(((75,), (75,)))
"""No tile length divides a part, and there is padding."""
PACKED = Batch(((13, 1, 18, 43), (32, 43)))
"""Documents that begin inside a tile, and with a stretch of two tiles of 16."""
BATCHES = {
    5: (Batch(((31,), (31,))), Batch(((13, 1, 17), (20, 11)))),
    16: (ONE, PACKED),
    23: (ONE, PACKED),
    64: (Batch(((139,),)), Batch(((40, 88, 11),))),
}
"""By tile length, sequences of one document and of several. A rank has two tiles and more. With tiles of 5, documents begin apart
in the rows of a stretch; with tiles of 64, one begins with the second stretch."""


def run(
    name: str, batches: Any, tile: int, alpha: float, ulysses: int = 2, own: dict[str, Any] | None = None, **memo: Any
) -> tuple[float, dict[str, Any]]:
    """Return the largest relative distance of logits or a gradient from the stock model's, of all ranks, and the report.

    Args:
        batches: one, or several for one attached model.
        own: what the model is configured with besides.
    """
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(name, **own or {})
        batches = batches if isinstance(batches, Sequence) else [batches]
        wants = [batch.apart(model) for batch in batches]
        sequence.set_up(model, dist.get_world_size(), ulysses=ulysses)
        handle = ds_memo.attach(model, config(tile, alpha, **memo))
        found = []
        for batch, want in zip([batches[0], *batches], [wants[0], *wants], strict=True):
            with poisoned_memory():
                found += batch.in_parts(model).off(want)[:2]
        report = handle.report()
        handle.detach()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, max(found))
    return max(everywhere), report


def check(name: str, batches: Any, tile: int, alpha: float, ulysses: int = 2) -> None:
    distance, report = run(name, batches, tile, alpha, ulysses)
    assert distance < EXACT, (name, tile, alpha, ulysses, distance)
    assert_was_tiled(report)
    assert report["tiles"]["striped"]


def halo_short_by_one(right: Callable[..., Any], *args: Any) -> torch.Tensor:
    """Between the ranks of a stretch."""
    halo = right(*args)
    return torch.cat([halo[:, :1] * 0, halo[:, 1:]], 1)


def by_rank_in_a_ring(
    right: Callable[..., Any], parts: SequenceParts, x: torch.Tensor, dim: int, of_ring: bool = False
) -> torch.Tensor:
    return x if of_ring else right(parts, x, dim)


def assert_is_seen(fault: str, monkeypatch: Any, name: str, ulysses: int, *how: Any) -> None:
    with monkeypatch.context() as patch:
        put_in(patch, *how)
        distance, report = run(name, PACKED, 16, 0.0, ulysses)
    assert report["tiles"]["striped"] and not report["tiles"]["not_tiled"], fault
    assert distance > WRONG, (fault, distance)


def as_one_document(right: Callable[..., Any], *args: Any, **how: Any) -> Any:
    return right(*args, **{**how, "packed": False})


class TestTwoRanks(DistributedTest):
    world_size = 2

    def test_same_as_whole(self):
        """The delta rule among documents; Mamba-2 around a ring; a convolution alone; Mamba-2 beside attention."""
        check("qwen3_next", PACKED, 16, 0.5)
        check("nemotron_h", ONE, 23, 1.0, ulysses=1)
        check("lfm2", BATCHES[5][1], 5, 0.0)
        check("falcon_h1", BATCHES[5][1], 8, 0.5)

    @pytest.mark.slow
    @pytest.mark.sweep
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("tile", [5, 16, 23, 64])
    @pytest.mark.parametrize("alpha, ulysses", [(0.0, 2), (1.0, 1)])
    def test_every_family(self, name, tile, alpha, ulysses):
        """Kimi's and Bailing's delta rule is a loop in Python here, of minutes."""
        check(name, BATCHES[tile], tile, alpha, ulysses)

    @pytest.mark.slow
    def test_tiles_shorter_than_a_halo(self):
        """A part of 5 tokens has tiles of 2, and a convolution reaches over 3."""
        check("nemotron_h", Batch(((10,), (4, 6))), 2, 0.0)

    @pytest.mark.slow
    def test_padding(self):
        """Some ranks have a mask, others none."""
        check("qwen3_next", Padded((7, -5)), 8, 0.5)
        check("qwen3_next", Padded((30, -40)), 8, 0.5, ulysses=1)
        check("falcon_h1", Padded((30, -40)), 8, 0.5)

    @pytest.mark.slow
    def test_attention_and_mixers_by_heads_and_around_a_ring(self):
        """Mixers before and behind attention; a layer that gets embeddings, too, with adapters."""
        check("in_a_row", (ONE, PACKED), 16, 1.0)
        check("zamba2", (ONE, PACKED), 23, 0.5, ulysses=1)

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
            "tokens stay as they lie": (striped, "move", lambda right, x, *how: x),
            "documents are not seen": (TileRuns, "run", as_one_document),
        }
        for fault, how in faults.items():
            assert_is_seen(fault, monkeypatch, "nemotron_h", 2, *how)

    @pytest.mark.slow
    def test_faults_beside_attention_are_seen(self, monkeypatch):
        by_heads, around = 2, 1
        faults = {
            "tokens of ranks that trade heads stay by rank": (by_heads, SequenceParts, "sorted", by_rank_in_a_ring),
            "attention by heads takes tiles for parts": (by_heads, attention, "running_on", lambda *how: nullcontext()),
            "attention around a ring takes tiles for parts": (around, attention, "running_on", lambda *how: nullcontext()),
            "positions stay as they lie": (around, striped.Striped, "argument", lambda right, order, x, dim: x),
        }
        for fault, (ulysses, *how) in faults.items():
            assert_is_seen(fault, monkeypatch, "falcon_h1", ulysses, *how)

    @pytest.mark.slow
    def test_a_tile_that_does_other_work_is_refused(self):
        """Here on all ranks; one alone would run it again without the others."""
        with float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build("falcon_h1")
            sequence.set_up(model, 2)
            ds_memo.attach(model, config(16, 0.0))
            ONE.in_parts(model)
            model.model.layers[1].feed_forward.act_fn = nn.Sequential(nn.SiLU(), nn.Sigmoid())
            with pytest.raises(ds_memo.MemoError, match=r"other work in a tile .* Set memo.tile_tokens to 0"):
                ONE.in_parts(model)

    @pytest.mark.slow
    def test_the_check_sees_a_halo_between_ranks(self, monkeypatch):
        put_in(monkeypatch, Carry, "_halo", halo_short_by_one)
        distance, report = run("nemotron_h", ONE, 16, 0.0)
        assert distance < EXACT and not report["tiles"]["striped"], "the layers run whole"
        assert any("other outputs" in why for why in report["tiles"]["not_tiled"].values())


@pytest.mark.slow
class TestFourRanks(DistributedTest):
    world_size = 4

    def test_ulysses_and_ring(self):
        check("qwen3_next", ONE, 8, 0.0)
        check("falcon_h1", BATCHES[5][1], 4, 0.5)

    @pytest.mark.sweep
    def test_ranks_without_heads(self):
        """Kimi's mixers have two heads here."""
        check("kimi_linear", PACKED, 5, 0.5)
