"""What ends a group of layers, what ends in an error, what an exception leaves behind, and faults that the tests must see."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ds_memo.errors import MemoError
from ds_memo.swap.engine import SwapEngine
from ds_memo.tiles import groups
from ds_memo.tiles.layer import TiledCall
from ds_memo.tiles.tile_runs import Tile, TileRuns
from tests.everyday import everyday
from tests.faults import put_in
from tests.inside import inside
from tests.models import Batch, Block, Different, Toy, gradients, step
from tests.remat.situations import assert_nothing_leaked
from tests.remat.test_exceptions import Stumbles, stumbling
from tests.tiles.grouped import LAYERS, compare, inputs_compared
from tests.tiles.rig import BATCH, assert_step, attached, small, toy
from tests.tiles.rig import compare as compare_steps
from tests.tiles.test_groups import in_alike, without_embeddings
from tests.tiles.test_probe import Convolves

Patch = pytest.MonkeyPatch
Change = Callable[[torch.Tensor], torch.Tensor]


class Script(Toy):
    """A model whose script changes hidden states behind some of its layers."""

    def __init__(self, change: Change, *behind: int, block: Any = Block) -> None:
        torch.manual_seed(0)
        super().__init__(block, layers=LAYERS)
        self.change, self.behind = change, behind or (0, 1, 2)

    def run_blocks(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, **kwargs)
            if number in self.behind:
                x = self.change(x)
        return x


class Twice(Toy):
    def run_blocks(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.add_(0.25)
    return x


def hooked(hook: Change, *behind: int) -> nn.Module:
    model = toy(layers=LAYERS)
    for number in behind or (0, 1, 2):
        model.blocks[number].register_forward_hook(lambda module, args, output: hook(output))
    return model


def hooked_before() -> nn.Module:
    model = toy(layers=LAYERS)
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return model


def parametrized() -> nn.Module:
    model = toy(layers=LAYERS)
    weight_norm(model.blocks[2].up)
    return model


def hooked_backward() -> nn.Module:
    model = toy(layers=LAYERS)
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, given, gradients: None)
    return model


def untiled(number: int) -> nn.Module:
    model = toy(layers=LAYERS)
    model.blocks[number] = Convolves()
    return model


def frozen(layers: int) -> nn.Module:
    model = toy(layers=LAYERS)
    model.blocks[:layers].requires_grad_(False)
    return model


OTHER, CHANGED = "it is not the output of the layer below", "the output of the layer below was changed in place"
NOTHING = "the layer below keeps nothing for a backward"
ENDS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "in place": (lambda: Script(lambda x: x.mul_(1.5)), 0, CHANGED),
    "in place, once": (lambda: Script(lambda x: x.mul_(1.5), 1), 1, CHANGED),
    "a part in place": (lambda: Script(lambda x: (x[:, 3].mul_(1.5), x)[1]), 0, CHANGED),
    "without gradients": (lambda: Script(without_gradients), 0, CHANGED),
    "another tensor": (lambda: Script(lambda x: x * 1.5, 0), 1, OTHER),
    "another layout": (lambda: Script(lambda x: x.mT.contiguous().mT, 0), 1, OTHER),
    "a hook": (lambda: hooked(lambda x: x * 1.5), 0, OTHER),
    "a hook in place": (lambda: hooked(lambda x: x.mul_(1.5), 1), 1, CHANGED),
    "a hook without gradients": (lambda: hooked(without_gradients), 0, CHANGED),
    "a hook that returns a view": (lambda: hooked(lambda x: x.view_as(x)), 2, ""),
    "a hook before a layer": (hooked_before, 1, OTHER),
    "a parametrized layer": (parametrized, 2, ""),
    "a backward hook": (hooked_backward, 2, ""),
    "a layer that runs whole": (lambda: untiled(2), 1, ""),
    "a layer that runs whole below": (lambda: untiled(1), 0, "which was to be computed again"),
    "a frozen layer below": (lambda: frozen(1), 1, NOTHING),
    "every layer twice": (lambda: Twice(layers=LAYERS), 2, ""),
}


@pytest.mark.filterwarnings("ignore::ds_memo.MemoWarning")
@pytest.mark.parametrize(
    "name", everyday(ENDS, ["in place, once", "without gradients", "a hook", "a layer that runs whole below"])
)
def test_ends_of_groups(name: str) -> None:
    """The input is stored, and the user is told once."""
    make, computed, why = ENDS[name]
    layers = [f"blocks.{number}" for number in range(LAYERS)]
    report = compare(make(), without_embeddings, computed=computed, quiet=True, layers=layers)
    told = [warning for warning in report["warnings"] if "which was to be computed again" in warning]
    assert len(told) == bool(why) and all(why in warning for warning in told)


# ---- changes that PyTorch does not count


def of_data(change: Callable[[torch.Tensor], Any]) -> Change:
    def changed(x: torch.Tensor) -> torch.Tensor:
        version = x._version
        change(x.data)
        assert x._version == version
        return x

    return changed


def swap_tokens(data: torch.Tensor) -> None:
    data.copy_(data.flip(1))


UNCOUNTED = {"scaled": lambda data: data.mul_(1.5), "one bit": lambda data: data[-1, -1, -1:].nextafter_(torch.ones(1))}
UNCOUNTED["tokens exchanged"] = swap_tokens


@pytest.mark.parametrize("how", UNCOUNTED)
def test_a_change_that_is_not_counted_is_refused(how: str) -> None:
    with attached(model := Script(of_data(UNCOUNTED[how]), 1), input_every=3):
        for _ in range(2):
            with pytest.raises(MemoError, match=r"layer blocks\.2: its input was changed in place .* memo\.input_every to 1"):
                step(model, BATCH)
            gradients(model)
        model.change = lambda x: x
        assert_step(step(model, BATCH), step(toy(layers=LAYERS), BATCH))


@pytest.mark.parametrize("behind", [0, 3])
def test_such_a_change_of_what_is_stored_is_exact(behind: int) -> None:
    """Behind the last layer, and in front of one that stores its input."""
    model = Script(of_data(UNCOUNTED["scaled"]), behind)
    compare_steps(model, without_embeddings, **({"input_every": 2} if behind == 0 else {"input_every": 3}))


def test_without_the_sums_it_is_silently_wrong(monkeypatch: Patch) -> None:
    monkeypatch.setattr(groups, "_bits", lambda hidden: hidden.new_zeros(1))
    with pytest.raises(Different):
        compare_steps(Script(of_data(UNCOUNTED["scaled"]), 1), without_embeddings, input_every=3)


class Scales(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


def test_an_argument_of_a_layer_below_that_was_changed() -> None:
    """The layer's own backward does not come."""
    model, scales = toy(Scales, layers=LAYERS), [torch.full((64,), 1.5) for _ in range(LAYERS)]

    def upper(change: bool) -> torch.Tensor:
        x = BATCH.embeds
        for block, scale in zip(model.blocks, scales, strict=True):
            x = block(x, scale)
        if change:
            scales[0].add_(1)
        return torch.autograd.grad(model.head(x).square().mean(), model.blocks[2].o.weight)[0]

    want = upper(change=False)
    with attached(model, input_every=3), inputs_compared() as names:
        torch.testing.assert_close(upper(change=False), want)
        assert names
        with pytest.raises(MemoError, match=r"blocks\.0.*changed in place"):
            upper(change=True)


# ---- exceptions


@contextmanager
def in_a_post_again(after: int) -> Any:
    """Have a layer raise in the (`after` + 1)-th post that runs while inputs are computed."""
    with pytest.MonkeyPatch.context() as patch, stumbling("post", after):
        where, Stumbles.where = Stumbles.where, None

        def run(right: Callable[..., Any], *args: Any, **named: Any) -> None:
            Stumbles.where = where
            try:
                right(*args, **named)
            finally:
                Stumbles.where = None

        put_in(patch, TiledCall, "run_posts_again", run)
        yield


@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_error_while_inputs_are_computed(after: int, frames: Any) -> None:
    """In the first layer's post and in the second one's, of four tiles each. The graph's next backward is right, and so is the
    next step."""
    model, stock = toy(Stumbles, layers=LAYERS), step(toy(Stumbles, layers=LAYERS), BATCH)
    with attached(model, input_every=3) as handle:
        assert_step(step(model, BATCH), stock)
        torch.manual_seed(7)
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        before = inside(handle).slab.used
        with in_a_post_again(after):
            loss.backward(retain_graph=True)
        for retain in (True, True, False):
            gradients(model)
            x.grad = None
            loss.backward(retain_graph=retain)
            assert inside(handle).slab.used <= before
        assert_step(type(stock)(loss.detach(), {**gradients(model), "the input": x.grad}), stock)
        del loss
        assert_nothing_leaked(handle, frames)
        with in_a_post_again(after):
            step(model, BATCH)
        gradients(model)
        assert_nothing_leaked(handle, frames)
        assert_step(step(model, BATCH), stock)
        assert_nothing_leaked(handle, frames)


def test_a_host_without_room_for_an_input(monkeypatch: Patch, frames: Any) -> None:
    model, stock = toy(layers=LAYERS), step(toy(layers=LAYERS), BATCH)
    with attached(model, input_every=3) as handle:
        step(model, BATCH)
        with monkeypatch.context() as patch:

            def full(right: Callable[..., Any], engine: SwapEngine, *args: Any) -> None:
                patch.setattr(engine.slab.budget, "has_room", lambda nbytes: False)
                right(engine, *args)

            put_in(patch, SwapEngine, "keep_late", full)
            with pytest.raises(MemoError, match=r"frame blocks\.1, tile 3, whose input was computed again,"):
                step(model, BATCH)
        gradients(model)
        assert_nothing_leaked(handle, frames)
        assert_step(step(model, BATCH), stock)


@pytest.mark.slow
def test_many_steps_leave_nothing(frames: Any) -> None:
    model, batch, counts = toy(layers=LAYERS), Batch.random(1, 23), []
    with attached(model, input_every=3, tile=12) as handle:
        for number in range(200):
            step(model, batch)
            assert_nothing_leaked(handle, frames)
            if number % 99 == 50:
                gc.collect()
                counts.append((len(gc.get_objects()), inside(handle).slab.size, len(inside(handle).engine._stack)))
    (first, *what), (last, *then) = counts
    assert what == then and last - first < 20


# ---- faults: each gets the right function first


@contextmanager
def again(patch: Patch) -> Any:
    """Yield a list that holds, while inputs are computed, the call whose post runs and the one whose input it makes."""
    running: list[Any] = []

    def run(right: Callable[..., Any], call: TiledCall, into: TiledCall) -> None:
        running[:] = [call, into]
        try:
            right(call, into)
        finally:
            running.clear()

    put_in(patch, TiledCall, "run_posts_again", run)
    yield running


def anothers_post(patch: Patch, running: list[Any]) -> None:
    def run(right: Callable[..., Any], runs: TileRuns, *args: Any, **named: Any) -> Any:
        if not running:
            return right(runs, *args, **named)
        own, runs._forward = runs._forward, running[1]._runs._forward
        try:
            return right(runs, *args)
        finally:
            runs._forward = own

    put_in(patch, TileRuns, "run", run)


def attention_of_another_tile(patch: Patch, running: list[Any]) -> None:
    latest: dict[Any, Any] = {}

    def run(right: Callable[..., Any], runs: TileRuns, *args: Any, **named: Any) -> Any:
        if running:
            *before, attend, seed = args
            own = attend(None)
            other, latest[own.shape] = latest.get(own.shape, own), own
            args = *before, lambda reached: other, seed
        return right(runs, *args, **named)

    put_in(patch, TileRuns, "run", run)


def another_seed(patch: Patch, running: list[Any]) -> None:
    def run(right: Callable[..., Any], runs: TileRuns, *args: Any, **named: Any) -> Any:
        return right(runs, *args[:-1], args[-1] + 1) if running else right(runs, *args, **named)

    put_in(patch, TileRuns, "run", run)


def first_input_a_layer_off(patch: Patch, running: list[Any]) -> None:
    inputs: dict[str, torch.Tensor] = {}

    def forward(right: Callable[..., Any], call: TiledCall, hidden: torch.Tensor) -> Any:
        inputs[call._tiled.layer.name] = hidden.detach().clone()
        return right(call, hidden)

    def hidden(right: Callable[..., Any], tile: Tile) -> torch.Tensor:
        found = right(tile)
        if running and running[0].below is None:
            whole = inputs[running[1]._tiled.layer.name]
            found = whole[tile.span.rows, tile.span.tokens].clone().requires_grad_()
        return found

    put_in(patch, TiledCall, "forward", forward)
    put_in(patch, Tile, "hidden", hidden)


def a_tile_is_left_out(patch: Patch, running: list[Any]) -> None:
    def keep(right: Callable[..., Any], engine: SwapEngine, frame: Any, *args: Any) -> None:
        if not frame.name.endswith("tile 1"):
            right(engine, frame, *args)

    put_in(patch, SwapEngine, "keep_late", keep)


def a_neighbours_input(patch: Patch, running: list[Any]) -> None:
    """Each tile's computed input is that of the tile before in the order of the backward."""
    latest: dict[Any, torch.Tensor] = {}

    def keep(right: Callable[..., Any], engine: SwapEngine, frame: Any, kept: Any, tensor: torch.Tensor) -> None:
        other, latest[tensor.shape] = latest.get(tensor.shape, tensor), tensor.detach().clone()
        right(engine, frame, kept, other)

    put_in(patch, SwapEngine, "keep_late", keep)


FAULTS = [anothers_post, attention_of_another_tile, first_input_a_layer_off, a_tile_is_left_out, a_neighbours_input]


def check(name: str = "llama") -> None:
    compare_steps(small(name, layers=LAYERS), lambda model, number: step(model, BATCH), steps=1, input_every=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_in_gradients(fault: Callable[[Patch, list[Any]], None], monkeypatch: Patch) -> None:
    with again(monkeypatch) as running:
        fault(monkeypatch, running)
        with pytest.raises((Different, KeyError)):
            check()


@pytest.mark.parametrize("fault", [*FAULTS[:3], another_seed])
def test_a_fault_is_seen_in_inputs(fault: Callable[[Patch, list[Any]], None], monkeypatch: Patch) -> None:
    with again(monkeypatch) as running, inputs_compared():
        fault(monkeypatch, running)
        with pytest.raises(AssertionError, match=r"the input of .* differs"):
            in_alike("dropout", 0.0) if fault is another_seed else check()


def test_another_seed_is_seen_in_gradients(monkeypatch: Patch) -> None:
    with again(monkeypatch) as running:
        another_seed(monkeypatch, running)
        with pytest.raises(AssertionError):
            in_alike("dropout", 0.0)
