"""Each fault here is one that the tests of tiles must catch: break one thing, and the suite's own check has to fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.remat import follower
from ds_memo.remat.op_policy import ATTENTION
from ds_memo.remat.recipe import Recipe
from ds_memo.spans import Span
from ds_memo.swap.engine import SwapEngine
from ds_memo.tiles import layer, modes, tile_runs, tiling
from ds_memo.tiles.check import probe, refuse
from ds_memo.tiles.layer import TiledCall
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import Batch, Different, Outcome, step
from tests.remat import test_training
from tests.remat.products import Flops
from tests.tiles import test_hooks, test_probe, test_random_numbers, test_whole_calls
from tests.tiles.rig import assert_was_tiled, assert_within, attached, compare, small, toy

Patch = pytest.MonkeyPatch


def drive(model: nn.Module, number: int) -> Outcome:
    """Run a batch of its own, so that leftovers of the step before are wrong."""
    return step(model, Batch.random(1, 35, seed=number))


def check(name: str = "llama", **settings: Any) -> None:
    """Check gradients as the gradient suite does."""
    assert_was_tiled(compare(small(name), drive, **{"alpha": 0.5, "groups": 2, **settings}))


# ---- faults: each gets the right function first


class EarlyArguments(tiling.Arguments):
    """Tiles but the first get what belongs to tokens that are one further to the left. The probe's tiles are right."""

    def tile(self, hidden: torch.Tensor, span: Span) -> Any:
        tokens = span.tokens
        return super().tile(hidden, Span(span.rows, slice(tokens.start - 1, tokens.stop - 1)) if tokens.start else span)


def boundary_off_by_one(right: Any, *args: Any) -> EarlyArguments:
    return EarlyArguments(*args)


last: dict[Any, torch.Tensor] = {}


def neighbours_frame(right: Any, engine: SwapEngine, frame: Any, kept: Any, tensor: torch.Tensor) -> None:
    """A tile is supplied from the frame of its neighbour, where that is as long."""
    where = frame.name.rpartition(" ")[0], kept.index, tensor.shape
    own, other = tensor.clone(), last.get(where, tensor)
    last[where] = own
    right(engine, frame, kept, other if "tile" in frame.name else tensor)


def wrong_group_of_heads(right: Any, mode: Any, index: int, op: Any) -> Any:
    """Each group gets the kept output of the first."""
    own, mode._heads = mode._heads, replace(mode._heads, number=0)
    try:
        return right(mode, index, op)
    finally:
        mode._heads = own


def leave_out_a_product_of_the_pre(right: Any, recipe: Any) -> Any:
    """A recipe that says the first product is not needed for attention's arguments."""
    found = right(recipe)
    return replace(found, ops=[replace(found.ops[0], wanted=False), *found.ops[1:]])


FAULTS: dict[Callable[..., Any], tuple[Any, str]] = {
    boundary_off_by_one: (tiling, "Arguments"),
    neighbours_frame: (SwapEngine, "keep"),
    wrong_group_of_heads: (modes.SupplyHeads, "_supplied"),
    leave_out_a_product_of_the_pre: (Recipe, "pre_backward"),
}
FAMILY = {leave_out_a_product_of_the_pre: "qwen3"}
"""Llama's queries are not needed for the backward of its rotary embedding; Qwen-3's norm needs them."""


@pytest.mark.parametrize("fault", FAULTS)
def test_is_caught_by_gradients(fault: Callable[..., Any], monkeypatch: Patch) -> None:
    owner, name = FAULTS[fault]
    if fault is leave_out_a_product_of_the_pre:
        right = owner.pre_backward.func
        monkeypatch.setattr(owner, name, property(lambda recipe: fault(right, recipe)))
    else:
        put_in(monkeypatch, owner, name, fault)
    with pytest.raises(AssertionError, match=r"gradients|Scalars are not close"):
        check(FAMILY.get(fault, "llama"))


@pytest.mark.parametrize("name", everyday(["llama", "qwen3"], ["llama"]))
def test_without_a_fault(name: str) -> None:
    check(name)


def test_the_comparison_itself() -> None:
    """A gradient that is off by 5e-6 of its norm, or 5e-9 of the largest in its layer, is caught; half of the bar is not."""
    want = {"blocks.0.a": torch.ones(4), "blocks.0.b": torch.full((4,), 1e-6), "blocks.1.a": torch.full((4,), 1e-6)}
    assert_within({**want, "blocks.0.a": want["blocks.0.a"] * (1 + 1e-6)}, want)
    assert_within({**want, "blocks.0.b": want["blocks.0.b"] + 1e-9}, want)
    for name, wrong in (("blocks.0.a", 1 + 5e-6), ("blocks.0.b", 1.005), ("blocks.1.a", 1 + 5e-6), ("blocks.0.a", float("nan"))):
        with pytest.raises(Different, match=name):
            assert_within({**want, name: want[name] * wrong}, want)
    with pytest.raises(Different, match="none"):
        assert_within({**want, "blocks.0.a": None}, want)


# ---- faults that other checks are for


def test_d_hidden_overwritten_while_others_hold_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(layer, "is_owned", lambda gradient: True)
    with pytest.raises(Different):
        test_hooks.test_an_incoming_gradient_that_is_shared(test_hooks.Around)
    with pytest.raises((Different, RuntimeError)):  # its elements share one number: PyTorch refuses to write to it
        test_hooks.test_an_incoming_gradient_that_is_shared(test_hooks.Sums)
    for how in ("hook", "numpy", "node"):  # `retain_grad` has a copy
        with pytest.raises(Different, match="kept 0"):
            test_hooks.test_a_gradient_that_is_kept_stays_as_it_was(how)
    for story in (
        test_hooks.test_gradients_of_hidden_states_are_asked_for,
        test_hooks.test_a_gradient_that_the_caller_gives_stays_the_callers,
        test_hooks.test_a_gradient_that_its_maker_has_saved,
    ):
        with pytest.raises((Different, RuntimeError)):  # what was saved has another version
            story()


def test_a_gradient_that_no_one_else_holds_is_overwritten(monkeypatch: Patch) -> None:
    """Else the tests of shared gradients would show nothing."""
    model, batch = small("llama"), Batch.random(2, 23)
    with attached(model):
        step(model, batch)
        found: list[bool] = []
        put_in(monkeypatch, TiledCall, "backward", lambda right, *args: found.append(args[2]) or right(*args))
        step(model, batch)
        assert found == [True, True]


@contextmanager
def _no_aliases(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    yield list(parameters)


def test_without_aliases_a_parameters_hook_is_called_for_each_tile(monkeypatch: Patch) -> None:
    monkeypatch.setattr(layer, "aliased", _no_aliases)
    with pytest.raises(AssertionError):
        test_hooks.test_hooks_of_a_parameter_are_called_once_for_each_backward()


@pytest.mark.parametrize("block", [test_probe.KeepsAnAttribute, test_probe.FillsADict])
def test_escapes_that_are_not_refused(block: type[nn.Module], monkeypatch: Patch) -> None:
    monkeypatch.setattr(probe, "refuse_escapes", lambda run: None)
    with pytest.raises((AssertionError, TypeError)):
        test_probe.test_refused(block)


def test_router_logits_that_are_not_refused(monkeypatch: Patch) -> None:
    """Mixtral's loss reads the router's logits of all tokens, and a tile has its own, without a graph."""
    monkeypatch.setattr(probe, "refuse_escapes", lambda run: None)
    monkeypatch.setattr(refuse, "is_external", lambda hook: False)
    with pytest.raises(TypeError, match="unpack_hook"):
        test_whole_calls.test_router_logits_that_are_asked_for_once()


def test_a_check_that_compares_nothing(monkeypatch: Patch) -> None:
    """Without the probe's comparison, layers that mix tokens run in tiles and are wrong."""
    monkeypatch.setattr(probe, "compare", lambda *args: None)
    for block in (test_probe.Convolves, test_probe.ShiftsTokens):
        with pytest.raises(AssertionError):
            test_probe.test_refused(block)


@pytest.mark.parametrize("part", ["_tile_post_backward", "_tile_pre_backward"])
def test_a_part_of_another_inputs_gradient_is_forgotten(part: str, monkeypatch: Patch) -> None:
    def without(right: Any, *args: Any) -> tuple[Any, ...]:
        *others, d_inputs = right(*args)
        return *others, [None] * len(d_inputs)

    put_in(monkeypatch, TiledCall, part, without)
    with pytest.raises(Different, match="memory"):
        test_probe.test_several_differentiable_inputs(test_probe.Adds, 0.5, 5)


@pytest.mark.parametrize(
    "check, story",
    [
        ("refuse_other_gradients", test_probe.test_a_gradient_that_leaves_the_layer_unseen),
        ("refuse_others", test_probe.test_a_mask_that_the_layer_cuts),
        ("refuse_others", test_probe.test_sequences_first),
    ],
)
def test_what_the_probe_must_look_at(check: str, story: Callable[[], None], monkeypatch: Patch) -> None:
    for owner in (probe, layer):
        monkeypatch.setattr(owner, check, lambda *args: None, raising=False)
    with pytest.raises((AssertionError, RuntimeError), match=r"off by|not close|none, stock has one|size"):
        story()


def test_a_probe_of_one_sequence(monkeypatch: Patch) -> None:
    """Without the second one, layers whose sequences do not come first run in tiles and are wrong."""
    monkeypatch.setattr(probe, "min", lambda a, b: 1 if (a, b) == (23, 2) else min(a, b), raising=False)
    with pytest.raises((AssertionError, RuntimeError), match=r"off by|not close|size"):
        test_probe.test_sequences_first()


def test_other_random_numbers_in_the_backward(monkeypatch: Patch) -> None:
    calls = itertools.count(1)
    put_in(monkeypatch, tile_runs, "seeded", lambda right, seed, device: right(seed + next(calls), device))
    with pytest.raises(AssertionError):
        test_random_numbers.test_a_backward_uses_the_forwards_dropout("dropout", 0.5)


def test_attention_that_runs_again(monkeypatch: Patch) -> None:
    """Its kept output is not supplied: gradients are right, and both counts show it."""

    def recompute(right: Any, mode: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in ATTENTION:
            return right(mode, func, types, args, kwargs)
        mode.at.next += 1
        return func(*args, **(kwargs or {}))

    put_in(monkeypatch, modes.SupplyHeads, "__torch_dispatch__", recompute)
    model, batch = toy(), Batch.random(2, 23)
    with follower.in_python(), attached(model):
        step(model, batch)
        with Flops() as seen:
            step(model, batch)
    assert seen.attention == 2 * 2


def test_products_that_run_again(monkeypatch: Patch) -> None:
    """A stored tile's products are computed: the share of recomputed FLOPs shows it."""
    put_in(monkeypatch, tile_runs, "make_recipe", lambda right, observed, alpha, keeps: right(observed, 0.0, keeps))
    report = compare(toy(), drive, alpha=1.0)
    assert report["gemm_flops_recomputed_fraction"] > 0.3


def test_graphs_that_are_kept_alive(monkeypatch: Patch, frames: Any) -> None:
    """A leak of frames is seen."""
    kept: list[Any] = []
    put_in(monkeypatch, TiledCall, "__init__", lambda right, *args: kept.append(args[0]) or right(*args))
    with pytest.raises(AssertionError):
        test_training.test_a_graph_dropped_without_a_backward("tiles", frames)
    kept.clear()
