"""Negative controls: scenarios that must fail."""

from __future__ import annotations

import ctypes
import threading

import torch

from tests.ops.cpu_scenarios.table import CPU
from tests.ops.rig import Rig, same


def a_wrong_byte() -> None:
    rig = Rig(CPU)
    reference = rig.forward_and_backward()
    rig.planned()

    def spoil(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        address, nbytes = rig.allocator.arena
        ctypes.memset(address, 1, nbytes // 2)

    rig.net.layers[1].register_forward_hook(spoil)
    assert same(rig.follow(), reference)


def a_crash() -> None:
    ctypes.string_at(0)


def a_deadlock() -> None:
    threading.Event().wait()


CONTROLS = {run.__name__: run for run in (a_wrong_byte, a_crash, a_deadlock)}
