"""Count the live and peak bytes that a block of code makes: tensor by tensor, or by CUDA's allocator.

The CPU has no `torch.cuda.max_memory_allocated`; this is its counterpart, exact to the byte, as no allocator rounds.
torch's MemTracker (torch/distributed/_tools/mem_tracker.py) also sorts tensors by module and role; this one only adds
them up, which is cheap enough for a whole training step. Storages are followed by weak reference, as there. Only the allocator
sees a kernel's workspace: flash attention's backward adds up dQ in float32, twice the bytes of Q in bf16.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the bytes of every tensor storage that torch ops create on one device inside the block.

    A storage counts once, however many views share it, from the op that returns it until it is freed, inside the block or
    later. Tensors made before the block never count, even if an op changes them in place. Backward counts too: autograd
    carries the mode along. Counting keeps no tensor alive.

    Enter it around other dispatch modes, not inside them: it counts only ops that reach it. It does not count a kernel's
    workspace, what a higher-order op (torch.cond) makes inside, tensors made in other Python threads, and memory that
    torch only wraps (`torch.frombuffer`).

    Args:
        device: The device to count on; a type without index ("cuda") means every device of that type.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)
        self.peak = 0
        """The most bytes alive at once since the first block began or since `reset_peak()`."""
        self._live = 0
        self._counted: dict[int, tuple[weakref.ref, int]] = {}  # address of the StorageImpl -> its reference, its bytes
        self._freed: deque[int] = deque()  # any thread may free; only the reader of `live` takes away, so no lock

    @property
    def live(self) -> int:
        self._forget_freed()
        return self._live

    def reset_peak(self) -> None:
        """Let `peak` start again from what is live now."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._forget_freed()  # first: a new storage may already have the address of a freed one
        given = None
        for storage in self._storages(out):
            if storage._cdata not in self._counted:
                if given is None:
                    given = {s._cdata for s in self._storages((args, kwargs))}
                if storage._cdata in given:
                    continue  # the op returns an argument that was made outside the block
            self._count(storage)
        return out

    def _forget_freed(self) -> None:
        while self._freed:
            self._live -= self._counted.pop(self._freed.popleft())[1]

    def _storages(self, tree) -> list[torch.UntypedStorage]:
        tensors = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t))
        return [storage for t in tensors if self._is_mine(t.device) for storage in storages_of(t)]

    def _is_mine(self, device: torch.device) -> bool:
        return device.type == self.device.type and self.device.index in (None, device.index)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        reference, counted = self._counted.get(key, (None, 0))
        if reference is None:
            freed = self._freed  # not self: the storage may outlive the counter
            reference = weakref.ref(storage, lambda _: freed.append(key))
        self._counted[key] = (reference, size)
        self._live += size - counted
        self.peak = max(self.peak, self._live)

    def __enter__(self) -> LiveBytes:
        super().__enter__()
        self._resize = resize = torch.UntypedStorage.resize_  # no dispatched op, yet how storages are emptied early

        def resize_and_count(storage: torch.UntypedStorage, size: int):
            result = resize(storage, size)
            self._forget_freed()
            if storage._cdata in self._counted:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count
        return self

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)


class AllocatedBytes:
    """LiveBytes' `live`, `peak` and `reset_peak` for all requests to CUDA's allocator, kernels' workspaces included.

    Bytes are those requested, before rounding. Older memory that is freed inside the block is subtracted. Entering resets the
    process's own peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    @property
    def live(self) -> int:
        return self._requested("current") - self._before

    @property
    def peak(self) -> int:
        return self._requested("peak") - self._before

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _requested(self, when: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{when}"]

    def __enter__(self) -> AllocatedBytes:
        gc.collect()  # a graph in a reference cycle would be freed inside
        _release_backward(self._device)
        self.reset_peak()
        self._before = self._requested("current")
        return self

    def __exit__(self, *error) -> None:
        pass


@contextmanager
def older_objects_aside(device: torch.device) -> Iterator[None]:
    """Within the block AllocatedBytes' collections look at objects made inside it alone: each would look at all modules of a
    training script, for 0.3 s, and a profile makes a hundred. Does nothing on a CPU, or if the user has frozen objects."""
    if device.type != "cuda" or gc.get_freeze_count():  # unfreeze() would give the user's back, too
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _release_backward(device: torch.device) -> None:
    """Wait until autograd's thread has released the last backward, which it does shortly after returning: a second, empty
    backward runs on that thread after it."""
    with torch.enable_grad():
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x, x.detach())


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return a tensor's storages. A sparse one has those of its indices and values."""
    if torch._C._has_storage(tensor):
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return []
    return [part.untyped_storage() for part in parts]


def bytes_made(device: torch.device) -> LiveBytes | AllocatedBytes:
    """Return the counter that sees most on this device."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes(device)
