"""Each fault here is one that the gradient tests must catch: break one thing, and the comparison has to fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_memo.remat import analyse, follower, replay
from ds_memo.remat import op_policy as keep
from ds_memo.swap.frame import Kept
from ds_memo.swap.streams import COMPUTE, D2H, H2D, ThreadStreams
from tests.faults import put_in
from tests.models import Batch, Different, Outcome, assert_same, build, compare_with_stock, step

Patch = pytest.MonkeyPatch
CONFIG = {"alpha": 0.5, "resident_layers": 0}


def drive(model: torch.nn.Module, number: int) -> Outcome:
    """Run a step whose batch differs from the one before, so that leftovers of that are wrong."""
    return step(model, Batch.random(2, 17, seed=number))


# ---- faults: each but the waits gets the right function first


def delay(patch: Patch, stream: str) -> None:
    """Delay the copies of one stream, and change nothing else about them."""

    def slow(right: Any, streams: ThreadStreams, name: str, *copy: Any) -> None:
        if name == stream:
            streams._queues[name].put((time.sleep, 0.002))
        right(streams, name, *copy)

    put_in(patch, ThreadStreams, "copy", slow)


def no_wait_for(stream: str, right: Any, streams: ThreadStreams, waiting: str, event: Any) -> None:
    if (waiting, event.stream) != (COMPUTE, stream):
        right(streams, waiting, event)


def no_wait_for_the_way_back(*args: Any) -> None:
    no_wait_for(H2D, *args)


def no_wait_for_the_way_out(*args: Any) -> None:
    no_wait_for(D2H, *args)


def wrong_buffer_offset(right: Any, kept: Kept, where: Any) -> Any:
    """Let a frame's tensor begin four rows inside the one before it. No loss depends on a sequence's last token."""
    return right(replace(kept, buffer_offset=kept.buffer_offset - 1024) if kept.index == 2 else kept, where)


def one_row_too_few(right: Any, func: Any, args: tuple, kwargs: dict, first: int, out: torch.Tensor) -> None:
    right(func, args, kwargs, first + 1, out)


def leave_out_a_product(right: Any, mode: Any, index: int, op: Any, args: Any, kw: Any) -> Any:
    return right(mode, index, replace(op, wanted=index != 1), args, kw)


def no_note_of_what_is_saved(right: Any, mode: analyse.Analyse, tensor: torch.Tensor) -> None:
    """Let the analysis forget that a saved tensor depends on products."""
    mode.observed.packs += 1


def unclipped_groups(right: Any, func: Any, args: tuple, kwargs: dict, first: int, out: torch.Tensor) -> None:
    """Give rows of a grouped product to the experts of the first rows."""
    if func is not torch.ops.aten._grouped_mm.default:
        return right(func, args, kwargs, first, out)
    left, weights, offsets, *others = args
    rest = left[first:]
    out[first:].copy_(func(rest, weights, offsets.clamp(max=rest.shape[0]), *others, **kwargs))


FAULTS: dict[Callable[..., Any], tuple[Any, str, tuple[str, ...]]] = {
    no_wait_for_the_way_back: (ThreadStreams, "wait", ("llama",)),
    no_wait_for_the_way_out: (ThreadStreams, "wait", ("llama",)),
    wrong_buffer_offset: (Kept, "slot_in", ("llama",)),
    one_row_too_few: (keep, "compute_rows", ("gpt2", "qwen3_moe")),
    leave_out_a_product: (replay.Replay, "_gemm", ("llama",)),
    no_note_of_what_is_saved: (analyse.Analyse, "_note", ("llama",)),
    unclipped_groups: (keep, "compute_rows", ("qwen3_moe",)),
}
LATE = {no_wait_for_the_way_back: H2D, no_wait_for_the_way_out: D2H}
"""Faults that show where the copies of a stream are late."""


@pytest.mark.parametrize("name, fault", [(name, fault) for fault, (*_, names) in FAULTS.items() for name in names])
def test_is_caught(name: str, fault: Callable[..., Any], monkeypatch: Patch) -> None:
    if fault in LATE:
        delay(monkeypatch, LATE[fault])
    put_in(monkeypatch, *FAULTS[fault][:2], fault)
    with follower.in_python(), pytest.raises(Different, match="gradients"):
        compare_with_stock(build(name), drive, CONFIG)


@pytest.mark.parametrize("stream", [D2H, H2D])
def test_delay_alone_is_no_fault(stream: str, monkeypatch: Patch) -> None:
    delay(monkeypatch, stream)
    compare_with_stock(build("llama"), drive, CONFIG)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
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
