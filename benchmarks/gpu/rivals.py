"""The rivals: other methods, each as its users call it, and ds_memo itself.

Every rival is installed on the same Hugging Face model, trains, and is taken off again. `around` encloses a forward with its
backward; a rival that holds host memory frees it when it is taken off.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ds_memo.remat.op_policy import ATTENTION
from ds_memo.remat.undo import changed
from ds_memo.units import GIB


@dataclass(frozen=True)
class Budget:
    """Memory that every rival may use."""

    device: torch.device
    host_bytes: int
    device_bytes: int | None = None
    """None: all of the device."""
    ranks: int = 1
    """Ranks that trade heads, under UPipe."""
    cache_dir: str | None = None
    """Folder of ds_memo's profiles, shared by the turns of one run; None: its default."""


@dataclass
class Installed:
    """A rival on a model."""

    around: Callable[[], AbstractContextManager] = nullcontext
    report: Callable[[], dict[str, Any]] = dict
    """The rival's own report."""
    profile: Callable[[], Any] = lambda: None
    """Its profile of the layers."""


@dataclass(frozen=True)
class Rival:
    """One way to train."""

    name: str
    install: Callable[..., AbstractContextManager[Installed]] = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 1
    """Steps before its time and memory are steady."""
    expandable: bool = False
    """Runs with PyTorch's expandable segments."""

    def on(self, model: nn.Module, budget: Budget) -> AbstractContextManager[Installed]:
        """Within the block the model trains this way."""
        return self.install(model, budget, **self.settings)


@contextlib.contextmanager
def nothing(model: nn.Module, budget: Budget) -> Iterator[Installed]:
    yield Installed()


@contextlib.contextmanager
def checkpointed(model: nn.Module, budget: Budget, keep_attention: bool = False, offload: bool = False) -> Iterator[Installed]:
    """Hugging Face's gradient checkpointing, that is torch.utils.checkpoint around every layer."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if keep_attention:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(ATTENTION))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs, **({"offload": True} if offload else {}))
    try:
        yield Installed()
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


@contextlib.contextmanager
def unpinned(device: torch.device) -> Iterator[None]:
    """Within the block Transformers' offload asks for no pinned memory where a CPU build lacks it."""
    from transformers import modeling_utils

    theirs = modeling_utils.save_on_cpu
    ours = theirs if device.type == "cuda" else lambda pin_memory, device_type: theirs(pin_memory=False, device_type=device_type)
    with changed(modeling_utils, "save_on_cpu", ours):
        yield


@contextlib.contextmanager
def hf_offload(model: nn.Module, budget: Budget) -> Iterator[Installed]:
    """Also as ``gradient_checkpointing_kwargs`` of a Trainer."""
    with checkpointed(model, budget, offload=True), unpinned(budget.device):
        yield Installed()


@contextlib.contextmanager
def async_offload(model: nn.Module, budget: Budget, keep_attention: bool = False) -> Iterator[Installed]:
    """Checkpointing with layer inputs on the host, as accelerate#4175 and DeepSpeed #8282 have it; copies run beside compute and
    come back a layer ahead.

    Args:
        keep_attention: attention's outputs leave, too, and attention runs once, as Axolotl has it (axolotl#3776, #3786).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    from benchmarks.input_offload import LayerTensors

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    tensors = LayerTensors(len(layers), budget.device)
    contexts = {"context_fn": tensors.keep_attention} if keep_attention else {}

    def run(layer: Callable[..., Any], *args: Any) -> Any:
        with tensors.hooks():
            return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False, **contexts)

    def around() -> AbstractContextManager:
        tensors.begin_step()
        return nullcontext()

    with checkpointed(model, budget):
        for layer in layers:
            layer._gradient_checkpointing_func = run
        try:
            yield Installed(around)
        finally:  # it holds host memory
            for layer in layers:
                del layer._gradient_checkpointing_func


axolotl = functools.partial(async_offload, keep_attention=True)
"""Axolotl's way since July 2026."""


@contextlib.contextmanager
def trl(model: nn.Module, budget: Budget) -> Iterator[Installed]:
    """TRL's example of a million tokens (trl#6846): PyTorch's ring attention, and checkpointing with the copies of async_offload.

    The ring is of one rank, with its kernels and sums in fp32; trl_million.py has it on ranks. TRL's chunked loss has nothing to
    do here, as the workloads' loss reads a few positions.
    """
    from benchmarks.ring import Ring, ring_of_one
    from benchmarks.workloads import attention_through

    with contextlib.ExitStack() as stack:
        installed, group = stack.enter_context(async_offload(model, budget)), stack.enter_context(ring_of_one(budget.device))
        stack.enter_context(attention_through(lambda q, k, v, scale: Ring.apply(q, k, v, scale, group)))
        yield installed


def _tiled(forward: Callable[[torch.Tensor], torch.Tensor], parameters: list[nn.Parameter]) -> Callable[..., torch.Tensor]:
    """Return an MLP's forward that DeepSpeed's TiledMLP runs tile by tile, now and again in the backward."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def tiled(x: torch.Tensor) -> torch.Tensor:
        tiles = math.ceil(x.shape[1] / x.shape[2])
        return TiledMLP.apply(lambda _, tile: forward(tile), None, x, tiles, parameters)

    return tiled


@contextlib.contextmanager
def alst(
    model: nn.Module, budget: Budget, offload: Callable[..., Any] = hf_offload, tiled: Callable[..., Any] = _tiled
) -> Iterator[Installed]:
    """The recipe of Arctic Long Sequence Training (ALST): checkpointing with layer inputs on the host, DeepSpeed's TiledMLP, and
    RMSNorm as one kernel. LayerNorm is one as it is.

    The MLP has as many tiles as the recipe gives it, ceil(tokens / hidden). TiledMLP adds up their weight gradients in the
    parameter's dtype: in bf16 the sum of 64 tiles is 1 % off.

    Args:
        offload: installs checkpointing.
        tiled: given an MLP's forward and its parameters, returns a forward in tiles.
    """
    with contextlib.ExitStack() as patches, fused_norms(model, budget, offload) as installed:
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                patches.enter_context(_forward(module, tiled(module.forward, list(module.parameters()))))
        yield installed


@contextlib.contextmanager
def fused_norms(model: nn.Module, budget: Budget, offload: Callable[..., Any]) -> Iterator[Installed]:
    """A rival with each RMSNorm as one kernel."""
    with contextlib.ExitStack() as patches, offload(model, budget) as installed:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                patches.enter_context(_forward(module, functools.partial(_fused_norm, module)))
        yield installed


@contextlib.contextmanager
def upipe(model: nn.Module, budget: Budget) -> Iterator[Installed]:
    """Untied Ulysses (UPipe, arXiv 2602.21196): attention in groups of heads with their projections, else ALST's recipe.

    Not under ZeRO-3, whose hooks on projections do not run.
    """
    from benchmarks.head_groups import in_head_groups, in_tiles

    with contextlib.ExitStack() as patches, alst(model, budget, async_offload, in_tiles) as installed:
        for name, module in model.named_modules():
            if name.endswith((".self_attn", ".attention")):
                patches.enter_context(_forward(module, in_head_groups(module, budget.ranks)))
        yield installed


def _fused_norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm as one kernel, which saves its input and a factor for each token."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


@contextlib.contextmanager
def _forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within the block the module runs this forward."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextlib.contextmanager
def deepspeed_offload(model: nn.Module, budget: Budget) -> Iterator[Installed]:
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    manager = CheckpointHiddenStatesOffload()  # one for all steps: it keeps its host buffers between them
    with checkpointed(model, budget):
        yield Installed(around=lambda: manager)


@contextlib.contextmanager
def memo(model: nn.Module, budget: Budget, planned: bool = False, **config: Any) -> Iterator[Installed]:
    import ds_memo

    # A plan that is not proven smallest would search for a minute of the eight that a benchmark has.
    config |= {"plan": {"enabled": planned, "time_limit_s": 10.0}, "host_memory_gib": budget.host_bytes / GIB}
    if budget.cache_dir is not None:
        config["cache_dir"] = budget.cache_dir
    if budget.device_bytes is not None:
        config["device_memory_gib"] = budget.device_bytes / GIB
    handle = ds_memo.attach(model, config)
    try:
        yield Installed(report=handle.report, profile=lambda: handle._session.tuner.profile if handle._session.tuner else None)
    finally:
        handle.detach()


@contextlib.contextmanager
def memo_with_whole_mixers(model: nn.Module, budget: Budget, **config: Any) -> Iterator[Installed]:
    """ds_memo with layers that call no attention whole, as before they ran in tiles: their check refuses them."""
    from ds_memo.tiles import tiling

    own = tiling.probe

    def probe(*args: Any) -> Any:
        shapes = own(*args)
        if shapes.attention is None:
            raise tiling.CannotTile("this rival has layers without attention whole")
        return shapes

    with changed(tiling, "probe", probe), memo(model, budget, **config) as installed:
        yield installed


_UNTIL_PLANNED = 4
"""Steps until addresses are planned: one after which ds_memo solves again, two alike to profile, one that plans and frees
the memory in torch's cache. (Observed in the emulator, at every length. Where a GPU takes longer, samples are taken again.)"""

TILES = {"alpha": 0.0, "resident_layers": 0, "tile_tokens": 4096, "head_groups": 8}
"""The least device memory per token, by hand."""

PLANNED = "ds_memo, planned"
"""The default of ds_memo."""
OURS = ("ds_memo", "ds_memo, expandable", PLANNED)
"""With its own solution."""
SWAPPING = "ds_memo, swapping"
MIXERS_WHOLE = "ds_memo, mixers whole"
INPUT_OFFLOAD = ("deepspeed", "hf_offload")
_ALL = (
    Rival("none", nothing),
    Rival("checkpoint", checkpointed),
    Rival("checkpoint+attention", checkpointed, {"keep_attention": True}),
    Rival("deepspeed", deepspeed_offload),
    Rival("hf_offload", hf_offload),
    Rival("alst", alst),
    Rival("async_offload", async_offload),
    Rival("trl", trl),
    Rival("alst, async", alst, {"offload": async_offload}),
    Rival("axolotl", axolotl),
    Rival("axolotl, fused norms", fused_norms, {"offload": axolotl}),
    Rival("alst, axolotl", alst, {"offload": axolotl}),
    Rival("upipe", upipe),
    Rival("ds_memo", memo, warm_up=3),
    Rival("ds_memo, expandable", memo, warm_up=3, expandable=True),
    Rival(PLANNED, memo, {"planned": True}, _UNTIL_PLANNED),
    Rival("ds_memo, fused norms", memo, {"planned": True, "kernels": {"norm": "torch"}}, _UNTIL_PLANNED),
    Rival("ds_memo, tiles", memo, TILES),
    Rival(MIXERS_WHOLE, memo_with_whole_mixers, {"planned": True}, _UNTIL_PLANNED),
    Rival(SWAPPING, memo, {"planned": True, "resident_layers": 2}, _UNTIL_PLANNED),  # even where more would fit
)
RIVALS = {rival.name: rival for rival in _ALL}
"""docs/benchmarks.md describes them."""
