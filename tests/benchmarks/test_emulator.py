"""Whole steps of 7B width on the emulated device: what torch's real CUDA allocator is asked for, with ds_memo's op around it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks import emulator
from ds_memo.ops.builder import cuda_headers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("DS_MEMO_CUDA_TORCH") or cuda_headers() is None,
        reason="needs DS_MEMO_CUDA_TORCH (see benchmarks/emulator.py) and CUDA's runtime headers",
    ),
]


def steps(capfd: pytest.CaptureFixture[str], memo: dict[str, Any], length: int = 16384, *options: str) -> list[dict[str, Any]]:
    assert emulator.main(["step", "gpt7b", str(length), "--json", "--memo", json.dumps(memo), *options]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "memo, length",
    [
        ({"alpha": 0.5, "resident_layers": 2}, 16384),
        ({"device_memory_gib": 16, "host_memory_gib": 32}, 32768),
        ({"device_memory_gib": 16, "host_memory_gib": 2}, 40960),
    ],
    ids=["configured", "solved", "small host"],
)
def test_a_planned_step_asks_cuda_for_nothing(memo: dict[str, Any], length: int, capfd: pytest.CaptureFixture[str]) -> None:
    """No cudaMalloc and no miss once addresses are planned; hardly more is reserved than is needed, and predicted than is had."""
    *_, before, last = steps(capfd, memo, length)
    assert last["hits"] > 0 and last["missed"] == {}
    assert before["mallocs"] == last["mallocs"] == 0
    assert last["reserved"] <= 1.02 * last["requested"]
    if last["predicted"]:
        assert last["predicted"] == pytest.approx(last["arena"], rel=0.02)


def test_models_that_take_turns_share_device_and_host(capfd: pytest.CaptureFixture[str]) -> None:
    """Two of 4.5 GiB of weights and gradients each on a device of 32: one arena, and neither asks CUDA for anything."""
    rows = steps(capfd, {"host_memory_gib": 32}, 65536, "--models", "2", "--device-gib", "32")
    larger, smaller = rows[-2:]
    assert larger["arena"] == smaller["arena"] > 16 << 30
    for row in (larger, smaller):
        assert row["mallocs"] == 0 and row["hits"] > 0 and row["missed"] == {}
        assert row["reserved"] <= 1.02 * row["requested"]
    assert larger["alpha"] > 0 and smaller["alpha"] > 0


def test_without_a_plan_more_is_reserved(capfd: pytest.CaptureFixture[str]) -> None:
    """The comparison can fail."""
    last = steps(capfd, {"alpha": 0.5, "resident_layers": 2, "plan": {"enabled": False}})[-1]
    assert last["hits"] == 0 and last["reserved"] > 1.02 * last["requested"]


@pytest.mark.parametrize("workload, host_gib", [("gpt7b", 2), ("gpt7b", 32), ("llama8b", 2)])
def test_no_rival_trains_longer_in_the_same_memory(workload: str, host_gib: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 16 GiB; where the host is small, ours is the longest of all."""
    rivals = ["checkpoint", "deepspeed", "hf_offload"]
    asked = ["capacity", workload, "--host-gib", str(host_gib), "--rivals", "ds_memo, planned", *rivals]
    assert emulator.main(asked) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith(" tokens")]
    ours, *theirs = [int(line.split()[-2].replace(",", "")) for line in lines]
    assert len(theirs) == len(rivals) and max(theirs) > 0
    assert ours > max(theirs) if host_gib == 2 else ours >= max(theirs)
