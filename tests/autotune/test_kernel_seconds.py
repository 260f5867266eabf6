"""Seconds of kernels while training: ratios by part, and the cache. Real steps are in tests/benchmarks/test_prediction.py."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_memo.autotune import kernel_seconds
from ds_memo.autotune.kernel_seconds import KernelSeconds, PartClock, _ratios
from ds_memo.placement import FULL_RECOMPUTE, GEMMS_RECOMPUTED, ON_DEVICE, Placement, PlacementKind
from ds_memo.solve.run_costs import LayerCosts, Slowdown, TileCosts
from ds_memo.swap.streams import ThreadStreams
from tests.solve import runs

TRUE = Slowdown(1.2, 1.3, 1.1, 1.25)
SWAPPED = Placement(PlacementKind.SWAPPED, 0.5)
WITHOUT_ATTENTION = Placement(PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, 0.0)
ONE = runs.layer(16 * 1024)
WHOLE = replace(ONE, attention_backward_s=2.5 * ONE.attention_s)


def in_tiles(differs: bool = False) -> LayerCosts:
    backward_s = WHOLE.backward_s + WHOLE.replay_s + WHOLE.gemm_s - WHOLE.attention_backward_s
    tiles = TileCosts(8, 0.8 * backward_s, 0.2 * backward_s, pre_again_s=0.1 * WHOLE.forward_s, result_differs=differs)
    return replace(WHOLE, in_tiles=tiles)


def seconds(layer: LayerCosts, placement: Placement) -> dict[str, float]:
    """Return the seconds of the parts of a call that takes as long as predicted."""
    again = layer.attention_s if placement.kind.recomputes_attention else 0.0
    alpha = placement.decided_alpha
    if (tiles := layer.in_tiles) is None:
        return {
            "forward": layer.forward_s,
            "": 1.0,
            "backward": layer.backward_s + layer.replay_s + (1 - alpha) * layer.gemm_s + again,
        }
    pre_again = tiles.pre_again_s if again or tiles.result_differs else 0.0
    rest = layer.forward_s - layer.attention_s
    return {
        "forward": 0.0,
        "pre": 0.3 * rest,
        "attention": layer.attention_s,
        "post": 0.7 * rest,
        "": 1.0,
        "backward": 0.0,
        "post_backward": tiles.post_backward_s - tiles.stored(alpha) / tiles.count * layer.gemm_s + pre_again + again,
        "attention_backward": layer.attention_backward_s,
        "pre_backward": tiles.pre_backward_s,
    }


@pytest.mark.parametrize("placement", [SWAPPED, ON_DEVICE, GEMMS_RECOMPUTED], ids=lambda placement: placement.kind.name)
@pytest.mark.parametrize("differs", [False, True])
def test_ratios_of_a_layer_in_tiles_are_those_of_its_parts(placement: Placement, differs: bool) -> None:
    layer = in_tiles(differs)
    took = seconds(layer.slower(TRUE), placement)
    assert list(_ratios(layer, placement, took)) == pytest.approx(list(TRUE))
    assert list(_ratios(layer.slower(TRUE), placement, took)) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("placement", [SWAPPED, ON_DEVICE, FULL_RECOMPUTE, WITHOUT_ATTENTION], ids=lambda p: p.kind.name)
def test_a_whole_layer_has_one_ratio_for_each_pass(placement: Placement) -> None:
    same = Slowdown(*(1.18,) * 4)
    assert list(_ratios(WHOLE, placement, seconds(WHOLE.slower(same), placement))) == pytest.approx(list(same))
    for layer in (WHOLE, in_tiles()):
        corrected = layer.slower(_ratios(layer, placement, seconds(layer.slower(same), placement)))
        assert seconds(corrected, placement) == pytest.approx(seconds(layer.slower(same), placement))


def learner() -> KernelSeconds:
    clock: Any = types.SimpleNamespace(device=torch.device("cuda", 0), watch=lambda layer: [])
    return KernelSeconds(clock, learns=True)


def test_the_greatest_of_all_ranks_is_learned_once_and_kept_for_the_card_and_its_power_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {"name": "a card", "watts": 700.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card["name"])
    monkeypatch.setattr(kernel_seconds, "power_limit_w", lambda device: card["watts"])
    (tmp_path / "cache").mkdir(mode=0o700)
    first = learner()
    first.begin(tmp_path / "cache")
    assert first.factors == Slowdown()
    assert first.learn([None, Slowdown(1.1, 1.3, 1.0, 1.0), Slowdown(1.2, 1.2, 1.0, 0.9)]) is not None
    assert first.factors == Slowdown(1.2, 1.3, 1.0, 1.0)
    later = learner()
    later.begin(tmp_path / "cache")
    assert later.factors == first.factors
    assert later.learn([Slowdown(1.0, 1.005, 1.0, 1.0)]) is None and later.factors == first.factors, "as predicted"
    for other in ({"name": "another"}, {"watts": 350.0}, {"watts": None}):
        with monkeypatch.context() as patch:
            for key, value in other.items():
                patch.setitem(card, key, value)
            (elsewhere := learner()).begin(tmp_path / "cache")
        assert elsewhere.factors == Slowdown(), other


@pytest.mark.parametrize("junk", ["", "[1.0, 1.0]", "[1.0, 1.0, 1.0, 1e9]", "[1.0, 1.0, 1.0, NaN]", '["1", 1, 1, 1]', "{}"])
def test_a_damaged_cache_is_not_used(junk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(kernel_seconds, "power_limit_w", lambda device: None)
    tmp_path.chmod(0o700)
    one = learner()
    one.learn([TRUE])
    one._folder = tmp_path
    one._store()
    assert json.loads(one._path.read_text()) == list(TRUE)
    one._path.write_text(junk)
    (other := learner()).begin(tmp_path)
    assert other.factors == Slowdown()


def test_a_cpu_learns_nothing() -> None:
    streams = ThreadStreams()
    one = KernelSeconds(PartClock(streams), learns=True)
    one.begin(None)
    one.stepped(None)
    assert one.measured(None, None) is None and one.factors == Slowdown()  # type: ignore[arg-type]
    streams.close()
