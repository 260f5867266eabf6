"""Groups of layers of which the first alone stores its input. The others' follow from it, layer by layer.

A swapped layer stores its input x and attention's output o. But the input of the layer above is

    x(i+1) = post(x(i), o(i))     output projection, residual, norm, MLP or experts; of a layer without attention, all of it

token by token, without attention. As the backward comes to the last layer of a group, the posts of the layers below run once
more, the lowest first. Each result is stored on the host, a tile at a time, as the forward would have stored it, and is there
until the backward of its layer is over. So each post runs once, ZeRO-3 gathers each layer once more, and what follows is the
backward of any layer in tiles. Layers above a group have freed more host memory by then than its inputs take
(ds_memo.solve.groups).

A layer is in a group with the one below if its input is what that has returned, and nothing has changed it since. One that is not
stores its input. A change that PyTorch does not count (a write to `.data`, a kernel of the user's own) shows in a sum of each
token's bits. The device compares the sums in the forward, and the backward that would compute the input again ends with an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_memo.errors import MemoError
from ds_memo.remat.recipe import integers
from ds_memo.spans import Span


class TiledCall(Protocol):
    """A call in tiles, as its group knows it."""

    below: Any
    """The call of which the backward computes the hidden states; None: they are stored."""
    input_changed: torch.Tensor
    """True, on the device, if the hidden states are not what that has returned."""

    @property
    def name(self) -> str:
        """The layer's."""

    @property
    def has_input(self) -> bool:
        """True if the hidden states can be read."""

    @property
    def why_no_outputs_again(self) -> str:
        """Why the backward must not compute what this call has returned; "": it may."""

    def run_posts_again(self, into: Any) -> None:
        """Compute what this call has returned once more, for the call above."""


class Returned(NamedTuple):
    """What a call in tiles has returned."""

    call: weakref.ref[TiledCall]
    storage: StorageWeakRef
    """Of the hidden states. Hooks of modules hand on views of them."""
    version: int
    bits: torch.Tensor
    layout: tuple[object, ...]
    spans: Sequence[Span]
    striped: bool

    @classmethod
    def by(cls, call: TiledCall, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> Returned:
        storage = StorageWeakRef(hidden.untyped_storage())
        return cls(weakref.ref(call), storage, hidden._version, _bits(hidden), _layout(hidden), spans, striped)

    def why_not(self, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> str:
        """Return why a call with these hidden states must store them; "": they are what this call has returned."""
        call = self.call()
        if self.storage.cdata != hidden.untyped_storage()._cdata or self.layout != _layout(hidden):
            return "it is not the output of the layer below"
        if call is None:
            return "the layer below keeps nothing for a backward"
        if self.version != hidden._version:
            return "the output of the layer below was changed in place"
        if self.spans != spans or self.striped != striped:
            return "the layer below has other tiles"
        return call.why_no_outputs_again


def _bits(hidden: torch.Tensor) -> torch.Tensor:
    """Return a sum of each token's bits: (b, s)."""
    return integers(hidden.detach()).sum(-1, dtype=torch.int64)


def _layout(hidden: torch.Tensor) -> tuple[object, ...]:
    return hidden.shape, hidden.stride(), hidden.storage_offset(), hidden.dtype


class Grouping:
    """Finds for each call of one model's layers the one below it."""

    def __init__(self) -> None:
        self._latest: Returned | None = None

    def returned(self, call: TiledCall, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> None:
        self._latest = Returned.by(call, hidden, spans, striped)

    def below(self, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> tuple[TiledCall | None, str]:
        """Return the call that has returned these hidden states; else None, and why they must be stored."""
        if self._latest is None:
            return None, "no layer below it ran in tiles"
        why = self._latest.why_not(hidden, spans, striped)
        return (None if why else self._latest.call()), why

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return True, on the device, if what the call below has returned was changed since, and PyTorch did not count that."""
        assert self._latest is not None
        return self._latest.bits.ne(_bits(hidden)).any()


def compute_inputs(call: TiledCall) -> None:
    """Compute and store the inputs of a call and of those below it in its group, if they are not there.

    Raises:
        MemoError: an input was changed, and PyTorch did not count that.
    """
    above = []
    while not call.has_input:
        assert call.below is not None
        above.append(call)
        call = call.below
    if not above:
        return
    # The group's one synchronization.
    changed = torch.stack([call.input_changed for call in above]).tolist()
    if any(changed):
        raise MemoError(
            f"layer {above[changed.index(True)].name}: its input was changed in place after the layer below had returned it, and "
            "PyTorch did not count that (a write to .data, or a kernel of its own). So the input cannot be computed again. Write "
            "the result to a new tensor, or set memo.input_every to 1"
        )
    for call in reversed(above):
        call.below.run_posts_again(into=call)
