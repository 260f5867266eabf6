"""Hooks, and gradients that others hold: what training code sees of a tiled layer."""

from __future__ import annotations

import copy
import types
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ds_memo.errors import MemoError
from tests.everyday import everyday
from tests.models import HIDDEN, Outcome, Toy, gradients, step
from tests.tiles.rig import (
    BATCH,
    LAYERS,
    assert_step,
    assert_was_tiled,
    attached,
    compare,
    drive,
    layers_of,
    model_of,
    small,
    toy,
)

# ---- hooks


def count_hooks(model: nn.Module, count: Counter[str]) -> None:
    """Count what hooks of the first layer's parameters see; scale a gradient in one of them."""
    for name, parameter in layers_of(model)[0].named_parameters():
        parameter.register_hook(lambda gradient, name=name: count.update([f"gradient of {name}"]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: count.update([f"accumulated {name}"]))
    next(layers_of(model)[0].parameters()).register_hook(lambda gradient: gradient * 0.5)


def test_hooks_of_a_parameter_are_called_once_for_each_backward() -> None:
    count: Counter[str] = Counter()
    with attached(tiled := small("plain")) as handle:
        stock = copy.deepcopy(tiled)
        count_hooks(tiled, count)
        next(layers_of(stock)[0].parameters()).register_hook(lambda gradient: gradient * 0.5)
        step(tiled, BATCH)  # with the probe
        count.clear()
        for backward in (1, 2):
            assert_step(step(tiled, BATCH), step(stock, BATCH))
            assert set(count.values()) == {backward}
        assert len(count) == 2 * len(list(layers_of(tiled)[0].parameters()))
        assert_was_tiled(handle.report())


def test_the_probe_calls_no_hook_of_a_parameter() -> None:
    count: Counter[str] = Counter()
    with attached(tiled := toy()):
        count_hooks(tiled, count)
        tiled(BATCH.embeds, BATCH.labels)
        assert not count


def test_hooks_of_a_layer_are_called_once_and_see_all_tokens() -> None:
    tiled = toy()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(what: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        seen.append((what, tuple(tensor.shape)))

    layer = layers_of(tiled)[0]
    layer.register_forward_pre_hook(lambda module, args: note("before", args))
    layer.register_forward_hook(lambda module, args, output: note("after", output))
    layer.register_full_backward_pre_hook(lambda module, gradients: note("backward begins", gradients))
    layer.register_full_backward_hook(lambda module, given, gradients: note("backward ends", given))
    with attached(tiled) as handle:
        step(tiled, BATCH)
        assert seen == [(what, (2, 23, HIDDEN)) for what in ("before", "after", "backward begins", "backward ends")]
        assert_was_tiled(handle.report())


# ---- a gradient that others hold


class Around(Toy):
    """A residual around each layer: its gradient goes to the layer and past it."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Sums(Toy):
    """The loss is a sum: its gradient is one number, expanded."""

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        return types.SimpleNamespace(loss=self.run_blocks(inputs_embeds).sum())


class KeepsGradients(Toy):
    """Callers see the gradient of each layer's output by a hook, by `retain_grad` or by a hook of its node."""

    how = "hook"

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        self.kept, self.outputs = [], []
        for block in self.blocks:
            x = block(x)
            KEEPS[self.how](x, self.kept.append)
            self.outputs.append(x)
        return x


KEEPS: dict[str, Any] = {
    "hook": lambda x, keep: x.register_hook(keep),
    "view": lambda x, keep: x.register_hook(lambda gradient: keep(gradient[0])),
    "numpy": lambda x, keep: x.register_hook(lambda gradient: keep(gradient.numpy())),
    "node": lambda x, keep: x.grad_fn.register_prehook(lambda gradients: keep(gradients[0])),
    "retain_grad": lambda x, keep: x.retain_grad(),
}


@pytest.mark.parametrize("kind", [Around, Sums])
def test_an_incoming_gradient_that_is_shared(kind: type[Toy]) -> None:
    assert_was_tiled(compare(model_of(kind), drive))


@pytest.mark.parametrize("how", KEEPS)
def test_a_gradient_that_is_kept_stays_as_it_was(how: str) -> None:
    def keep(model: nn.Module, number: int) -> Outcome:
        model.how = how
        outcome = step(model, BATCH)
        kept = model.kept if how != "retain_grad" else [output.grad for output in reversed(model.outputs)]
        assert len(kept) == LAYERS
        return Outcome(outcome.loss, {**outcome.grads, **{f"kept {i}": torch.as_tensor(g) for i, g in enumerate(kept)}})

    assert_was_tiled(compare(model_of(KeepsGradients), keep))


def test_gradients_of_hidden_states_are_asked_for() -> None:
    """`autograd.grad` captures the gradients of every layer's input while the layers go on with them."""

    def capture(model: nn.Module, number: int) -> Outcome:
        x, states = BATCH.embeds.clone().requires_grad_(), []
        for block in model.blocks:
            states.append(x)
            x = block(x)
        states.append(x)
        found = torch.autograd.grad(model.head(x).square().mean(), [*states, *model.parameters()])
        return Outcome(torch.zeros(()), {str(index): gradient for index, gradient in enumerate(found)})

    assert_was_tiled(compare(toy(), capture))


def test_a_gradient_that_the_caller_gives_stays_the_callers() -> None:
    given = torch.randn(2, 23, HIDDEN, generator=torch.Generator().manual_seed(0))

    def give(model: nn.Module, number: int) -> Outcome:
        x, mine = BATCH.embeds.clone().requires_grad_(), given.clone()
        model.blocks[0](x).backward(mine)
        return Outcome(torch.zeros(()), {**gradients(model), "x": x.grad, "given": mine})

    assert_was_tiled(compare(toy(), give), 1)


class FusedLoss(torch.autograd.Function):
    """Computes its gradient in the forward, as fused cross entropies do, and hands out what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach() * 2 / x.numel())
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def test_a_gradient_that_its_maker_has_saved() -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = FusedLoss.apply(model.blocks[0](x))
        loss.backward(retain_graph=True)
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    assert_was_tiled(compare(toy(), twice), 1)


def test_hidden_states_are_changed_behind_the_layer() -> None:
    """The layer's output is a tensor of its own: its caller may change it in place."""

    class Changes(Toy):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).mul_(1.5).add_(0.25)
            return x

    assert_was_tiled(compare(model_of(Changes), drive))


def test_hidden_states_changed_in_front_of_the_backward_are_refused() -> None:
    """As in plain autograd, and by the same words as for whole layers."""
    with attached(tiled := toy()):
        x = BATCH.embeds * 1.0
        x.requires_grad_()
        held = x.view_as(x)
        output = tiled.blocks[0](held)
        with torch.no_grad():
            held.add_(1)
        with pytest.raises((MemoError, RuntimeError), match=r"changed in place|modified by an inplace"):
            output.sum().backward()


@pytest.mark.parametrize("name", everyday(["mixtral", "plain"], ["plain"]))
def test_parameters_get_their_gradients_in_the_order_of_a_whole_layer(name: str) -> None:
    """ZeRO reduces gradients in the order in which they come, and a rank with a short batch runs its layers whole."""

    def order(model: nn.Module) -> list[str]:
        seen: list[str] = []
        hooks = [p.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n)) for n, p in model.named_parameters()]
        step(model, BATCH)
        for hook in hooks:
            hook.remove()
        return seen

    want = order(small(name))
    with attached(tiled := small(name)) as handle:
        assert [order(tiled), order(tiled)] == [want, want]
        assert_was_tiled(handle.report())
