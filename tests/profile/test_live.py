"""LiveBytes against cases whose bytes are known by hand."""

import gc
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_several_outputs_and_nested_outputs():
    x = torch.randn(64, 64)
    with LiveBytes() as count:
        values, indices = x.max(dim=1)
        assert count.live == 64 * 4 + 64 * 8
        parts = torch.unbind(x)
        assert count.live == 64 * 12 and len(parts) == 64
        copies = torch._foreach_add([x, x], 1.0)
        assert count.live == 64 * 12 + 2 * x.nbytes
    del values, indices, copies
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


def test_freed_in_another_thread():
    with LiveBytes() as count:
        box = [kib(1) for _ in range(200)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        made = [kib(1) for _ in range(200)]
        thread.join()
        assert count.live == 200 * KIB and len(made) == 200


def test_it_sees_what_an_inner_mode_allocates():
    class Inner(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.buffer = kib(3)
            return func(*args, **(kwargs or {}))

    with LiveBytes() as count, Inner() as inner:
        a = kib(1)
        assert count.live == 4 * KIB
        del a, inner.buffer
        assert count.live == 0


def test_only_its_own_device():
    with LiveBytes("meta") as count:
        a = kib(4)
        assert count.live == 0
        b = torch.empty(KIB, device="meta")
        assert count.live == 4 * KIB
        del a, b


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_backward_counts_too():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with LiveBytes("cuda") as count:
        (x @ x).relu().sum().backward()
        assert count.live == x.nbytes
        assert count.peak >= 2 * x.nbytes


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


def test_objects_that_the_user_froze_stay_frozen(nothing_frozen):
    gc.freeze()
    with older_objects_aside(torch.device("cuda")):
        pass
    assert gc.get_freeze_count() > 0
