"""A layer in tiles is measured part by part, and three samples tell what it takes in other tiles and at other lengths."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.hf.attention import catch_attention
from ds_memo.placement import Tiles
from ds_memo.profile import tiles
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.json_file import ProfileError, from_json, to_json
from ds_memo.profile.merge_ranks import most_careful
from ds_memo.profile.run_profile import LayerProfile
from ds_memo.profile.tile_sample import PARTS, TileSample, in_tiles
from ds_memo.profile.tiles import measure_in_tiles
from ds_memo.remat.layer import Layer
from ds_memo.remat.layer_call import CannotTile
from ds_memo.solve.run_costs import LayerCosts
from tests import architectures
from tests.placements import swapped_at
from tests.profile.samples import make_profile, make_sample
from tests.runtime.traces import fingerprint
from tests.tiles.rig import small

CPU = torch.device("cpu")
LONGEST = 768


def llama_call() -> CaughtCall:
    catch_attention()
    model = small("llama").train()
    layer, x = model.model.layers[0], torch.randn(1, LONGEST, model.config.hidden_size, requires_grad=True)
    positions = torch.arange(LONGEST)[None]
    tables = model.model.rotary_emb(x, positions)
    more = {"position_embeddings": tables, "attention_mask": None, "position_ids": positions}
    return CaughtCall(Layer(0, "layer 0", layer), layer.forward, (x,), more)


@pytest.fixture(scope="module")
def call() -> CaughtCall:
    return llama_call()


@pytest.fixture(scope="module")
def samples(call: CaughtCall) -> tuple[TileSample, ...]:
    return measure_in_tiles(call, (256, 512), CPU)


@pytest.mark.filterwarnings("ignore")
def test_a_hybrid_is_left_as_it_was() -> None:
    layer = architectures.build("lfm2", layer_types=["conv", "full_attention"] * 2).model.layers[0]
    x = torch.randn(1, LONGEST, architectures.HIDDEN, requires_grad=True)
    call = CaughtCall(Layer(0, "layer 0", layer), layer.forward, (x,), {"attention_mask": None})
    source = sys.modules[type(layer).__module__]
    before = fingerprint(layer), dict(vars(source))
    measure_in_tiles(call, (64, 128), CPU)
    assert (fingerprint(layer), dict(vars(source))) == before


def whole(tokens: int) -> LayerCosts:
    """Costs of the layer that runs whole, of which only what tiles keep matters here."""
    kind = LayerProfile("layer 0", (make_sample(512), make_sample(1024)))
    return kind.costs(1, tokens)


def peaks(sample: TileSample, stored: bool) -> tuple[int, int]:
    found = [peak[stored] for peak in sample.peaks[0]]
    return max(found[:3]), max(found[3:])


@pytest.mark.parametrize("tokens, tile", [(256, 64), (768, 192), (640, 320)])
def test_bytes_at_other_lengths_and_in_other_tiles(
    call: CaughtCall, samples: tuple[TileSample, ...], tokens: int, tile: int
) -> None:
    costs = in_tiles(whole(tokens), samples, 1, tokens, Tiles(tile))
    measured = tiles._measure(call, tokens, Tiles(tile), 1, CPU, None, 0)[0]
    for working, stored in ((costs.working_at_0, False), (costs.working, True)):
        assert (working.forward, working.backward) == pytest.approx(peaks(measured, stored), rel=0.02), stored
    assert costs.working.backward < 0.95 * costs.working_at_0.backward, "GEMM outputs are part of the frame"


def test_without_a_tiles_transients_they_are_wrong(call: CaughtCall, samples: tuple[TileSample, ...]) -> None:
    """The check above would see it."""
    few, many, larger = samples
    costs = in_tiles(whole(768), (few, many, dataclasses.replace(larger, peaks=many.peaks)), 1, 768, Tiles(320))
    backward = peaks(tiles._measure(call, 768, Tiles(320), 1, CPU, None, 0)[0], False)[1]
    assert costs.working_at_0.backward < 0.95 * backward


def test_groups_of_heads_take_what_was_measured(samples: tuple[TileSample, ...]) -> None:
    assert {sample.most_groups for sample in samples} == {2}, "as many as there are key-value heads"
    number = PARTS.index("attention_backward")
    one, two = (in_tiles(whole(512), samples, 1, 512, Tiles(128, groups)) for groups in (1, 2))
    assert one.working_at_0.backward == max(peak for peak, _ in samples[1].peaks[0][number - 1 :])
    assert two.working_at_0.backward == max(peak for peak, _ in samples[1].peaks[1][number - 1 :])
    assert 0.7 < samples[1].peaks[1][number][0] / samples[1].peaks[0][number][0] < 0.95
    more = in_tiles(whole(512), samples, 1, 512, Tiles(128, 8))
    assert more.working_at_0 == two.working_at_0, "eight groups are not used"


def test_seconds_are_those_of_the_parts(samples: tuple[TileSample, ...]) -> None:
    costs = in_tiles(dataclasses.replace(whole(512), attention_backward_s=1.0), samples, 1, 512, Tiles(128))
    seconds = dict(zip(PARTS, samples[1].seconds, strict=True))
    assert costs.forward_s == pytest.approx(seconds["pre"] + seconds["post"] + whole(512).attention_s)
    assert costs.in_tiles is not None and costs.in_tiles.count == 4
    assert costs.in_tiles.post_backward_s == pytest.approx(seconds["post_backward"])
    again = costs.gemm_s + costs.replay_s
    assert costs.backward_s + again == pytest.approx(seconds["post_backward"] + 1.0 + seconds["pre_backward"])


class Sums(nn.Linear):
    """Mixes its tokens without attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.cumsum(1))


def test_a_layer_that_cannot_be_tiled_says_why() -> None:
    layer = Sums(16, 16)
    call = CaughtCall(Layer(0, "layer 0", layer), layer.forward, (torch.randn(1, 512, 16, requires_grad=True),), {})
    with pytest.raises(CannotTile, match="attention"):
        measure_in_tiles(call, (256, 512), CPU)


def test_a_layer_without_attention() -> None:
    """Its only parts are those behind attention. Their bytes are known at other lengths and in other tiles."""
    model = architectures.build("lfm2", layer_types=["conv"] * 4)
    layer, x = model.model.layers[0], torch.randn(1, LONGEST, model.config.hidden_size, requires_grad=True)
    call = CaughtCall(Layer(0, "layer 0", layer), layer.forward, (x,), {"attention_mask": None})
    found = measure_in_tiles(call, (256, 512), CPU)
    post = [PARTS.index(part) for part in ("post", "post_backward")]
    for sample in found:
        assert sum(sample.seconds[part] for part in post) > 0.95 * sum(sample.seconds)
    costs = in_tiles(whole(768), found, 1, 768, Tiles(192))
    measured = tiles._measure(call, 768, Tiles(192), 1, CPU, None, 0)[0]
    assert (costs.working_at_0.forward, costs.working_at_0.backward) == pytest.approx(peaks(measured, False), rel=0.02)
    kind = LayerProfile("layer 0", (make_sample(256), make_sample(512)), in_tiles=found)
    mixed = dataclasses.replace(make_profile(), kinds=(kind,), layers=(0,))
    assert mixed.tilings([(1, 1024)])[0].tokens == 512


# ---- files, ranks


def tiled_profile(samples: tuple[TileSample, ...]) -> Any:
    kind = LayerProfile("layer 0", (make_sample(256), make_sample(512)), in_tiles=samples)
    return dataclasses.replace(make_profile(), kinds=(kind,))


def test_there_and_back(samples: tuple[TileSample, ...]) -> None:
    profile = tiled_profile(samples)
    assert from_json(to_json(profile)) == profile


@pytest.mark.parametrize(
    "path, value",
    [
        (("tile_tokens",), 0),
        (("length",), 3),
        (("peaks",), [[[1, 1]] * 5]),
        (("peaks", 1, 2, 1), -1),
        (("seconds", 2), float("nan")),
    ],
)
def test_damaged_samples_are_refused(samples: tuple[TileSample, ...], path: tuple, value: Any) -> None:
    data = json.loads(to_json(tiled_profile(samples)))
    owner = data["kinds"][0]["in_tiles"][1]
    for name in path[:-1]:
        owner = owner[name]
    owner[path[-1]] = value
    with pytest.raises(ProfileError):
        from_json(json.dumps(data))


def test_ranks_agree_on_the_most_memory(samples: tuple[TileSample, ...]) -> None:
    peaks = samples[0].peaks[0]
    hungry = dataclasses.replace(samples[0], peaks=((*peaks[:3], (1 << 40, peaks[3][1]), *peaks[4:]),))
    merged = most_careful([tiled_profile(samples), tiled_profile((hungry, *samples[1:]))]).kinds[0].in_tiles
    assert merged[0].peaks[0][3][0] == 1 << 40 and merged[0].most_groups == 1
    assert merged[1:] == samples[1:]


def test_a_rank_that_cannot_speaks_for_all(samples: tuple[TileSample, ...]) -> None:
    other = copy.deepcopy(tiled_profile(()))
    other = dataclasses.replace(other, kinds=(dataclasses.replace(other.kinds[0], not_tiled="it mixes tokens"),))
    merged = most_careful([tiled_profile(samples), other]).kinds[0]
    assert merged.in_tiles == () and merged.not_tiled == "it mixes tokens"


def test_what_is_solved_for(samples: tuple[TileSample, ...]) -> None:
    profile = tiled_profile(samples)
    assert profile.tilings([(1, 1000)]) == [Tiles(512, 2), Tiles(256, 2), Tiles(128, 2), Tiles(64, 2)]
    assert profile.tilings([None]) == [] and tiled_profile(()).tilings([(1, 1000)]) == []
    run = profile.costs([(1, 1000)], 0, 0, tiles=Tiles(128, 2))
    assert run.tiles == Tiles(128, 2) and run.layers[0].in_tiles is not None
    assert profile.costs([(1, 100)], 0, 0, tiles=Tiles(128, 2)).layers[0].in_tiles is None, "one tile: it runs whole"
    stored = [run.layers[0].host_bytes(swapped_at(alpha)) for alpha in (0.0, 0.5, 1.0)]
    exact = [profile.costs([(1, 1000)], 0, 0).layers[0].host_bytes(swapped_at(alpha)) for alpha in (0.0, 0.5, 1.0)]
    assert all(0 <= here - there <= 8 * 4096 for here, there in zip(stored, exact, strict=True)), "but for whole pages"
