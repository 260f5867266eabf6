"""Steps in an emulated process, call by call: who makes the host or compute wait, and what orders the accesses to memory."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.emulated_calls import SYNCHRONIZING
from tests.benchmarks import emulated_controls
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs, ran  # noqa: F401

pytestmark = NEEDED
LAYERS = 6
SWAPPING = json.dumps({"alpha": 0.5, "resident_layers": 2})
TILES = json.dumps({"alpha": 0.5, "resident_layers": 0, "tile_tokens": 4096})
RUN_AHEAD = "run_ahead_limit.py"


def control(capfd: pytest.CaptureFixture[str], case: str) -> Any:
    assert emulated_controls.main(case) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def made_by(found: dict[str, Any], who: str, *names: str) -> dict[str, float]:
    """Return calls of a step by the place that asked for them."""
    return {where: n for call, whose, where, n in found["calls"] if whose == who and call in names}


# ---- who waits


@pytest.mark.parametrize("memo", [SWAPPING, TILES], ids=["whole", "tiles"])
def test_a_steady_step_never_makes_the_host_wait(memo: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = ran(capfd, "syncs", "gpt7b", "16384", "--memo", memo)
    assert [call for call in found["calls"] if call[0] in SYNCHRONIZING] == []


@pytest.mark.parametrize("memo", ["{}", SWAPPING], ids=["solved", "swapping"])
def test_with_zero_3_only_the_run_ahead_limit_does(memo: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It holds the host while compute has more than a layer's work left, so compute never waits for the host because of it."""
    found = ran(capfd, "syncs", "gpt7b", "32768", "--zero", "3", "--ranks", "8", "--memo", memo)
    ours = made_by(found, "ds_memo", *SYNCHRONIZING)
    assert all(where.startswith(RUN_AHEAD) for where in ours)
    assert 0 < sum(ours.values()) <= 2 * LAYERS  # forwards and replays
    assert found["least_queued_ms"] > 20
    assert sum(made_by(found, "deepspeed", *SYNCHRONIZING).values()) > 5  # they are told apart


def test_a_value_read_in_a_users_hook_is_found_and_is_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """The negative control: once in the forward and once in the replay."""
    found = control(capfd, "item")
    ((where, times),) = made_by(found, "tests", "cudaStreamSynchronize").items()
    assert "read_a_value" in where and times == 2
    assert made_by(found, "ds_memo", *SYNCHRONIZING) == {}


# ---- what is ordered


@pytest.mark.parametrize("memo", [SWAPPING, TILES], ids=["whole", "tiles"])
def test_all_accesses_to_the_same_bytes_are_ordered(memo: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = ran(capfd, "order", "gpt7b", "16384", "--memo", memo)
    assert found["races"] == [] and found["checked"] > 5000


def test_models_that_compute_on_other_streams(capfd: pytest.CaptureFixture[str]) -> None:
    for model, found in control(capfd, "streams").items():
        assert found["races"] == [] and found["checked"] > 100, model


@pytest.mark.parametrize("model", ["inside a layer", "layers in turn"])
def test_an_engine_that_knows_of_one_stream_alone_races_there(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert control(capfd, f"{model}, unguarded")[model]["races"]


# ---- several devices


def test_a_rank_makes_no_context_on_another_ranks_device(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context takes half a GiB. The runtime makes one on the device of the thread that calls it, and threads begin on GPU 0."""
    monkeypatch.setenv("EMULATED_DEVICES", "2")
    assert control(capfd, "second device") == {"running": 1 << 1, "dropped": 1 << 1, "failure": None}


# ---- host memory that cannot be locked


def test_where_cuda_refuses_to_lock_host_memory_layers_are_recomputed_and_solved_for_less(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The negative control is every other step in here."""
    memo = json.dumps({"device_memory_gib": 16, "host_memory_gib": 32})
    *_, last = ran(capfd, "step", "gpt7b", "32768", "--memo", memo, "--lock-gib", "2")
    (warning,) = last["warnings"]
    assert re.search(r"^layer calls are recomputed .*: cudaHostRegister refused [\d.]+ GiB \(out of memory\)", warning)
    (change,) = (change for change in last["changes"] if change.startswith("host budget lowered to"))
    assert 1 < float(re.search(r"to ([\d.]+) GiB", change)[1]) <= 2 and "cudaHostRegister refused" in change
