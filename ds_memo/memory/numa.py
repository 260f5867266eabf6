"""The NUMA node of a device. A copy from another node's memory first crosses the link between the sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Node:
    """A NUMA node and those of its CPUs that this process may run on."""

    number: int
    cpus: frozenset[int]


def node_of(device: torch.device, root: Path = Path("/")) -> Node | None:
    """Return the node of a CUDA device; None for other devices, and if the machine has one node or does not tell.

    Args:
        root: the folder that holds /sys.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return node_of_pci(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id, root)


def node_of_pci(domain: int, bus: int, slot: int, root: Path = Path("/")) -> Node | None:
    """Return the node of a PCI device; see :func:`node_of`."""
    system = root / "sys/devices/system/node"
    try:
        number = int((root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
        if number < 0 or len(list(system.glob("node[0-9]*"))) < 2:
            return None
        cpus = _numbers((system / f"node{number}/cpulist").read_text()) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return None
    return Node(number, frozenset(cpus)) if cpus else None


@contextmanager
def on(node: Node | None) -> Iterator[None]:
    """Run this thread on the node's CPUs: Linux puts a page on the node of the CPU that first touches it.

    A memory policy would be more direct, but most containers forbid mbind.
    """
    if node is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with suppress(OSError):  # the CPUs are not this container's: pages may lie on another node
            os.sched_setaffinity(0, node.cpus)
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list like "0-3,8,10-11"."""
    numbers: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
