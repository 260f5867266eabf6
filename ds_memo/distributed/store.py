"""The process group's key-value store. No wait is longer than the process group's time-out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

ANSWER_S = 5.0
"""Seconds for a question to the store itself. A store that lies in a frozen rank answers none."""


def time_out() -> timedelta:
    """Return how long ranks wait for each other in a collective of the default group."""
    world = distributed_c10d._get_default_group()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    default: timedelta = distributed_c10d.default_pg_timeout
    return default if options is None else options._timeout


@contextmanager
def groups_wait_no_longer() -> Iterator[None]:
    """Give groups that are made within, by DeepSpeed say, the default group's time-out where torch's default is longer.

    Gloo's would wait half an hour for a lost rank. A time-out that is set later does not reach gloo's sends.
    """
    stock, longest = distributed_c10d._get_default_timeout, time_out() if dist.is_initialized() else timedelta.max
    distributed_c10d._get_default_timeout = lambda backend: min(stock(backend), longest)
    try:
        yield
    finally:
        distributed_c10d._get_default_timeout = stock


def tell(key: str, text: str) -> None:
    """Set a key. A store that is gone with its rank hears nothing."""
    _within(ANSWER_S, lambda: distributed_c10d._get_default_store().set(key, text))


def forget(key: str) -> None:
    _within(ANSWER_S, lambda: distributed_c10d._get_default_store().delete_key(key))


def heard(keys: Sequence[str], wait_s: float) -> list[str | None]:
    """Return what was told under these keys; None for one under which nothing is told in time.

    Args:
        wait_s: seconds to wait for the last of them.
    """
    answers: list[str | None] = [None] * len(keys)

    def listen() -> None:
        store = distributed_c10d._get_default_store()
        with suppress(RuntimeError):
            store.wait(list(keys), timedelta(seconds=wait_s))
        answers[:] = [store.get(key).decode() if store.check([key]) else None for key in keys]

    _within(wait_s + ANSWER_S, listen)
    return list(answers)


def _within(seconds: float, ask: Callable[[], object]) -> None:
    """Ask the store, on a thread, since some of its answers are waited for without end."""

    def asked() -> None:
        with suppress(RuntimeError):
            ask()

    thread = threading.Thread(target=asked, name="ds_memo asks the store", daemon=True)
    thread.start()
    thread.join(seconds)
