"""``"kernels": "fast"``: gradients against the whole code's, and code of another form, which keeps its own.

Liger's kernels need a GPU. A stand-in with their signatures writes into its inputs as they do. The real ones run in Triton's
interpreter, which takes CPU tensors, where Liger is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.hf import fast_kernels
from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, ds_config, start, train
from tests.models import LAYERS, Batch, assert_same, build, compare_with_stock, step
from tests.runtime.traces import fingerprint

pytestmark = ON_ONE_CPU_RANK

SWIGLU = """
import torch
calls = []
def swiglu_forward(a, b):
    calls.append("forward")
    return a, b, torch.nn.functional.silu(a) * b
def swiglu_backward(a, b, dc):
    calls.append("backward")
    sigmoid = a.sigmoid()
    da, db = dc * b * sigmoid * (1 + a * (1 - sigmoid)), dc * a * sigmoid
    return a.copy_(da), b.copy_(db)
"""
ROPE = """
import torch
calls = []
def _turn(x, cos, sin, sign):
    seen = x.transpose(1, 2).contiguous()
    half = x.shape[-1] // 2
    cos, sin = cos[:, :, None, :half], sign * sin[:, :, None, :half]
    first, second = seen[..., :half].clone(), seen[..., half:].clone()
    seen[..., :half], seen[..., half:] = first * cos - second * sin, second * cos + first * sin
    return seen.transpose(1, 2)
def rope_forward(q, k, cos, sin):
    calls.append("forward")
    return _turn(q, cos, sin, 1), _turn(k, cos, sin, 1), cos, sin
def rope_backward(dq, dk, cos, sin):
    calls.append("backward")
    return _turn(dq, cos, sin, -1), _turn(dk, cos, sin, -1)
"""
FAST = {"alpha": 0.5, "resident_layers": 1, "kernels": "fast"}
WAYS = {
    "whole": FAST,
    "tiles": {**FAST, "tile_tokens": 8, "resident_layers": 0},
    "solved": {"kernels": "fast"},
    "with whole logits": {**FAST, "kernels": {"fast": True, "cross_entropy": "whole"}},
}
DONE = {"kernel": "liger", "modules": LAYERS, "stock": {}}


def write(folder: Path, swiglu: str = SWIGLU, rope: str = ROPE) -> None:
    (folder / "liger_kernel" / "ops").mkdir(parents=True)
    for name, text in {"__init__": "", "ops/__init__": "", "ops/swiglu": swiglu, "ops/rope": rope}.items():
        (folder / "liger_kernel" / f"{name}.py").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder for a stand-in of Liger, which runs on CPUs."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "liger_kernel"}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fast_kernels, "takes_triton", lambda device: True)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    sys.modules.update(hidden)


def calls() -> dict[str, list[str]]:
    return {name: sys.modules[f"liger_kernel.ops.{name}"].calls for name in ("rope", "swiglu")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients(name: str, way: str, packages: Path) -> None:
    """Stored rows, replays and tiles give the whole code's gradients: no kernel writes into what is kept."""
    write(packages)
    model = build(name)
    report = compare_with_stock(model, lambda model, at: step(model, Batch.random(1, 32, seed=at)), WAYS[way], tolerance=1e-5,
                                same=lambda got, want, tolerance: assert_same(_at_loss(got, want), want, tolerance))  # fmt: skip
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    assert report["kernels"] == {"norm": {"kernel": "torch", "modules": norms, "stock": {}}, "rotary": DONE, "swiglu": DONE}
    assert all({"forward", "backward"} == set(seen) for seen in calls().values())


def _at_loss(got, want):
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    got.loss = want.loss
    return got


def test_each_op_in_bf16(packages: Path) -> None:
    """Inputs that are no contiguous memory, and gradients that are expanded."""
    write(packages)
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(3, 4, 10, generator=generator).bfloat16()[..., ::2] for _ in range(2))
    q, k = (torch.randn(2, heads, 5, 8, generator=generator).bfloat16() for heads in (4, 2))
    angles = torch.rand(1, 5, 4, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    cases = [
        (lambda *x: (fast_kernels.swiglu(*x),), lambda gate, up: (nn.functional.silu(gate) * up,), [gate, up]),
        (lambda q, k: fast_kernels.rotate(q, k, cos, sin), lambda q, k: fast_kernels._rotated(q, k, cos, sin), [q, k]),
    ]
    for fused, formula, inputs in cases:
        results = []
        for function in (fused, formula):
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = function(*leaves)
            sum(out.sum() for out in outputs).backward()
            results.append([*outputs, *(leaf.grad for leaf in leaves)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.library.opcheck(fast_kernels.swiglu, (gate.float().requires_grad_(), up.float().requires_grad_()))
    torch.library.opcheck(fast_kernels._rotate, (*(x.float().requires_grad_() for x in (q, k)), cos.float(), sin.float(), False))


def left(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return what keeps its own code, by kernel."""
    before = fingerprint(model)
    handle = ds_memo.attach(model, FAST)
    account = handle.report()["kernels"]
    assert all(row["kernel"] is None and row["modules"] == 0 for row in account.values() if row["stock"])
    handle.detach()
    assert fingerprint(model) == before
    return {name: row["stock"] for name, row in account.items()}


def test_code_of_another_form_is_left_alone(packages: Path) -> None:
    """Gemma's norm scales by 1 + weight and its MLP has another activation; Phi-3 has one projection for gate and up."""
    write(packages)
    gemma = left(build("gemma3"))
    assert gemma["norm"] == {"Gemma3RMSNorm": "it has no weight, or does not compute weight * x / rms(x)"}
    assert gemma["swiglu"] == {"Gemma3MLP": "its activation is GELUTanh"}
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
    cohere = CohereForCausalLM(CohereConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    assert left(cohere)["rotary"] == {"CohereAttention": "angles by CohereRotaryEmbedding, which is not Llama's"}
    llama = build("llama")
    llama.model.layers[0].mlp.forward = lambda x: x
    with_own = ds_memo.attach(llama, FAST)
    assert with_own.report()["kernels"]["swiglu"] == {**DONE, "modules": LAYERS - 1, "stock": {"LlamaMLP": fast_kernels.REPLACED}}
    with_own.detach()


def test_a_norm_with_epsilon_outside_the_root_and_a_subclass_are_left_alone() -> None:
    class OutsideRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)

    class TwiceRMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for norm in (OutsideRMSNorm, lambda: TwiceRMSNorm(8)):
        model = nn.ModuleList([nn.ModuleList(norm() for _ in range(2))])
        assert len(left(model)["norm"]) == 1


def test_a_norm_of_another_type_than_its_input_keeps_the_wider_one() -> None:
    model = build("llama")
    norm, x = model.model.norm, torch.randn(2, 3, model.config.hidden_size, dtype=torch.bfloat16)
    want = norm(x)
    handle = ds_memo.attach(model, FAST)
    assert want.dtype == norm(x).dtype == torch.float32 and torch.equal(norm(x), want)
    handle.detach()


@pytest.mark.parametrize(
    "kernel, source", [("swiglu", SWIGLU.replace("1 + a *", "1 - a *")), ("rope", ROPE.replace("- second", "+ second"))]
)
def test_a_kernel_whose_results_differ_is_not_taken(kernel: str, source: str, packages: Path) -> None:
    write(packages, **{kernel: source})
    differ = {"all": "Liger's results differ from the formula on this device"}
    account = left(build("llama"))
    assert account == {"norm": {}, "rotary": {}, "swiglu": {}, {"rope": "rotary"}.get(kernel, kernel): differ}


def test_not_installed_and_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    account = left(build("llama"))
    assert account["norm"] == {} and "which needs a GPU; the model is on cpu" in account["rotary"]["all"]
    monkeypatch.setattr(fast_kernels, "takes_triton", lambda device: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", None)
    assert "Install it: pip install liger-kernel" in left(build("llama"))["rotary"]["all"]


def test_a_model_of_the_same_class_beside_it_and_a_compiler_have_stock_code(packages: Path) -> None:
    write(packages)
    model, batch = build("llama"), Batch.random(1, 16)
    other = copy.deepcopy(model)
    handle = ds_memo.attach(model, FAST)
    counts = {name: len(seen) for name, seen in calls().items()}
    want = step(other, batch)
    compiled = copy.deepcopy(other)
    compiled.compile(backend="eager")
    step(compiled, batch)
    inner = torch.compile(model.model.layers[0].mlp, backend="eager")
    inner(torch.randn(1, 4, model.config.hidden_size))
    assert {name: len(seen) for name, seen in calls().items()} == counts
    got = _at_loss(step(model, batch), want)
    assert_same(got, want, tolerance=1e-5)
    handle.detach()


def test_zero_3(packages: Path) -> None:
    write(packages)
    stock = start(ds_config(3, memo=MEMO))
    want = train(stock, steps=2)
    stock.memo.detach()
    engine = start(ds_config(3, memo={**MEMO, "kernels": "fast"}))
    assert train(engine, steps=2) == pytest.approx(want, rel=1e-5)
    assert engine.memo.report()["kernels"]["swiglu"] == DONE and "backward" in calls()["rope"]
    engine.memo.detach()


INTERPRETED = """
import numpy, torch, triton.language as tl
from triton.runtime import interpreter
own = interpreter._implicit_cvt
def convert(x):  # the interpreter leaves a float as it is; a compiled kernel gets a tensor
    if type(x) is not float:
        return own(x)
    return tl.tensor(interpreter.TensorHandle(numpy.array([x], numpy.float32), tl.float32), tl.float32)
interpreter._implicit_cvt = convert
from ds_memo.hf import fast_kernels
assert fast_kernels._is_rotary_right(torch.device("cpu")) and fast_kernels._is_swiglu_right(torch.device("cpu"))
"""


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed: pip install liger-kernel")
def test_ligers_own_kernels_in_tritons_interpreter() -> None:
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
