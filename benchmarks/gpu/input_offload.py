"""What checkpointed layers save, on the host, with copies beside compute: their inputs, and the outputs of their attention.

Inputs alone are what accelerate#4175 and DeepSpeed #8282 offload. Accelerate and Transformers copy on the compute stream.
DeepSpeed copies beside it, but begins to copy an input back only when compute wants it. Here a layer's tensors come back while
the layer above runs backward. That costs the tensors of one layer more on the device.

Attention's outputs as well are what Axolotl offloads since July 2026, so that attention runs once: `activation_offloading:
hidden_states` (axolotl#3776) with `selective_checkpointing: {save: [attention], offload: true}` (axolotl#3786). Axolotl brings
outputs back one layer ahead, inputs when compute wants them, and outputs of the last layer leave, too. Here both come back ahead,
and the last layer's tensors stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ds_memo.remat.op_policy import ATTENTION


class _Copy(NamedTuple):
    """A tensor that is copied, or was."""

    tensor: Tensor
    over: torch.cuda.Event | None
    """None: it is there already."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor that was packed."""

    layer: int
    number: int
    """Among the layer's tensors: 0 is its input, which its backward wants first."""


class LayerTensors:
    """The tensors that a model's checkpointed layers save, in the order of the forward.

    Args:
        layers: number of them. The last one's tensors stay on the device: its backward comes first.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._last, self._device = layers - 1, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._on_host: dict[Place, Tensor] = {}
        self._on_device: dict[Place, _Copy] = {}
        self._next = Place(-1, 0)
        self._leaving: list[_Copy] = []

    def begin_step(self) -> None:
        self._on_device, self._next = {}, Place(-1, 0)

    def hooks(self) -> saved_tensors_hooks:
        """Return hooks for the forward of the next layer's checkpoint."""
        self._next = Place(self._next.layer + 1, 0)
        return saved_tensors_hooks(self.pack, self.unpack)

    def keep_attention(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the contexts of a checkpoint's forward and recomputation in which attention runs once."""
        packed: list[Any] = []
        return _PacksAttention(self, packed), _UnpacksAttention(self, iter(packed))

    def pack(self, x: Tensor) -> Tensor | Place:
        x = x.detach()  # these hooks live in the graph: one that they held would never be freed
        if not x.numel() or not x.is_floating_point():  # checkpoint's own, where no input needs a gradient; a kernel's seed
            return x
        place, self._next = self._next, replace(self._next, number=self._next.number + 1)
        if not place.number:
            self._left()
        if place.layer == self._last:
            self._on_device[place] = _Copy(x, None)
            return place
        if place not in self._on_host:
            self._on_host[place] = torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)
        self._leaving.append(self._copy(self._on_host[place], x, x))
        return place

    def unpack(self, packed: Tensor | Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._left()
        if packed not in self._on_device:
            self._load(packed.layer)
        tensor, over = self._on_device.pop(packed)
        if over is not None:
            torch.cuda.current_stream(self._device).wait_event(over)
        if not packed.number and packed.layer:
            self._load(packed.layer - 1)
        return tensor

    def _load(self, layer: int) -> None:
        """Begin to copy a layer's tensors back."""
        for place, host in self._on_host.items():
            if place.layer == layer:
                x = torch.empty_like(host, device=self._device)
                self._on_device[place] = self._copy(x, host, x)

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
        """Drop the tensors that were sent last: memory that compute takes from now on is written behind their copies."""
        for leaving in self._leaving:
            if leaving.over is not None:
                torch.cuda.current_stream(self._device).wait_event(leaving.over)
        self._leaving = []


class _PacksAttention(TorchDispatchMode):
    """Selective checkpointing as torch's create_selective_checkpoint_contexts has it, whose own cache stays on the device."""

    def __init__(self, tensors: LayerTensors, packed: list[Any]) -> None:
        super().__init__()
        self._tensors, self._packed = tensors, packed

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = op(*args, **kwargs or {})
        if op in ATTENTION:
            self._packed.append(tree_map_only(Tensor, self._tensors.pack, outputs))
        return outputs


class _UnpacksAttention(TorchDispatchMode):
    def __init__(self, tensors: LayerTensors, packed: Iterator[Any]) -> None:
        super().__init__()
        self._tensors, self._packed = tensors, packed

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in ATTENTION:
            return tree_map_only((Tensor, Place), self._tensors.unpack, next(self._packed))
        return op(*args, **kwargs or {})
