"""Model states on the host: budgets, seconds and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_memo.estimate import hardware
from ds_memo.estimate.costs import Costs
from ds_memo.estimate.errors import EstimateError
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.layout import LEAST_ZERO, OFFLOADS, GpuLayout
from ds_memo.estimate.methods import state_bytes
from ds_memo.estimate.model import load
from ds_memo.estimate.question import OK, OOHM, OOM, Question
from ds_memo.units import GIB
from tests.estimate.models import LLAMA_8B

LLAMA = load(str(LLAMA_8B))
ONE = Question(LLAMA, hardware.load("h100"), gpus=1, seq_length=128 << 10, offload="optimizer", tile_tokens=0)
H200 = hardware.load("h200")
STATES = 18 * LLAMA.parameters
"""Bytes on the host with `--offload optimizer`."""


@pytest.mark.parametrize(("zero", "kept"), [(1, 2 + 2), (2, 2), (3, 2)])
def test_what_each_stage_keeps_on_the_device(zero: int, kept: int) -> None:
    costs = Costs(LLAMA, ONE.hardware, GpuLayout(1, zero=zero, offload="optimizer"), 1 << 10)
    assert sum(state_bytes(costs).values()) == kept * LLAMA.parameters


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offload_moves_bytes_from_the_device_to_the_host(zero: int) -> None:
    """This method places activations alike, so that model states alone differ."""
    asked = replace(ONE, gpus=8, sp=1, zero=zero, method="full_recompute", tile_tokens=None)
    found = [estimate(replace(asked, offload=where)) for where in OFFLOADS if LEAST_ZERO[where] <= zero]
    device, host = [answer.device_total for answer in found], [answer.host_state_bytes for answer in found]
    assert device == sorted(device, reverse=True) and host == sorted(host)
    assert host[0] == 0 < host[1] and device[1] < device[0]


def test_states_take_the_activations_host_memory() -> None:
    """All the host memory that a step uses is enough; a GiB less changes the answer."""
    question = replace(ONE, hardware=H200, seq_length=256 << 10)
    most = estimate(replace(question, host_memory=1000 * GIB))
    assert most.status == OK and most.host_state_bytes == STATES and most.host_activation_bytes > GIB
    assert estimate(replace(question, host_memory=most.host_bytes + 1)).placements == most.placements
    less = estimate(replace(question, host_memory=most.host_bytes - GIB))
    assert less.status == OOHM or less.host_bytes < most.host_bytes - GIB


def test_states_that_the_host_cannot_hold() -> None:
    answer = estimate(replace(ONE, host_memory=STATES - GIB))
    assert answer.status == OOHM and "model's states alone take 134.6 of 133.6 GiB of the node" in answer.binding
    assert estimate(replace(ONE, offload="none")).status == OOM


def test_a_short_step_pays_for_cpu_adam_and_a_long_one_hides_the_copies() -> None:
    roomy = replace(H200, device_memory=1000 * GIB)
    on_device = replace(ONE, hardware=roomy, seq_length=8 << 10, method="none", tile_tokens=None)
    short = [estimate(replace(on_device, offload=where)) for where in OFFLOADS]
    adam_s = 42 * LLAMA.parameters / (0.43 * 614.4e9)
    assert short[1].seconds["optimizer"] == pytest.approx(adam_s + 2 * LLAMA.parameters / 21e9)
    assert short[2].seconds["optimizer"] == pytest.approx(adam_s)
    down_s = 6 * LLAMA.layer_parameters / 21e9
    assert short[1].seconds["backward"] == pytest.approx(LLAMA.layers * down_s) and short[0].seconds["backward"] < 2
    long = [estimate(replace(on_device, offload=where, seq_length=256 << 10, method="full_recompute")) for where in OFFLOADS]
    assert long[0].seconds["backward"] == long[1].seconds["backward"] == long[2].seconds["backward"]


def test_reloads_share_the_link_with_model_states() -> None:
    def h2d(where: str, tokens: int) -> float:
        return Costs(LLAMA, ONE.hardware, GpuLayout(1, offload=where), tokens).h2d / ONE.hardware.h2d

    assert h2d("none", 1 << 10) == 1 > h2d("optimizer", 64 << 10) > h2d("all", 64 << 10) > h2d("all", 16 << 10) >= 0.5
    assert h2d("all", 1 << 20) > 0.99


@pytest.mark.parametrize(("where", "zero"), [("optimizer", 0), ("all", 0), ("all", 2)])
def test_stages_that_deepspeed_does_not_offload(where: str, zero: int) -> None:
    with pytest.raises(EstimateError, match=f"--offload {where} with --zero {zero}"):
        estimate(replace(ONE, offload=where, zero=zero))


CPU_ADAM_S = {1e9: 0.22, 2e9: 0.51, 4e9: 1.03, 8e9: 2.41, 10e9: 2.57}
"""Seconds by parameters on a DGX-2, whose two Xeon 8168 have 256 GB/s (ZeRO-Offload, arXiv 2101.06840, tables 2 and 4)."""


def cpu_adam_errors(efficiency: float) -> list[float]:
    return [28 * parameters / (256e9 * efficiency) / seconds - 1 for parameters, seconds in CPU_ADAM_S.items()]


def test_cpu_adams_efficiency_is_the_published_one() -> None:
    errors = cpu_adam_errors(hardware.load("h100").host_bandwidth_efficiency)
    assert sum(abs(error) < 0.02 for error in errors) == 3 and max(map(abs, errors)) < 0.16
    for other in (0.36, 0.5):
        assert sum(abs(error) < 0.02 for error in cpu_adam_errors(other)) == 1
