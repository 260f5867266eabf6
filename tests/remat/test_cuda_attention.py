"""The recipe over CUDA's attention kernels, here stand-ins with their metadata (tests/attention_kernels.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat import checkpoint, diagnostics
from ds_memo.remat.recipe import Observed
from ds_memo.remat.replay import Replay
from tests.attention_kernels import cuda_kernels, packed_by
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import (
    CONFIGS,
    HEADS,
    HIDDEN,
    LAYERS,
    Batch,
    Block,
    Different,
    Outcome,
    assert_same,
    build,
    compare_with_stock,
    step,
)
from tests.remat.situations import toy
from tests.tiles import rig as tiled
from tests.tiles.test_random_numbers import slope

BATCH = Batch.random(2, 45)
"""Neither a multiple of 16 nor of 32: masks and log-sum-exps are padded."""
SETTINGS = (*CONFIGS, {"alpha": 0.5, "resident_layers": 0}, {"alpha": 1.0, "resident_layers": 0})


class Grouped(Block):
    """Two key-value heads for four heads of queries."""

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), dim=-1)
        return tuple(part.view(b, s, -1, HIDDEN // HEADS).transpose(1, 2) for part in (q, k, v))

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(attention_dropout=dropout)
        self.qkv = nn.Linear(HIDDEN, 2 * HIDDEN)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, dropout_p=self.attention_dropout, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Biased(Block):
    """A bias of each head that trains, as of relative positions. Of CUDA's kernels, only the efficient one has its gradient."""

    trains = True

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 45, 45), requires_grad=self.trains)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.unsqueeze(0), dropout_p=0.1)
        return self.o(out.transpose(1, 2).flatten(2))


class Fixed(Biased):
    trains = False


class Masked(Block):
    """Padding at the front of the second sequence, as a mask of bools."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(s, s, dtype=torch.bool).tril().repeat(b, 1, 1, 1)
        mask[1, :, 5:, :5] = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))


class Packed(Block):
    """Documents of different lengths behind each other, with dropout."""

    kernel: str

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b * s, 3, HEADS, -1).unbind(1)
        borders = torch.tensor([0, 7, 40, 41, b * s], dtype=torch.int32)
        return self.o(packed_by(self.kernel, *qkv, borders, 0.2).reshape(b, s, HIDDEN))


ALL = ("cudnn", "flash", "efficient")
CASES: dict[str, tuple[tuple[str, ...], Callable[[], nn.Module]]] = {
    "causal": (ALL, toy),
    "dropout": (ALL, functools.partial(toy, functools.partial(Block, attention_dropout=0.2, dropout=0.1))),
    "grouped": (ALL, functools.partial(toy, Grouped)),
    "masked": (("cudnn", "efficient"), functools.partial(toy, Masked)),
    "biased": (("cudnn", "efficient"), functools.partial(toy, Fixed)),
    "bias trains": (("efficient",), functools.partial(toy, Biased)),
    "packed": (ALL, functools.partial(toy, Packed)),
    "llama": (ALL, functools.partial(build, "llama")),
    "mistral": (("cudnn", "efficient"), functools.partial(build, "mistral")),
}
"""Models, and the kernels that take their calls."""
PAIRS = [(name, kernel) for name, (kernels, _) in CASES.items() for kernel in kernels]
DAILY = ("dropout", "cudnn", 0)
PRODUCTS = sorted({DAILY, *((*pair, (0, 1 + i % 4)[i // 4 % 2]) for i, pair in enumerate(PAIRS))})
"""Each pair once: one half of them with the first setting, the other half with the other four in turn."""


def drive(model: nn.Module, number: int) -> Outcome:
    return step(model, BATCH)


@pytest.fixture(autouse=True)
def packed_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packed, "kernel", request.node.callspec.params["kernel"], raising=False)


def to_the_bit(got: Outcome, want: Outcome, tolerance: float) -> None:
    assert_same(got, want, 0.0)


@pytest.mark.parametrize("name, kernel, setting", everyday(PRODUCTS, [DAILY]))
def test_gradients(name: str, kernel: str, setting: int) -> None:
    """To the bit, unless alpha splits GEMMs: fewer rows may be summed in another order."""
    settings = SETTINGS[setting]
    with cuda_kernels(kernel) as ran:
        same = assert_same if settings["alpha"] == 0.5 else to_the_bit
        report = compare_with_stock(CASES[name][1](), drive, settings, same=same)
        assert report["attention_recomputed"] == 0 and not report["warnings"]
        forwards = [op for op in ran if not op.endswith("_backward")]
        assert len(forwards) == 2 * 3 * LAYERS == len(ran) / 2, "stock's and ours, once in each of three steps"


# ---- negative controls


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("what", ["output", "log-sum-exp", "log-sum-exp's padding", "seed"])
def test_a_wrong_output_would_show(kernel: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay supplies one output of the kernel wrong. What pads a log-sum-exp is never read."""
    position = {"output": 0, "seed": 2 if kernel == "efficient" else 6}.get(what, 1)

    def wrong(supplied: Any, *args: Any) -> tuple[Any, ...]:
        outputs = [*supplied(*args)]
        value = outputs[position]
        outputs[position] = value + 1 if value.dtype.is_floating_point else (value.to(torch.int64) + 1).to(value.dtype)
        if what == "log-sum-exp's padding":
            outputs[position] = torch.cat([value[..., :45], value[..., 45:] + 1], -1)
        return tuple(outputs)

    put_in(monkeypatch, Replay, "_supplied", wrong)
    with cuda_kernels(kernel), nullcontext() if what.endswith("padding") else pytest.raises(Different):
        compare_with_stock(CASES["dropout"][1](), drive, SETTINGS[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ALL)
def test_a_generator_that_does_not_move_on_would_show(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout behind attention would draw the numbers that attention drew."""
    monkeypatch.setattr("ds_memo.remat.replay.generator_of", lambda device: torch.Generator())
    with cuda_kernels(kernel), pytest.raises(Different):
        compare_with_stock(CASES["dropout"][1](), drive, SETTINGS[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ALL)
def test_attention_that_is_not_kept_would_show(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are right, and both counts tell."""
    monkeypatch.setattr(Observed, "note_hidden_writes", Observed.recompute_attention)
    with cuda_kernels(kernel) as ran:
        report = compare_with_stock(CASES["causal"][1](), drive, SETTINGS[0])
        assert sum(not op.endswith("_backward") for op in ran) == 3 * 3 * LAYERS
        assert report["attention_recomputed"] == 3 * LAYERS


# ---- in tiles

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "causal": tiled.toy,
    "grouped": functools.partial(tiled.toy, functools.partial(Grouped, dropout=0.0)),
    "llama": functools.partial(tiled.small, "llama"),
    "mistral": functools.partial(tiled.small, "mistral"),
}
BY = [pair for pair in itertools.product(BUILDS, ALL) if pair != ("mistral", "flash")]  # its window is a mask
IN_TILES = [(*pair, alpha, groups) for pair in BY for alpha in (0.0, 0.5, 1.0) for groups in (1, 2)]


@pytest.mark.parametrize("name, kernel, alpha, groups", everyday(IN_TILES, [("grouped", "flash", 0.5, 2)], slow=IN_TILES[::13]))
def test_gradients_in_tiles(name: str, kernel: str, alpha: float, groups: int) -> None:
    """The efficient kernel runs for all heads at once, and a warning says so."""
    with cuda_kernels(kernel) as ran:
        report = tiled.compare(BUILDS[name](), drive, alpha=alpha, groups=groups, quiet=kernel == "efficient")
        tiled.assert_was_tiled(report)
        backwards, per_layer = sum(op.endswith("_backward") for op in ran), 1 + (1 if kernel == "efficient" else groups)
        assert backwards == 2 * tiled.LAYERS * per_layer, "stock's and ours, in two steps"


@pytest.mark.parametrize("elements, kernel", [(1 << 9, "flash"), (1 << 20, "cudnn")])
def test_cudnn_gets_no_more_than_it_can(monkeypatch: pytest.MonkeyPatch, elements: int, kernel: str) -> None:
    for module in (checkpoint, diagnostics):
        monkeypatch.setattr(module, "CUDNN_ELEMENTS", elements)
    with cuda_kernels("cudnn") as ran:
        model = tiled.toy()
        with tiled.attached(model, quiet=True) as handle:
            drive(model, 0)
            assert {op for op in ran if op.endswith("_backward")} == {f"_scaled_dot_product_{kernel}_attention_backward"}
            assert sum("another kernel than cuDNN's" in said for said in handle.report()["warnings"]) == (kernel == "flash")
        handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 0})
        drive(model, 0)
        assert sum('Set memo.attention to "flash"' in said for said in handle.report()["warnings"]) == (kernel == "flash")
        handle.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("groups, alpha", [(1, 1.0), (2, 0.0)])
def test_dropout_of_attention_is_the_forwards(kernel: str, groups: int, alpha: float) -> None:
    """Gradients are the slope of the very function that the forward computed. Kernels drop by the number of the head."""
    model = tiled.toy(lambda: Block(attention_dropout=0.2)).double()
    with cuda_kernels(kernel), tiled.attached(model, quiet=True, alpha=alpha, groups=groups) as handle:
        by_gradients, by_values = slope(model, BATCH, seed=1)
        assert by_gradients == pytest.approx(by_values, rel=1e-5)
        assert tiled.tiled_layers(handle) == [0, 1]
