"""Attention's kernels in this process: FlashAttention-3 or 4 behind PyTorch's flash ops, and the choice for a call on a device.

`torch.nn.attention.activate_flash_attention_impl` replaces aten's flash ops for the process. Calls that the new kernel lacks
(dropout, FlashAttention-4's windows) go on to FlashAttention-2 by their arguments, forward and backward alike.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.attention as torch_attention
from torch.nn.attention import SDPBackend

from ds_memo.attention_kernel import (
    CPU,
    CUDNN,
    EFFICIENT,
    FA3,
    FA4,
    FLASH,
    NAMES,
    PLAIN,
    WINDOW,
    Attention,
    AttentionKernel,
    attention_kernel,
    flash_refusal,
)
from ds_memo.errors import MemoError
from ds_memo.remat.shared_changes import Undo, need

aten = torch.ops.aten
KEY = "CUDA"
"""Dispatch key under which flash ops are replaced."""
_PACKAGES = {FA3: ("FA3", "flash_attn_interface"), FA4: ("FA4", "flash_attn.cute")}
"""PyTorch's name of each, and the module that it imports."""
_FORWARD = "_flash_attention_forward", "_scaled_dot_product_flash_attention"
_BACKWARD = "_flash_attention_backward", "_scaled_dot_product_flash_attention_backward"
_BAR = 0.05
"""Relative error of the check: of half precision it is below 0.01."""


@dataclass
class _Process:
    """State of the process, as the flash ops are the process's."""

    configured: str | None = None
    """memo.attention of the model that was attached last: of ranks' calls, which know no model."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Kernels of calls that ds_memo chose itself, and why."""
    warn: Callable[[], Callable[[str], None] | None] | None = None
    """Returns that model's, unless it is gone. None: no model is attached."""


_process = _Process()


def use(device: torch.device, configured: str | None, warn: Callable[[str], None], undo_with: Callable[[Undo], Any]) -> None:
    """Have this process run the kernels that `configured` (memo.attention) asks for, or the best ones of the device.

    Args:
        undo_with: is given what puts PyTorch's kernels back, unless another model still needs them.
    """
    need(torch_attention, functools.partial(_use, device, configured, warn), undo_with)


def running() -> Set[str]:
    """Return FA3 or FA4, if PyTorch's flash ops run it."""
    active = torch_attention.current_flash_attention_impl()
    if active is None:  # the usual case, asked twice per layer call
        return frozenset()
    return frozenset(name for name, (theirs, _) in _PACKAGES.items() if theirs == active)


def kernel_for(call: Attention, device: torch.device) -> AttentionKernel:
    """Return the kernel of a call that ds_memo makes itself, and note it for the report."""
    kernel = choice(call, device)
    note(kernel)
    return kernel


def choice(call: Attention, device: torch.device) -> AttentionKernel:
    """Return the kernel for a call on this device, as its process is set."""
    if device.type != "cuda":
        return attention_kernel(call, None)
    capability = torch.cuda.get_device_capability(device)
    return attention_kernel(call, capability, running(), _process.configured, _cudnn_first(device))


def described(q: torch.Tensor, v: torch.Tensor, mask: str = PLAIN, **more: Any) -> Attention:
    """Return what the choice knows of a call: dtype, sizes of heads, and the setting of PyTorch."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Attention(str(q.dtype).removeprefix("torch."), q.shape[-1], v.shape[-1], mask, deterministic=deterministic, **more)


def note(kernel: AttentionKernel) -> None:
    """Show a kernel that runs in the report, and warn once if it is not the one that the user asked for."""
    if kernel.name not in _process.chosen:
        _process.chosen[kernel.name] = kernel.reason
        _tell(kernel)


def _tell(kernel: AttentionKernel) -> None:
    if kernel.instead_of is not None and _process.warn is not None and (warn := _process.warn()):
        warn(f'memo.attention is "{kernel.instead_of}"; the run goes on with {kernel.name}: {kernel.reason}')


def chosen() -> dict[str, str]:
    """Return kernels of calls that ds_memo chose itself, and why."""
    return dict(_process.chosen)


def taken(func: Any) -> tuple[str, str] | None:
    """Return the kernel behind a saved op that a layer calls, and why; None: ds_memo chose it, and noted it."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", type(func).__name__)
    if name.startswith("ds_memo::") and "cudnn" not in name:
        return None
    reason = "F.scaled_dot_product_attention took it" if "scaled_dot" in name or "cudnn" in name else "the model calls it"
    for part, kernel in _OPS.items():
        if part in name:
            return next(iter(running()), kernel) if kernel == FLASH else kernel, reason
    return name, reason


_OPS = {
    "for_cpu": CPU,
    "cudnn": CUDNN,
    "efficient": EFFICIENT,
    "flash_attn_3::": FA3,
    "flash_attn::": "flash_attn_2",
    "flash": FLASH,
}
"""Kernels by a part of an op's name, the first that is met."""


def _cudnn_first(device: torch.device) -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled() and _prefers_cudnn(device)


@functools.cache
def _prefers_cudnn(device: torch.device) -> bool:
    """Return True if PyTorch takes cuDNN before flash here, by its version, the card and the environment."""
    q = torch.empty(1, 1, 128, 64, device=device, dtype=torch.bfloat16)
    torch._fused_sdp_choice(q, q, q)  # the first choice sets the order
    order = torch._C._get_sdp_priority_order()
    return order.index(int(SDPBackend.CUDNN_ATTENTION)) < order.index(int(SDPBackend.FLASH_ATTENTION))


# ---- FlashAttention-3 and 4


def _use(device: torch.device, configured: str | None, warn: Callable[[str], None]) -> Undo:
    before = _process.configured, _process.warn
    if before[1] is None or before[1]() is None:
        _process.chosen.clear()  # of calls without a model
    weak = weakref.WeakMethod(warn) if inspect.ismethod(warn) else lambda: warn
    _process.configured, _process.warn = configured, weak
    deactivate = _activate_best(device, configured, warn) if device.type == "cuda" else None

    def undo() -> None:
        if deactivate:
            deactivate()
        _process.configured, _process.warn = before

    return undo


def _activate_best(device: torch.device, configured: str | None, warn: Callable[[str], None]) -> Undo | None:
    """Activate FlashAttention-3 or 4 if its package is there and the card is made for it. What the user activated stays."""
    there = frozenset(name for name, (_, module) in _PACKAGES.items() if _is_there(module))
    plain = Attention("bfloat16", 64, 64)
    found = attention_kernel(plain, torch.cuda.get_device_capability(device), there, configured)
    _tell(found)
    if found.name not in _PACKAGES or torch_attention.current_flash_attention_impl() is not None:
        return None
    try:
        return activate(found.name, device)
    except Exception as error:  # a package for another PyTorch fails in many ways
        warn(f"{NAMES[found.name]} is installed, but PyTorch cannot run it ({error}). The run goes on with another kernel")
        return None


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except Exception:  # of a package around it, which may be one for another PyTorch
        return False


def activate(name: str, device: torch.device) -> Undo:
    """Have PyTorch's flash ops run a package where it can serve, and check it on the device.

    Raises:
        Exception: it cannot be imported, raises, or computes something else. FlashAttention-2 runs as before.
    """
    stock = {op: torch.library.get_kernel(f"aten::{op}", KEY) for op in (*_FORWARD, *_BACKWARD)}
    torch_attention.activate_flash_attention_impl(_PACKAGES[name][0])
    library = torch.library.Library("aten", "IMPL")

    def undo() -> None:
        library._destroy()
        torch_attention.restore_flash_attention_impl(_raise_warn=False)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for op, ours in stock.items():
                theirs = torch.library.get_kernel(f"aten::{op}", KEY)
                route = _Route(name, getattr(aten, op).default, theirs, ours, device)
                library.impl(op, route, KEY, with_keyset=True, allow_override=True)
        _check(device)
    except BaseException:
        undo()
        raise
    return undo


class _Route:
    """A flash op: the package's kernel if it can run the call, else PyTorch's own.

    Args:
        op: its default overload.
    """

    def __init__(self, name: str, op: Any, theirs: Any, stock: Any, device: torch.device) -> None:
        self._name = name
        self._names = [argument.name for argument in op._schema.arguments]
        self._theirs, self._stock = theirs, stock
        self._heads_first = "scaled_dot_product" in op._schema.name
        self._is_forward = not op._schema.name.endswith("backward")
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if not self._serves(given):
            return self._stock.call_boxed(keys, *args, **kwargs)
        found = self._theirs.call_boxed(keys, *args, **kwargs)
        if self._is_forward:
            shape = given["query"].shape[:-1]
            checked(self._name, found[1], shape if self._heads_first else (*shape[:-2], shape[-1], shape[-2]))
        return found

    def _serves(self, given: dict[str, Any]) -> bool:
        q, v = given["query"], given["value"]
        others = "return_debug_mask", "alibi_slopes", "seqused_k", "block_table", "num_splits"  # not proved for the packages
        windows = (given.get(f"window_size_{side}") for side in ("left", "right"))
        mask = PLAIN if all(window in (None, -1) for window in windows) else WINDOW
        call = described(q, v, mask, dropout=bool(given.get("dropout_p")))
        plain = all(given.get(name) is None or given.get(name) is False for name in others)
        return plain and not flash_refusal(self._name, call, self._capability)


def _check(device: torch.device) -> None:
    """Run causal attention forward and backward.

    Raises:
        MemoError: it is not what formulas in float32 give.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, gradient = (
        torch.randn(1, 192, heads, 64, device=device, dtype=torch.bfloat16, generator=generator) for heads in (4, 2, 2, 4)
    )
    how = None, None, 192, 192, 0.0, True
    with torch.no_grad():
        out, lse, *states = aten._flash_attention_forward(q, k, v, *how, False)
        found = out, *aten._flash_attention_backward(gradient, q, k, v, out, lse, *how, *states[:2])
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        by_head = (x.transpose(1, 2) for x in leaves)
        query, key, value = (x.repeat_interleave(4 // x.shape[1], 1) for x in by_head)
        hidden = torch.ones(192, 192, dtype=torch.bool, device=device).triu(1)
        scores = (query @ key.mT * 64**-0.5).masked_fill(hidden, -torch.inf)
        expected = (scores.softmax(-1) @ value).transpose(1, 2)
    of_expected = torch.autograd.grad(expected, leaves, gradient.float())
    names = "output", "gradient of q", "gradient of k", "gradient of v"
    for name, one, other in zip(names, found, (expected.detach(), *of_expected), strict=True):
        if differs(one, other):
            raise MemoError(f"its {name} is wrong on 192 tokens; install one that is made for this PyTorch")


def differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (found.float() - expected).norm() / expected.norm()
    return not error.item() < _BAR


def checked(kernel: str, lse: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """Return a kernel's log-sum-exp, from which alone its backward knows the softmax.

    Raises:
        MemoError: it is not there, or none of such a call. cuDNN's backward would compute nothing without an error.
    """
    if lse is None or tuple(lse.shape) != tuple(shape) or lse.dtype not in (torch.float32, torch.float64):
        found = "none" if lse is None else f"one of shape {tuple(lse.shape)} in {lse.dtype}"
        raise MemoError(
            f"the log-sum-exp of attention's kernel {kernel} is missing: expected one of shape {tuple(shape)} in float32, got "
            f"{found}. Its gradients would be wrong. Set memo.attention to another kernel"
        )
    return lse
