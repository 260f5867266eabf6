"""`gpu.sh first`: every assertion runs on a CPU and over the emulator, and fails, with its cure, where something is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import first, first_large, first_steps, results
from benchmarks.assertions import FAIL, NOT_JUDGED, PASS, SKIPPED, TIMES, VALUES, Assertion, Machine, Measured, Skip
from benchmarks.emulated_process import run_emulated
from tests.benchmarks.emulated import needs_emulator, no_emulated_process_hangs  # noqa: F401

CPU = Machine(torch.device("cpu"), emulated=False)
EMULATOR = Machine(torch.device("cuda"), emulated=True)


def asserts(measure: Any, **more: Any) -> Assertion:
    return Assertion(2, "a thing", "1", "mend it", measure, **more)


def raises(_: Machine) -> Measured:
    raise ValueError("no such\nkernel")


def skips(_: Machine) -> Measured:
    raise Skip("it is not installed")


def test_the_points_are_those_of_the_list():
    assert list(range(1, 12)) == first.POINTS and first.IN_ORDER[-1].measure is first_steps.sanitizer
    assert all(assertion.cure and assertion.bar for assertion in first.IN_ORDER)


@pytest.mark.processes  # git, for the commit
def test_an_assertion_that_raises_is_a_failure_with_its_line_and_the_others_still_run(tmp_path, capsys):
    run = results.Run("first", torch.device("cpu"), str(tmp_path / "first.json"))
    passes = asserts(lambda machine: Measured("1", held=True))
    first.judge(run, CPU, [asserts(raises), passes, asserts(skips), asserts(lambda machine: Measured("2", held=False))])
    assert run.finish() == 1
    found = json.loads((tmp_path / "first.json").read_text())
    assert [row["verdict"] for row in found["assertions"]] == [FAIL, PASS, SKIPPED, FAIL]
    where = f"test_first.py:{raises.__code__.co_firstlineno + 1}"
    assert found["failures"] == [f"2 a thing: ValueError: no such kernel ({where})", "2 a thing: 2"]
    said = capsys.readouterr().out
    assert said.count("cure: mend it") == 2 and "it is not installed" in said


def test_what_a_machine_cannot_judge_runs_and_is_no_failure():
    off = lambda machine: Measured("2", held=False)  # noqa: E731
    for machine, needs in ((EMULATOR, {TIMES}), (EMULATOR, {VALUES}), (CPU, {TIMES})):
        row = asserts(off, needs=frozenset(needs)).run(machine)
        assert row["verdict"] == NOT_JUDGED and row["measured"] == "2" and row["why"]
    assert asserts(off, needs=frozenset({VALUES})).run(CPU)["verdict"] == FAIL
    assert asserts(raises, needs=frozenset({TIMES})).run(EMULATOR)["verdict"] == FAIL


def test_calls_are_counted_inside_the_steps_alone():
    """The profiler synchronizes around them; the device's own annotation is not theirs."""

    def event(name: str, begin: float, end: float, cat: str = "cuda_runtime") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin}

    mark = first_steps._MARK
    inside = [event("cudaMalloc", 11, 12), event("cudaLaunchKernel", 12, 13), event("cudaEventSynchronize", 19, 25)]
    marks = [event(mark, 10, 20, "user_annotation"), event(mark, 12, 90, "gpu_user_annotation")]
    around = [event("cudaDeviceSynchronize", 1, 2), event("cudaDeviceSynchronize", 30, 40), {"ph": "s", "name": "ac2g"}]
    assert first_steps.in_trace([*marks, *around, *inside]) == {"cudaMalloc": 1, "cudaEventSynchronize": 1}
    assert first_steps.in_trace([*marks, *around]) == {}


@pytest.mark.slow
@pytest.mark.processes
def test_on_a_cpu_nothing_fails(tmp_path):
    out = tmp_path / "first.json"
    assert first.main(["--device", "cpu", "--out", str(out)]) == 0
    verdicts = {(row["point"], row["verdict"]) for row in json.loads(out.read_text())["assertions"]}
    assert {(point, PASS) for point in (1, 3, 5, 7, 9)} <= verdicts


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_kernel_that_wraps_is_seen(wrong):
    """Point 11 compares all rows: these are wrong behind row 250 of 256 only, and where all are computed at once."""

    def wraps(x: torch.Tensor) -> torch.Tensor:
        behind = (torch.arange(len(x)) > 250).unsqueeze(1)
        return F.silu(x).masked_fill(behind, wrong)

    assert first_large.of_tokens(CPU, F.silu).held
    assert not first_large.of_tokens(CPU, wraps).held


# ---- over the emulator


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(out.read_text())["assertions"]}


@needs_emulator
def test_every_assertion_runs_over_the_emulator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "first.json"
    assert first.main(["--device", "emulator", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert len(rows) == len(first.IN_ORDER)
    judged = {name for name, row in rows.items() if row["verdict"] == PASS}
    assert {row["point"] for row in rows.values() if row["verdict"] == PASS} == {1, 2, 3, 6, 9}
    assert {"memory of the host slab", "calls of CUDA in steady steps", "planned addresses in steady steps"} <= judged
    assert json.loads(out.read_text())["verb"] not in results.VERBS  # never among a GPU's results
    said = capfd.readouterr().out
    assert "the emulator has no values" in said and "the emulator has no times" in said


@needs_emulator
@pytest.mark.parametrize(
    "fault, point, name",
    [
        ("unpinned", 2, "memory of the host slab"),
        ("synchronizes", 6, "calls of CUDA in steady steps"),
        ("reads_a_value", 6, "steady steps under sync-debug mode"),
        ("unplanned", 9, "planned addresses in steady steps"),
    ],
)
def test_what_is_broken_fails_with_its_cure(
    fault: str, point: int, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_CALLS", "1")
    out = tmp_path / "first.json"
    words = [fault, "--device", "emulator", "--points", str(point), "--out", str(out)]
    assert run_emulated("tests.benchmarks.broken_first", words, 139.8) == 1
    row = rows_of(out)[name]
    assert row["verdict"] == FAIL and row["cure"] in capfd.readouterr().out
