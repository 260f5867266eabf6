"""Measure a layer's attention alone, at a length near the run's. Of long sequences it is most of the time.

A GPU keeps neither the rate nor the clock of short sequences. The kernel's call is caught in the layer, and repeated on random
tensors of as many times the tokens as time and memory allow. The other ranks of a sequence are not asked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ds_memo.memory.device import UNSEEN, device_budget
from ds_memo.placement import NO_RECOMPUTE
from ds_memo.profile.caught_call import CaughtCall
from ds_memo.profile.layer import Bench, alone
from ds_memo.profile.layer_sample import AttentionSample, LayerSample, extrapolate
from ds_memo.profile.stopwatch import now, repeats, seconds_between, sustain, synchronize
from ds_memo.remat.functions import ObservesFunctions, has_inner_tensors
from ds_memo.remat.op_policy import OpKind, kind_of

MOST_S = 1.0
"""Predicted seconds of a forward and a backward, at most."""
_UNITS = 16
"""Bytes that they take at once, in those of queries, keys and values together, at most: outputs, gradients, sums in fp32."""


class CaughtKernel(NamedTuple):
    """A call of an attention kernel. Tensors are on the meta device."""

    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    tokens: int


def measure_attention(
    call: CaughtCall, sample: LayerSample, length: int, device: torch.device, attention: str | None
) -> AttentionSample | None:
    """Measure attention alone.

    Args:
        sample: the longest of the layer.
        length: the run's.
        attention: as the "memo" section's.

    Returns:
        None: the layer has no such kernel, or none that can be called at more tokens; or the sample is as long as can be.
    """
    if device.type != "cuda" or not sample.attention_s:
        return None
    with alone(call, sample.length, device) as (fn, args, inputs, trained):
        bench = Bench(call.layer, fn, args, [*inputs, *trained], device, attention)
        try:
            with _Catches() as caught:
                bench.forward(NO_RECOMPUTE)
        finally:
            bench.close()
        kernel = caught.call
        if kernel is None or not (times := _times(sample, kernel, length, device_budget(device, None, 0, UNSEEN).nbytes)):
            return None
        seconds = _timed(kernel, times, device)
    return AttentionSample(sample.batch, sample.length * times, *seconds)


def _times(sample: LayerSample, kernel: CaughtKernel, length: int, free: int) -> int:
    """Return how many times the sample's tokens the kernel runs with, at most the run's; 0: it cannot be more than them."""
    nbytes, found = _UNITS * sum(x.nbytes for x in _long(kernel)), 0
    for times in (1 << doubled for doubled in range(1, max(1, length // sample.length).bit_length())):
        costs = extrapolate([sample], sample.batch, times * sample.length, 1.0)
        if costs.attention_s + costs.attention_backward_s > MOST_S or times * nbytes > free:
            break
        found = times
    return found


def _timed(kernel: CaughtKernel, times: int, device: torch.device) -> Iterator[float]:
    """Return the seconds of a forward and a backward: medians."""
    given = {id(x): _longer(x, kernel.tokens, times, device) for x in _long(kernel)}

    def longer(value: Any) -> Any:
        if type(value) is int and value == kernel.tokens:
            return times * value
        return given.get(id(value), value) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(longer, (kernel.args, kernel.kwargs))

    def run(read: Callable[[], Any] = lambda: None) -> list[Any]:
        readings = [read()]
        out = next(x for x in tree_leaves(kernel.run(*args, **kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad)
        readings.append(read())
        torch.autograd.grad(out, list(given.values()), out.detach())
        return [*readings, read()]

    run()
    sustain(device)
    points = [run(partial(now, device)) for _ in range(repeats(device))]
    synchronize(device)
    seconds = ([seconds_between(*pair) for pair in pairwise(run)] for run in points)
    return map(statistics.median, zip(*seconds, strict=True))


def _longer(x: torch.Tensor, tokens: int, times: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of random numbers, laid out in memory alike."""
    dims = sorted(range(x.dim()), key=x.stride, reverse=True)
    sizes = [times * x.shape[dim] if x.shape[dim] == tokens and dim in (1, 2) else x.shape[dim] for dim in dims]
    made = torch.randn(sizes, dtype=x.dtype, device=device).permute(*(dims.index(dim) for dim in range(x.dim())))
    return made.requires_grad_()


def _long(kernel: CaughtKernel) -> list[torch.Tensor]:
    return [x for x in tree_leaves((kernel.args, kernel.kwargs)) if isinstance(x, torch.Tensor) and kernel.tokens in x.shape]


class _Catches(ObservesFunctions):
    """Catches the last attention call of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.call: CaughtKernel | None = None
        """None: there was none, or a tensor of it, a mask or the ends of documents, cannot be made longer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_inner_tensors(types):
            return NotImplemented
        if kind_of(func) is OpKind.ATTENTION:
            self._catch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def run_function(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self._catch(fn, args, kwargs)
        return fn(*args, **kwargs)

    def _catch(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        wide = [x for x in tensors if x.dim() == 4 and x.is_floating_point() and x.shape[0] == tensors[0].shape[0]]
        tokens = max(wide[0].shape[1:3]) if wide else 0
        alike = len(wide) >= 3 and all(max(x.shape[1:3]) == tokens != x.shape[3] for x in wide)
        alike = alike and getattr(run, "namespace", "") != "ds_memo"  # such an op has no backward of its own, nor other lengths
        if not alike or len(tensors) > len(wide) or min(wide[0].shape[1:3]) == tokens:
            self.call = None
            return
        args, kwargs = tree_map(lambda x: _on_meta(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        self.call = CaughtKernel(run, args, kwargs, tokens)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
