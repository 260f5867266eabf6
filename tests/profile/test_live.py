"""LiveBytes against cases whose bytes are known by hand."""

import gc
import weakref

import pytest
import torch

from ds_memo.profile.live import LiveBytes, older_objects_aside

KIB = 1024


def kib(n: int) -> torch.Tensor:
    return torch.zeros(n * KIB // 4)


def test_counts_what_is_born_and_what_is_freed():
    with LiveBytes() as count:
        a, b = kib(4), kib(2)
        assert count.live == count.peak == 6 * KIB
        del a
        assert (count.live, count.peak) == (2 * KIB, 6 * KIB)
        c = kib(1)
        assert (count.live, count.peak) == (3 * KIB, 6 * KIB)
    del b, c
    assert (count.live, count.peak) == (0, 6 * KIB)


def test_a_view_is_not_counted_and_keeps_its_whole_storage():
    with LiveBytes() as count:
        a = kib(4)
        view = a.view(2, -1)[:0]
        also = a.detach(), a[1:], a.split(16)
        assert count.live == count.peak == 4 * KIB
        del a, also
        assert count.live == 4 * KIB
        del view
        assert count.live == 0


def test_outside_tensors_do_not_count():
    outside, target = kib(4), kib(4)
    with LiveBytes() as count:
        outside.add_(1)
        outside[1:].mul_(2)
        torch.add(outside, 1, out=target)
        view = outside.view(-1, 4)
        assert count.live == count.peak == 0
        inside = view + 1
        inside.add_(outside.view(-1, 4))
        assert count.live == count.peak == 4 * KIB


def test_resized_storages():
    with LiveBytes() as count:
        a = kib(4)
        a.untyped_storage().resize_(0)
        assert (count.live, count.peak) == (0, 4 * KIB)
        a.untyped_storage().resize_(8 * KIB)
        assert count.live == count.peak == 8 * KIB
        out = torch.empty(0)
        torch.add(torch.ones(KIB), 1, out=out)  # the kernel resizes `out`
        assert count.live == 12 * KIB
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_forward_keeps_what_backward_needs_and_backward_frees_it():
    x, w = torch.randn(8, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    with LiveBytes() as count:
        loss = torch.relu(x @ w).sum()  # mm's output dies: relu saves its own
        assert count.live == 8 * 32 * 4 + 4
        count.reset_peak()
        loss.backward()
        assert count.live == 4 + x.nbytes + w.nbytes  # loss and the two gradients
        # At the peak: loss, relu output, its gradient, which broadcasts as a view of one element
        assert count.peak >= x.nbytes * 2 + 4
        x.grad = w.grad = None
        assert count.live == 4


def test_it_keeps_nothing_alive():
    with LiveBytes() as count:
        a = kib(1)
        gone = weakref.ref(a)
        del a
        assert gone() is None and count.live == 0
        b = kib(1)
        counter_gone = weakref.ref(count)
    del count
    gc.collect()
    assert counter_gone() is None
    del b  # its callback must survive the counter


class Node:
    """An object that refers to itself: reference counting alone never frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen():
    """The suite freezes what it imports: see tests/haste.py."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_collections_see_the_block_s_own_objects_alone(nothing_frozen):
    older = weakref.ref(Node())
    with older_objects_aside(torch.device("cuda")):
        assert older() is None  # garbage of before went first
        made = weakref.ref(Node())
        gc.collect()
        assert made() is None and gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
