"""Blocks of the slab are pinned from a CPU of the device's node: the first touch decides where pages lie."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from ds_memo.memory.numa import Node, node_of, node_of_pci, on
from ds_memo.swap import host_pool as pool
from ds_memo.swap import pinned_segments as segments
from ds_memo.swap.host_pool import HostPool
from ds_memo.swap.host_slab import HostSlab
from ds_memo.swap.pinned_segments import PAGE

CPUS = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU: running elsewhere cannot be observed")


@pytest.fixture
def machine(tmp_path):
    """Make a /sys tree of two nodes; device 0000:3b:00 is on the second, with this process's CPUs and more."""

    def make(node="1\n", cpulist=f"9990,9998-9999,{CPUS[0]}-{CPUS[-1]}\n", nodes=2):
        device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node)
        for number in range(nodes):
            folder = tmp_path / f"sys/devices/system/node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cpulist if number == 1 else "0-3")
        return tmp_path

    return make


def test_the_node_of_a_device(machine):
    assert node_of_pci(0, 0x3B, 0, machine()) == Node(1, frozenset(CPUS))


@pytest.mark.parametrize(
    "odd",
    [
        {"node": "-1\n"},  # a virtual machine that hides the node
        {"node": "nonsense"},
        {"nodes": 1, "node": "0\n"},
        {"cpulist": "9998-9999\n"},  # this process may use none of them
        {"cpulist": "\n"},  # memory without CPUs
    ],
)
def test_where_nothing_is_to_be_gained(machine, odd):
    assert node_of_pci(0, 0x3B, 0, machine(**odd)) is None


def test_other_devices(machine, monkeypatch):
    root = machine()
    assert node_of_pci(0, 0x3C, 0, root) is None  # not in the tree
    assert node_of(torch.device("cpu"), root) is None
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert node_of(torch.device("cuda", 0), root).number == 1
    del properties.pci_bus_id  # an older PyTorch
    assert node_of(torch.device("cuda", 0), root) is None


@needs_two_cpus
def test_only_this_thread_moves_and_only_for_a_while():
    observed, inside, go_on = [], threading.Event(), threading.Event()

    def other():
        inside.wait()
        observed.append(os.sched_getaffinity(0))
        go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError), on(Node(1, frozenset({CPUS[-1]}))):
        assert os.sched_getaffinity(0) == {CPUS[-1]}
        inside.set()
        go_on.wait()
        raise RuntimeError
    thread.join()
    assert observed == [set(CPUS)] and os.sched_getaffinity(0) == set(CPUS)
    with on(None):
        assert os.sched_getaffinity(0) == set(CPUS)


def test_cpus_that_the_container_lacks_change_nothing():
    with on(Node(1, frozenset({1023}))):
        assert os.sched_getaffinity(0) == set(CPUS)


@needs_two_cpus
def test_blocks_are_pinned_from_there(monkeypatch):
    where = []
    monkeypatch.setattr(HostPool, "_stream", lambda host: None)
    monkeypatch.setattr(segments, "pin", lambda block: where.append(os.sched_getaffinity(0)))
    for node in (Node(1, frozenset({CPUS[-1]})), None):
        monkeypatch.setattr(pool, "node_of", lambda device, node=node: node)
        host = HostSlab(4 * PAGE, HostPool(torch.device("cuda", 0)))
        host.free(host.allocate(PAGE, "a layer"))
    assert where == [{CPUS[-1]}, set(CPUS)]
    assert os.sched_getaffinity(0) == set(CPUS)
