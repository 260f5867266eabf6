"""Layers in tiles by formula: bytes against real layers and the emulator's, time against the schedule, and what is chosen."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_memo.estimate.costs import Costs
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.hardware import load
from ds_memo.estimate.layout import Layout
from ds_memo.estimate.model import from_config
from ds_memo.estimate.question import EstimateError, Question
from ds_memo.estimate.simulate import simulate
from ds_memo.estimate.tiles import parts, tiled_layer
from ds_memo.placement import PlacementKind, Tiles
from ds_memo.profile import tiles
from ds_memo.profile.call import layer_calls
from ds_memo.profile.tile_sample import PARTS, Cut
from ds_memo.runtime.attach import attach_model
from ds_memo.solve.costs import RunCosts
from ds_memo.solve.kinds import place
from ds_memo.solve.schedule import Schedule
from ds_memo.swap.engine import FrameRef
from tests.estimate.test_requests import LLAMA, REAL
from tests.placements import placed

CPU = torch.device("cpu")
CUTS = (Cut(512, 4, 128), Cut(1024, 8, 128), Cut(1024, 4, 256))


# ---- bytes


def peaks(config: dict, folder: Path, name: str = "peak_bytes") -> dict[str, list[int]]:
    """Return a real layer's peak bytes by part, at each of CUTS, in a process of its own.

    Where layers were compiled in the process before, a tensor of hidden states more is alive in the tails' backward.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(peaks_here, config, folder, name).result()


def peaks_here(config: dict, folder: Path, name: str) -> dict[str, list[int]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    memo = attach_model(model, {"plan": {"enabled": False}, "host_memory_gib": 0.01}, device=CPU)
    try:
        embeds = torch.randn(1, 1024, 64, dtype=torch.bfloat16)
        (call,) = layer_calls(memo.remat, model, (), {"inputs_embeds": embeds}, [0] * len(memo.layers), bool).values()
        found = [tiles._measure(call, cut.tokens, Tiles(cut.of_tile), 1, CPU, None, 0) for cut in CUTS]
    finally:
        memo.detach()
    return {part: [getattr(sample.parts[number], name) for sample in found] for number, part in enumerate(PARTS)}


@pytest.mark.processes
@pytest.mark.parametrize("name, within", [("llama", 0.05), ("qwen3", 0.08), ("gemma", 0.08), ("olmo2", 0.06)])
def test_what_a_real_layer_takes_in_tiles(name: str, within: float, tmp_path: Path) -> None:
    """On the device, without its frame. A CPU's kernel of attention takes less in its backward: see the next test."""
    real, formula = peaks(REAL[name], tmp_path), parts(from_config(REAL[name], name), Layout(1), 1)
    for part in PARTS:
        if part != "attention_backward":
            assert [formula[part].nbytes(cut) for cut in CUTS] == pytest.approx(real[part], rel=within), part


@pytest.mark.slow
@pytest.mark.parametrize("name, within", [("llama", 0.05), ("gemma", 0.08), ("olmo2", 0.1)])
def test_what_a_real_layer_takes_where_all_gemm_outputs_are_stored(name: str, within: float, tmp_path: Path) -> None:
    real = peaks(REAL[name], tmp_path, "stored_peak_bytes")
    formula = parts(from_config(REAL[name], name), Layout(1), 1, stored=True)
    for part in PARTS:
        if part != "attention_backward":
            assert [formula[part].nbytes(cut) for cut in CUTS] == pytest.approx(real[part], rel=within), part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts(name: str, tmp_path: Path) -> None:
    """In layers so small, gradients of weights are most."""
    real, formula = peaks(REAL[name], tmp_path), parts(from_config(REAL[name], name), Layout(1), 1)
    for part in ("tails", "tails_backward", "heads_backward"):
        assert [formula[part].nbytes(cut) for cut in CUTS] == pytest.approx(real[part], rel=0.17), part


IN_THE_EMULATOR = {
    "heads": (5.250, 3.875, 5.250),
    "attention": (3.516, 3.516, 3.516),
    "tails": (9.766, 6.391, 9.766),
    "tails_backward": (39.501, 21.500, 28.000),
    "attention_backward": (20.516, 14.766, 14.766),
    "heads_backward": (23.751, 13.125, 16.500),
}
"""A profile of a Llama-3-8B layer, in units of tokens * hidden * 2 bytes: 4,096 tokens in tiles of 2,048; 8,192 in such; 8,192 in
tiles of 4,096."""
WITH_ALL_STORED = IN_THE_EMULATOR | {
    "heads": (6.000, 5.000, 6.000),
    "attention": (5.016, 5.016, 5.016),
    "tails": (17.516, 15.016, 17.516),
    "tails_backward": (36.001, 19.750, 24.500),
}


@pytest.mark.parametrize("stored, found", [(False, IN_THE_EMULATOR), (True, WITH_ALL_STORED)], ids=["recomputed", "stored"])
def test_what_a_layer_takes_on_cuda(stored: bool, found: dict[str, tuple[float, ...]]) -> None:
    cuts = (Cut(4096, 2, 2048), Cut(8192, 4, 2048), Cut(8192, 2, 4096))
    formula = parts(LLAMA, Layout(1), 1, stored)
    for part, units in found.items():
        assert [formula[part].nbytes(cut) / (cut.tokens * 8192) for cut in cuts] == pytest.approx(units, rel=0.001), part


@pytest.mark.parametrize(
    "ranks, groups, units",
    [
        (8, 1, (8.03, 7.04, 13.11)),
        (8, 2, (7.53, 6.54, 10.86)),
        (8, 4, (5.78, 5.13, 7.10)),
        (4, 2, (7.27, 6.28, 9.23)),
        (4, 4, (6.02, 5.13, 7.23)),
        (4, 8, (5.15, 5.13, 5.35)),
    ],
)
def test_what_a_layer_takes_under_ulysses(ranks: int, groups: int, units: tuple[float, ...]) -> None:
    """Measured in rehearsals with 524,288 tokens a rank in tiles of 8,192, without the frames."""
    formula, cut = parts(LLAMA, Layout(8, sp=ranks), groups), Cut(1 << 19, 64, 1 << 13)
    found = [formula[part].nbytes(cut) / 8192 / cut.tokens for part in ("attention", "tails_backward", "attention_backward")]
    assert found == pytest.approx(units, rel=0.01)


def test_groups_of_heads_take_less() -> None:
    one, eight = (parts(LLAMA, Layout(1), groups)["attention_backward"] for groups in (1, 8))
    assert eight.of_token < 0.8 * one.of_token


# ---- seconds


def run(how: Tiles | None, tokens: int = 1 << 17, layers: int = 4, ranks: int = 1) -> RunCosts:
    found = Costs(LLAMA, load("h100"), Layout(ranks, sp=ranks), tokens)
    layer = found.memo_layer() if how is None else tiled_layer(found, how)
    return RunCosts((layer,) * layers, found.hardware.d2h, found.hardware.h2d, 1 << 50, 1 << 50, tiles=how)


@pytest.mark.parametrize("ranks", (1, 8))
@pytest.mark.parametrize("alpha", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("residents", (0, 1))
@pytest.mark.parametrize("tokens, tile", [(1 << 15, 4096), (1 << 17, 4096), (1 << 17, 16384)])
def test_the_engine_takes_the_solvers_time(tokens: int, tile: int, residents: int, alpha: float, ranks: int) -> None:
    how, kinds = run(Tiles(tile, 4), tokens, ranks=ranks), [PlacementKind(kind) for kind in place(4, residents)]
    solved, engine = Schedule(how, kinds).at(alpha), simulate(how, placed(kinds, alpha))
    least = 0.99 if ranks == 1 else 0.97
    assert least < solved.seconds / engine.seconds < (1.01 if alpha == 0 else 1.06), "careful where compute waits"


@pytest.mark.parametrize("ranks", (1, 8))
def test_attention_again_takes_the_solvers_time(ranks: int) -> None:
    how = run(Tiles(4096, 4), ranks=ranks)
    kinds = [PlacementKind.SWAPPED_ATTENTION_RECOMPUTED, PlacementKind.SWAPPED, PlacementKind.FULL_RECOMPUTE] * 2
    how = replace(how, layers=how.layers[:1] * 6)
    solved, engine = Schedule(how, kinds).at(0.0), simulate(how, placed(kinds, 0.0))
    assert solved.seconds == pytest.approx(engine.seconds, rel=0.01 if ranks == 1 else 0.02)
    kept = Schedule(how, [PlacementKind.SWAPPED] * 6).at(0.0).seconds
    assert solved.seconds > kept + 2 * how.layers[0].attention_s


@pytest.mark.parametrize("alpha", (0.0, 0.3))
def test_neighbours_of_many_tiles_run_as_one(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is bounded by layers, and the step is as long."""
    how, placements = run(Tiles(256)), placed([PlacementKind.SWAPPED] * 4, alpha)
    exact = simulate(how, placements)
    monkeypatch.setattr("ds_memo.estimate.simulate.MOST_TILES", 64)
    few = simulate(how, placements)
    assert few.seconds == pytest.approx(exact.seconds, rel=1e-3)
    assert len(few.spans) < 4 * 64 * 12 < len(exact.spans)


def test_a_tile_passes_by_no_other_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a layer's backward takes the square of its tiles."""
    asked = []

    class Counted(FrameRef):
        def __call__(self) -> Any:
            asked.append(self)
            return super().__call__()

    monkeypatch.setattr("ds_memo.swap.engine.FrameRef", Counted)
    simulate(run(Tiles(512), layers=2), placed([PlacementKind.SWAPPED] * 2, 0.0))
    assert 2 * 256 < len(asked) < 6 * 2 * 256


def test_tiles_cost_what_runs_once_more() -> None:
    whole, tiled = run(None).layers[0], run(Tiles(4096, 8)).layers[0]
    took = [layer.forward_s + layer.backward_s + layer.replay_s + layer.gemm_s for layer in (whole, tiled)]
    assert 1.0 < took[1] / took[0] < 1.1


def test_a_call_of_one_tile_runs_whole() -> None:
    assert run(Tiles(1 << 17)).layers[0].in_tiles is None


# ---- what is chosen


def question(tokens: int, **how: Any) -> Question:
    return Question(model=replace(LLAMA, layers=32, vocab=128256), hardware=load("h100"), gpus=8, seq_length=tokens, **how)


def test_tiles_reach_further_than_whole_layers() -> None:
    tiled, whole = estimate(question(5 << 19)), estimate(question(5 << 19, tile_tokens=0))
    assert tiled.status == "ok" and tiled.tiles is not None and tiled.placed["attention_recomputed"] == 0
    assert whole.status == "oom"


def test_what_fits_whole_runs_whole() -> None:
    answer = estimate(question(1 << 16))
    assert answer.status == "ok" and answer.tiles is None


def test_a_given_tile_is_taken() -> None:
    assert estimate(question(1 << 18, tile_tokens=4096)).tiles.tokens == 4096
    with pytest.raises(EstimateError, match="only memo runs layers in tiles"):
        estimate(question(1 << 18, tile_tokens=4096, method="alst"))
