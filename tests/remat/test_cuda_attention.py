"""The recipe over CUDA's attention kernels, here stand-ins with their metadata (tests/attention_kernels.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ds_memo
from ds_memo.remat import cudnn, diagnostics
from ds_memo.remat.recipe import Observed
from ds_memo.remat.replay import Replay
from tests.attention_kernels import KERNELS, cuda_kernels, packed_by
from tests.everyday import everyday, pairs
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

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout, enable_gqa=True)


class Biased(Block):
    """A bias of each head that trains, as of relative positions. Of CUDA's kernels, only the efficient one has its gradient."""

    trains = True

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 45, 45), requires_grad=self.trains)

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.unsqueeze(0), dropout_p=0.1)


class Fixed(Biased):
    trains = False


class Masked(Block):
    """Padding at the front of the second sequence, as a mask of bools."""

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().repeat(len(q), 1, 1, 1)
        mask[1, :, 5:, :5] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


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


WRONG = [
    *(("cudnn", "output"), ("flash", "log-sum-exp"), ("efficient", "log-sum-exp's padding")),
    *(("efficient", "seed"), ("cudnn", "seed")),
]
"""Kernels, and what is supplied wrong. Seeds differ in dtype and place."""


@pytest.mark.slow
@pytest.mark.parametrize("kernel, what", WRONG)
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
@pytest.mark.parametrize("kernel", ["cudnn"])
def test_a_generator_that_does_not_move_on_would_show(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout behind attention would draw the numbers that attention drew."""
    monkeypatch.setattr("ds_memo.remat.replay.generator_of", lambda device: torch.Generator())
    with cuda_kernels(kernel), pytest.raises(Different):
        compare_with_stock(CASES["dropout"][1](), drive, SETTINGS[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flash"])
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
IN_TILES = [case for case in pairs(list(BUILDS), ALL, (0.0, 0.5, 1.0), (1, 2)) if case[:2] != ("mistral", "flash")]
"""Mistral's window is a mask, which flash does not take."""


@pytest.mark.parametrize(
    "name, kernel, alpha, groups", everyday(IN_TILES, [each for each in IN_TILES if each[:2] == ("grouped", "flash")])
)
def test_gradients_in_tiles(name: str, kernel: str, alpha: float, groups: int) -> None:
    """The efficient kernel runs for all heads at once, and a warning says so."""
    with cuda_kernels(kernel) as ran:
        report = tiled.compare(BUILDS[name](), drive, alpha=alpha, groups=groups, quiet=kernel == "efficient")
        tiled.assert_was_tiled(report)
        backwards, per_layer = sum(op.endswith("_backward") for op in ran), 1 + (1 if kernel == "efficient" else groups)
        assert backwards == 2 * tiled.LAYERS * per_layer, "stock's and ours, in two steps"


# ---- sizes and masks with which cuDNN's gradients may be wrong

CUDNN = "_scaled_dot_product_cudnn_attention"
ALL_HEADS = 2 * 45 * HIDDEN
"""Elements of queries."""
ALONE = {"plan": {"enabled": False}}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"alpha": 0.5, "resident_layers": 0, **ALONE},
    "tiles": tiled.config(alpha=0.5),
    "groups": tiled.config(alpha=0.5, groups=2),
    "recomputed": {"ablation": "full_recompute", "tile_tokens": 16, **ALONE},
}


def noting(name: str, sizes: list[int]) -> Callable[..., Any]:
    """Return cuDNN's stand-in, which notes elements of queries."""
    position = name.endswith("backward")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        sizes.append(args[position].numel())
        return KERNELS[name](*args, **kwargs)

    return kernel


def in_way(model: nn.Module, way: str, monkeypatch: pytest.MonkeyPatch, limit: int, drive: Any = drive) -> tuple[list[int], Any]:
    """Compare gradients with those of one call. Return elements of queries of each call, and the report."""
    sizes: list[int] = []
    with cuda_kernels("cudnn", **{name: noting(name, sizes) for name in (CUDNN, f"{CUDNN}_backward")}):
        want = drive(model, 0)
        sizes.clear()
        monkeypatch.setattr(cudnn, "CUDNN_ELEMENTS", limit)
        with tiled.strict(quiet=True):
            handle = ds_memo.attach(model, WAYS[way])
            for _ in range(2):
                tiled.assert_step(drive(model, 0), want)
            report = handle.report()
            handle.detach()
        return sizes, report


CALLS = [("causal", 4), ("causal", 3), ("grouped", 2), ("grouped", 1), ("llama", 2)]
IN_WAYS = [(*call, [*WAYS][(number + more) % 4]) for number, call in enumerate(CALLS) for more in (0, 2)]
"""Models, heads in a call, and two ways each."""


@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.parametrize("name, each, way", IN_WAYS)
def test_cudnn_gets_few_heads_at_a_time(kernel: str, way: str, name: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads, `each` in a call; also with two heads to a key head."""
    limit = ALL_HEADS * each // HEADS
    sizes, report = in_way(BUILDS[name](), way, monkeypatch, limit)
    assert max(sizes) <= limit and sizes and not [said for said in report["warnings"] if "cuDNN" in said]


@pytest.mark.parametrize("kernel", ["cudnn"])
@pytest.mark.parametrize("way", ["whole", "tiles"])
@pytest.mark.parametrize("why, limit", [("a mask of 64 queries", 1 << 29), ("elements of queries", 1 << 9)])
def test_another_kernel_than_cudnns(kernel: str, way: str, why: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a mask of 64 tokens of 128, and for a head that is too large by itself."""
    masked = why.startswith("a mask")
    model = tiled.toy(Masked if masked else Block)
    batch = Batch.random(2, 64 if masked else 45)
    sizes, report = in_way(model, way, monkeypatch, limit, lambda model, number: step(model, batch))
    assert not sizes
    (said,) = [said for said in report["warnings"] if "another kernel than cuDNN's" in said]
    assert why in said


@pytest.mark.parametrize("kernel", ["cudnn"])
def test_calls_that_nothing_can_cut(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that is called by name."""
    monkeypatch.setattr(diagnostics, "CUDNN_ELEMENTS", 1 << 9)
    model = tiled.toy()
    with cuda_kernels("cudnn"), tiled.attached(model, quiet=True, tile=0) as handle:
        drive(model, 0)
        assert sum('Set memo.attention to "flash"' in said for said in handle.report()["warnings"]) == 1


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
