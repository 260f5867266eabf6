"""Layer inputs on the host, with copies beside compute: what accelerate#4175 and DeepSpeed #8282 offload, prefetched.

Accelerate and Transformers copy on the compute stream. DeepSpeed copies beside it, but begins to copy an input back only when
compute wants it. Here an input comes back while the layer above runs backward. That costs one input more on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Copy(NamedTuple):
    """A tensor that is copied, or was."""

    tensor: Tensor
    over: torch.cuda.Event | None
    """None: it is there already."""


class Inputs:
    """The inputs of a model's checkpointed layers, in the order of the forward.

    Args:
        layers: number of them. The last one's input stays on the device: its backward comes first.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_host: list[Tensor] = []
        self._on_device: dict[int, _Copy] = {}
        self._sent = 0
        self._leaving: _Copy | None = None

    def begin_step(self) -> None:
        self._on_device, self._sent = {}, 0

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks for the forward of one checkpoint."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor | int:
        if not x.numel():  # checkpoint's own, for a graph where no input needs a gradient
            return x
        x = x.detach()  # these hooks live in the graph: one that they held would never be freed
        number, self._sent = self._sent, self._sent + 1
        self._left()
        if number == self._layers - 1:
            self._on_device[number] = _Copy(x, None)
            return number
        if number == len(self._on_host):
            self._on_host.append(torch.empty_like(x, device="cpu", pin_memory=self._stream is not None))
        self._leaving = self._copy(self._on_host[number], x, x)
        return number

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._left()
        if packed not in self._on_device:
            self._load(packed)
        tensor, over = self._on_device.pop(packed)
        if over is not None:
            torch.cuda.current_stream(self._device).wait_event(over)
        if packed:
            self._load(packed - 1)
        return tensor

    def _load(self, number: int) -> None:
        host = self._on_host[number]
        x = torch.empty_like(host, device=self._device)
        self._on_device[number] = self._copy(x, host, x)

    def _copy(self, to: Tensor, source: Tensor, on_device: Tensor) -> _Copy:
        """Begin a copy behind what compute has been given, as it may write the source, or use the target's memory."""
        if self._stream is None:
            to.copy_(source)
            return _Copy(on_device, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        return _Copy(on_device, self._stream.record_event())

    def _left(self) -> None:
        """Drop the input that was sent last: memory that compute takes from now on is written behind its copy."""
        if self._leaving is not None and self._leaving.over is not None:
            torch.cuda.current_stream(self._device).wait_event(self._leaving.over)
        self._leaving = None
