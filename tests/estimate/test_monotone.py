"""Estimates are monotone where physics is: over random machines and questions."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ds_memo.estimate import hardware
from ds_memo.estimate.estimate import KI, estimate
from ds_memo.estimate.model import load
from ds_memo.estimate.question import OK, Question
from tests.estimate.models import GPT_7B, LLAMA_8B
from tests.everyday import everyday

MODELS = [load(str(path)) for path in (GPT_7B, LLAMA_8B)]
FACTOR = 3.0
OF_LAYERS = ("intra_node", "device_bandwidth", "gemm_efficiency", "attention_backward_efficiency")
"""Rates by which layers are measured again."""

questions = st.builds(
    Question,
    model=st.sampled_from(MODELS),
    hardware=st.just(hardware.load("a800")),
    gpus=st.sampled_from([8, 64]),
    seq_length=st.sampled_from([16, 128, 512, 1024]).map(lambda k: k * KI),
    method=st.sampled_from(["memo", "full_recompute", "none"]),
    tile_tokens=st.just(0),
)
EXAMPLES = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def ask(question: Question):
    return estimate(question if question.method == "memo" else replace(question, tile_tokens=None))


def faster(question: Question, name: str, factor: float = FACTOR) -> Question:
    value = getattr(question.hardware, name) * factor
    value = min(value, 1.0) if name.endswith("efficiency") else value
    return replace(question, hardware=replace(question.hardware, **{name: value}))


@pytest.mark.slow
@EXAMPLES
@given(question=questions, name=st.sampled_from(["d2h", "h2d", "host_memory"]))
def test_more_of_a_machine_is_never_slower(question, name):
    before, after = ask(question), ask(faster(question, name))
    assert (after.status == OK) >= (before.status == OK)
    if before.step_s is not None:
        assert after.step_s <= before.step_s * (1 + 2e-4)  # ds_memo.solve rounds alpha down


@pytest.mark.parametrize("name", everyday(OF_LAYERS, ["gemm_efficiency"], slow=["intra_node"]))
def test_faster_kernels_and_links_are_never_slower(name):
    question = Question(MODELS[1], hardware.load("a800"), 8, 128 * KI, tile_tokens=0)
    assert ask(faster(question, name)).step_s < ask(question).step_s


@pytest.mark.slow
@EXAMPLES
@given(question=questions, alpha=st.one_of(st.none(), st.floats(0, 1)), zero=st.integers(0, 3), host=st.floats(1e9, 4e12))
def test_what_fits_keeps_every_budget(question, alpha, zero, host):
    answer = ask(replace(question, method="memo", alpha=alpha, zero=zero, host_memory=host))
    if answer.status == OK:
        assert answer.device_total <= question.hardware.device_memory * (1 + 1e-9)
        assert answer.host_bytes <= host and 0 < answer.mfu < 1
    else:
        assert answer.step_s is None and answer.binding


@pytest.mark.slow
@EXAMPLES
@given(question=questions)
def test_memo_goes_as_far_as_training_without(question):
    """Wherever another method fits, so does ds_memo, in no longer a step; and a plan never hurts."""
    memo = ask(replace(question, method="memo"))
    other = ask(replace(question, plan=True))
    assume(other.status == OK)
    assert memo.status == OK and memo.step_s <= other.step_s * 1.02
    assert ask(replace(question, plan=False)).status in (OK, "oom")
