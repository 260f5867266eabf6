"""Kernels that ranks call on CUDA, by stand-ins with their metadata (tests/attention_kernels.py): values against formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_memo import attention_kernel as choice
from ds_memo.errors import MemoError
from ds_memo.remat import cudnn
from ds_memo.sequence import kernels
from ds_memo.sequence.masks import Mask, plan
from tests import attention_kernels
from tests.attention_kernels import cuda_kernels
from tests.everyday import everyday
from tests.sequence.test_kernels import MASKS, differences, layout

chosen: set[str] = set()
"""Kernels of ds_memo's own calls. What ran may be the stock model's."""
TOLERANCE = 1e-5
"""Log-sum-exps are in float32, as all else here."""
CARDS = {"hopper": (9, 0), "ampere": (8, 0), "turing": (7, 5)}
DOCUMENTS = {"one": [[0]], "packed": [[0, 7, 8, 30]], "rows differ": [[0, 7, 8, 30], [0]]}


@pytest.fixture(autouse=True)
def fresh_calls() -> Iterator[None]:
    kernels._work.cache_clear()
    yield
    kernels._work.cache_clear()


@contextmanager
def card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], configured: str | None = None, **changed: Callable[..., Any]
) -> Iterator[list[str]]:
    """Have calls on the CPU choose and run kernels as on such a card, in half precision; yield the kernels that ran."""
    chosen.clear()

    def kernel_for(call: choice.Attention, device: torch.device) -> choice.AttentionKernel:
        found = choice.attention_kernel(call._replace(dtype="bfloat16"), capability, configured=configured)
        chosen.add(found.name)
        return found

    monkeypatch.setattr(kernels, "kernel_for", kernel_for)
    with cuda_kernels("cudnn", **changed) as ran:
        yield ran


def errors(ring: int = 1, mask: Mask = MASKS[0], documents: Any = ((0,),), **case: Any) -> list[float]:
    return differences(layout(ring, 48, documents), mask, 2, dtype=torch.float32, **case)


@pytest.mark.parametrize("ring", everyday([1, 2, 3], [1, 2]))
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
@pytest.mark.parametrize("name", CARDS)
def test_each_card_s_kernels_give_the_softmax(
    name: str, mask: Mask, documents: str, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with card(monkeypatch, CARDS[name]) as ran:
        assert max(errors(ring, mask, DOCUMENTS[documents])) < TOLERANCE
    families = {"hopper": {"flash", "cudnn"}, "ampere": {"flash"}, "turing": {"efficient"}}[name]
    if name == "hopper" and mask.kind in ("causal", "both") and documents == "one":
        families = {"cudnn"}
    elif mask.kind == "window" or documents == "rows differ":
        families -= {"cudnn"}
    assert ran and {next(family for family in ("flash", "cudnn", "efficient") if family in op) for op in ran} <= families


CASES = [((0, 47), "cudnn"), (tuple(range(0, 48, 5)), "flash")]


@pytest.mark.parametrize(("starts", "kernel"), CASES, ids=["a key alone", "many calls"])
@pytest.mark.parametrize("ring", [1, 2])
def test_a_call_with_one_key(starts: tuple[int, ...], kernel: str, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As padding may be; cuDNN takes none. Three heads share a key head. Ten calls are one of flash."""
    with card(monkeypatch, (9, 0)) as ran:
        assert max(errors(ring, documents=(starts,), heads=(6, 2))) < TOLERANCE
    assert ran and (kernel in ran[0] or ring == 2)


def test_documents_have_flash_however_few() -> None:
    """Their lengths change with each batch, and cuDNN makes a plan for each."""
    for starts, kind in (((0,), "plain"), ((0, 20), "documents")):
        found = plan(layout(1, 48, (starts,))[0], Mask())
        assert kernels._mask_of(tuple(found.steps[0]), found.documents) == kind


@pytest.mark.parametrize(
    ("heads", "sizes"), [((4, 1), (8, 8)), ((3, 3), (16, 16)), ((4, 2), (24, 16)), ((4, 2), (12, 12))], ids=str
)
@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.kind)
def test_heads_of_any_number_and_size(
    heads: tuple[int, int], sizes: tuple[int, int], mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    with card(monkeypatch, (9, 0)) as ran:
        assert max(errors(2, mask, heads=heads, sizes=sizes)) < TOLERANCE
    by_cudnn = mask.kind == "causal" and sizes[0] == sizes[1] and sizes[0] % 8 == 0
    assert all(("cudnn" in op) == by_cudnn for op in ran)


@pytest.mark.parametrize("elements", [96 * 8 * 2, 96 * 8], ids=["two heads", "one head"])
def test_calls_of_many_elements_go_in_groups_of_heads(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of several that share a key is a call of its own; their sums are of float32."""
    monkeypatch.setattr(cudnn, "CUDNN_ELEMENTS", elements)
    with card(monkeypatch, (9, 0)) as ran:
        assert max(errors(heads=(4, 2))) < TOLERANCE
    assert len(ran) == 2 * (4 * 96 * 8 // elements)
    monkeypatch.setattr(choice, "CUDNN_ELEMENTS", 96 * 8 - 1)
    choice.attention_kernel.cache_clear()
    with card(monkeypatch, (9, 0)) as ran:
        assert max(errors(heads=(4, 2))) < TOLERANCE
    choice.attention_kernel.cache_clear()
    assert ran and not any("cudnn" in op for op in ran)


# ---- negative controls


NO_LSE = {
    "hopper": ("_scaled_dot_product_cudnn_attention", 1),
    "ampere": ("_flash_attention_forward", 1),
    "turing": ("_scaled_dot_product_efficient_attention", 1),
}


@pytest.mark.parametrize("found", [None, torch.empty(0), torch.empty(0, dtype=torch.bfloat16)], ids=["none", "empty", "of half"])
@pytest.mark.parametrize("name", CARDS)
def test_a_kernel_without_a_log_sum_exp_is_an_error(
    name: str, found: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, at = NO_LSE[name]
    whole = attention_kernels.KERNELS[op]

    def without(*args: Any, **kwargs: Any) -> Any:
        outputs = list(whole(*args, **kwargs))
        outputs[at] = found if found is None or found.dtype == torch.float32 else outputs[at].to(found.dtype)
        return tuple(outputs)

    with card(monkeypatch, CARDS[name], **{op: without}), pytest.raises(MemoError, match="the log-sum-exp of attention's kernel"):
        errors()


def test_the_gradients_of_cudnn_want_the_merged_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = kernels.backward

    def of_one_step(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bands: Any, *rest: Any) -> Any:
        return backward(grad, q, k, v, *kernels.forward(q, k, v, bands, *rest), bands, *rest)

    monkeypatch.setattr("tests.sequence.test_kernels.backward", of_one_step)
    with card(monkeypatch, (9, 0)):
        *right, dq, dk, dv = errors(2)
    assert max(right) < TOLERANCE < 0.01 < min(dq, dk, dv)
