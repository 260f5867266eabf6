"""Layers that cannot run in tiles run whole: the report says why, one warning does, and the gradients are stock's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat.layer_call import CannotTile
from ds_memo.tiles.check.probe import probe
from ds_memo.tiles.slices import Arguments
from tests.everyday import everyday
from tests.models import FP32, HEADS, HIDDEN, Batch, Block, Outcome, Toy, build, gradients, step
from tests.tiles.rig import BATCH, LAYERS, assert_step, assert_was_tiled, attached, compare, drive, toy


class Calls(Toy):
    """A model that calls its blocks in a way of its own."""

    def __init__(self, block: Any, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(block, layers=LAYERS)
        self.call = call

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def assert_whole(report: dict[str, Any], why: str, layers: int = LAYERS) -> None:
    """Assert that all layers run whole for one reason, which one warning says."""
    assert report["tiles"]["layers"] == [] and len(report["tiles"]["not_tiled"]) == layers
    (reason,) = set(report["tiles"]["not_tiled"].values())
    assert re.search(why, reason), reason
    assert len([text for text in report["warnings"] if "not in tiles of memo.tile_tokens" in text]) == 1


# ---- layers that mix tokens outside of attention


def block(name: str, feed: Any = None, attend: Any = None, **parts: Callable[[], Any]) -> type[Block]:
    """Return a class of blocks with methods and parts of their own. A method gets the block, the right method and the input."""

    def __init__(self: Block) -> None:
        Block.__init__(self)
        for part, make in parts.items():
            setattr(self, part, make())

    methods: dict[str, Any] = {"__init__": __init__}
    if feed:
        methods["feed"] = lambda self, x: feed(self, functools.partial(Block.feed, self), x)
    if attend:
        methods["attend"] = lambda self, x: attend(self, functools.partial(Block.attend, self), x)
    return type(name, (Block,), methods)


def convolved(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    return right(self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))


def shifted(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """RWKV's token shift: each token sees a little of the one before."""
    return right(x + 0.01 * F.pad(x, (0, 0, 1, -1)))


def recurrent(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """A recurrence over the tokens, as in Mamba hybrids."""
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = torch.sigmoid(self.decay) * state + token
        states.append(state)
    return right(torch.stack(states, 1))


def by_number(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """Tokens are mixed by their number in the call."""
    return right(x) * torch.linspace(1, 2, x.shape[1])[:, None]


def in_chunks(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention over blocks of eight tokens."""
    length = x.shape[1]
    blocks = F.pad(x, (0, 0, 0, -length % 8)).unflatten(1, (-1, 8))
    return right(blocks.flatten(0, 1)).view(x.shape[0], -1, HIDDEN)[:, :length]


def short_convolution() -> nn.Module:
    return nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN)


Convolves = block("Convolves", feed=convolved, conv=short_convolution)
ConvolvesKeys = block("ConvolvesKeys", attend=convolved, conv=short_convolution)
ShiftsTokens = block("ShiftsTokens", feed=shifted)
Recurs = block("Recurs", feed=recurrent, decay=lambda: nn.Parameter(torch.full((HIDDEN,), 2.0)))
MixesHere = block("MixesHere", feed=by_number)
Chunks = block("Chunks", attend=in_chunks)


# ---- layers that are no function of their arguments


def kept_in_an_attribute(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = right(x)
    return self.seen


def kept_in_a_dict(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss beside the output."""
    self.losses["z"] = (out := right(x)).square().mean()
    return out


KeepsAnAttribute = block("KeepsAnAttribute", feed=kept_in_an_attribute)
FillsADict = block("FillsADict", feed=kept_in_a_dict, losses=dict)
TwoAttentions = block("TwoAttentions", feed=lambda self, right, x: self.other.attend(x), other=Block)


class Shortens(Block):
    """Returns half of its tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, ::2]


class ScalesByLength(Block):
    """Attention's scale is that of the length that the layer sees."""

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[2])


def tiled_mlp(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """DeepSpeed's TiledMLP, whose backward runs another one that adds to parameters' gradients."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(lambda self, x: Block.feed(self, x), self, x, 3, list(self.parameters()))


TilesItsMLP = block("TilesItsMLP", feed=tiled_mlp)
REFUSED = {
    Convolves: "mixes its tokens",
    ConvolvesKeys: "mixes its tokens",
    ShiftsTokens: "mixes its tokens",
    Recurs: "mixes its tokens",
    MixesHere: "mixes its tokens",
    Chunks: "tokens",
    KeepsAnAttribute: "outlive",
    FillsADict: "outlive",
    TwoAttentions: "attention more than once",
    ScalesByLength: "in a tile of",
    TilesItsMLP: "adds to its parameters' gradients",
}


@pytest.mark.parametrize("block", REFUSED)
def test_refused(block: type[nn.Module]) -> None:
    assert_whole(compare(toy(block), drive, quiet=True), REFUSED[block])


def test_attention_by_a_function_that_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay supplies its outputs and cannot build its graph again, which the backward of a tile would need."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", ds_memo.keep_whole(F.scaled_dot_product_attention))
    whole, tiled = build("llama"), build("llama")
    with attached(whole, tile=0), attached(tiled, quiet=True) as handle:
        for _ in range(2):
            assert_step(step(tiled, BATCH), step(whole, BATCH))
        assert_whole(handle.report(), "keep_whole", layers=4)


# ---- layers of which a refusal would be needless


ConvolvesChannels = block(
    "ConvolvesChannels",
    feed=lambda self, right, x: right(self.conv(x.flatten(0, 1)[:, None]).view_as(x)),
    conv=lambda: nn.Conv1d(1, 1, 3, padding=1),
)


class ReturnsATuple(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x), None, 7)


def kept_number(self: Any, right: Any, x: torch.Tensor) -> torch.Tensor:
    """A number outlives the call, no tensor."""
    self.tokens = x.shape[1]
    return right(x)


KeepsANumber = block("KeepsANumber", feed=kept_number)


class Sequential(Block):
    """Sequence first inside: (s, b, h)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        t = self.norm1(x).transpose(0, 1)
        q, k, v = self.qkv(t).view(s, b, 3, HEADS, -1).permute(2, 1, 3, 0, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = (t + self.o(out)).transpose(0, 1)
        return x + self.feed(x)


@pytest.mark.parametrize("block", [ConvolvesChannels, KeepsANumber, Sequential])
def test_tiled_all_the_same(block: type[nn.Module]) -> None:
    """A filter of three numbers sums 4,224 terms that cancel: stock's own gradient is 3e-6 off."""
    assert_was_tiled(compare(toy(block), drive, tolerance=2e-5 if block is ConvolvesChannels else FP32))


class Kinks(Block):
    """A whole of many tokens is on the one side of an activation's kink, a tile on the other."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        side = 1e-12 if x.shape[1] > 20 else -1e-12
        few = max(1, int(self.share * x.shape[1]))
        kink = F.relu(x[:, :few] - x[:, :few].detach() + side)
        return super().feed(x) + F.pad(kink, (0, 0, 0, x.shape[1] - few))


def test_an_activations_kink_between_two_roundings() -> None:
    """One token's gradient may differ where its output does not; that of many tokens is no chance."""
    few, many = Kinks(0.0), Kinks(0.5)
    x = BATCH.embeds
    probe(few, few.forward, Arguments((x,), {}))
    with pytest.raises(CannotTile, match="gradients of its input"):
        probe(many, many.forward, Arguments((x,), {}))


class ScalesAGradient(Kinks):
    """Beside the kink, a parameter's gradient depends on the length of the call, and nothing else does."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain.detach() + (1.0 if x.shape[1] > 20 else 1.1) * (self.gain - self.gain.detach())
        return super().feed(x) * gain


def test_a_kink_excuses_its_token_alone() -> None:
    block = ScalesAGradient(0.0)
    with pytest.raises(CannotTile, match="other gradients of its parameters"):
        probe(block, block.forward, Arguments((BATCH.embeds,), {}))


class Routes(Block):
    """Each token goes to one of two experts. Many tokens' scores differ by `margin`, in tiles the other way."""

    def __init__(self, margin: float, shift: float = 0.0) -> None:
        super().__init__()
        self.margin, self.shift = margin, shift
        self.gate, self.experts = nn.Linear(HIDDEN, 2), nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        if self.margin:
            side = self.margin if x.shape[1] > 20 else -self.margin
            tie = scores.mean(-1, keepdim=True) + torch.tensor([side / 2, -side / 2])
            scores = torch.where(x[..., :1] > 0, tie, scores)
        weight, choice = scores.flatten(0, 1).topk(1)
        outs = torch.stack([expert(x) for expert in self.experts], 2).flatten(0, 1)
        chosen = outs.gather(1, choice[..., None].expand(-1, 1, HIDDEN)).squeeze(1)
        out = (weight * chosen).view_as(x)
        return super().feed(x) + out + self.shift * F.pad(out, (0, 0, 1, -1))


def test_a_routers_choice_between_equal_scores() -> None:
    """A GEMM of another size rounds otherwise, next to a cut too. A larger difference, or a shift of tokens, is no chance."""
    torch.manual_seed(0)
    x = BATCH.embeds
    probe(equal := Routes(1e-7), equal.forward, Arguments((x,), {}))
    with pytest.raises(CannotTile, match="tiles choose other experts"):
        probe(other := Routes(0.1), other.forward, Arguments((x,), {}))
    with pytest.raises(CannotTile, match="outputs than the whole"):
        probe(shifted := Routes(1e-7, 0.1), shifted.forward, Arguments((x,), {}))


def test_a_layer_that_returns_a_tuple() -> None:
    def unwrapped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x, *others = block(x)
        assert others == [None, 7]
        return x

    assert_was_tiled(compare(Calls(ReturnsATuple, unwrapped), drive))


def test_a_refusal_counts_for_its_kind_of_layer_alone() -> None:
    stock, tiled = toy(Block), toy(Block)
    stock.blocks[1], tiled.blocks[1] = toy(Convolves).blocks[0], toy(Convolves).blocks[0]
    with attached(tiled, layers=["blocks.0", "blocks.1"], quiet=True) as handle:
        for _ in range(2):
            assert_step(step(tiled, BATCH), step(stock, BATCH))
        report = handle.report()["tiles"]
    assert report["layers"] == [0]
    assert list(report["not_tiled"]) == ["blocks.1"]


def test_an_output_of_another_shape() -> None:
    longer = Calls(Shortens, lambda block, x: block(x).repeat_interleave(2, 1)[:, : x.shape[1]])
    assert_whole(compare(longer, drive, quiet=True), "another shape than its hidden states")


# ---- arguments


class Crosses(Block):
    """Attends to another sequence."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.qkv(self.norm1(x))[..., :HIDDEN].view(b, s, HEADS, -1).transpose(1, 2)
        k, v = self.qkv(memory)[..., HIDDEN:].view(b, memory.shape[1], 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(q, k, v))
        return x + self.feed(x)


def crossing(length: int, trained: bool, rows: int = 2) -> Any:
    def drive(model: nn.Module, number: int) -> Outcome:
        x, memory = BATCH.embeds.clone().requires_grad_(), Batch.random(rows, length, seed=9).embeds.requires_grad_(trained)
        loss = model(x, BATCH.labels, memory=memory).loss
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "x": x.grad, "memory": memory.grad})

    return drive


@pytest.mark.parametrize("trained, why", [(True, "needs a gradient, and is not cut"), (False, "a tile of it raises")])
def test_cross_attention(trained: bool, why: str) -> None:
    """A memory of another length is not cut."""
    assert_whole(compare(toy(Crosses), crossing(20, trained), quiet=True), why)


@pytest.mark.parametrize("trained", [False, True])
def test_cross_attention_to_as_many_tokens(trained: bool) -> None:
    """Keys and values of a tile are those of as many tokens of the memory, so their sum over tiles is right."""
    assert_was_tiled(compare(toy(Crosses), crossing(23, trained), alpha=0.5))


def test_cross_attention_to_as_many_tokens_at_first() -> None:
    compare(toy(Crosses), lambda model, number: crossing(20 if number else 23, False)(model, number), quiet=True)


class Adds(Block):
    """Adds something to its hidden states that is no attention's: Zamba's embeddings."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return super().forward(x + memory)


class AddsBehind(Block):
    """Adds something to its output that is no attention's: Gemma 4's inputs of each layer."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * memory.sigmoid()


@pytest.mark.parametrize("block", [Adds, AddsBehind])
@pytest.mark.parametrize("alpha, tile", everyday([(0.5, 5), (1.0, 23)], [(0.5, 5)]))
def test_several_differentiable_inputs(block: type[nn.Module], alpha: float, tile: int) -> None:
    assert_was_tiled(compare(toy(block), crossing(23, True), alpha=alpha, tile=tile))


def test_one_input_for_all_sequences() -> None:
    """Its gradient is the sum over the sequences."""
    assert_was_tiled(compare(toy(Adds), crossing(23, True, rows=1)))


class Borrows(Block):
    """Uses a tensor that is neither argument nor parameter, and that needs a gradient: keys and values of another layer."""

    borrowed: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.borrowed[-1])


def test_a_gradient_that_leaves_the_layer_unseen() -> None:
    def borrow(model: nn.Module, number: int) -> Outcome:
        scale = torch.full((HIDDEN,), 1.5, requires_grad=True)
        Borrows.borrowed[:] = [scale * 1.0]
        loss = model(BATCH.embeds, BATCH.labels).loss
        loss.backward()
        return Outcome(loss.detach(), {**gradients(model), "scale": scale.grad})

    assert_whole(compare(toy(Borrows), borrow, quiet=True), "neither its argument nor its parameter")


class CutsTheMask(Block):
    """Gives attention as much of the mask as it sees tokens."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.join(F.scaled_dot_product_attention(*self.heads(x), mask[..., : x.shape[1]]))
        return x + self.feed(x)


def test_a_mask_that_the_layer_cuts() -> None:
    mask = torch.ones(23, 23).tril().bool()[None, None]
    assert_whole(compare(toy(CutsTheMask), lambda model, number: step(model, BATCH, mask=mask), quiet=True), "attention gets")


class SequenceFirst(Block):
    """Its hidden states are (s, b, h)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def test_sequences_first() -> None:
    """A tile of a few "sequences" is a few tokens of all."""

    batch, turned = Batch.random(6, 23), Calls(SequenceFirst, lambda block, x: block(x.transpose(0, 1)).transpose(0, 1))
    report = compare(turned, lambda model, number: step(model, batch), quiet=True)
    assert report["tiles"]["layers"] == []


def test_another_input_that_needs_a_gradient_later() -> None:
    def later(model: nn.Module, number: int) -> Outcome:
        return crossing(23, number > 0)(model, number)

    assert_was_tiled(compare(toy(Adds), later, steps=3))


def test_hidden_states_by_keyword() -> None:
    class ByKeyword(Block):
        def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(hidden_states) * scale

    assert_was_tiled(compare(Calls(ByKeyword, lambda block, x: block(scale=0.5, hidden_states=x)), drive))


def test_hidden_states_that_are_given_twice() -> None:
    assert_was_tiled(compare(Calls(Adds, lambda block, x: block(x, x)), drive))


# ---- whole models


def test_eager_attention_of_transformers() -> None:
    eager = build("llama", num_hidden_layers=LAYERS, attn_implementation="eager")
    assert_whole(compare(eager, drive, quiet=True), 'makes a matrix of tokens × tokens: attn_implementation is "eager"')
