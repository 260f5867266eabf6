"""What real training does around layers and inside them: the gradients stay stock's, or a clear error says why not."""

from __future__ import annotations

import copy
import gc
import itertools
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ds_memo
from ds_memo.swap.frame import Frame
from tests.models import (
    BF16,
    HIDDEN,
    LAYERS,
    Batch,
    Block,
    Different,
    Outcome,
    Toy,
    assert_same,
    assert_same_grads,
    build,
    compare_with_stock,
    every_config,
    gradients,
    poisoned_memory,
    step,
)

pytestmark = pytest.mark.filterwarnings("ignore::ds_memo.errors.MemoWarning")
BATCH = Batch.random(2, 17)


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


def toy(block: Any = Block, **kwargs: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(block, **kwargs)


class Lines(nn.Module):
    """A layer's material: three Linears and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Frame]:
    """The frames that are alive, of those made in this test."""
    alive: weakref.WeakSet[Frame] = weakref.WeakSet()
    init = Frame.__init__

    def noted(self: Frame, *args: Any) -> None:
        init(self, *args)
        alive.add(self)

    monkeypatch.setattr(Frame, "__init__", noted)
    return alive


def assert_nothing_leaked(handle: Any, frames: weakref.WeakSet[Frame]) -> None:
    if frames:
        gc.collect()  # a traceback may hold them in a circle
    assert not frames
    handle.engine._clear_graves()  # what the next forward does first
    assert handle.slab.used == 0


# ---- randomness, precision, parameters


@every_config
@pytest.mark.parametrize(
    "name, more", [("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2}), ("gpt2", {"attn_pdrop": 0.2}), ("opt", {"dropout": 0.2})]
)
def test_dropout(config: dict, name: str, more: dict) -> None:
    compare_with_stock(build(name, **more), lambda model, number: step(model, BATCH, seed=number), config)


@every_config
def test_dropout_in_a_plain_block(config: dict) -> None:
    model = toy(lambda: Block(attention_dropout=0.3, dropout=0.3))
    compare_with_stock(model, lambda model, number: step(model, BATCH, seed=number), config)


@every_config
def test_lora(config: dict) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(build("llama"), lora).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)  # starts as zeros, which would hide lora_A
    report = compare_with_stock(model, lambda model, number: step(model, BATCH, seed=number), config)
    assert report["frames"] == 3 * LAYERS


@every_config
@pytest.mark.parametrize("name", ["llama", "plain"])
def test_frozen_first_layers(config: dict, name: str) -> None:
    model = build(name)
    layers = model.model.layers if name == "llama" else model.blocks
    layers[:2].requires_grad_(False)
    compare_with_stock(model, drive, config)

    def without_input_gradient(model: nn.Module, number: int) -> Outcome:
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), gradients(model))

    compare_with_stock(model, without_input_gradient, config)


@every_config
def test_freezing_and_unfreezing_between_steps(config: dict) -> None:
    def freeze(model: nn.Module, number: int) -> Outcome:
        for index, layer in enumerate(model.blocks):
            layer.requires_grad_(index >= number % 3)
            layer.up.weight.requires_grad_(number % 2 == 0)
        return drive(model, number)

    compare_with_stock(toy(), freeze, config, steps=6)


@every_config
def test_replaced_parameters(config: dict) -> None:
    """The weights that memo looked at when it attached are not the ones in use, and the frozen one changes."""

    class Chain(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c(F.gelu(self.b(F.gelu(self.a(x)))))

    def replace(model: nn.Module, number: int) -> Outcome:
        for layer in model.blocks:
            layer.a.weight = nn.Parameter(layer.a.weight.data.clone(), requires_grad=number % 2 == 0)
            layer.b.weight = nn.Parameter(layer.b.weight.data.clone(), requires_grad=number % 2 == 1)
        return drive(model, number)

    compare_with_stock(toy(Chain), replace, config, steps=4)


@every_config
@pytest.mark.parametrize("name", ["llama", "mixtral", "plain"])
def test_autocast(config: dict, name: str) -> None:
    def cast(model: nn.Module, number: int) -> Outcome:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return drive(model, number)

    compare_with_stock(build(name), cast, config, tolerance=BF16)


@every_config
def test_autocast_that_changes_between_steps(config: dict) -> None:
    def cast(model: nn.Module, number: int) -> Outcome:
        dtype = [torch.bfloat16, torch.float16, None][number % 3]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return drive(model, number)

    compare_with_stock(toy(), cast, config, steps=6, tolerance=BF16)


@every_config
def test_mixture_of_experts_in_a_python_loop(config: dict) -> None:
    """How many tokens an expert gets differs from step to step: no recipe can be followed."""
    model = build("mixtral", experts_implementation="eager")
    compare_with_stock(model, lambda model, number: step(model, Batch.random(2, 17, seed=number)), config, steps=5)


@every_config
def test_router_logits_and_their_loss(config: dict) -> None:
    """Hooks take the logits out of the layer, and a second loss goes back through them."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    compare_with_stock(model, drive, config)


# ---- batches


@every_config
@pytest.mark.parametrize("name", ["llama", "plain"])
def test_changing_batch_and_length(config: dict, name: str) -> None:
    shapes = [(2, 17), (1, 64), (2, 17), (1, 4), (2, 33), (1, 64)]
    compare_with_stock(build(name), lambda model, number: step(model, Batch.random(*shapes[number])), config, steps=6)


@every_config
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_packed_position_ids(config: dict, name: str) -> None:
    """With a cache Hugging Face models do not notice packing; memo gives them none, so stock gets none either."""
    positions = torch.cat([torch.arange(5), torch.arange(9), torch.arange(3)]).expand(2, -1)
    compare_with_stock(build(name), lambda model, number: step(model, BATCH, position_ids=positions, use_cache=False), config)


@every_config
def test_padding_mask(config: dict) -> None:
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, :6] = 0
    masks = [mask, None, mask]
    compare_with_stock(build("llama"), lambda model, number: step(model, BATCH, attention_mask=masks[number]), config)


@every_config
def test_gradient_accumulation(config: dict) -> None:
    def accumulate(model: nn.Module, number: int) -> Outcome:
        losses = []
        for seed in range(3):
            batch = Batch.random(2, 17, seed=seed)
            loss = model(inputs_embeds=batch.embeds, labels=batch.labels).loss / 3
            loss.backward()
            losses.append(loss.detach())
        return Outcome(sum(losses), gradients(model))

    compare_with_stock(build("llama"), accumulate, config)


# ---- graphs


@every_config
def test_retain_graph_twice(config: dict) -> None:
    def thrice(model: nn.Module, number: int) -> Outcome:
        torch.manual_seed(number)
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare_with_stock(toy(lambda: Block(dropout=0.2)), thrice, config)
    compare_with_stock(build("mixtral"), thrice, config)


@every_config
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
def test_two_forwards_before_a_backward(config: dict, order: tuple) -> None:
    def both(model: nn.Module, number: int) -> Outcome:
        batches = [Batch.random(2, 17), Batch.random(1, 33)]
        losses = [model(inputs_embeds=batch.embeds, labels=batch.labels).loss for batch in batches]
        for which in order:
            losses[which].backward()
        return Outcome(losses[0].detach() + losses[1].detach(), gradients(model))

    compare_with_stock(build("llama"), both, config)


@every_config
def test_two_losses_through_one_backward(config: dict) -> None:
    def together(model: nn.Module, number: int) -> Outcome:
        losses = [model(inputs_embeds=b.embeds, labels=b.labels).loss for b in (BATCH, Batch.random(2, 17, seed=5))]
        sum(losses).backward()
        return Outcome(sum(losses).detach(), gradients(model))

    compare_with_stock(toy(), together, config)


@every_config
def test_interleaved_retained_backwards(config: dict) -> None:
    def interleaved(model: nn.Module, number: int) -> Outcome:
        losses = [model(inputs_embeds=b.embeds, labels=b.labels).loss for b in (BATCH, Batch.random(2, 17, seed=5))]
        for which, retain in ((0, True), (1, True), (0, False), (1, False)):
            losses[which].backward(retain_graph=retain)
        return Outcome(sum(losses).detach(), gradients(model))

    compare_with_stock(toy(), interleaved, config)


@every_config
def test_backwards_from_the_middle(config: dict) -> None:
    """Losses on hidden states: the upper layers are replayed once, the lower ones twice."""

    def middle(model: nn.Module, number: int) -> Outcome:
        out = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels, output_hidden_states=True)
        out.hidden_states[2].pow(2).mean().backward(retain_graph=True)
        out.loss.backward(retain_graph=True)
        out.hidden_states[1].abs().mean().backward()
        return Outcome(out.loss.detach(), gradients(model))

    compare_with_stock(build("llama"), middle, config)


@every_config
def test_autograd_grad(config: dict) -> None:
    def grad(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        parameters = dict(model.named_parameters())
        taken = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True)
        return Outcome(loss.detach(), dict(zip(["x", *parameters], taken, strict=True)))

    compare_with_stock(build("llama"), grad, config)


@every_config
def test_gradient_penalty(config: dict) -> None:
    """A backward through the backward."""

    class Smooth(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.tanh(self.a(self.norm(x))))

    def penalty(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare_with_stock(toy(Smooth), penalty, config)


@every_config
def test_eval_between_forward_and_backward(config: dict) -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=BATCH.labels).loss
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        model.eval()
        with torch.no_grad():
            model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
        model.train()
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare_with_stock(build("llama"), evaluate, config)
    compare_with_stock(toy(), evaluate, config)


@every_config
def test_eval_with_gradients(config: dict) -> None:
    def evaluate(model: nn.Module, number: int) -> Outcome:
        return drive(model.train(number != 1), number)

    compare_with_stock(build("gpt2", resid_pdrop=0.2), evaluate, config)
    compare_with_stock(toy(lambda: Block(dropout=0.2)), evaluate, config)


@pytest.mark.parametrize("config", [{"alpha": 0.5, "resident_layers": 1}])
def test_a_graph_dropped_without_a_backward(config: dict, frames: Any) -> None:
    model = build("llama")
    handle = ds_memo.attach(model, config)
    for _ in range(5):
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        assert handle.slab.used > 0
        del loss
    assert_nothing_leaked(handle, frames)
    assert handle.slab.size == handle.slab.peak_used  # later steps took the blocks of the first
    assert len(handle.engine._stack) <= 2 * LAYERS
    handle.detach()


def test_nothing_grows_with_the_steps(frames: Any) -> None:
    model = build("llama")
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    sizes = []
    for _ in range(8):
        step(model, BATCH)
        sizes.append((handle.slab.size, len(handle.engine._stack)))
    assert len(set(sizes[1:])) == 1
    assert_nothing_leaked(handle, frames)
    handle.detach()


# ---- exceptions


class Stumbles(Block):
    """Raises in its forward or, by way of an autograd function, in its backward, while `where` says so."""

    where: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if type(self).where == "forward" and self.weak:
            raise ZeroDivisionError("in the middle of forward")
        return Trips.apply(x, self.weak)

    weak = False


class Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weak: bool) -> torch.Tensor:
        ctx.weak = weak
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        if Stumbles.where == "backward" and ctx.weak:
            raise ZeroDivisionError("in the middle of backward")
        return grad, None


@every_config
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
@pytest.mark.parametrize("where", ["forward", "backward", "replay", "head"])
def test_an_exception_and_a_clean_next_step(
    config: dict, where: str, first: bool, frames: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(Stumbles)
    model.blocks[1].weak = True
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, config)
    if not first:
        step(model, BATCH)
    with monkeypatch.context() as patch:
        if where == "replay":  # the layer's second run, not its first
            runs = itertools.count()
            gelu = F.gelu

            def breaks(x: torch.Tensor) -> torch.Tensor:
                if next(runs) == LAYERS + 1:
                    raise ZeroDivisionError("in the middle of a replay")
                return gelu(x)

            patch.setattr(F, "gelu", breaks)
        elif where == "head":
            patch.setattr(model.head, "forward", lambda x: x / 0 if 1 // 0 else x)
        else:
            patch.setattr(Stumbles, "where", where)
        with pytest.raises(ZeroDivisionError):
            step(model, BATCH)
    gradients(model)
    assert_nothing_leaked(handle, frames)
    for _ in range(2):
        with poisoned_memory():
            assert_same(step(model, BATCH), step(stock, BATCH))
    assert_nothing_leaked(handle, frames)
    handle.detach()


@every_config
def test_another_try_while_the_exception_is_held(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As code does that runs out of memory and goes on with a smaller batch inside its except block."""
    model = toy(Stumbles)
    model.blocks[1].weak = True
    stock = copy.deepcopy(model)
    handle = ds_memo.attach(model, config)
    for _ in range(2):
        frames = handle.report()["frames"]
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Stumbles, "where", "forward")
                step(model, BATCH)
        except ZeroDivisionError as error:
            with poisoned_memory():
                assert_same(step(model, Batch.random(1, 17)), step(stock, Batch.random(1, 17)))
            assert handle.report()["frames"] == frames + 2 + LAYERS
            assert error.__traceback__ is not None
        gradients(model)
    handle.detach()


@every_config
def test_backward_again_after_one_that_failed(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module, number: int) -> Outcome:
        model.blocks[1].weak = True
        x = BATCH.embeds.clone().requires_grad_()
        loss = model(x, BATCH.labels).loss
        with monkeypatch.context() as patch:
            patch.setattr(Stumbles, "where", "backward")
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
        gradients(model)
        x.grad = None
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad})

    compare_with_stock(toy(Stumbles), twice, config)


# ---- what layers do inside


class ChangesProducts(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.norm(x))
        y += self.bias
        y.mul_(2)
        F.relu_(y)
        z = self.b(y)
        z[:, 1:].add_(0.5)
        z = torch.tanh_(z)
        return x + self.c(z)


class ChangesItsOutput(Lines):
    """The product that the layer returns is changed by whoever comes next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(F.gelu(self.b(x)))
        return x.add_(1)


class ChangesItsInput(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.add_(1))
        return x + self.b(F.gelu(y))


class LooksAtValues(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.isinf().any():
            y = y.clamp(-1, 1)
        if y.sum() > 0:  # nothing saved depends on the product that decides
            return x + y
        return x - F.gelu(self.b(x))


class LooksWithoutSaving(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.c(x).mean()
        return x + F.gelu(self.a(x)) if gate.item() > 0 else x - torch.sigmoid(self.b(x))


class ChangesChoice(Lines):
    """A router that scales its top-k in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = self.a(x).softmax(-1).topk(2, -1)
        weights *= 2.5
        return x + self.b(x) * weights.sum(-1, keepdim=True)


class Strided(Lines):
    """Products whose operands are transposed, sliced, expanded, and one with a single column."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.transpose(0, 1)).transpose(0, 1)
        z = torch.addmm(x.flatten(0, 1), F.gelu(y).flatten(0, 1), self.b.weight, beta=0.5, alpha=2.0).view_as(x)
        w = self.c.weight @ x[:, :1].expand(-1, 3, -1).flatten(0, 1).T
        return F.silu(z) * torch.sigmoid(self.gate(x)) + w.sum() * 0.01


class NestedCheckpoint(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = torch_checkpoint(lambda t: self.b(F.gelu(t)), y, use_reentrant=self.reentrant)
        return x + self.c(F.silu(z))

    reentrant = False


class NestedReentrantCheckpoint(NestedCheckpoint):
    reentrant = True


class NestedMemoCheckpoint(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ds_memo.checkpoint(self.a, x) if any(ds_memo.integrate.attach._attached) else self.a(x)
        return x + self.c(F.silu(y))


class Sparse(Lines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.eye(x.shape[1]).roll(1, 0).to_sparse()
        return x + torch.stack([torch.sparse.mm(shift, F.gelu(row)) for row in self.a(x)])


class TakesAnIndex(Lines):
    """Rows of a table are picked by a product that nothing else needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(10, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            index = (self.a(x)[..., 0].abs() * 3).clamp(max=9).nan_to_num(0).long()
        return x + self.table[index] + self.b(F.gelu(self.c(x)))


class SharesAProduct(Lines):
    """One product read by many, a saved view of it, and a second product of the same weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = y[:, ::2].tanh().mean() + y.chunk(2, -1)[1].sigmoid().sum(-1, keepdim=True)
        return x + self.a(F.gelu(y)) * z


@every_config
@pytest.mark.parametrize(
    "block",
    [
        ChangesProducts,
        ChangesItsOutput,
        LooksAtValues,
        LooksWithoutSaving,
        ChangesChoice,
        Strided,
        NestedCheckpoint,
        NestedReentrantCheckpoint,
        NestedMemoCheckpoint,
        Sparse,
        TakesAnIndex,
        SharesAProduct,
    ],
)
@pytest.mark.parametrize("shape", [(2, 17), (1, 4)], ids=str)
def test_layer(config: dict, block: type, shape: tuple) -> None:
    batch = Batch.random(*shape)
    compare_with_stock(toy(block), lambda model, number: step(model, batch), config, steps=4)


@every_config
def test_layer_that_changes_its_input(config: dict) -> None:
    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(inputs_embeds * 1.0, labels)  # a leaf must not be changed

    torch.manual_seed(0)
    compare_with_stock(Model(ChangesItsInput), drive, config)


@every_config
def test_input_changed_after_the_layer(config: dict) -> None:
    """Plain autograd does not mind as long as nobody saved the input; memo either has its own copy or says no."""

    class Scale(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(F.gelu(x * 2))

    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds * 1.0
            for block in self.blocks:
                y = block(x)
                x.zero_()
                x = y
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    try:
        compare_with_stock(Model(Scale), drive, config)
    except Different:
        raise
    except (ds_memo.MemoError, RuntimeError) as error:
        assert "changed in place" in str(error) or "modified by an inplace operation" in str(error)


@every_config
def test_shared_argument_changed_between_two_forwards(config: dict) -> None:
    """Stock has used the mask up when it changes; a replay would see the new one, so it must be refused."""

    class Masked(Lines):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(self.a(x) * (mask * 1.0)))

    class Model(Toy):
        by_keyword = False

        def __init__(self) -> None:
            super().__init__(Masked)
            self.register_buffer("mask", torch.ones(17, 1))

        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor, fill: float) -> Any:
            x = inputs_embeds
            self.mask.fill_(fill)
            for block in self.blocks:
                x = block(x, mask=self.mask) if self.by_keyword else block(x, self.mask)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    def twice(model: nn.Module, number: int) -> Outcome:
        losses = [model(BATCH.embeds, BATCH.labels, fill).loss for fill in (1.0, 2.0)]
        sum(losses).backward()
        return Outcome(sum(losses).detach(), gradients(model))

    for by_keyword in (False, True):
        torch.manual_seed(0)
        model = Model()
        model.by_keyword = by_keyword
        with pytest.raises(ds_memo.MemoError, match="changed in place"):
            compare_with_stock(model, twice, config)


@every_config
def test_other_work_behind_the_same_ops(config: dict) -> None:
    """Op for op alike, but another product is the one that nothing saved depends on."""

    class Switches(Lines):
        def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
            y, z = self.a(x), self.b(x)
            return x + (F.gelu(y * 2) + z * 1 if other else y * 1 + F.gelu(z * 2))

    compare_with_stock(toy(Switches), lambda model, number: step(model, BATCH, other=number % 2 == 1), config, steps=5)


@every_config
def test_another_number_of_experts_per_token(config: dict) -> None:
    class Routes(Lines):
        def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
            weights, _ = self.a(x).softmax(-1).topk(k, -1)
            return x + self.b(x) * weights.sum(-1, keepdim=True)

    compare_with_stock(toy(Routes), lambda model, number: step(model, BATCH, k=2 - number % 2), config, steps=4)


# ---- kernels that the dispatcher does not see: NumPy stands for Triton


def unseen(compute: Any, backward: Any) -> type[torch.autograd.Function]:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return compute(ctx, x)

    Kernel.backward = staticmethod(lambda ctx, grad: backward(grad))
    return Kernel


def _into_empty(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape)
    np.multiply(x.detach().numpy(), 3, out=out.numpy())
    return out


def _onto_zeros(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape)
    out.numpy()[...] += 3 * x.detach().numpy()
    return out


def _onto_zeroed(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape).zero_()
    out.numpy()[...] += 3 * x.detach().numpy()
    return out


def _elsewhere(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(3 * x.detach().numpy())


def _in_place(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[...] *= 3  # as Liger's rotary embedding
    return x.view_as(x)


def _in_place_and_says_so(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    x.detach().numpy()[...] *= 3
    ctx.mark_dirty(x)
    return x


@every_config
@pytest.mark.parametrize("compute", [_into_empty, _onto_zeros, _onto_zeroed, _elsewhere, _in_place, _in_place_and_says_so])
def test_a_kernel_out_of_sight(config: dict, compute: Any) -> None:
    kernel = unseen(compute, lambda grad: 3 * grad)

    class Calls(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(kernel.apply(self.a(self.norm(x)))))

    compare_with_stock(toy(Calls), drive, config)


def test_a_write_out_of_sight_is_named() -> None:
    kernel = unseen(_in_place, lambda grad: 3 * grad)

    class Calls(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.gelu(kernel.apply(self.a(self.norm(x)))))

    model = toy(Calls)
    handle = ds_memo.attach(model, {"alpha": 1.0})
    # mm: DeepSpeed leaves its own linear in torch.nn.functional once a ZeRO-3 model was built in this process
    with pytest.warns(ds_memo.MemoWarning, match=r"layer blocks\.0: outputs of aten\.(add)?mm\.default were changed in place"):
        step(model, BATCH)
    handle.detach()


# ---- hooks and what escapes


@every_config
def test_a_hook_that_keeps_a_product(config: dict) -> None:
    """What a hook holds is its own for ever: no copy, reload or replay writes over it."""
    model = build("llama")
    held: list[torch.Tensor] = []
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.mlp.up_proj):
            part.register_forward_hook(lambda module, args, out: held.append(out) if not replaying() else None)

    def replaying() -> bool:
        return torch._C._current_graph_task_id() != -1

    handle = ds_memo.attach(model, config)
    values = []
    for number in range(3):
        step(model, Batch.random(2, 17, seed=number))
        values += [tensor.detach().clone() for tensor in held[len(values) :]]
        for tensor, value in zip(held, values, strict=True):
            assert torch.equal(tensor, value)
    handle.detach()
    reference = build("llama")
    seen: list[torch.Tensor] = []
    for layer in reference.model.layers:
        for part in (layer.self_attn.q_proj, layer.mlp.up_proj):
            part.register_forward_hook(lambda module, args, out: seen.append(out))
    for number in range(3):
        step(reference, Batch.random(2, 17, seed=number))
    assert len(seen) == len(held)
    assert all(torch.equal(a, b) for a, b in zip(held, seen, strict=True))


@every_config
def test_a_hook_that_holds_what_replays_produce(config: dict) -> None:
    """Slots of a reload buffer that escape must not be reused under the holder."""

    def hold_everything(model: nn.Module, number: int) -> Outcome:
        held = []
        hooks = [
            b.qkv.register_forward_hook(lambda module, args, out: held.append((out, out.detach().clone()))) for b in model.blocks
        ]
        outcome = drive(model, number)
        drive(model, number)
        assert all(torch.equal(tensor, value) for tensor, value in held)
        for hook in hooks:
            hook.remove()
        return outcome

    compare_with_stock(toy(), hold_everything, config)


@every_config
def test_output_hidden_states(config: dict) -> None:
    kept: dict[bool, list[torch.Tensor]] = {}

    def hidden(model: nn.Module, number: int) -> Outcome:
        out = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels, output_hidden_states=True)
        (out.loss + sum(state.pow(2).mean() for state in out.hidden_states)).backward()
        attached = model in ds_memo.integrate.attach._attached
        kept[attached] = [state.detach() for state in out.hidden_states]
        return Outcome(out.loss.detach(), gradients(model))

    compare_with_stock(build("llama"), hidden, config)
    assert all(torch.equal(a, b) for a, b in zip(kept[True], kept[False], strict=True))


@every_config
def test_backward_hooks(config: dict) -> None:
    class Hooked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
            self.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))

    compare_with_stock(toy(Hooked), drive, config)


@every_config
def test_tensor_hooks_inside_a_layer(config: dict) -> None:
    class Hooked(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 3)
            return x + self.b(F.gelu(y))

    compare_with_stock(toy(Hooked), drive, config)


# ---- how layers are called


@every_config
def test_hidden_states_by_keyword(config: dict) -> None:
    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds
            for block in self.blocks:
                x = block(x=x)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    report = compare_with_stock(Model(), drive, config)
    assert (report["bytes_to_host"] > 0) == (config["resident_layers"] < LAYERS)


@every_config
def test_arguments_that_share_names_with_ours(config: dict) -> None:
    class Named(Lines):
        def forward(self, x: torch.Tensor, *, fn: Any, layer: int, preserve_rng_state: float) -> torch.Tensor:
            return x + self.b(fn(self.a(x))) * layer * preserve_rng_state

    arguments = {"fn": F.gelu, "layer": 3, "preserve_rng_state": 0.5}
    compare_with_stock(toy(Named), lambda model, number: step(model, BATCH, **arguments), config)


@every_config
def test_layers_that_return_structures(config: dict) -> None:
    class Returns(Block):
        def forward(self, x: torch.Tensor, extra: torch.Tensor | None) -> dict:
            y = super().forward(x)
            more = self.attend(x) if extra is None else extra * 0.5 + self.feed(x)
            return {"out": (y, [more, None, 7]), "same": x}

    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x, extra = inputs_embeds, None
            for block in self.blocks:
                returned = block(x, extra)
                x, (extra, _, seven) = returned["out"]
                x = x + 0.1 * returned["same"] * (seven / 7)
            logits = self.head(x + extra)
            return types.SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    compare_with_stock(Model(Returns), drive, config)


@every_config
def test_a_layer_called_several_times(config: dict) -> None:
    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            x = inputs_embeds
            for block in [self.blocks[0], self.blocks[0], *self.blocks, self.blocks[0]]:
                x = block(x)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    compare_with_stock(Model(), drive, config)


class CallsCheckpoint(Toy):
    """A model that checkpoints by itself, as those with their own flag do."""

    def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor, how: str = "module") -> Any:
        checkpoint = ds_memo.checkpoint if self in ds_memo.integrate.attach._attached else lambda fn, *args, **kw: fn(*args)
        x = inputs_embeds
        for block in self.blocks:
            if how == "module":
                x = checkpoint(block, x, use_reentrant=False)
            elif how == "methods":
                x = x + checkpoint(block.attend, x)
                x = x + checkpoint(block.feed, x, use_reentrant=True)
            else:
                x = checkpoint(lambda x, block=block: block(x), x)
        return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("how", ["module", "methods", "function"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_checkpoint_called_by_the_model(how: str, alpha: float) -> None:
    torch.manual_seed(0)
    config = {"alpha": alpha, "resident_layers": 1}
    report = compare_with_stock(CallsCheckpoint(), lambda model, number: step(model, BATCH, how=how), config, steps=5, layers=())
    assert report["bytes_to_host"] > 0


@every_config
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_several_layers(config: dict, reentrant: bool) -> None:
    class Model(Toy):
        def forward(self, inputs_embeds: torch.Tensor, labels: torch.Tensor) -> Any:
            def half(x: torch.Tensor, first: int) -> torch.Tensor:
                for block in self.blocks[first : first + 2]:
                    x = block(x)
                return x

            x = inputs_embeds
            for first in (0, 2):
                x = torch_checkpoint(half, x, first, use_reentrant=reentrant)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))

    torch.manual_seed(0)
    compare_with_stock(Model(), drive, config)


def test_two_models_at_once() -> None:
    models = [build("llama"), build("gpt2")]
    stocks = [copy.deepcopy(model) for model in models]
    handles = [ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1}) for model in models]
    for _ in range(3):
        losses = [model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss for model in models]
        losses[0].backward()
        losses[1].backward()
        for model, stock in zip(models, stocks, strict=True):
            stock(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss.backward()
            assert_same_grads(gradients(model), gradients(stock))
    handles[0].detach()
    assert_same(step(models[1], BATCH), step(stocks[1], BATCH))
    handles[1].detach()


def test_two_models_that_call_checkpoint() -> None:
    torch.manual_seed(0)
    models = [CallsCheckpoint(), CallsCheckpoint()]
    stocks = [copy.deepcopy(model) for model in models]
    handles = [ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0}, layers=()) for model in models]
    for model, stock in zip(models, stocks, strict=True):
        assert_same(step(model, BATCH), step(stock, BATCH))
    assert all(handle.report()["frames"] == LAYERS for handle in handles)
    with pytest.raises(ds_memo.MemoError, match="2 models attached and 0 of them in forward"):
        ds_memo.checkpoint(models[0].blocks[0], BATCH.embeds)
    for handle in handles:
        handle.detach()


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_no_cache_is_filled(name: str) -> None:
    """A cache in training would hold all keys and values on the device, and a replay would add to it."""
    model = build(name)
    handle = ds_memo.attach(model, {"alpha": 0.5})
    out = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels)
    assert out.get("past_key_values") is None or out.past_key_values.get_seq_length() == 0
    handle.detach()
    assert model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).past_key_values.get_seq_length() == 17


@every_config
def test_weights_that_change_between_steps(config: dict) -> None:
    """Training proper: an optimizer step after each backward, losses equal all along."""
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def train(model: nn.Module, number: int) -> Outcome:
        optimizer = optimizers.setdefault(id(model), torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
        loss.backward()
        optimizer.step()
        return Outcome(loss.detach(), gradients(model))

    compare_with_stock(build("llama"), train, {**config, "alpha": 1.0})


def test_a_dead_model_leaves_nothing(frames: Any) -> None:
    model = build("llama")
    ds_memo.attach(model, {"alpha": 0.5})
    loss = model(inputs_embeds=BATCH.embeds, labels=BATCH.labels).loss
    gone = weakref.ref(model)
    del model, loss
    gc.collect()  # a module and its own hooks and methods are a circle
    assert gone() is None
    assert not frames
