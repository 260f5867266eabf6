"""Estimates are monotone where physics is: over random machines, models and questions."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ds_memo.estimate import answers, hardware, model
from ds_memo.estimate.estimate import estimate
from ds_memo.estimate.question import OK, Question
from tests.everyday import everyday

MODELS = [
    model.load(str(Path(__file__).parents[2] / "ds_configs" / "models" / f"{name}.json"))
    for name in ("gpt-7b", "gpt-13b", "llama3-8b")
]
MACHINES = [hardware.load(name) for name in ("a800", "h200")]
SPEEDS = (
    "d2h",
    "h2d",
    "intra_node",
    "inter_node",
    "device_bandwidth",
    "gemm_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
)
RATE = ("d2h", "h2d")

questions = st.builds(
    Question,
    model=st.sampled_from(MODELS),
    hardware=st.sampled_from(MACHINES),
    gpus=st.sampled_from([4, 8, 16, 64]),
    seq_length=st.integers(4, 4096).map(lambda k: k * 1024),
    batch=st.sampled_from([1, 16]),
    method=st.sampled_from(["memo", "alst", "full_recompute", "full_swap", "none"]),
)
factors = st.floats(1.0, 8.0)
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
ROUNDING = 1 + 2e-4
"""ds_memo.solve rounds alpha down to a multiple of 1 / 10 000."""


def faster(machine, name, factor):
    value = getattr(machine, name) * factor
    return replace(machine, **{name: min(value, 1.0) if name.endswith("efficiency") else value})


@pytest.mark.parametrize("name", everyday(SPEEDS, ["h2d"]))
@EXAMPLES
@given(question=questions, factor=factors)
def test_more_of_a_speed_is_never_slower(name, question, factor):
    before = estimate(question)
    after = estimate(replace(question, hardware=faster(question.hardware, name, factor)))
    assert after.status == before.status
    if before.step_s is not None:
        assert after.step_s <= before.step_s * ROUNDING


@pytest.mark.parametrize("names", [("d2h",), ("h2d",), RATE])
@EXAMPLES
@given(question=questions, alpha=st.one_of(st.none(), st.floats(0, 1)), factor=factors)
def test_a_faster_link_is_never_slower_under_the_papers_rules(names, question, alpha, factor):
    question = replace(question, method="paper", alpha=alpha, tp=4, cp=1)
    before = estimate(question)
    machine = question.hardware
    for name in names:
        machine = faster(machine, name, factor)
    after = estimate(replace(question, hardware=machine))
    assert after.status == before.status
    assume(before.step_s is not None)
    assert after.step_s <= before.step_s * (1 + 1e-9)


@pytest.mark.slow
@settings(EXAMPLES, max_examples=15)
@given(question=questions)
def test_the_longest_fits_and_the_next_longer_one_does_not(question):
    longest, beyond = answers.longest(question)
    assume(longest is not None)
    assert longest.status == OK != beyond.status
    low, high = (answer.question.seq_length // answers.KI for answer in (longest, beyond))
    assert 0 < high - low <= max(1, low // answers.GRAIN)


@pytest.mark.slow
@settings(EXAMPLES, max_examples=15)
@given(question=questions, factor=factors)
def test_more_memory_is_never_shorter(question, factor):
    longest, _ = answers.longest(question)
    assume(longest is not None)
    for name in ("host_memory", "device_memory"):
        longer, _ = answers.longest(replace(question, hardware=faster(question.hardware, name, factor)))
        assert longer.question.seq_length >= longest.question.seq_length


@pytest.mark.slow
@EXAMPLES
@given(question=questions, factor=factors)
def test_more_host_memory_is_never_slower(question, factor):
    before, after = estimate(question), estimate(replace(question, hardware=faster(question.hardware, "host_memory", factor)))
    assume(before.step_s is not None)
    assert after.step_s <= before.step_s * ROUNDING


@EXAMPLES
@given(question=questions)
def test_the_planner_never_hurts(question):
    loose, planned = (estimate(replace(question, plan=plan)) for plan in (False, True))
    assert (planned.status == "ok") >= (loose.status == "ok")


@EXAMPLES
@given(question=questions, alpha=st.one_of(st.none(), st.floats(0, 1)), zero=st.integers(0, 3), host=st.floats(1e9, 4e12))
def test_what_fits_keeps_every_budget(question, alpha, zero, host):
    answer = estimate(replace(question, method="memo", alpha=alpha, zero=zero, host_memory=host))
    if answer.status == "ok":
        assert answer.device_total <= question.hardware.device_memory * (1 + 1e-9)
        assert answer.host_bytes <= host
        assert 0 < answer.mfu < 1
    else:
        assert answer.step_s is None and answer.binding


@pytest.mark.parametrize("model", everyday(MODELS, MODELS[-1:]))
@settings(EXAMPLES, max_examples=20)
@given(question=questions)
def test_memo_goes_as_far_as_any_other(model, question):
    """Wherever another method fits, so does ds_memo; and it beats recomputing and swapping everything on the same layout."""
    question = replace(question, model=model, method="memo", sp=4, gpus=8)
    memo = estimate(question)
    for method in ("none", "full_recompute", "full_swap"):
        other = estimate(replace(question, method=method, plan=True))
        if other.status == "ok":
            assert memo.status == "ok"
            assert memo.step_s <= other.step_s * 1.02, method
