"""Functions given to `keep_whole`: attention whose kernels no dispatch mode sees, here because it runs below all modes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

import ds_memo
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.remat import modes
from ds_memo.remat.layer import Layer
from tests.faults import put_in
from tests.inside import inside, recipe_of
from tests.models import HIDDEN, LAYERS, Batch, Block, Toy, assert_same, compare_with_stock, every_config, step
from tests.remat import situations
from tests.remat.situations import BATCH, drive

aten = torch.ops.aten
FORWARD, BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward
ran: list[str] = []
"""Functions that ran below the modes."""


class Out(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor | None


class Below(torch.autograd.Function):
    """Causal attention over (b, heads, s, d), with dropout of the result, hidden from the modes like a package's own kernels.

    It saves the tensors that flash-attn's functions save, one of them padded.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0) -> Any:
        ran.append("forward")
        with _disable_current_modes():
            out, lse = FORWARD(q, k, v, 0.0, True)
            padded = F.pad(lse, (0, 3))
            mask = (torch.rand_like(out) >= dropout) / (1 - dropout) if dropout else None
        ctx.save_for_backward(q, k, v, None, out, padded, mask)
        ctx.length = lse.shape[-1]
        ctx.mark_non_differentiable(lse)
        return (out.clone() if mask is None else out * mask), lse

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        q, k, v, _, out, padded, mask = ctx.saved_tensors
        with _disable_current_modes():
            gradient = gradient if mask is None else gradient * mask
            return *BACKWARD(gradient, q, k, v, out, padded[..., : ctx.length], 0.0, True), None


def attend_below(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0) -> Out:
    return Out(*Below.apply(q, k, v, dropout))


class Attending(Block):
    """A block with the given attention function."""

    attention: Callable[..., Any] = staticmethod(ds_memo.keep_whole(attend_below))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.attention(*self.heads(x)).out)


def toy(block: Callable[[], nn.Module] = Attending) -> Toy:
    return situations.toy(block)


def runs(model: nn.Module, config: dict[str, Any], steps: int = 3) -> tuple[float, dict[str, Any]]:
    """Return how often attention ran per step and layer, and the report."""
    handle = ds_memo.attach(model, config)
    step(model, BATCH)
    ran.clear()
    for _ in range(steps):
        step(model, BATCH)
    report = handle.report()
    handle.detach()
    return len(ran) / steps / LAYERS, report


# ---- gradients


@every_config
def test_gradients_while_it_runs_once(config: dict[str, Any]) -> None:
    report = compare_with_stock(toy(), drive, config)
    assert report["attention_recomputed"] == 0 and not report["warnings"]
    assert runs(toy(), config)[0] == 1


def test_attention_runs_twice_without_keep_whole() -> None:
    """The negative control, and its warning."""

    class Unsaid(Attending):
        attention = staticmethod(attend_below)

    with pytest.warns(ds_memo.MemoWarning, match=r"no attention kernel was seen in it.*wrap its function in ds_memo\.keep_whole"):
        times, _ = runs(toy(Unsaid), {"alpha": 0.5, "resident_layers": 0})
    assert times == 2


def test_a_wrong_saved_tensor_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the gradients: the replay gives autograd the arguments in another order."""
    from ds_memo.remat.functions import FunctionCall

    put_in(monkeypatch, FunctionCall, "rebuild_saved", lambda right, *args: reversed([*right(*args)]))
    with pytest.raises((AssertionError, RuntimeError)):
        compare_with_stock(toy(), drive, {"alpha": 0.5, "resident_layers": 0})


def test_it_draws_random_numbers() -> None:
    class Dropping(Attending):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.join(self.attention(*self.heads(x), 0.2).out), 0.1)

    report = compare_with_stock(toy(Dropping), drive, {"alpha": 0.5, "resident_layers": 1})
    assert report["attention_recomputed"] == 0


@every_config
def test_what_it_returns_is_changed_in_place(config: dict[str, Any]) -> None:
    class Doubling(Attending):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            out, lse = self.attention(*self.heads(x))
            return self.join(out.mul_(2).sub_(lse.unsqueeze(-1)))

    compare_with_stock(toy(Doubling), drive, config)


def test_a_part_of_an_argument_is_saved() -> None:
    """A part of the output is saved too. Both are views of tensors that the replay has."""

    def gated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = x.chunk(2, dim=-1)
        ran.append("gated")
        out = left * right
        return out, out.view(-1)[3:7].exp()

    kept = ds_memo.keep_whole(gated)

    class Gated(Block):
        def feed(self, x: torch.Tensor) -> torch.Tensor:
            out, few = kept(self.up(self.norm2(x)))
            return x * out + few.sum()

    ran.clear()
    report = compare_with_stock(toy(Gated), drive, {"alpha": 0.5, "resident_layers": 0})
    assert len(ran) == 2 * 3 * LAYERS, "stock's forwards and ours"
    assert report["attention_recomputed"] == 0


# ---- calls that differ


@pytest.mark.filterwarnings("ignore:layer .* no attention kernel was seen")
@pytest.mark.parametrize("other", [None, ds_memo.keep_whole(lambda q, k, v: Out(q * 1.5 + v, None))], ids=["none", "another"])
def test_calls_that_differ(other: Any) -> None:
    """Lengths change, and a layer sometimes skips its attention, or calls another function."""

    class Fickle(Attending):
        differs = False

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            if not Fickle.differs:
                return super().attend(x)
            return self.join(other(*self.heads(x)).out) if other else torch.zeros_like(x)

    def fickle(model: nn.Module, number: int) -> Any:
        Fickle.differs = number in (2, 3, 6)
        return step(model, Batch.random(2, 17 + number % 2))

    compare_with_stock(toy(Fickle), fickle, {"alpha": 0.5, "resident_layers": 1}, steps=8)


def test_a_replay_that_does_something_else_is_an_error() -> None:
    class Unsteady(Attending):
        calls = 0

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            Unsteady.calls += 1
            q, k, v = self.heads(x)
            return self.join(self.attention(q, k, v if Unsteady.calls <= LAYERS else v.contiguous()).out)

    model = toy(Unsteady)
    ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
    with pytest.raises(ds_memo.MemoError, match="op 1, attend_below, was called with tensors of other shapes"):
        step(model, BATCH)


def test_under_a_checkpoint_inside_the_layer() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointing(Attending):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().attend, x, use_reentrant=False)

    with pytest.warns(ds_memo.MemoWarning, match="runs under torch.utils.checkpoint"):
        report = compare_with_stock(toy(Checkpointing), drive, {"alpha": 0.5, "resident_layers": 0})
    assert report["attention_recomputed"] == 3 * LAYERS


def test_full_recompute() -> None:
    times, report = runs(toy(), {"ablation": "full_recompute"})
    assert times == 2 and report["attention_recomputed"] == 4 * LAYERS


# ---- what cannot be kept


class Changing(Attending):
    attention = staticmethod(ds_memo.keep_whole(lambda q, k, v: attend_below(q, k, v.mul_(2))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        return self.join(self.attention(q, k, v.clone()).out)


class Scaled(Attending):
    """A function that closes over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 1.5))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        scaled = ds_memo.keep_whole(lambda q, k, v: attend_below(q * self.scale, k, v))
        return self.join(scaled(*self.heads(x)).out)


class ScaledByArgument(Scaled):
    @staticmethod
    @ds_memo.keep_whole
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> Out:
        return attend_below(q * scale, k, v)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.attention(*self.heads(x), self.scale).out)


@pytest.mark.parametrize(
    "block, why",
    [(Changing, "changes an argument in place"), (Scaled, "its backward needs a parameter that is not among its arguments")],
)
def test_what_is_refused(block: type[Block], why: str) -> None:
    """After the error the model still trains without memo."""
    model, stock = toy(block), toy(block)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 1})
    with pytest.raises(ds_memo.MemoError, match=f"was given to ds_memo.keep_whole, but {why}"):
        step(model, BATCH)
    handle.detach()
    model.zero_grad()
    assert_same(step(model, BATCH), step(stock, BATCH))


@pytest.mark.parametrize("config", [{"ablation": "full_recompute"}, {"alpha": 0.5, "resident_layers": 1}], ids=["again", "once"])
def test_it_closes_over_tensors_of_the_layer(config: dict[str, Any]) -> None:
    """If it is recomputed, the tensors that it closes over must be right too."""

    class Closing(Attending):
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.heads(x)
            return self.join(ds_memo.keep_whole(lambda: attend_below(q, k, v))().out)

    compare_with_stock(toy(Closing), drive, config)


def test_a_parameter_among_the_arguments() -> None:
    report = compare_with_stock(toy(ScaledByArgument), drive, {"alpha": 0.5, "resident_layers": 1})
    assert report["attention_recomputed"] == 0 and not report["warnings"]


# ---- compiled functions


def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        ran.append("compiled forward")
        return graph(*args)

    return make_boxed_func(run)


def test_a_compiled_function() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Out:
        return Out(F.scaled_dot_product_attention(q, k, v, is_causal=True), None)

    torch._dynamo.reset()
    compiled = torch.compile(
        attend, backend=aot_autograd(fw_compiler=counting, bw_compiler=lambda graph, inputs: make_boxed_func(graph))
    )

    class Compiled(Attending):
        attention = staticmethod(ds_memo.keep_whole(compiled))

    times, report = runs(toy(Compiled), {"alpha": 0.5, "resident_layers": 1})
    assert times == 1 and report["attention_recomputed"] == 0 and not report["warnings"]
    compare_with_stock(toy(Compiled), drive, {"alpha": 0.5, "resident_layers": 1})


def test_a_layer_compiled_around_it() -> None:
    """Without memo the compiler traces through."""
    torch._dynamo.reset()
    whole = ds_memo.keep_whole(lambda x: x * 2)
    compiled = torch.compile(lambda x: whole(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [3.0] * 3


def test_dynamo_skips_files_that_exist() -> None:
    assert [name for name in modes.IN_LAYERS if find_spec(f"ds_memo.remat.{name}") is None] == []


# ---- what is stored, and what is measured


class Mask:
    """Like FlexAttention's BlockMask: tensors for all layers, in an object that is no container."""

    def __init__(self, length: int) -> None:
        self.blocks = torch.ones(1, length, length)


def test_tensors_in_an_object_among_the_arguments_stay_where_they_are() -> None:
    @ds_memo.keep_whole
    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Out:
        return Out(attend_below(q, k, v).out * (q @ k.transpose(-1, -2) * mask.blocks).mean(), None)

    mask = Mask(17)

    class Masked(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.join(masked(*self.heads(x), mask).out)
            return x + self.feed(x)

    model = toy(Masked)
    handle = ds_memo.attach(model, {"alpha": 0.0, "resident_layers": 0})
    step(model, BATCH)
    recipe = recipe_of(handle)
    call = recipe.ops[1].func
    saved = [saved for saved in call.saved if saved.of_argument and saved.index == 3]
    assert saved, "the mask is known as an argument's"
    assert all(kept is None or kept.shape != mask.blocks.shape for op in recipe.ops[1:2] for kept in op.kept)
    handle.detach()
    compare_with_stock(toy(Masked), drive, {"alpha": 0.5, "resident_layers": 1})


def test_the_profile_knows_it_as_attention() -> None:
    model = toy()
    handle = ds_memo.attach(model, {"host_memory_gib": 1, "device_memory_gib": 1e-3})
    step(model, Batch.random(2, 64))
    sample = inside(handle).tuner.profile.kinds[0].samples[-1]
    assert sample.attention_s > 0 and sample.attention_backward_s > 0
    assert sample.attention_flops == 2 * 2 * HIDDEN * 64 * 64
    assert "attention" in {output.role for output in sample.outputs}


def test_a_block_mask_is_cut_with_its_call() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    block = Block()
    call = CaughtCall(Layer(0, "layer", block), block.forward, (torch.randn(1, 512, HIDDEN),), {"mask": mask})
    fn, args, _ = call.at(256)
    assert args[0].shape[1] == 256
    assert fn.keywords["mask"].seq_lengths == (256, 256)
    assert torch.equal(fn.keywords["mask"].to_dense(), torch.ones(1, 1, 2, 2).tril())
