"""Models whose attention Transformers runs eagerly, with memo's op in its place: values and gradients are stock's, layers run in
tiles, and what the op cannot do is left to the eager function."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_memo.hf import eager_attention
from ds_memo.remat.tensors import tensor_leaves
from ds_memo.sequence import kernels
from ds_memo.sequence.masks import Mask
from tests import architectures
from tests.everyday import everyday
from tests.faults import put_in
from tests.models import Batch, Outcome, build, poisoned_memory, step
from tests.sequence.float64 import float64
from tests.tiles.rig import assert_step, assert_was_tiled, attached, reasons

FAMILIES = ("gemma2", "gpt_oss", "vaultgemma", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "flint")
"""Soft caps and sinks; all but Flint have windows in some layers."""
PACKED = ((20, 30, 21), (71,))
WHOLE = ((71,),)
UNEQUAL = 1e-4
"""A control's least difference from stock, where 2e-6 is allowed."""


@functools.cache
def small(name: str) -> nn.Module:
    """Return a model whose caps bind and whose sinks count."""
    model = build("gemma2", attn_logit_softcapping=0.5) if name == "gemma2" else architectures.build(name)
    model = model.to(torch.get_default_dtype()).train()
    for owner in (model.config, *model.modules()):
        if getattr(owner, "attn_logit_softcapping", None):
            owner.attn_logit_softcapping = 0.5
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels know no float64
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    assert model.config._attn_implementation == "eager"
    return model


def drive(model: nn.Module, lengths: tuple[tuple[int, ...], ...] = WHOLE, **kwargs: Any) -> Outcome:
    """Take a step with documents of these lengths, by row."""
    batch = Batch.random(len(lengths), sum(lengths[0]), torch.get_default_dtype())
    if lengths != WHOLE:
        kwargs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return step(model, batch, use_cache=False, **kwargs)


def compare(name: str, tile: int, alpha: float, lengths: tuple[tuple[int, ...], ...], tolerance: float = 2e-6) -> dict[str, Any]:
    want = drive(small(name), lengths)
    with attached(small(name), tile=tile, alpha=alpha) as handle:
        for _ in range(2):
            with poisoned_memory():
                assert_step(drive(small(name), lengths), want, tolerance)
        report = handle.report()
    assert set(report["eager_attention"].values()) == {"one op"}
    return report


# ---- values and gradients

CASES = [(5, 0.0, WHOLE), (16, 0.0, PACKED), (23, 1.0, PACKED), (64, 1.0, WHOLE)]
IN_TILES = [("gemma2", 1), ("gpt_oss", 2), ("gemma2", 3), ("gpt_oss", 0), *((name, n % 4) for n, name in enumerate(FAMILIES[2:]))]


@pytest.mark.parametrize("name, case", everyday(IN_TILES, IN_TILES[:2]))
def test_in_tiles(name: str, case: int) -> None:
    tile, alpha, lengths = CASES[case]
    assert_was_tiled(compare(name, tile, alpha, lengths), layers=len(eager_layers(name)))


@pytest.mark.parametrize("name", everyday(FAMILIES, ["gemma2", "gpt_oss"]))
def test_whole_layers_keep_their_attention(name: str) -> None:
    for lengths in (WHOLE, PACKED):
        report = compare(name, 0, 0.5, lengths)
        assert report["attention_recomputed"] == 0 and report["warnings"] == []


@pytest.mark.parametrize("name", everyday(FAMILIES, ["gpt_oss"]))
def test_in_float64(name: str) -> None:
    """What differs in float32 is rounding."""
    with float64():
        exact = small.__wrapped__(name)
        for lengths in (WHOLE, PACKED):
            want = drive(exact, lengths)
            with attached(exact, tile=23, alpha=0.0):
                assert_step(drive(exact, lengths), want, 1e-11)


@pytest.mark.parametrize("name, tile", everyday([(name, 23 * (n % 2)) for n, name in enumerate(FAMILIES)], [("gpt_oss", 23)]))
def test_under_autocast(name: str, tile: int) -> None:
    """Weights in float32, as a Trainer's bf16=True has them: gradients are as far from float32's as stock's, or half more."""
    model = small(name)
    exact = drive(model, PACKED)
    with autocast_forward(model):
        stock = drive(model, PACKED)
    with attached(model, tile=tile, alpha=0.5) as handle, autocast_forward(model):
        got = drive(model, PACKED)
        assert set(handle.report()["eager_attention"].values()) == {"one op"}
    assert distance(got, exact) <= 1.5 * distance(stock, exact)


def test_logits_under_autocast_are_in_the_accumulators_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a backward that is called under autocast."""
    dtypes = []
    put_in(monkeypatch, kernels, "_product", lambda right, *factors: dtypes.append((out := right(*factors)).dtype) or out)
    model = small("gemma2")
    with torch.autocast("cpu", torch.bfloat16), attached(model, tile=0, alpha=0.5):
        drive(model)
    assert {*dtypes} == {torch.float32}


@contextmanager
def autocast_forward(model: nn.Module) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", torch.autocast("cpu", torch.bfloat16)(model.forward))
        yield


def distance(got: Outcome, want: Outcome) -> float:
    pairs = [(got.grads[key], gradient) for key, gradient in want.grads.items() if gradient is not None]
    return float(torch.cat([(a - b).flatten() for a, b in pairs]).norm())


def eager_layers(name: str) -> nn.ModuleList:
    return small(name).model.layers


# ---- negative controls


def off(name: str, lengths: tuple[tuple[int, ...], ...] = WHOLE) -> float:
    """Return the largest relative difference of a gradient."""
    want = drive(small(name), lengths)
    with attached(small(name), tile=16, alpha=0.0):
        got = drive(small(name), lengths)
    pairs = [(got.grads[key], gradient) for key, gradient in want.grads.items() if gradient is not None]
    largest = max(float(gradient.norm()) for _, gradient in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-3 * largest) for a, b in pairs)


@pytest.mark.parametrize("dropped", ["softcap", "s_aux"])
def test_a_cap_or_sinks_left_out(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison on a few tokens finds it, and the eager function runs. Without the comparison gradients are wrong."""
    name = "gemma2" if dropped == "softcap" else "gpt_oss"
    without = {"softcap": lambda cap: None, "s_aux": lambda sinks: sinks * 0 - 100}[dropped]

    def leave_out(right: Any, *args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs | {dropped: without(kwargs[dropped])})

    put_in(monkeypatch, eager_attention, "attend", leave_out)
    monkeypatch.setattr(eager_attention, "_alike", {})
    with attached(small(name), tile=16, alpha=0.0, quiet=True) as handle:
        drive(small(name))
        assert "other values than memo's" in handle.report()["warnings"][0]
    monkeypatch.setattr(eager_attention, "_are_alike", lambda *args: True)
    assert off(name) > UNEQUAL


def test_gradients_of_sinks_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(right: Any, *args: Any, s_aux: torch.Tensor, **kwargs: Any) -> Any:
        return right(*args, s_aux=s_aux.detach() + 0 * s_aux, **kwargs)

    put_in(monkeypatch, eager_attention, "attend", constant)
    assert off("gpt_oss") > UNEQUAL


def test_a_window_off_by_one_and_documents_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eager_attention._interval
    for fault in (
        lambda mask: Mask(mask.kind, mask.size + 1, parts=mask.parts),
        lambda mask: Mask(mask.kind, mask.size, parts=eager_attention._parts(mask.parts.length, ((0,),))),
    ):
        monkeypatch.setattr(eager_attention, "_interval", lambda *args, fault=fault: fault(right(*args)))
        assert off("gemma2", PACKED) > UNEQUAL


# ---- what is left to the eager function


MASK = torch.zeros(1, 1, 71, 71).masked_fill(torch.ones(71, 71).triu(1).bool(), torch.finfo(torch.float32).min)
MASK[..., 50, 40] = torch.finfo(torch.float32).min
LEFT: dict[str, dict[str, Any]] = {
    "drops 50% of attention's weights": {},
    "output_attentions": {"output_attentions": True},
    "pads its batch": {"attention_mask": (torch.arange(71) < 60).long()[None]},
    "a mask of its own": {"attention_mask": MASK},
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_to_the_eager_function(why: str) -> None:
    """To the bit, and a warning says why."""
    model, kwargs = build("gemma2", attention_dropout=0.5 * why.startswith("drops")), LEFT[why]
    want = drive(copy.deepcopy(model), **kwargs)
    with attached(model, tile=16, alpha=0.5, quiet=True) as handle:
        for _ in range(2):
            got = drive(model, **kwargs)
            assert torch.equal(got.loss, want.loss) and torch.equal(got.generator, want.generator)
        assert_step(got, want)
        report = handle.report()
    assert any(why in warning for warning in report["warnings"]), report["warnings"]
    assert why in report["eager_attention"]["Gemma2Attention"]
    assert report["tiles"]["layers"] == [] and len(report["tiles"]["not_tiled"]) == report["layers"]


def test_a_mask_that_pads_nothing_leaves_the_op() -> None:
    model, mask = build("gemma2"), torch.ones(1, 71, dtype=torch.long)
    want = drive(model, attention_mask=mask)
    with attached(model, tile=16, alpha=0.5) as handle:
        assert_step(drive(model, attention_mask=mask), want)
        assert handle.report()["tiles"]["not_tiled"] == {}


@pytest.mark.parametrize("length", [71, 5000])
def test_a_mask_that_is_no_interval(length: int) -> None:
    def holes(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & ((key != 3) | (query < length // 2))

    assert isinstance(eager_attention._interval(holes, 1, length, None, tuple), str)
    causal = eager_attention._interval(lambda row, head, query, key: key <= query, 1, length, None, tuple)
    assert isinstance(causal, Mask) and causal.kind == "causal"


def test_generation_with_a_cache() -> None:
    """Keys of earlier tokens are there, and the eager function serves."""
    model = build("gemma2").eval()
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    with attached(model, tile=16, quiet=True):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)


# ---- the model's configuration


def test_it_is_stock_again_when_detached_and_copies_are() -> None:
    model = build("gemma2")
    twin = type(model)(model.config)  # shares the configuration, and is not attached
    want = drive(twin)
    with attached(model, tile=16):
        assert model.config._attn_implementation == eager_attention._NAME
        assert copy.deepcopy(model).config._attn_implementation == "eager"
        assert pickle.loads(pickle.dumps(model.config))._attn_implementation == "eager"
        got = drive(twin)
        assert torch.equal(got.loss, want.loss) and all(torch.equal(got.grads[key], want.grads[key]) for key in want.grads)
        assert "ds_memo" not in model.config.to_json_string()
    assert model.config._attn_implementation == "eager"
    with attached(model, tile=16, attention="eager", quiet=True) as handle:
        drive(model)
        assert "eager" in model.config._attn_implementation and handle.report()["tiles"]["layers"] == []


def test_eager_attention_that_a_user_chose_stays() -> None:
    model = build("llama", attn_implementation="eager")
    want = drive(model)
    with attached(model, tile=16, quiet=True) as handle:
        assert torch.equal(drive(model).loss, want.loss)
        (reason,) = reasons(handle)
        assert 'attn_implementation is "eager"' in reason


# ---- memory


class Largest(TorchDispatchMode):
    """Sees the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, *(tensor.nbytes for tensor in tensor_leaves(out)), 0)
        return out


@pytest.mark.parametrize("name", everyday(["gemma2", "gpt_oss"], ["gpt_oss"]))
def test_no_tensor_of_tokens_by_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIDE", 64)
    monkeypatch.setattr(kernels, "BLOCK", 64)
    length = 512
    with Largest() as stock:
        drive_long(small(name), length)
    with attached(small(name), tile=64, alpha=0.0), Largest() as ours:
        drive_long(small(name), length)
    assert stock.nbytes >= 4 * 4 * length * length, "of all heads, in float32"
    assert ours.nbytes < 4 * length * length


def drive_long(model: nn.Module, length: int) -> None:
    model.config.max_position_embeddings = length
    step(model, Batch.random(1, length), use_cache=False, position_ids=torch.arange(length)[None])
