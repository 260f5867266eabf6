"""ZeRO stages, dtypes, accumulation, offload and sequence parallelism, in whole layers and in tiles: the same losses with memo as
without, and on one process.

The whole matrix: pytest -m slow tests/deepspeed/test_matrix.py -s
"""

from dataclasses import replace

import pytest
import torch
from torch.distributed.nn.functional import all_gather

from ds_memo.deepspeed import sequence
from ds_memo.swap import streams
from ds_memo.tiles.layer import TiledCall
from tests.deepspeed import matrix
from tests.distributed_harness.common import DistributedTest
from tests.faults import put_in


class TestQuick(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ranks_per_sequence", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_every_stage_and_dtype(self, ranks_per_sequence):
        matrix.run(matrix.quick_cases(ranks_per_sequence))

    def test_a_ring_and_a_length_that_does_not_divide(self, monkeypatch):
        monkeypatch.setattr(matrix, "LENGTH", 35)
        matrix.run([replace(case, ulysses=1) for case in matrix.quick_cases(2) if case.dtype == "fp32"])

    def test_mistakes_would_show(self, monkeypatch):
        """A loss that is not weighted, the tutorial's gradient below ZeRO-3, and host rows that come back wrong."""
        case, want = matrix.Case(1, "fp32", 1, ranks_per_sequence=2), matrix.reference()

        def unweighted(loss, labels, engine):
            return sequence.mean_over_ranks(loss, torch.zeros_like(labels), engine)

        def as_in_the_tutorial(loss, labels, engine):
            counts = all_gather((labels != -100).sum().float())
            return (torch.stack(all_gather(loss)) * torch.stack(counts)).sum() / sum(counts)

        for mistake in (unweighted, as_in_the_tutorial):
            losses, _ = matrix.train(case, None, mistake)
            assert matrix.apart(losses, want) > 100 * matrix.TOLERANCE["fp32"], mistake.__name__

        assert matrix.apart(matrix.train(case, matrix.MEMO)[0], want) <= matrix.TOLERANCE["fp32"]
        put_in(monkeypatch, streams, "_copy_all", spoiled)
        assert matrix.apart(matrix.train(case, matrix.MEMO)[0], want) > 100 * matrix.TOLERANCE["fp32"]


def spoiled(right, copies, then=lambda: None):
    """Have reloads bring other values."""
    right(copies)
    for dst, *_ in copies:
        if dst.is_floating_point():
            dst.mul_(1.01)
    then()


@pytest.mark.slow
@pytest.mark.sweep
class TestWhole(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("ranks_per_sequence", [1, 2])
    def test_everything(self, ranks_per_sequence):
        matrix.run(matrix.every_case(ranks_per_sequence))


@pytest.mark.slow
class TestFourRanks(DistributedTest):
    """More ranks than the model's two key and value heads; and two groups of two."""

    world_size = 4

    @pytest.mark.parametrize("ranks_per_sequence, case", [(2, 1), (4, 3)])
    def test_four_ranks(self, ranks_per_sequence, case):
        matrix.run([matrix.quick_cases(ranks_per_sequence)[case]])

    def test_two_by_two(self, monkeypatch):
        monkeypatch.setattr(matrix, "LENGTH", 35)
        matrix.run([replace(case, ulysses=2) for case in matrix.quick_cases(4)[1:4:2]])


TILES = matrix.MEMO | {"tile_tokens": 11, "head_groups": 2}
LENGTH = 44
"""Half of it is no other size of the model: a rank's part of the rotary table would look like a mask of tokens × tokens."""


class TestTiles(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("cases", [matrix.quick_cases(1)[1::2], matrix.quick_cases(2)[::2]], ids=["whole sequences", "parts"])
    def test_stages_and_dtypes(self, cases, monkeypatch):
        monkeypatch.setattr(matrix, "LENGTH", LENGTH)
        matrix.run(cases, TILES)

    def test_layers_that_compute_their_inputs(self, monkeypatch):
        """Under ZeRO-3, parts of sequences, and both."""
        monkeypatch.setattr(matrix, "LENGTH", LENGTH)
        cases = [*matrix.quick_cases(1)[3::4], *matrix.quick_cases(2)[2:4]]
        matrix.run(cases, TILES | {"resident_layers": 0, "input_every": 3})

    def test_evaluations(self, monkeypatch):
        """Before the first step, and between steps."""
        monkeypatch.setattr(matrix, "LENGTH", LENGTH)
        kept = []
        forward = TiledCall.forward
        monkeypatch.setattr(TiledCall, "forward", lambda self, hidden: kept.append(self._trains) or forward(self, hidden))
        for stage, ranks_per_sequence in ((2, 2), (3, 1)):
            case = matrix.Case(stage, "fp32", 1, ranks_per_sequence=ranks_per_sequence)
            stock, _ = matrix.train(case, None, evaluations=(0, 3))
            kept.clear()
            tiled, report = matrix.train(case, TILES, evaluations=(0, 3))
            assert matrix.apart(tiled, stock) <= matrix.TOLERANCE["fp32"], (tiled, stock)
            assert report["tiles"]["layers"] == [0, 1, 2, 3] and not report["tiles"]["not_tiled"]
            assert [kept[step * 4 : step * 4 + 4] for step in range(5)] == [[step not in (0, 3)] * 4 for step in range(5)]

    def test_ulysses_stores_attention_once_from_the_first_step_on(self, monkeypatch):
        """What ranks trade behind the kernel is made again from the kernel's output."""
        monkeypatch.setattr(matrix, "LENGTH", LENGTH)
        case = matrix.Case(0, "fp32", 1, ranks_per_sequence=2)
        moved = []
        for steps in (1, 2):
            monkeypatch.setattr(matrix, "STEPS", steps)
            moved.append(matrix.train(case, TILES)[1]["bytes_to_host"])
        assert moved[1] == 2 * moved[0] > 0
