"""Each fault here is one that the gradient tests must catch: break one thing, and the comparison has to fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_memo.remat import analyse, replay
from ds_memo.remat import op_policy as keep
from ds_memo.swap.engine import SwapEngine
from ds_memo.swap.frame import Frame, Kept
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams
from tests.models import Batch, Different, Outcome, assert_same, build, compare_with_stock, step

Patch = pytest.MonkeyPatch
CONFIG = {"alpha": 0.5, "resident_layers": 0}


def drive(model: torch.nn.Module, number: int) -> Outcome:
    """Run a step whose batch differs from the one before, so that leftovers of that are wrong."""
    return step(model, Batch.random(2, 17, seed=number))


# ---- faults


def corrupt_a_row(patch: Patch) -> None:
    """Change one number of one stored row."""
    reload = SwapEngine._reload

    def corrupting(self: SwapEngine, frame: Frame) -> None:
        frame.rows[max(frame.rows)][0][0] += 1.0
        reload(self, frame)

    patch.setattr(SwapEngine, "_reload", corrupting)


def delay(patch: Patch, stream: str) -> None:
    """Delay the copies of one stream, and change nothing else about them."""
    copy = ThreadStreams.copy

    def slow(self: ThreadStreams, name: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        if name == stream:
            self._queues[name].put((time.sleep, 0.002))
        copy(self, name, dst, src)

    patch.setattr(ThreadStreams, "copy", slow)


def skip_wait(patch: Patch, waiting: str, waited_for: str) -> None:
    wait = ThreadStreams.wait

    def careless(self: ThreadStreams, stream: str, event: Any) -> None:
        if (stream, event.stream) != (waiting, waited_for):
            wait(self, stream, event)

    patch.setattr(ThreadStreams, "wait", careless)


def no_wait_for_the_way_back(patch: Patch) -> None:
    delay(patch, H2D)
    skip_wait(patch, COMPUTE, H2D)


def no_wait_for_the_way_out(patch: Patch) -> None:
    delay(patch, D2H)
    skip_wait(patch, COMPUTE, D2H)


def wrong_offset(patch: Patch, field: str, method: str) -> None:
    """Let a frame's tensor begin four rows inside the one before it. No loss depends on a sequence's last token."""
    right = getattr(Kept, method)

    def shifted(self: Kept, where: Any) -> Any:
        return right(replace(self, **{field: getattr(self, field) - 1024}) if self.index == 2 else self, where)

    patch.setattr(Kept, method, shifted)


def wrong_buffer_offset(patch: Patch) -> None:
    wrong_offset(patch, "buffer_offset", "slot_in")


def wrong_host_offset(patch: Patch) -> None:
    wrong_offset(patch, "host_offset", "rows_in")


def replace_compute_rows(patch: Patch, wrong: Callable[..., None]) -> None:
    right = keep.compute_rows
    patch.setattr(keep, "compute_rows", lambda *args: wrong(right, *args))


def one_row_too_few(patch: Patch) -> None:
    replace_compute_rows(patch, lambda right, func, args, kwargs, first, out: right(func, args, kwargs, first + 1, out))


def rows_of_other_tokens(patch: Patch) -> None:
    def wrong(right: Any, func: Any, args: tuple, kwargs: dict, first: int, out: torch.Tensor) -> None:
        at = 1 if func is torch.ops.aten.addmm.default else 0
        right(func, (*args[:at], args[at].roll(1, 0), *args[at + 1 :]), kwargs, first, out)

    replace_compute_rows(patch, wrong)


def stored_rows_computed_too_late(patch: Patch) -> None:
    """Split one row lower on the way out than on the way back."""
    right = Kept.rows_of
    patch.setattr(Kept, "rows_of", lambda self, tensor: right(self, tensor.roll(1, 0) if self.index == 2 else tensor))


def leave_out_a_product(patch: Patch) -> None:
    gemm = replay.Replay._gemm
    patch.setattr(replay.Replay, "_gemm", lambda self, op, args, kw: gemm(self, replace(op, wanted=self._next != 2), args, kw))


def no_note_of_what_is_saved(patch: Patch) -> None:
    """Let the analysis forget that a saved tensor depends on products."""

    def forgetful(self: analyse.Analyse, tensor: torch.Tensor) -> None:
        self.observed.packs += 1

    patch.setattr(analyse.Analyse, "_note", forgetful)


def unclipped_groups(patch: Patch) -> None:
    """Give rows of a grouped product to the experts of the first rows."""

    def wrong(right: Any, func: Any, args: tuple, kwargs: dict, first: int, out: torch.Tensor) -> None:
        if func is not torch.ops.aten._grouped_mm.default:
            return right(func, args, kwargs, first, out)
        left, weights, offsets, *others = args
        rest = left[first:]
        out[first:].copy_(func(rest, weights, offsets.clamp(max=rest.shape[0]), *others, **kwargs))

    replace_compute_rows(patch, wrong)


FAULTS = {
    "llama": [
        corrupt_a_row,
        no_wait_for_the_way_back,
        no_wait_for_the_way_out,
        wrong_buffer_offset,
        wrong_host_offset,
        one_row_too_few,
        rows_of_other_tokens,
        stored_rows_computed_too_late,
        leave_out_a_product,
        no_note_of_what_is_saved,
    ],
    "gpt2": [corrupt_a_row, wrong_buffer_offset, one_row_too_few, rows_of_other_tokens],
    "qwen3_moe": [unclipped_groups, one_row_too_few],
}


@pytest.mark.parametrize("name, fault", [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_is_caught(name: str, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(Different, match="gradients"):
        compare_with_stock(build(name), drive, CONFIG)


@pytest.mark.parametrize("stream", [D2H, H2D])
def test_delay_alone_is_no_fault(stream: str, monkeypatch: Patch) -> None:
    delay(monkeypatch, stream)
    compare_with_stock(build("llama"), drive, CONFIG)


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_fault(name: str) -> None:
    compare_with_stock(build(name), drive, CONFIG)


def test_the_comparison_itself() -> None:
    model, batch = build("llama"), Batch.random(1, 4)
    want = step(model, batch)
    name = "model.layers.1.mlp.up_proj.weight"
    off = replace(want, grads={**want.grads, name: want.grads[name] * (1 + 5e-6)})
    with pytest.raises(Different, match=name):
        assert_same(off, want)
    with pytest.raises(Different, match="none"):
        assert_same(replace(want, grads={**want.grads, name: None}), want)
    with pytest.raises(Different, match="nan"):
        assert_same(replace(want, grads={**want.grads, name: want.grads[name] * torch.nan}), want)
    with pytest.raises(Different, match="loss"):
        assert_same(replace(want, loss=torch.nextafter(want.loss, torch.tensor(9.0))), want)
    torch.rand(1)
    with pytest.raises(Different, match="generator"):
        assert_same(replace(want, generator=torch.get_rng_state()), want)
    assert_same(want, want)
