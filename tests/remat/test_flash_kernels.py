"""FlashAttention-3 and 4 behind PyTorch's flash ops: stand-ins that register themselves as the packages do, on a CPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention as torch_attention
from torch.nn.attention import _registry

from ds_memo import attention_kernel as rules
from ds_memo.attention_kernel import FA3, FA4, FLASH, Attention
from ds_memo.errors import MemoError
from ds_memo.remat import attention_kernels, shared_changes
from tests.attention_kernels import KERNELS, aten, below_modes, cuda_kernels, ran
from tests.models import FP32, Batch, Block, compare_with_stock, step
from tests.remat.situations import toy
from tests.remat.test_cuda_attention import Grouped
from tests.tiles import rig as tiled

CPU = torch.device("cpu")
HOPPER, BLACKWELL = (9, 0), (10, 0)
THEIRS = {FA3: "FA3", FA4: "FA4"}
OPS = [op for op in KERNELS if "flash" in op]
Change = Callable[[str, Any], Any]
"""Given an op and its outputs, returns others: a fault."""


class _Handle:
    def __init__(self, library: torch.library.Library) -> None:
        self.library = library

    def remove(self) -> None:
        self.library._destroy()


def _register(name: str, change: Change) -> _Handle:
    """Replace the flash ops, as torch/nn/attention/_fa3.py does; dropout is refused, and of FlashAttention-4 windows."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(op: str, *args: Any, **kwargs: Any) -> Any:
        schema = getattr(aten, op).default._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        if given.get("dropout_p"):
            raise RuntimeError("dropout_p must be 0")
        if name == FA4 and (given.get("window_size_left"), given.get("window_size_right")) != (None, None):
            raise RuntimeError("windowed attention not supported")
        return change(op, KERNELS[op](*args, **kwargs))

    for op in OPS:
        library.impl(op, below_modes(f"{name}:{op}", functools.partial(kernel, op)), "CPU", allow_override=True)
    return _Handle(library)


def nothing(op: str, outputs: Any) -> Any:
    return outputs


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace CPU kernels, and take all floats for half precision."""
    monkeypatch.setattr(attention_kernels, "KEY", "CPU")
    refusal = rules.flash_refusal
    half = lambda name, call, card: refusal(name, call._replace(dtype="bfloat16"), card)  # noqa: E731
    # Models of other tests that were never detached still have need of the process's kernels.
    monkeypatch.setattr(shared_changes, "_needs", weakref.WeakKeyDictionary())
    monkeypatch.setattr(attention_kernels, "_process", attention_kernels._Process())
    monkeypatch.setattr(attention_kernels, "flash_refusal", half)
    yield
    assert torch_attention.current_flash_attention_impl() is None


@contextmanager
def active(
    monkeypatch: pytest.MonkeyPatch, name: str = FA3, change: Change = nothing, kernel: str = "cudnn"
) -> Iterator[list[str]]:
    """Have a package active over stand-ins of CUDA's kernels, and choose as on its card."""
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, THEIRS[name], functools.partial(_register, name, change))

    def choice(call: Attention, device: torch.device) -> rules.AttentionKernel:
        card = HOPPER if name == FA3 else BLACKWELL
        return rules.attention_kernel(call._replace(dtype="bfloat16"), card, attention_kernels.running())

    monkeypatch.setattr(attention_kernels, "choice", choice)
    with cuda_kernels(kernel):
        undo = attention_kernels.activate(name, CPU)
        ran.clear()
        try:
            yield ran
        finally:
            undo()


def call(left: int | None = None, right: int | None = None, dropout: float = 0.0, causal: bool = True) -> list[torch.Tensor]:
    """Call the flash ops as ranks do; return output, log-sum-exp and gradients."""
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 20, heads, 8) for heads in (4, 2, 2, 4))
    how, windows = (None, None, 20, 20, dropout, causal), {"window_size_left": left, "window_size_right": right}
    out, lse, *states = aten._flash_attention_forward(q, k, v, *how, False, **windows)
    return [out, lse, *aten._flash_attention_backward(gradient, q, k, v, out, lse, *how, *states[:2], **windows)]


CALLS = {
    "plain": {},
    "all keys": {"causal": False},
    "window": {"left": 5, "right": 0, "causal": False},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.parametrize("name", [FA3, FA4])
@pytest.mark.parametrize("which", CALLS)
def test_each_call_has_a_kernel_that_can_run_it(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward have the same one."""
    with active(monkeypatch, name) as found:
        values = call(**CALLS[which])
        runs = list(found)
    theirs = which in ("plain", "all keys") or (which == "window" and name == FA3)
    assert len(runs) == 2 and all(op.startswith(f"{name}:") == theirs for op in runs)
    with cuda_kernels(FLASH):
        assert all(torch.equal(*pair) for pair in zip(values, call(**CALLS[which]), strict=True))


def test_the_kernels_before_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_kernels(FLASH):
        with active(monkeypatch):
            assert attention_kernels.running() == {FA3}
        ran.clear()
        call()
        assert ran == ["_flash_attention_forward", "_flash_attention_backward"] and not attention_kernels.running()


# ---- layers that call F.scaled_dot_product_attention

BATCH = Batch.random(2, 45)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"alpha": 0.5, "resident_layers": 0, "plan": {"enabled": False}},
    "tiles": tiled.config(alpha=0.5),
    "groups": tiled.config(alpha=0.5, groups=2),
}


def drive(model: torch.nn.Module, number: int) -> Any:
    return step(model, BATCH)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [Block, functools.partial(Grouped, dropout=0.0)], ids=["", "grouped"])
def test_layers_attend_by_the_package(way: str, block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in tiles and by groups of heads, which all have one kernel; stock's is cuDNN."""
    with active(monkeypatch) as found:
        report = compare_with_stock(tiled.toy(block), drive, WAYS[way], tolerance=FP32)
    stock, ours = ([op for op in found if op.startswith(f"{FA3}:") == mine] for mine in (False, True))
    assert stock and all("cudnn" in op for op in stock)
    backwards = 2 if way == "groups" else 1
    assert len(ours) == len(stock) * (1 + backwards) / 2
    assert report["attention_kernel"] == {FA3: "its package is installed, and it is made for compute capability 9.0"}
    assert report["attention_recomputed"] == 0


def test_dropout_has_the_kernel_that_pytorch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with active(monkeypatch) as found:
        report = compare_with_stock(toy(functools.partial(Block, attention_dropout=0.2)), drive, WAYS["whole"], tolerance=FP32)
    assert found and all("cudnn" in op for op in found)
    assert report["attention_kernel"] == {"cudnn": "F.scaled_dot_product_attention took it"}


@pytest.mark.parametrize("asked", ["cudnn", "flash"])
def test_a_kernel_that_is_asked_for_comes_first(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "flash" is whatever the flash ops run: the user activated it."""
    with active(monkeypatch, kernel=asked) as found:
        compare_with_stock(toy(), drive, {**WAYS["whole"], "attention": asked}, tolerance=FP32)
    assert found and all(("cudnn" in op) == (asked == "cudnn") for op in found)


# ---- negative controls


def without_lse(op: str, outputs: Any) -> Any:
    return (outputs[0], None, *outputs[2:]) if "backward" not in op else outputs


def wrong_gradient(op: str, outputs: Any) -> Any:
    return (outputs[0], outputs[1] * 1.1, outputs[2]) if "backward" in op else outputs


@pytest.mark.parametrize(
    ("change", "said"), [(without_lse, "log-sum-exp .* is missing"), (wrong_gradient, "gradient of k is wrong")]
)
def test_a_package_for_another_pytorch_is_found_when_it_is_activated(
    change: Change, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoError, match=said), active(monkeypatch, change=change):
        raise AssertionError("it was activated")


def test_a_log_sum_exp_that_goes_missing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[bool] = []
    change = lambda op, outputs: without_lse(op, outputs) if faults else outputs  # noqa: E731
    with active(monkeypatch, change=change):
        call()
        faults.append(True)
        with pytest.raises(MemoError, match="kernel flash_attn_3 is missing"):
            call()


# ---- what a session does


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A device whose kernels are the CPU's, and that says it is a Hopper card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    activate = attention_kernels.activate
    monkeypatch.setattr(attention_kernels, "activate", lambda name, device: activate(name, CPU))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", functools.partial(_register, FA3, nothing))
    monkeypatch.setattr(attention_kernels, "_cudnn_first", lambda device: True)
    with cuda_kernels("cudnn"):
        yield ran


def used(monkeypatch: pytest.MonkeyPatch, installed: bool, configured: str | None = None) -> tuple[str, list[str]]:
    """Return the kernel of a plain call, and the warnings."""
    monkeypatch.setattr(attention_kernels, "_is_there", lambda module: installed)
    undo: list[Any] = []
    said: list[str] = []
    device = torch.device("cuda", 0)
    attention_kernels.use(device, configured, said.append, undo.append)
    try:
        return attention_kernels.kernel_for(Attention("bfloat16", 128, 128), device).name, said
    finally:
        for each in undo:
            each()


def test_a_package_that_is_there_is_taken(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert used(monkeypatch, True) == (FA3, [])
    assert used(monkeypatch, False) == ("cudnn", [])
    assert used(monkeypatch, True, "cudnn") == ("cudnn", [])
    assert used(monkeypatch, True, "flash") == ("flash", [])
    kernel, said = used(monkeypatch, False, FA3)
    assert kernel == "cudnn" and set(said) == {
        'memo.attention is "flash_attn_3"; the run goes on with cudnn: FlashAttention-3 cannot: PyTorch does not run its '
        "package; PyTorch prefers it on compute capability 9.0"
    }


def test_a_package_that_fails_is_told_once_and_cudnn_runs(hopper: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", functools.partial(_register, FA3, wrong_gradient))
    kernel, (said,) = used(monkeypatch, True)
    assert kernel == "cudnn" and "FlashAttention-3 is installed, but PyTorch cannot run it (its gradient of k is wrong" in said
