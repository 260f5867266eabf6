"""The switch ``"kernels": "fast"``: one kernel each for RMSNorm, rotary embedding and SwiGLU.

PyTorch has the norm, Liger the other two. Liger's kernels write into their inputs, unseen by the dispatcher. A write into a kept
output makes a replay wrong, so they run here as custom ops over copies.

A class takes a kernel only if its code has Llama's form. Everything else keeps its own code, and the report has the reason.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_memo.errors import MemoError
from ds_memo.hf.fused_norms import fused_norm, replace_forward, torch_rms_norm
from ds_memo.hf.packages import Package
from ds_memo.remat.shared_changes import Undo, need

Account = dict[str, dict[str, Any]]
"""By kernel: whose it is (None: stock code runs), the number of modules that have it, and why others do not."""
_INSTALL = "pip install liger-kernel"
SWIGLU = Package("liger_kernel.ops.swiglu", ("swiglu_forward", "swiglu_backward"), _INSTALL)
ROTARY = Package("liger_kernel.ops.rope", ("rope_forward", "rope_backward"), _INSTALL)
_WIDEST = 1 << 16
"""Most columns that Liger's kernels take."""
REPLACED = "its forward is replaced already"
_ROTATE = "apply_rotary_pos_emb"
_LLAMA = {
    _ROTATE: "q, k, cos, sin, unsqueeze_dim=1: cos = cos.unsqueeze(unsqueeze_dim); sin = sin.unsqueeze(unsqueeze_dim); "
    "q_embed = q * cos + rotate_half(q) * sin; k_embed = k * cos + rotate_half(k) * sin; return (q_embed, k_embed)",
    "rotate_half": "x: x1 = x[..., :x.shape[-1] // 2]; x2 = x[..., x.shape[-1] // 2:]; return torch.cat((-x2, x1), dim=-1)",
    "MLP": "self, x: down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)); return down_proj",
}
"""Functions of Llama, as `_form` returns them: the kernels compute these."""
_ANGLES = {
    "emb = torch.cat((freqs, freqs), dim=-1)",
    "cos = emb.cos() * self.attention_scaling",
    "sin = emb.sin() * self.attention_scaling",
}
"""Llama's cosines and sines: their second half repeats the first, which is the one that the kernel reads."""


def takes_triton(device: torch.device) -> bool:
    """Return True if Triton's kernels run there."""
    return device.type == "cuda"


def _liger(package: Package, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(package.module), name)


@torch.library.custom_op("ds_memo::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``."""
    return _liger(SWIGLU, "swiglu_forward")(gate.contiguous(), up.contiguous())[-1]


@torch.library.custom_op("ds_memo::swiglu_backward", mutates_args=())
def _swiglu_backward(gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = (x.clone(memory_format=torch.contiguous_format) for x in (gate, up))  # the kernel writes both gradients there
    return _liger(SWIGLU, "swiglu_backward")(*own, gradient.contiguous())


@torch.library.custom_op("ds_memo::rotate", mutates_args=())
def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys (batch, heads, tokens, size), rotated by their positions.

    Args:
        back: rotate gradients, which turn the other way.
    """
    own = (_by_token(x).clone(memory_format=torch.contiguous_format) for x in (q, k))  # the kernel writes its results there
    return _liger(ROTARY, "rope_backward" if back else "rope_forward")(*map(_by_token, own), cos, sin)[:2]


def _by_token(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


swiglu.register_fake(lambda gate, up: _dense(gate))
_swiglu_backward.register_fake(lambda gate, up, gradient: (_dense(gate), _dense(up)))
_rotate.register_fake(lambda q, k, cos, sin, back: tuple(_by_token(_dense(_by_token(x))) for x in (q, k)))
swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_backward(*ctx.saved_tensors, gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_rotate.register_autograd(
    lambda ctx, d_q, d_k: (*_rotate(d_q, d_k, *ctx.saved_tensors, True), None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[2:4]),
)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as Transformers' function of Llama. The second half of `cos` and of `sin` repeats the first."""
    return _rotate(q, k, cos, sin, False)


def _half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _half(q) * sin, k * cos + _half(k) * sin


def use_fast_kernels(model: nn.Module, norm: str | None, device: torch.device, undo: ExitStack) -> Account:
    """Install each kernel that is here and right on the device in the modules whose code it can replace.

    Args:
        norm: the kernel of norms that is configured, and installed already.
        undo: is given what restores the model.
    """
    norms = {"kernel": norm, "modules": 0, "stock": {}}
    if norm is None:
        count, left = _take_norms(model, undo)
        norms = {"kernel": "torch" if count else None, "modules": count, "stock": left}
    return {
        "norm": norms,
        "rotary": _take(ROTARY, device, _is_rotary_right, lambda: _take_rotary(model, undo)),
        "swiglu": _take(SWIGLU, device, _is_swiglu_right, lambda: _take_swiglu(model, undo)),
    }


def _take_norms(model: nn.Module, undo: ExitStack) -> tuple[int, dict[str, str]]:
    """Return the number of RMSNorms that take PyTorch's kernel, and by class of norm why others do not."""
    count, left = 0, {}
    for module in model.modules():
        if "forward" in vars(module) and type(module).__name__.endswith("RMSNorm"):
            left[type(module).__name__] = REPLACED
        elif (run := fused_norm(module, torch_rms_norm)) is not None:
            replace_forward(module, run, undo)
            count += 1
        elif type(module).__name__.endswith("RMSNorm"):
            left[type(module).__name__] = "it has no weight, or does not compute weight * x / rms(x)"
    return count, left


def _take(
    package: Package,
    device: torch.device,
    is_right: Callable[[torch.device], bool],
    take: Callable[[], tuple[int, dict[str, str]]],
) -> dict[str, Any]:
    count, left = 0, {}
    if not takes_triton(device):
        left = {"all": f"Liger's kernels are written in Triton, which needs a GPU; the model is on {device.type}"}
    else:
        try:
            package.load('memo.kernels "fast"')
            count, left = take() if is_right(device) else (0, {"all": "Liger's results differ from the formula on this device"})
        except MemoError as error:
            left = {"all": str(error)}
    return {"kernel": "liger" if count else None, "modules": count, "stock": left}


def _is_swiglu_right(device: torch.device) -> bool:
    gate, up = (torch.linspace(*ends, 80, dtype=torch.float32, device=device).view(2, 5, 8) for ends in ((-4, 4), (2, -1)))
    return _agree(lambda *x: (swiglu(*x),), lambda gate, up: (F.silu(gate) * up,), [gate, up])


def _is_rotary_right(device: torch.device) -> bool:
    q, k = (_by_token(torch.linspace(-2, 3, 2 * 5 * h * 8, dtype=torch.float32, device=device).view(2, 5, h, 8)) for h in (4, 2))
    angles = torch.linspace(0, 9, 20, dtype=torch.float32, device=device).view(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    return _agree(lambda q, k: rotate(q, k, cos, sin), lambda q, k: _rotated(q, k, cos, sin), [q, k])


def _agree(fused: Callable[..., Any], formula: Callable[..., Any], inputs: list[torch.Tensor]) -> bool:
    """Return True if outputs and gradients are the formula's, and inputs are left as they were."""
    results = []
    with torch.enable_grad():
        for function in (formula, fused):
            leaves = [x.clone().requires_grad_() for x in inputs]
            try:
                outputs = function(*leaves)
                gradients = torch.autograd.grad(outputs, leaves, [out.detach().cos() for out in outputs])
            except Exception as error:  # a compiler's, a driver's
                raise MemoError(f"Liger's kernel failed on this device, so the model's own code is used: {error}") from error
            results.append([*outputs, *gradients, *leaves])
    return all(torch.allclose(have, want, rtol=1e-4, atol=1e-5) for want, have in zip(*results, strict=True))


def _take_swiglu(model: nn.Module, undo: ExitStack) -> tuple[int, dict[str, str]]:
    """Return the number of MLPs that take the kernel, and by class of MLP why others do not."""
    count, left = 0, {}
    for module in model.modules():
        if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            continue
        name = type(module).__name__
        if "forward" in vars(module):
            left[name] = REPLACED
        elif _form(type(module).forward) != _LLAMA["MLP"]:
            left[name] = "its forward is not Llama's"
        elif type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            left[name] = f"its activation is {type(module.act_fn).__name__}"
        else:
            replace_forward(module, functools.partial(_fused_mlp, module, module.forward), undo)
            count += 1
    return count, left


def _fused_mlp(module: Any, own: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or not takes_triton(x.device):  # a compiler fuses the stock code
        return own(x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    fits = gate.dtype == up.dtype and gate.shape == up.shape and gate.shape[-1] <= _WIDEST and gate.numel()
    return module.down_proj(swiglu(gate, up) if fits else module.act_fn(gate) * up)


class _Rotary(threading.local):
    fused = False
    """True inside the forward of an attention module that takes the kernel: its file's function serves all models."""


_rotary = _Rotary()


def _take_rotary(model: nn.Module, undo: ExitStack) -> tuple[int, dict[str, str]]:
    """Return the number of attention modules that take the kernel, and by class of attention why others do not."""
    count, left = 0, {}
    tables = [type(module) for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    unlike = next((table.__name__ for table in tables if _assigned(table.forward, {"emb", "cos", "sin"}) != _ANGLES), None)
    for module in model.modules():
        file = sys.modules[type(module).__module__]
        own = vars(file).get(_ROTATE)
        if own is None or not type(module).__name__.endswith("Attention"):
            continue
        name = type(module).__name__
        if "forward" in vars(module):
            left[name] = REPLACED
        elif unlike or not tables:
            left[name] = f"angles by {unlike or 'no module'}, which is not Llama's"
        elif any(_form(vars(file).get(function)) != _LLAMA[function] for function in (_ROTATE, "rotate_half")):
            left[name] = f"its {_ROTATE} is not Llama's"
        elif _assigned(type(module).forward, {"cos", "sin"}) != {"cos, sin = position_embeddings"}:
            left[name] = "its forward does not use the cosines and sines as the layer is given them"
        else:
            need(file, functools.partial(_choose_rotary, file), undo.callback)
            replace_forward(module, functools.partial(_in_attention, module.forward), undo)
            count += 1
    return count, left


def _choose_rotary(file: Any) -> Undo | None:
    """Have a file's function run the kernel for calls inside modules that take it; others keep the stock one."""
    own = getattr(file, _ROTATE)
    if hasattr(own, "_ds_memo_stock"):
        return None

    @functools.wraps(own)
    def chosen(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _rotary.fused and not args and not kwargs and _fits(q, k, cos, sin):
            return rotate(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **kwargs)

    chosen._ds_memo_stock = own  # type: ignore[attr-defined]
    setattr(file, _ROTATE, chosen)

    def restore() -> None:
        if getattr(file, _ROTATE) is chosen:
            setattr(file, _ROTATE, own)

    return restore


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        takes_triton(q.device)
        and q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:] == (*cos.shape[1:],)
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
        and q.shape[-1] % 2 == 0
        and q.numel() > 0
    )


def _in_attention(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return own(*args, **kwargs)
    before, _rotary.fused = _rotary.fused, True
    try:
        return own(*args, **kwargs)
    finally:
        _rotary.fused = before


@functools.cache
def _parsed(function: Any) -> ast.FunctionDef | None:
    """Return a function's syntax tree without its docstring; None: there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    tree.body = tree.body[ast.get_docstring(tree) is not None :]
    for argument in tree.args.args:
        argument.annotation = None
    return tree


def _form(function: Any) -> str:
    """Return arguments and statements of a function on one line, without decorators and comments."""
    tree = _parsed(function)
    return f"{ast.unparse(tree.args)}: {'; '.join(map(ast.unparse, tree.body))}" if tree else ""


def _assigned(function: Any, names: set[str]) -> set[str]:
    """Return the statements of a function that give these names values."""
    tree = _parsed(function)
    stores = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For)
    found = (node for node in ast.walk(tree) if isinstance(node, stores)) if tree else ()
    return {
        ast.unparse(node)
        for node in found
        if any(isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id in names for x in ast.walk(node))
    }
