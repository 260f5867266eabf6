"""The search for the lengths of hybrids: which points run, what a file saves, and bars."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hybrids
from benchmarks.rivals import MIXERS_WHOLE, PLANNED, RIVALS
from ds_memo.ops.builder import cuda_headers

LIMITS = {PLANNED: 224 * 1024, MIXERS_WHOLE: 64 * 1024, hybrids.OFFLOAD: 58 * 1024}


class Counted(hybrids.Points):
    """Points that fit up to LIMITS. The last length of the short search fails in full."""

    def run(self, what: str, rival: str, length: int, steps: int = 0, profile: str = "") -> dict[str, Any]:
        asked.append((what, rival, length, steps, profile))
        if what == "peak":
            return {"length": length, "parts": {"tiles": 1.0}}
        limit = LIMITS[rival] - (4 * 1024 if steps > 2 else 0)
        return {"length": length, "steps": steps, "fits": length <= limit, "step_s": length / 1e5, "why": "no room"}


asked: list[tuple[Any, ...]] = []


def measured(row: dict[str, Any]) -> dict[str, Any]:
    asked.clear()
    hybrids.measure(Counted("qwen3next", (16.0, 64.0), Path()), row, lambda: None, with_peak=True)
    return row


def test_a_longest_length_is_tried_in_full_and_with_a_profile_of_its_own() -> None:
    row = measured({})
    for rival, limit in LIMITS.items():
        full = RIVALS[rival].warm_up + 1
        best = hybrids.longest(row[rival])
        reached = limit - (4 * 1024 if full > 2 else 0)
        assert best["steps"] >= min(full, 2) and reached / (1 + 1 / 16) - hybrids.GRAIN <= best["length"] <= reached
        assert len([point for point in asked if point[1] == rival]) <= 9
    assert all(bool(profile) == (what == "probe" and steps == 2) for what, *_, steps, profile in asked)
    assert [point[0] for point in asked].count("peak") == 1


def test_points_that_the_file_has_are_not_run_again() -> None:
    row = measured({})
    every = list(asked)
    again = json.loads(json.dumps(row))
    assert measured(again) == row and asked == []
    again[PLANNED] = again[PLANNED][:1]  # it was ended after one point
    del again["peak"]
    assert measured(again) == row
    assert asked == [point for point in every if point[:2] in (("probe", PLANNED), ("peak", "ds_memo"))][1:-2] + every[-1:]


@pytest.mark.parametrize("ours_s, held", [(0.5, True), (0.7, False)])
def test_bars(ours_s: float, held: bool) -> None:
    def fits(length: int, step_s: float) -> dict[str, Any]:
        return {"length": length, "steps": 5, "fits": True, "step_s": step_s}

    row = {PLANNED: [fits(200, 2)], MIXERS_WHOLE: [fits(65, 0.6)], hybrids.OFFLOAD: [fits(110, 1)]}
    row["where whole mixers end"] = fits(65, ours_s)
    found = hybrids.claims("qwen3next 16/64", row)
    assert [claim["held"] for claim in found] == [True, False, held]
    row["where whole mixers end"] = {"length": 65, "steps": 5, "fits": False, "why": "OutOfMemoryError"}
    assert hybrids.claims("qwen3next 16/64", row)[-1]["why"] == "OutOfMemoryError"
    assert hybrids.table({"qwen3next 16/64": row})[-1] == "| qwen3next | 16/64 | 200 | 65 | 110 | 3.1, 1.8 | – / 600 |"


@pytest.mark.sweep
@pytest.mark.skipif(
    not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
    reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator/emulator.py) and CUDA's runtime headers",
)
def test_nemotron_h_trains_where_whole_layers_end(tmp_path: Path) -> None:
    """The model's initialization leaves a block in torch's cache, of which weights and a workspace take parts: until attach()
    joined it, torch's allocator lost 4 of 16 GiB between blocks, and the third step."""
    found = hybrids.Points("nemotronh", (16.0, 64.0), tmp_path).run("probe", PLANNED, 40 * 1024, 5)
    assert found["fits"], found["why"]
