"""Predictions on a card that slows down by 18 % once it has worked for 0.2 s: in an emulated process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks import emulated_controls
from tests.benchmarks.emulated import NEEDED, no_emulated_process_hangs  # noqa: F401

pytestmark = NEEDED
FIRST_CORRECTED = 6
"""Index of the step behind the window in which kernels are timed."""


def rows(capfd: pytest.CaptureFixture[str], case: str) -> list[dict[str, Any]]:
    assert emulated_controls.main(case) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("case", ["slows down", "slows down, in tiles"])
def test_training_corrects_a_profile_of_short_samples(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In tiles alpha follows, so the first corrected step is analysed anew."""
    found = rows(capfd, case)
    assert bool(found[-1]["tiles"]) == ("tiles" in case)
    before, after = found[FIRST_CORRECTED - 1], found[-1]
    assert before["predicted"] < 0.88 * before["measured"] and before["changes"] == []
    assert after["predicted"] == pytest.approx(after["measured"], rel=0.02)
    (change,) = after["changes"]
    assert "layers take, in shares of what was predicted" in change
    assert all(1.1 < factor < 1.25 for factor in after["kernel_factors"].values())


def test_without_the_correction_predictions_stay_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    """The negative control."""
    for row in rows(capfd, "slows down, uncorrected")[1:]:
        assert row["predicted"] < 0.9 * row["measured"] and row["changes"] == []


def test_a_profile_taken_behind_as_much_work_needs_no_correction(capfd: pytest.CaptureFixture[str]) -> None:
    last = rows(capfd, "slows down, after work")[-1]
    assert last["predicted"] == pytest.approx(last["measured"], rel=0.02)
    (samples,) = last["samples"].values()
    assert max(sample["length"] for sample in samples if "forward_s" in sample) < max(sample["length"] for sample in samples)
