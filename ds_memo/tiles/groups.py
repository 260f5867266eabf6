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

Ranks that wait for each other in layers have the same groups, by the layers' placements. So a rank that has stored an input after
all, or runs a layer whole, takes part in what the others do there. Under ZeRO-3 it gathers the layer below. Where ranks exchange
tensors inside the layer (shared sequences and GEMMs, experts) it runs the posts, too. At the first call these agree whether the
input follows at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_memo.errors import MemoError
from ds_memo.remat.layer import Layer
from ds_memo.remat.recipe import integers
from ds_memo.spans import Span


class CallInTiles(Protocol):
    """A call in tiles, as its group knows it."""

    member: Member
    below: Any
    """The call whose posts the backward runs again; None: none."""
    input_changed: torch.Tensor | None
    """True, on the device, if the hidden states are not what that has returned; None: they are stored."""

    @property
    def why_no_outputs_again(self) -> str:
        """Return why the backward must not compute what this call has returned; "": it may."""

    def run_posts_again(self, into: Any) -> None:
        """Compute what this call has returned once more, for the call above."""


@dataclass
class Member:
    """A layer call as a member of its group, in tiles or not."""

    layer: Layer
    call: Callable[[], CallInTiles | None] = lambda: None
    """None: it runs whole, or is gone."""
    below: Member | None = None
    """None: it is the first of its group."""
    runs_again: bool = False
    """True if its posts can run again in a backward. Ranks that exchange tensors in the layer are alike in that."""
    done: bool = False
    """True if what comes before its backward is done: its input is there, and other ranks do not wait."""


class ReturnedHidden(NamedTuple):
    """What a call in tiles has returned."""

    call: weakref.ref[CallInTiles]
    storage: StorageWeakRef
    """Memory of the hidden states. Hooks of modules hand on views of them."""
    version: int
    bits: torch.Tensor
    layout: tuple[object, ...]
    spans: Sequence[Span]
    striped: bool

    @classmethod
    def by(cls, call: CallInTiles, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> ReturnedHidden:
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
        self.latest: Member | None = None
        """The latest call, in tiles or not."""
        self._latest: ReturnedHidden | None = None

    def returned(self, call: CallInTiles, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> None:
        call.member.runs_again = not call.why_no_outputs_again
        self.latest, self._latest = call.member, ReturnedHidden.by(call, hidden, spans, striped)

    def ran(self, member: Member | None) -> None:
        """Hear of a call that cannot run again in the backward of the next; None: it has no backward."""
        self.latest, self._latest = member, None

    def below(self, hidden: torch.Tensor, spans: Sequence[Span], striped: bool) -> tuple[Any, str]:
        """Return the call that has returned these hidden states; else None, and why they must be stored."""
        if self._latest is None:
            return None, "no layer below it ran in tiles"
        why = self._latest.why_not(hidden, spans, striped)
        return (None if why else self._latest.call()), why

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return True, on the device, if what the call below has returned was changed since, and PyTorch did not count that."""
        assert self._latest is not None
        return self._latest.bits.ne(_bits(hidden)).any()


def compute_inputs(member: Member, gathering: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Compute and store the inputs of a call and of those below it in its group, if they are not there.

    Args:
        gathering: gathers a layer.

    Raises:
        MemoError: an input was changed, and PyTorch did not count that.
    """
    above = []
    while member.below is not None and not member.done:
        above.append(member)
        member = member.below
    _refuse_changes(above)
    for member in reversed(above):
        call, module = member.call(), member.below.layer.module()  # type: ignore[union-attr]
        if call is not None and call.below is not None:
            call.below.run_posts_again(into=call)
        elif module is not None:
            with gathering(module):  # with the other ranks
                pass
        member.done = True


def _refuse_changes(members: Sequence[Member]) -> None:
    calls = [(member, call.input_changed) for member in members if (call := member.call()) is not None]
    given = [(member, changed) for member, changed in calls if changed is not None]
    # The group's one synchronization.
    flags = torch.stack([changed for _, changed in given]).tolist() if given else []
    if any(flags):
        raise MemoError(
            f"layer {given[flags.index(True)][0].layer.name}: its input was changed in place after the layer below had returned "
            "it, and PyTorch did not count that (a write to .data, or a kernel of its own). So the input cannot be computed "
            "again. Write the result to a new tensor, or set memo.input_every to 1"
        )
