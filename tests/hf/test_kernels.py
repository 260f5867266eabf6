"""Optional kernels: an error with the install line if missing, and calls from the right modules if installed.

apex and flash-attn need a GPU; stand-ins with their signatures, computed by PyTorch, show here that the right modules call them
with the right arguments.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ds_memo
from ds_memo.hf import fused_norms
from tests.deepspeed.engines import MEMO, ON_ONE_CPU_RANK, ds_config, train
from tests.models import LAYERS, Batch, assert_same, build, step
from tests.runtime.traces import fingerprint

pytestmark = ON_ONE_CPU_RANK

MISSING = {
    ("attention", "flash_attn_2"): ("flash_attn", "pip install flash-attn --no-build-isolation"),
    ("attention", "flash_attn_3"): ("flash_attn_interface", "./flash-attention/hopper"),
    ("attention", "flash_attn_4"): ("flash_attn.cute", "pip install --pre flash-attn-4"),
    ("norm", "apex"): ("apex.normalization.fused_layer_norm", "git clone https://github.com/NVIDIA/apex"),
    ("adam", "apex"): ("apex.optimizers", "git clone https://github.com/NVIDIA/apex"),
    ("cross_entropy", "liger"): ("liger_kernel.transformers.monkey_patch", "pip install liger-kernel"),
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
APEX = {
    "apex/__init__.py": "import torch\n",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
import torch.nn.functional as F
calls = []
def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append("layer")
    return F.layer_norm(input, normalized_shape, weight, bias, eps)
def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append("rms")
    return F.rms_norm(input, normalized_shape, weight, eps)
""",
    "apex/optimizers.py": """
import torch
class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0., amsgrad=False, set_grad_none=True, capturable=False, use_master=False):
        assert adam_w_mode and bias_correction
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
""",
    "fused_layer_norm_cuda.py": "",
    "amp_C.py": "",
}


def section(field: str, value: str) -> dict:
    return {**MEMO, field: value} if field == "attention" else {**MEMO, "kernels": {field: value}}


def start(memo: dict, name: str = "llama", stage: int = 0):
    return ds_memo.initialize(model=build(name), config=ds_config(stage, memo=memo, optimizer=OPTIMIZER))[0]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder for packages; imports from it are undone afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("field, value", MISSING)
def test_asked_for_and_missing(field: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, install = MISSING[field, value]
    monkeypatch.setitem(sys.modules, module, None)  # also where it is installed
    with pytest.raises(ds_memo.MemoError) as error:
        start(section(field, value))
    assert f"{module} cannot be used" in str(error.value) and install in str(error.value).partition("Install it: ")[2]
    assert ("memo.attention" if field == "attention" else f"memo.kernels.{field}") in str(error.value)


@pytest.mark.parametrize("field, extension", [("norm", "fused_layer_norm_cuda"), ("adam", "amp_C")])
def test_apex_built_without_its_extensions(field: str, extension: str, packages: Path) -> None:
    write(packages, {name: text for name, text in APEX.items() if extension not in name})
    with pytest.raises(ds_memo.MemoError, match=f"No module named '{extension}'"):
        start(section(field, "apex"))


@pytest.mark.parametrize("name, kind", [("llama", "rms"), ("gpt2", "layer")])
def test_apex_norms(name: str, kind: str, packages: Path) -> None:
    write(packages, APEX)
    model, batch = build(name), Batch.random(2, 9)
    want = step(copy.deepcopy(model), batch)
    handle = ds_memo.attach(model, {"alpha": 0.5, "resident_layers": 2, "kernels": {"norm": "apex"}})
    got = step(model, batch)
    import apex.normalization.fused_layer_norm as apex

    assert apex.calls.count(kind) == len(apex.calls) == 2 * LAYERS + 1 + 2 * LAYERS  # forward, and replays
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    got.loss = want.loss
    assert_same(got, want, tolerance=1e-5)
    handle.detach()


def test_torch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles, too: the norm beside the layers is one of them."""
    fused, calls = fused_norms.torch_rms_norm, []
    monkeypatch.setattr(fused_norms, "torch_rms_norm", lambda *args: (calls.append(args[0].shape), fused(*args))[1])
    model, batch = build("llama"), Batch.random(1, 96)
    want = step(copy.deepcopy(model), batch)
    memo = {"alpha": 0.5, "resident_layers": 0, "tile_tokens": 32, "kernels": {"norm": "torch"}}
    handle = ds_memo.attach(model, memo)
    assert step(model, batch).loss.item() == pytest.approx(want.loss.item(), rel=1e-6)  # probed, too
    calls.clear()
    got = step(model, batch)
    assert handle.report()["tiles"]["layers"] == list(range(LAYERS))
    # Three tiles: a head, a tail, and again in the backward. A tail's run passes the head's norm, too.
    assert calls == [torch.Size([1, 32, model.config.hidden_size])] * (3 * (LAYERS * (1 + 2 + 2 + 1) + 2))
    got.loss = want.loss
    assert_same(got, want, tolerance=1e-5)
    handle.detach()


REFUSED = {
    "residents": ({"resident_layers": 99}, {}, "resident_layers: got 99"),
    "not enabled": ({"enabled": False}, {}, "enabled: got false"),
    "no such layers": ({}, {"layers": ["nowhere"]}, "'nowhere' is no module"),
    "no such device": ({}, {"device": "nowhere"}, "device: got nowhere"),
    "a kernel after the norms": ({"kernels": {"norm": "apex", "cross_entropy": "liger"}}, {}, "liger"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_attach_leaves_the_model_as_it_was(case: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(packages, APEX)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    memo, arguments, said = REFUSED[case]
    model = build("llama")
    before = fingerprint(model)
    with pytest.raises(ds_memo.MemoError, match=said):
        ds_memo.attach(model, {"kernels": {"norm": "apex"}, **memo}, **arguments)
    assert fingerprint(model) == before


def test_norms_that_scale_otherwise_or_lack_what_the_kernel_multiplies_and_adds_are_left_alone(packages: Path) -> None:
    write(packages, APEX)
    lacking = [[nn.LayerNorm(8, **lacks) for _ in range(2)] for lacks in ({"bias": False}, {"elementwise_affine": False})]
    for model in (build("gemma3"), *(nn.ModuleList([nn.ModuleList(layers)]) for layers in lacking)):
        with pytest.raises(ds_memo.MemoError, match="has no LayerNorm or RMSNorm"):
            ds_memo.attach(model, {"kernels": {"norm": "apex"}})


@pytest.mark.parametrize("stage", [0, 3])
def test_apex_adam(stage: int, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(packages, APEX)
    torchs = start(MEMO, stage=stage)
    want = train(torchs, steps=2)
    torchs.memo.detach()
    engine = start(section("adam", "apex"), stage=stage)
    import apex.optimizers

    inner = engine.optimizer if isinstance(engine.optimizer, torch.optim.Optimizer) else engine.optimizer.optimizer
    assert isinstance(inner, apex.optimizers.FusedAdam)
    assert train(engine, steps=2) == pytest.approx(want, rel=1e-5)
    engine.memo.detach()


def test_apex_adam_beside_another_optimizer(packages: Path) -> None:
    write(packages, APEX)
    memo = section("adam", "apex")
    with pytest.raises(ds_memo.MemoConfigError, match='of type "Adam" or "AdamW" in the DeepSpeed JSON; there is type \'lion\''):
        ds_memo.initialize(model=build("llama"), config=ds_config(memo=memo, optimizer={"type": "Lion"}))
    model = build("llama")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ds_memo.MemoConfigError, match="there is the script's own SGD"):
        ds_memo.initialize(model=model, optimizer=sgd, config=ds_config(memo=memo))
    with pytest.raises(ds_memo.MemoConfigError, match=r"use ds_memo\.initialize"):
        ds_memo.attach(model, {"kernels": {"adam": "apex"}})


def test_liger_on_a_cpu_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="Liger is not installed: pip install liger-kernel")
    memo = section("cross_entropy", "liger")
    with pytest.raises(ds_memo.MemoError, match="need a GPU; leave it out on a CPU"):
        start(memo)
    with pytest.raises(ds_memo.MemoError, match=r"Liger has none for OPTForCausalLM \(model type 'opt'\)"):
        start(memo, "opt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the model is changed, not run
    from ds_memo.hf.kernels import use_liger_cross_entropy

    model = build("llama")
    with contextlib.ExitStack() as undo:
        use_liger_cross_entropy(model, undo)
        assert model.forward.__module__.startswith("liger_kernel.")
        assert all("liger" not in type(part).__module__ and "forward" not in vars(part) for part in list(model.modules())[1:])
    assert "forward" not in vars(model)


def test_flash_attention_switches_the_model(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers itself checks the package, and refuses it here for want of a GPU."""
    write(packages, {"flash_attn/__init__.py": "flash_attn_func = flash_attn_varlen_func = None\n"})
    asked = []
    model = build("llama")
    before = model.config._attn_implementation

    def switch(name: str) -> None:
        asked.append(name)
        model.config._attn_implementation = name

    monkeypatch.setattr(model, "set_attn_implementation", switch)
    handle = ds_memo.attach(model, {"attention": "flash_attn_2"})
    assert asked == ["flash_attention_2"] and model.config._attn_implementation == "flash_attention_2"
    handle.detach()
    assert model.config._attn_implementation == before
    with pytest.raises(ds_memo.MemoError, match="Toy is no Hugging Face model; call the package in the model itself"):
        ds_memo.attach(build("plain"), {"attention": "flash_attn_2"})
