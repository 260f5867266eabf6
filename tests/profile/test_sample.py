"""Lines through samples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_memo.profile.layer_sample import AttentionSample, LayerSample
from ds_memo.profile.run_profile import LayerProfile
from ds_memo.solve.run_costs import PeakBytes
from tests.profile.samples import HIDDEN, make_profile, make_sample

LENGTHS = st.integers(16, 1 << 14)


def layer(*lengths: int, **how: Any) -> LayerProfile:
    return LayerProfile("layer 0", tuple(make_sample(length, **how) for length in lengths))


@given(LENGTHS, LENGTHS, st.integers(1, 1 << 21), st.integers(1, 4), st.integers(1, 4), st.floats(0, 1e-2))
def test_lines_and_parabolas_are_found(first: int, second: int, length: int, batch: int, other: int, overhead: float) -> None:
    """Times and bytes follow a + b·t, attention b·t + c·t·s, at any length and batch. So does the moment when
    outputs are made: earlier before attention, later behind it, as the length grows."""
    if first == second:
        second += 1
    low, high = sorted((first, second))
    found = layer(low, high, batch=batch, overhead=overhead).costs(other, length)
    true = make_sample(length, other, overhead=overhead)
    for name in ("forward_s", "backward_s", "replay_s", "gemm_s", "attention_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6, abs=1e-12), name
    assert found.no_recompute_bytes == pytest.approx(true.no_recompute_bytes, rel=1e-9, abs=1)
    assert [output.role for output in found.outputs] == [output.role for output in true.outputs]
    for got, want in zip(found.outputs, true.outputs, strict=True):
        assert got.rows * got.row_bytes == pytest.approx(want.rows * want.row_bytes, rel=1e-9, abs=1)
        assert got.born == pytest.approx(want.born, rel=1e-6)


@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=4), st.lists(LENGTHS, min_size=2, max_size=2, unique=True), LENGTHS)
def test_whatever_was_measured_a_longer_sequence_is_not_cheaper(times: list[float], at: list[int], length: int) -> None:
    """Noise may make the longer sample the faster one. No result is negative then."""
    low, high = sorted(at)
    samples = [
        dataclasses.replace(make_sample(n), forward_s=rest + attention, attention_s=attention, replay_s=rest)
        for n, rest, attention in ((low, *times[:2]), (high, *times[2:]))
    ]
    profile = LayerProfile("layer 0", tuple(samples))
    short, long = profile.costs(1, length), profile.costs(1, 2 * length)
    for name in ("forward_s", "attention_s", "replay_s", "no_recompute_bytes"):
        assert 0 <= getattr(short, name) <= getattr(long, name) * (1 + 1e-9), name
    at_sample = profile.costs(1, high)
    assert at_sample.attention_s == pytest.approx(times[3]) and at_sample.replay_s == pytest.approx(times[2])


def test_one_sample_gives_lines_through_the_origin() -> None:
    one, half = layer(1024).costs(1, 1024), layer(1024).costs(1, 512)
    assert half.replay_s == pytest.approx(one.replay_s / 2)
    assert half.attention_s == pytest.approx(one.attention_s / 4)
    assert half.no_recompute_bytes == one.no_recompute_bytes // 2


def test_working_bytes_are_rounded_up() -> None:
    profile = LayerProfile("", tuple(dataclasses.replace(make_sample(n), working=PeakBytes(0, 7 * n // 3)) for n in (100, 200)))
    assert profile.costs(1, 151).working.backward == math.ceil(233 + (466 - 233) / 100 * 51)


def test_ranks_that_share_a_sequence_attend_to_all_of_it() -> None:
    alone, shared = layer(1024, 2048).costs(1, 4096), layer(1024, 2048).costs(1, 4096, spread=8)
    assert shared.attention_s - alone.attention_s == pytest.approx(7 * 1e-10 * 4096**2)
    assert shared.forward_s - shared.attention_s == pytest.approx(alone.forward_s - alone.attention_s)
    assert [output.nbytes for output in shared.outputs] == [output.nbytes for output in alone.outputs]
    profile = dataclasses.replace(make_profile(), ranks_per_sequence=2)
    as_it_was, with_more = (profile.costs([(1, 4096)], 0, 0, ranks).layers[0] for ranks in (None, 16))
    assert dataclasses.asdict(as_it_was) == dataclasses.asdict(make_profile().kinds[0].costs(1, 4096))
    assert dataclasses.asdict(with_more) == dataclasses.asdict(shared)


def test_what_is_held_at_once_follows_the_longest_two_samples() -> None:
    """The peak is the maximum of two lines: gradients of weights plus little per token, or activations alone."""

    def held(tokens: int) -> int:
        return max(12 * HIDDEN**2 + 11 * HIDDEN * tokens, 15 * HIDDEN * tokens)

    short, middle, long = (
        dataclasses.replace(make_sample(n), working=PeakBytes(0, held(n))) for n in (HIDDEN, 4 * HIDDEN, 8 * HIDDEN)
    )
    length = 100 * HIDDEN
    assert LayerProfile("", (short, middle, long)).costs(1, length).working.backward == held(length)
    assert LayerProfile("", (short, middle)).costs(1, length).working.backward < 0.95 * held(length)


def test_times_follow_the_longest_two_samples_and_attention_the_one_measured_alone() -> None:
    """Kernels reach another rate at long sequences than at short ones. Without the sample the prediction is theirs."""
    short, middle, long = make_sample(1024, slower=3.0), make_sample(2048), make_sample(4096)
    profile, true = LayerProfile("", (short, middle, long)), make_sample(1 << 17)
    assert profile.costs(1, 1 << 17).forward_s == pytest.approx(true.forward_s)
    slow = make_sample(1 << 16, slower=1.2)
    alone = AttentionSample(1, 1 << 16, slow.attention_s, slow.attention_backward_s)
    found = dataclasses.replace(profile, attention=alone).costs(1, 1 << 17)
    assert found.attention_s == pytest.approx(1.2 * true.attention_s, rel=0.01)
    assert found.attention_backward_s == pytest.approx(1.2 * true.attention_backward_s, rel=0.01)
    assert found.forward_s - found.attention_s == pytest.approx(true.forward_s - true.attention_s)


# ---- the check


def checked(check: LayerSample) -> LayerProfile:
    return LayerProfile("layer 0", (check, make_sample(2048), make_sample(4096)))


@pytest.mark.parametrize("slower, off", [(1.0, 0.0), (1.2, 0.2 / 1.2), (2.0, 0.5)])
def test_a_check_and_the_lines(slower: float, off: float) -> None:
    assert checked(make_sample(1024, slower=slower)).off() == pytest.approx(off, abs=1e-9)
    assert layer(1024, 2048).off() == 0


@pytest.mark.parametrize("change", ["no_recompute_bytes", "outputs", "kinds"])
def test_a_size_off_the_line_is_never_trusted(change: str) -> None:
    check = make_sample(1024)
    if change == "no_recompute_bytes":
        check = dataclasses.replace(check, no_recompute_bytes=int(check.no_recompute_bytes * 1.02))
    elif change == "outputs":
        outputs = (dataclasses.replace(check.outputs[0], row_bytes=int(check.outputs[0].row_bytes * 1.3)), *check.outputs[1:])
        check = dataclasses.replace(check, outputs=outputs)
    else:
        check = dataclasses.replace(check, outputs=(*check.outputs[:2], *check.outputs[:1:-1]))
    assert checked(check).off() == math.inf
