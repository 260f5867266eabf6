"""What training code does around a tiled layer: hooks, shared gradients, dropout, adapters, exceptions."""

from __future__ import annotations

import copy
import gc
import itertools
import types
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.errors import MemoError
from tests.everyday import everyday
from tests.models import HIDDEN, VOCAB, Batch, Block, Outcome, Toy, build, gradients, poisoned_memory, step
from tests.remat.situations import assert_nothing_leaked
from tests.tiles.rig import LAYERS, assert_step, assert_was_tiled, assert_within, attached, compare, reasons, small, tiled_layers

BATCH = Batch.random(2, 23)
"""Four tiles: of twelve tokens and of eleven."""


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


def layers_of(model: nn.Module) -> nn.ModuleList:
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)


def toy(block: Any = Block, **more: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(block, **{"layers": LAYERS, **more})


# ---- hooks


def count_hooks(model: nn.Module, count: Counter[str]) -> None:
    """Count what hooks of the first layer's parameters see; scale a gradient in one of them."""
    for name, parameter in layers_of(model)[0].named_parameters():
        parameter.register_hook(lambda gradient, name=name: count.update([f"gradient of {name}"]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: count.update([f"accumulated {name}"]))
    next(layers_of(model)[0].parameters()).register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize("name", everyday(["llama", "plain"], ["plain"]))
def test_hooks_of_a_parameter_are_called_once_for_each_backward(name: str) -> None:
    count: Counter[str] = Counter()
    with attached(tiled := small(name)) as handle:
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


@pytest.mark.slow
def test_a_hook_that_changes_a_layers_input_and_output() -> None:
    tiled = toy()
    layers_of(tiled)[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    layers_of(tiled)[1].register_forward_hook(lambda module, args, output: output * 0.5)
    assert_was_tiled(compare(tiled, drive))


# ---- a gradient that others hold


class Around(Toy):
    """A residual around each layer: its gradient goes to the layer and past it."""

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x = inputs_embeds
        for block in self.blocks:
            x = x + block(x)
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Sums(Toy):
    """The loss is a sum: its gradient is one number, expanded."""

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        return types.SimpleNamespace(loss=x.sum())


class KeepsGradients(Toy):
    """Callers see the gradient of each layer's output by a hook, by `retain_grad` or by a hook of its node."""

    how = "hook"

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
        x, self.kept, self.outputs = inputs_embeds, [], []
        for block in self.blocks:
            x = block(x)
            if self.how == "hook":
                x.register_hook(self.kept.append)
            elif self.how == "detached":
                x.register_hook(lambda gradient: self.kept.append(gradient.detach()))
            elif self.how == "view":
                x.register_hook(lambda gradient: self.kept.append(gradient[0]))
            elif self.how == "numpy":
                x.register_hook(lambda gradient: self.kept.append(gradient.numpy()))
            elif self.how == "node":
                x.grad_fn.register_prehook(lambda gradients: self.kept.append(gradients[0]))
            elif self.how == "several":
                torch.autograd.graph.register_multi_grad_hook([x], lambda gradients: self.kept.append(gradients[0]))
            else:
                x.retain_grad()
                self.outputs.append(x)
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def model_of(kind: type[Toy], **more: Any) -> Toy:
    torch.manual_seed(0)
    return kind(layers=LAYERS, **more)


@pytest.mark.parametrize("kind", [Around, Sums])
def test_an_incoming_gradient_that_is_shared(kind: type[Toy]) -> None:
    assert_was_tiled(compare(model_of(kind), drive))


@pytest.mark.parametrize("how", ["hook", "detached", "view", "numpy", "node", "several", "retain_grad"])
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
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds * 1.0
            for block in self.blocks:
                x = block(x).mul_(1.5).add_(0.25)
            return types.SimpleNamespace(loss=self.head(x).square().mean())

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


# ---- backwards in other ways


@pytest.mark.parametrize("alpha", everyday([0.0, 0.5, 1.0], [0.5]))
def test_a_graph_runs_backward_twice(alpha: float) -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        loss.backward(retain_graph=True)
        first = {**gradients(model), "x": x.grad}
        x.grad = None
        loss.backward()
        second = {**gradients(model), "x": x.grad}
        assert_within(second, first, 0.0)
        return Outcome(loss.detach(), second)

    assert_was_tiled(compare(toy(), twice, alpha=alpha, groups=2))


def test_a_graph_that_was_freed_is_refused() -> None:
    with attached(tiled := toy()):
        loss = tiled(BATCH.embeds, BATCH.labels).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def in_the_order(order: tuple[int, ...]) -> Callable[[nn.Module, int], Outcome]:
    batches = [BATCH, Batch.random(1, 71, seed=2), Batch.random(1, 9, seed=3)]

    def several(model: nn.Module, number: int) -> Outcome:
        losses = [model(inputs_embeds=batch.embeds, labels=batch.labels).loss for batch in batches]
        for index in order:
            losses[index].backward()
        return Outcome(sum(losses).detach(), gradients(model))

    return several


@pytest.mark.parametrize("order", everyday([((2, 1, 0),), ((1, 2, 0),), ((0, 1, 2),)], [((1, 2, 0),)]), ids=str)
def test_several_forwards_before_a_backward(order: tuple[int, ...]) -> None:
    assert_was_tiled(compare(toy(), in_the_order(order), alpha=0.5))


@pytest.mark.slow
def test_one_backward_through_two_forwards() -> None:
    other = Batch.random(1, 40, seed=2)

    def both(model: nn.Module, number: int) -> Outcome:
        loss = sum(model(inputs_embeds=batch.embeds, labels=batch.labels).loss for batch in (BATCH, other))
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(toy(), both))


@pytest.mark.slow
def test_a_layer_that_is_called_twice_in_one_graph() -> None:
    class Twice(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return types.SimpleNamespace(loss=self.head(x).square().mean())

    assert_was_tiled(compare(model_of(Twice), drive))


@pytest.mark.slow
def test_a_forward_inside_a_backward() -> None:
    def inside(model: nn.Module, number: int) -> Outcome:
        done: list[bool] = []

        def again(gradient: torch.Tensor) -> None:
            if not done:
                done.append(True)
                with torch.enable_grad():
                    model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss.backward()

        hook = layers_of(model)[0].register_forward_hook(lambda module, args, out: out.register_hook(again) and None)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        hook.remove()
        loss.backward()
        assert done
        return Outcome(loss.detach(), gradients(model))

    compare(toy(), inside, quiet=True)  # memo takes a forward inside a backward for a checkpoint's, and leaves it alone


def test_a_gradient_of_a_gradient_is_refused() -> None:
    with attached(tiled := toy()):
        x = BATCH.embeds.clone().requires_grad_()
        with pytest.raises(MemoError, match=r"create_graph.*memo\.tile_tokens"):
            torch.autograd.grad(tiled(x, BATCH.labels).loss, x, create_graph=True)
        gradients(tiled)
        assert_step(step(tiled, BATCH), step(toy(), BATCH))


@pytest.mark.slow
def test_only_the_gradient_of_the_input_is_asked_for() -> None:
    def ask(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        (found,) = torch.autograd.grad(loss, x)
        return Outcome(loss.detach(), {"x": found})

    assert_was_tiled(compare(toy(), ask))


def test_only_parameters_get_a_gradient() -> None:
    """The first layer's input needs none, as that of a model without trained embeddings."""

    def ask(model: nn.Module, number: int) -> Outcome:
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(toy(), ask))


@pytest.mark.slow
def test_anomaly_mode() -> None:
    def watched(model: nn.Module, number: int) -> Outcome:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return step(model, BATCH)

    stock, tiled = toy(), toy()
    with attached(tiled) as handle:
        for number in range(2):
            assert_step(watched(tiled, number), step(stock, BATCH))
        assert_was_tiled(handle.report())


@pytest.mark.slow
def test_evaluation_between_training_steps() -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        with torch.no_grad():
            before = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        outcome = step(model, BATCH)
        model.eval()
        with torch.no_grad():
            model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        evaluated = step(model, BATCH)  # a backward in eval mode
        model.train()
        return Outcome(before, {**outcome.grads, **{f"eval {name}": g for name, g in evaluated.grads.items()}})

    assert_was_tiled(compare(toy(), evaluate))


def test_a_training_step_with_an_optimizer() -> None:
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def train(model: nn.Module, number: int) -> Outcome:
        optimizer = optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        optimizer.step()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(toy(), train, steps=4, tolerance=1e-5))


# ---- parameters


def test_frozen_parameters() -> None:
    tiled = small("llama")
    for name, parameter in tiled.named_parameters():
        parameter.requires_grad_("norm" not in name and "q_proj" not in name and "down_proj" not in name)
    assert_was_tiled(compare(tiled, drive, alpha=1.0))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_layer(frozen: int) -> None:
    def ask(model: nn.Module, number: int) -> Outcome:
        layers_of(model)[frozen].requires_grad_(number == 2)
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    compare(toy(), ask, steps=3)


@pytest.mark.slow
def test_a_parameter_without_a_gradient_has_none() -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(HIDDEN, HIDDEN)

    assert_was_tiled(compare(toy(Unused), drive))


@pytest.mark.slow
def test_layers_that_share_parameters() -> None:
    tiled = toy()
    tiled.blocks[1].up, tiled.blocks[1].norm1 = tiled.blocks[0].up, tiled.blocks[0].norm1
    assert_was_tiled(compare(tiled, drive))


def test_one_weight_under_two_names_in_a_layer() -> None:
    class Tied(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down.weight = nn.Parameter(self.up.weight.detach().T.clone())
            self.up2 = nn.Linear(HIDDEN, 2 * HIDDEN)
            self.up2.weight = self.up.weight

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(self.norm2(x))) * self.up2(x) + F.linear(x, self.up.weight))

    assert_was_tiled(compare(toy(Tied), drive))


def test_weights_of_other_kinds() -> None:
    """A scale, an einsum, a convolution of width one and an expanded bias: no products with a transposed weight."""

    class Kinds(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(HIDDEN))
            self.mix = nn.Parameter(torch.randn(4, HIDDEN // 4, HIDDEN // 4) / 4)
            self.point = nn.Conv1d(HIDDEN, HIDDEN, 1)
            self.left = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            x = torch.einsum("bshi,hij->bshj", x.unflatten(-1, (4, -1)), self.mix).flatten(-2)
            x = x @ self.left + (self.left @ x.flatten(0, 1).T).T.view_as(x)
            return self.point(x.transpose(1, 2)).transpose(1, 2)

    assert_was_tiled(compare(toy(Kinds), drive))


def test_a_product_with_a_factor() -> None:
    class Scales(Block):
        """Adds a bias and a scaled product in one op, as adapters do."""

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(0, 1)
            return super().feed(torch.addmm(flat, flat, self.o.weight, alpha=0.5).view_as(x))

    assert_was_tiled(compare(toy(Scales), drive))


def lora(model: nn.Module, dropout: float, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which hides mistakes
            nn.init.normal_(parameter, std=0.1)
    return adapted.train()


def test_adapters_on_frozen_weights() -> None:
    assert_was_tiled(compare(lora(small("llama"), 0.0, ["q_proj", "up_proj", "down_proj"]), drive, alpha=0.5))


def test_autocast() -> None:
    def cast(model: nn.Module, number: int) -> Outcome:
        embeds = BATCH.embeds.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs_embeds=embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "the input": embeds.grad})

    assert_was_tiled(compare(small("llama"), cast, tolerance=1e-2, groups=2))


def test_autocast_in_every_second_step() -> None:
    def cast(model: nn.Module, number: int) -> Outcome:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 1):
            loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(small("plain"), cast, steps=4, tolerance=1e-2))


# ---- random numbers


def slope(model: nn.Module, batch: Batch, seed: int) -> tuple[float, float]:
    """Return the derivative of the loss along a direction: by the gradients, and by two more forwards with the same seed."""
    generator, step_size = torch.Generator().manual_seed(5), 1e-5
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]

    def loss() -> torch.Tensor:
        torch.manual_seed(seed)
        logits = model(inputs_embeds=batch.embeds.double(), labels=batch.labels).logits
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())  # models compute theirs in float32

    found = torch.autograd.grad(loss(), trained)
    by_gradients = sum(float((g * d).sum()) for g, d in zip(found, directions, strict=True))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=sign * step_size)
        values.append(loss().item())
        with torch.no_grad():
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=-sign * step_size)
    return by_gradients, (values[0] - values[1]) / (2 * step_size)


DROPS = {
    "dropout": lambda: toy(lambda: Block(dropout=0.2)),
    "attention's dropout": lambda: toy(lambda: Block(attention_dropout=0.2)),
    "adapters'": lambda: lora(toy(), 0.2, ["qkv", "up", "down"]),
}
CASES = [*itertools.product(DROPS, (0.0, 0.5, 1.0))]


@pytest.mark.parametrize("drops, alpha", everyday(CASES, CASES[::4]))
def test_a_backward_uses_the_forwards_dropout(drops: str, alpha: float) -> None:
    """Gradients are those of the very function that the forward computed: its slope says so, in float64."""
    with attached(tiled := DROPS[drops]().double(), quiet=True, alpha=alpha) as handle:
        by_gradients, by_values = slope(tiled, BATCH, seed=1)
        assert by_gradients == pytest.approx(by_values, rel=1e-5)
        whole = drops == "attention's dropout"  # on a CPU it makes a matrix of tokens × tokens
        assert tiled_layers(handle) == ([] if whole else [0, 1])


def test_dropout_differs_among_tiles_steps_and_layers_and_comes_again_with_a_seed() -> None:
    class Shows(Block):
        """Its output is the mask."""

        def feed(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(torch.ones_like(x)) * 1e6

    tiled = toy(lambda: Shows(dropout=0.5))
    with attached(tiled) as handle:
        step(tiled, BATCH)

        def masks(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            outputs = [block(BATCH.embeds.clone().requires_grad_()) for block in tiled.blocks]
            return [half for output in outputs for half in (output > 1e3)[0, :22].chunk(2)]

        first, again, other = masks(1), masks(1), masks(2)
        assert tiled_layers(handle) == [0, 1]
    assert all(map(torch.equal, first, again))
    for a, b in itertools.combinations([*first, *other], 2):
        assert 0.4 < (a == b).float().mean() < 0.6


@pytest.mark.slow
def test_dropout_drops_as_much_as_stock() -> None:
    tiled = toy(lambda: Block(dropout=0.1))
    with attached(tiled) as handle:
        first = step(tiled, BATCH, seed=7)
        same, other = step(tiled, BATCH, seed=7), step(tiled, BATCH, seed=8)
        assert tiled_layers(handle) == [0, 1]
    assert_within(same.grads, first.grads, 0.0)
    assert not torch.equal(first.loss, other.loss)


# ---- arguments


def test_packed_documents() -> None:
    positions = torch.cat([torch.arange(9), torch.arange(17), torch.arange(7)])[None]

    def packed(model: nn.Module, number: int) -> Outcome:
        return step(model, Batch.random(1, 33), position_ids=positions, use_cache=False)  # a cache hides the documents

    attends_to_all = step(small("llama"), Batch.random(1, 33), position_ids=positions)
    assert not torch.equal(packed(small("llama"), 0).loss, attends_to_all.loss)
    assert_was_tiled(compare(small("llama"), packed, groups=2))


def test_padded_sequences() -> None:
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, 15:] = 0

    def padded(model: nn.Module, number: int) -> Outcome:
        return step(model, BATCH, **({"attention_mask": mask} if number % 2 else {}))

    assert_was_tiled(compare(small("llama"), padded, steps=3, groups=2))


@pytest.mark.parametrize("name", everyday(["plain", "llama", "mixtral"], ["plain"]))
def test_batches_of_many_shapes(name: str) -> None:
    shapes = [(1, 33), (2, 17), (1, 6), (3, 5), (2, 4), (1, 41), (4, 2), (1, 5), (5, 14)]

    def varied(model: nn.Module, number: int) -> Outcome:
        return step(model, Batch.random(*shapes[number], seed=number))

    assert_was_tiled(compare(small(name), varied, steps=len(shapes), tile=9))


@pytest.mark.parametrize("length, head_dim", [(16, 16), (127, 112)], ids=str)
def test_a_length_that_is_also_the_size_of_a_head(length: int, head_dim: int) -> None:
    """The probe runs 112 tokens of a long sequence."""
    model = build("llama", num_hidden_layers=LAYERS, head_dim=head_dim)
    assert_was_tiled(compare(model, lambda model, number: step(model, Batch.random(1, length)), tile=length // 2, quiet=True))


def test_a_later_length_that_is_also_the_size_of_a_head() -> None:
    lengths = (33, 16)
    compare(small("llama"), lambda model, number: step(model, Batch.random(1, lengths[number])), tile=5)


def test_a_short_first_batch_does_not_switch_tiles_off() -> None:
    shapes = [(8, 4), (1, 33)]
    assert_was_tiled(compare(small("llama"), lambda model, n: step(model, Batch.random(*shapes[n])), tile=5, quiet=True))


# ---- exceptions, and graphs that are dropped


class Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("backward")
        return gradient


class Stumbles(Block):
    """Raises where and when it is told to: at the n-th time that a run passes there."""

    where: str | None = None
    left = 0

    @staticmethod
    def pass_here(where: str) -> None:
        if Stumbles.where == where:
            Stumbles.left -= 1
            if Stumbles.left < 0:
                raise ZeroDivisionError(f"in the middle of {where}")

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("head")
        return super().attend(Trips.apply(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        Stumbles.pass_here("tail")
        return super().feed(Trips.apply(x))


PLACES = [("head", 1), ("head", 3), ("head", 7), ("head", 9), ("tail", 2), ("tail", 5), ("backward", 0), ("backward", 9)]


@pytest.mark.parametrize(
    "place, first", everyday([*itertools.product(PLACES, (True, False))], [*zip(PLACES[::2], (True, False) * 2, strict=True)])
)
def test_an_exception_and_a_clean_next_step(
    place: tuple[str, int], first: bool, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of two layers passes 16 heads and 8 tails, a backward as many again; the first step analyses besides."""
    where, passes = place
    stock, tiled = toy(Stumbles), toy(Stumbles)
    with attached(tiled, quiet=first) as handle:
        if not first:
            step(tiled, BATCH)
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", where)
            patch.setattr(Stumbles, "left", passes)
            with suppress(ZeroDivisionError):
                step(tiled, BATCH)
            raised = Stumbles.left < 0
        assert raised
        gradients(tiled)
        assert_nothing_leaked(handle, frames)
        for _ in range(2):
            with poisoned_memory():
                assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert_nothing_leaked(handle, frames)
        if not first:
            assert_was_tiled(handle.report())


def test_a_parameter_is_the_layers_own_again_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(tiled := toy(Stumbles)):
        before = list(tiled.parameters())
        step(tiled, BATCH)
        for where, passes in (("head", 1), ("tail", 1), ("backward", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(Stumbles, "where", where)
                patch.setattr(Stumbles, "left", passes)
                with pytest.raises(ZeroDivisionError):
                    step(tiled, BATCH)
            assert all(a is b for a, b in zip(before, tiled.parameters(), strict=True))
            assert "forward" not in vars(tiled.blocks[0]) or callable(tiled.blocks[0].forward)


def test_backward_again_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", "backward")
            patch.setattr(Stumbles, "left", 1)
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        gradients(model)
        x.grad = None
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    assert_was_tiled(compare(toy(Stumbles), twice))


def test_graphs_that_are_dropped(frames: Any) -> None:
    stock, tiled = toy(), toy()
    with attached(tiled) as handle:
        for _ in range(3):
            tiled(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        assert_nothing_leaked(handle, frames)
        loss = tiled(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        torch.autograd.grad(loss, next(layers_of(tiled)[1].parameters()))
        del loss
        assert_nothing_leaked(handle, frames)
        assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert_nothing_leaked(handle, frames)


def test_nothing_waits_for_the_garbage_collector(frames: Any) -> None:
    with attached(tiled := toy()) as handle:
        step(tiled, BATCH)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                step(tiled, BATCH)
                assert not frames
                handle._session.engine._drain()
                assert handle._session.slab.used == 0
        finally:
            gc.enable()


def test_a_frozen_layer_keeps_no_frame(frames: Any) -> None:
    """No backward will ask for it."""
    with attached(tiled := toy()):
        tiled.requires_grad_(False)
        tiled.head.requires_grad_(True)
        loss = tiled(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        assert not frames
        loss.backward()


# ---- the model is given back


def test_detaching_gives_the_model_back() -> None:
    tiled, stock = toy(), toy()
    with attached(tiled):
        step(tiled, BATCH)
    got, want = step(tiled, BATCH), step(stock, BATCH)
    assert torch.equal(got.loss, want.loss)
    assert_within(got.grads, want.grads, 0.0)


def test_calls_of_ds_memo_checkpoint() -> None:
    """A model that hands its layers to memo itself."""

    class Checkpoints(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds
            for block in self.blocks:
                x = ds_memo.checkpoint(block, x) if self.ours else block(x)
            return types.SimpleNamespace(loss=self.head(x).square().mean())

        ours = False

    stock, tiled = model_of(Checkpoints), model_of(Checkpoints)
    tiled.ours = True
    with attached(tiled) as handle:
        for _ in range(2):
            assert_step(step(tiled, BATCH), step(stock, BATCH))
        assert tiled_layers(handle) == [0, 1], reasons(handle)


@pytest.mark.slow
def test_resident_layers_and_tiles() -> None:
    """A resident layer's tiles stay on the device."""
    for residents in (1, 2):
        report = compare(toy(), drive, resident_layers=residents)
        assert_was_tiled(report)
        assert (report["bytes_to_host"] > 0) == (residents == 1)


@pytest.mark.slow
def test_embeddings_below_and_a_head_above() -> None:
    """Token ids and a real embedding below the first layer, and tied weights above the last."""
    tokens = torch.randint(0, VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))

    def train(model: nn.Module, number: int) -> Outcome:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    assert_was_tiled(compare(small("gpt2"), train))
