"""The allocator op in Python: log the requests of a pass, then give each request its planned address.

    allocator = Allocator(torch.device("cpu"))
    allocator.install()
    allocator.profile()                  # a pass begins; from here on requests are logged
    allocator.phase("forward")           # any name; ds_memo.plan.phases has those of a training pass
    …
    log = allocator.requests()           # -> a trace -> a plan (ds_memo.plan)
    allocator.load_plan(0, visits)
    allocator.reserve(plan.peak)         # the arena, one block of the native allocator
    allocator.follow(0)                  # a pass begins that follows plan 0
    allocator.phase("forward")

Words: a *pass* is one training forward and everything until the next one begins; it *visits* phases; the k-th request of a visit
gets slot k. A request that does not fit the plan goes to torch's own allocator and is counted; even a wrong plan never makes two
live blocks overlap. The state belongs to a device, not to a thread: on CUDA the backward runs on another thread.

C++: csrc/allocator_core.h has the logic, ops_cpu.cpp and ops_cuda.cpp the hooks into torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ds_memo.errors import warn
from ds_memo.ops import library

MIN_BYTES = {"cpu": 64 << 10, "cuda": 1 << 20}
"""Smaller requests go to the native allocator. CUDA's serves them from a separate pool, which fragments nothing."""
NATIVE = (1 << 64) - 1
"""Offset of a slot that the plan leaves to the native allocator."""
MISSES = ("native", "overlap", "size", "abandoned", "end", "unplanned", "stream", "pool", "arena")
"""Reasons why a request inside a phase got no planned address; see Outcome in csrc/allocator_core.h."""

_MODES = ("off", "profile", "plan")
"""In the order of csrc/allocator_core.h, like _KINDS."""
_KINDS = ("enter", "malloc", "free", "elsewhere")
_names: dict[int, Any] = {}
"""Names of phases, by the op's number."""
_count = itertools.count()


class _Numbers(dict[Hashable, int]):
    """The op's number of each phase, by name; assigned once per process."""

    def __missing__(self, name: Hashable) -> int:
        number = self.setdefault(name, next(_count))  # another thread may ask, too
        _names[number] = name
        return number


_numbers = _Numbers()


class LogEvent(NamedTuple):
    """One event of a profiled pass."""

    kind: str
    """ "enter", "malloc", "free"; or "elsewhere", a malloc on another stream (CPU: thread) than the pass's, served by no plan."""
    phase: Any
    """The phase's name; None for "free"."""
    id: int
    """The block's number; unused for "enter"."""
    size: int
    """Bytes of a malloc."""


Slot = tuple[int, int]
"""Requested bytes, and offset in bytes from the arena's start (or NATIVE)."""


class Allocator:
    """The op on one device. All instances of a device share its state.

    Args:
        device: the device; on CUDA with its index.
        warn: called with the reason if the cache of compiled ops cannot be used.

    Raises:
        ds_memo.compiled.Unavailable: the op cannot be built here; the message says what is missing.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None] = warn) -> None:
        self._op = library.load(device.type, warn)
        if device.type == "cuda":
            torch.cuda.init()
        self._device = 0 if device.type == "cpu" else device.index
        self.min_bytes = MIN_BYTES[device.type]

    def install(self) -> None:
        """Put the op in front of torch's allocator for this type of device. It changes nothing until a pass begins.

        Raises:
            RuntimeError: another allocator is installed.
        """
        self._op.install()
        self._op.set_min_bytes(self._device, self.min_bytes)

    def uninstall(self) -> None:
        """End the pass, forget the plans, free the arena and restore torch's allocator.

        Live blocks of the arena stay valid, and the last of them frees it. Until then the op stays in front, switched off.
        """
        if self.installed:
            self.reset()
            self._op.uninstall()

    @property
    def installed(self) -> bool:
        return self._op.installed()

    @property
    def mode(self) -> str:
        """ "off", "profile" or "plan"."""
        return _MODES[self._op.mode(self._device)]

    def profile(self) -> None:
        """Begin a pass whose requests are logged."""
        self._op.begin_pass(self._device, _MODES.index("profile"), 0)

    def follow(self, key: int) -> None:
        """Begin a pass that follows plan `key`.

        Raises:
            KeyError: the plan was never loaded.
        """
        self._op.begin_pass(self._device, _MODES.index("plan"), key)

    def stop(self) -> None:
        """End the pass: all requests go to the native allocator."""
        self._op.stop(self._device)

    def phase(self, name: Hashable | None) -> None:
        """Enter a phase, for requests on any thread; None: leave the present one. Equal names are one phase."""
        self._op.enter(self._device, -1 if name is None else _numbers[name])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the requests inside to the native allocator, in any phase, and do not log them."""
        try:
            self._op.set_min_bytes(self._device, 1 << 62)
            yield
        finally:
            self._op.set_min_bytes(self._device, self.min_bytes)

    def requests(self) -> list[LogEvent]:
        """Return the events since the pass began, or since the last call. A free has the id of its malloc, even from an earlier
        pass."""
        return [
            LogEvent(_KINDS[kind], _names[phase] if phase >= 0 and _KINDS[kind] != "free" else None, id_, size)
            for kind, phase, id_, size in self._op.take_log(self._device)
        ]

    def load_plan(self, key: int, visits: Iterable[tuple[Hashable, Sequence[Slot]]], spare: int = 0) -> None:
        """Load plan `key`.

        Args:
            key: any number; replaces an earlier plan of this number.
            visits: the phases in the order of the pass, each with its slots in the order of its requests.
            spare: bytes by which a request may be smaller than its slot.
        """
        self._op.load_plan(self._device, key, [(_numbers[phase], list(slots)) for phase, slots in visits], spare)

    def forget_plan(self, key: int) -> None:
        """Forget a plan. A pass that follows it ends."""
        self._op.forget_plan(self._device, key)

    def reset(self) -> None:
        """Forget every plan, and the arena."""
        self._op.forget_plans(self._device)
        self._op.set_arena(self._device, 0)

    def reserve(self, nbytes: int) -> None:
        """Replace the arena by one of exactly `nbytes`; 0: none. The last live block of an old arena frees it.

        Raises:
            torch.OutOfMemoryError: (CUDA) the native allocator has no such block; the arena is as before.
            RuntimeError: (CPU) the same.
        """
        self._op.set_arena(self._device, nbytes)

    def release(self) -> int:
        """End the pass and free the arena, for example before an evaluation. Returns the arena's bytes."""
        nbytes = self.arena_bytes
        self._op.stop(self._device)
        self._op.set_arena(self._device, 0)
        return nbytes

    @property
    def arena(self) -> tuple[int, int]:
        """Address and bytes of the arena; zeros without one."""
        return self._op.arena(self._device)[:2]

    @property
    def arena_bytes(self) -> int:
        return self._op.arena(self._device)[1]

    @property
    def live_blocks(self) -> int:
        """Blocks alive in the present arena."""
        return self._op.arena(self._device)[2]

    @property
    def retired_arenas(self) -> int:
        """Arenas that were replaced and still hold a live block."""
        return self._op.arena(self._device)[3]

    def owns(self, address: int) -> bool:
        """Return True if an address lies in an arena."""
        return self._op.owns(self._device, address)

    def stats(self) -> dict[str, int]:
        """Return counts since the process began:

        "hit" and each of MISSES   requests
        "waits"                    events of other streams that the compute stream waited for before it used a slot
        "gave_way"                 empty arenas that were freed because the native allocator had no room (CUDA)
        "live_bytes", "peak_bytes" bytes in arenas, now and at most
        "highest_end"              end of the highest slot in use so far, in bytes from the arena's start
        """
        return self._op.stats(self._device)
