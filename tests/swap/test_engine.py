"""The schedule itself, driven by hand: the calls that the engine makes to its streams."""

from __future__ import annotations

import pytest
import torch

from ds_memo.swap.streams import ThreadStreams
from tests.swap.by_hand import Rig
from tests.swap.delayed import DelayedStreams
from tests.swap.ordered import Immediate


class Diary(Immediate):
    """Records the engine's calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._events = 0

    def mark(self, stream: str) -> str:
        self._events += 1
        self.lines.append(f"mark {stream} as {self._events}")
        return str(self._events)

    def wait(self, stream: str, event: str) -> None:
        self.lines.append(f"{stream} waits for {event}")

    def copy(self, stream: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int, *where: int) -> None:
        super().copy(stream, dst, src, nbytes, *where)
        self.lines.append(f"{stream} copies {nbytes}")


def test_the_schedule_of_three_layers():
    diary = Diary()
    rig = Rig(diary)
    frames = []
    for index in range(3):
        frames.append(rig.layer((index + 1, 64)))
        diary.lines.append(f"layer {index} has run")
    for index in reversed(range(3)):
        rig.replay(frames[index])
        diary.lines.append(f"layer {index} was replayed")
    assert "\n".join(diary.lines) == (
        """\
mark compute as 1
d2h waits for 1
d2h copies 256
mark d2h as 2
layer 0 has run
mark compute as 3
d2h waits for 3
d2h copies 512
mark d2h as 4
layer 1 has run
compute waits for 2
mark compute as 5
d2h waits for 5
d2h copies 768
mark d2h as 6
layer 2 has run
compute waits for 4
compute waits for 6
mark compute as 7
h2d waits for 7
h2d copies 768
mark h2d as 8
compute waits for 8
mark compute as 9
h2d waits for 9
h2d copies 512
mark h2d as 10
layer 2 was replayed
compute waits for 10
mark compute as 11
h2d waits for 11
h2d copies 256
mark h2d as 12
layer 1 was replayed
compute waits for 12
layer 0 was replayed"""
    )


def test_a_frame_that_is_not_to_come_back_ahead_takes_no_memory_before_it_is_wanted(rig):
    frames = [rig.layer_of([torch.full((64,), float(number))], ahead=number == 1) for number in range(4)]
    for number in (3, 2, 1, 0):
        assert rig.replay(frames[number])[0][0] == number
        assert [bool(frame.slots) for frame in frames[:number]] == [below == 1 and number == 2 for below in range(number)]
    assert (rig.engine.traffic.frames_on_demand, rig.engine.traffic.frames_prefetched) == (3, 1)
    rig.engine.close()


@pytest.mark.parametrize("streams", [ThreadStreams, lambda: DelayedStreams(5)], ids=["prompt", "late"])
def test_what_comes_back_is_what_left(streams):
    rig = Rig(streams())
    tensors = [
        torch.randn(9, 16),
        torch.randn(2, 5, 4, 8).transpose(1, 2),
        torch.randint(0, 9, (64,)),
        torch.randn(33).bfloat16(),
    ]
    frames = [rig.layer_of([tensor + index for tensor in tensors]) for index in range(4)]
    for index in reversed(range(4)):
        for back, tensor in zip(rig.replay(frames[index]), tensors, strict=True):
            assert torch.equal(back, tensor + index)
            assert back.dtype == tensor.dtype
    traffic = rig.engine.traffic
    assert (traffic.frames, traffic.frames_on_demand, traffic.frames_prefetched) == (4, 1, 3)
    assert traffic.bytes_to_host == traffic.bytes_from_host == 4 * sum(tensor.nbytes for tensor in tensors)
    rig.engine.close()


def test_reloads_are_issued_ahead_across_resident_frames(rig):
    frames = [rig.layer(value=index, resident=index in (1, 3)) for index in range(5)]
    for index in reversed(range(5)):
        assert rig.replay(frames[index])[0].unique().tolist() == [index]
    assert rig.engine.traffic.frames_on_demand == 1
    assert rig.engine.traffic.frames_prefetched == 2


@pytest.mark.parametrize("first", [64, 512, 640])
def test_of_small_frames_two_come_back_at_once(first, rig):
    """The large one below them has twice as long. No more bytes are on their way than in two large buffers."""
    values = [[torch.full((size,), float(number)) for size in (first, 1024 - first)] for number in range(5)]
    frames = [rig.layer_of(tensors) for tensors in values]
    for frame in frames[2:]:
        frame.first_only = True
    coming = {4: {4, 3}, 3: {3, 2}, 2: {2, 1}, 1: {1, 0}, 0: {0}}
    if first <= 512:  # half of a buffer
        coming |= {4: {4, 3, 2}, 3: {3, 2, 1}}
    for number in reversed(range(5)):
        rig.engine.bring_back(frames[number])
        assert {below for below, frame in enumerate(frames) if frame.slots} == coming[number]
        assert sum(slot.nbytes for frame in frames for slot in frame.slots.values()) <= 2 * 1024 * 4
        back = [frames[number].tensor(kept) for kept in frames[number].layout.kept[: 1 if number > 1 else 2]]
        assert all(torch.equal(found, tensor) for found, tensor in zip(back, values[number], strict=False))
        rig.engine.replayed(frames[number])
    assert (rig.engine.traffic.frames_on_demand, rig.engine.traffic.frames_prefetched) == (1, 4)


def test_small_frames_that_are_not_next_after_all_are_sent_away(rig):
    frames = [rig.layer_of([torch.full((64,), float(number)), torch.zeros(64)]) for number in range(5)]  # halves
    for frame in frames:
        frame.first_only = True
    rig.engine.bring_back(frames[4])
    rig.engine.replayed(frames[4])
    rig.engine.bring_back(frames[1])
    assert [bool(frame.slots) for frame in frames] == [True, True, False, False, False]
    rig.engine.replayed(frames[1])
    frames[3].first_only = False  # else its second tensor stays away
    assert rig.replay(frames[3])[0].unique().item() == 3


LAYS = {
    "as laid out": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "columns": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


def test_the_bytes_of_a_conjugate_are_those_that_it_stands_for(rig):
    """Copies read bare memory, where a lazy conjugate looks like the tensor that it was made of."""
    tensors = [torch.randn(8, 3, dtype=torch.complex64).conj(), torch._neg_view(torch.randn(8, 3))]
    for back, tensor in zip(rig.replay(rig.layer_of(tensors)), tensors, strict=True):
        assert torch.equal(back, tensor)
    rig.engine.close()


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("lay", LAYS)
def test_a_tensor_is_kept_as_its_frame_lays_it_out(lay, resident):
    rig, own = Rig(), LAYS[lay](torch.randn(3, 40, 16))
    frame = rig.begin([torch.empty(own.shape)], resident=resident)
    (kept,) = frame.layout.kept
    rig.engine.keep(frame, kept, own)
    rig.engine.end(frame)
    rig.engine.bring_back(frame)
    found = frame.tensor(kept)
    assert torch.equal(found, own) and found.stride() == kept.stride
    assert (found.data_ptr() == own.data_ptr()) == (resident and lay == "as laid out")  # else a copy
    rig.engine.close()
