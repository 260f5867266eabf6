"""Tiled layers under DeepSpeed: every ZeRO stage, dtype, offload and sequence parallelism; the same losses as stock's."""

import pytest

from ds_memo.tiles.layer import TiledCall
from tests.deepspeed import matrix
from tests.distributed_harness.common import DistributedTest

LENGTH = 44
"""Half of it is no other size of the model: a rank's part of the rotary table would look like a mask of tokens × tokens."""
TILES = matrix.MEMO | {"tile_tokens": 11, "head_groups": 2}


def run(cases):
    """Train every case with tiles and without memo."""
    wrong = []
    for case in cases:
        stock, _ = matrix.train(case, None)
        tiled, report = matrix.train(case, TILES)
        apart = matrix.apart(tiled, stock)
        print(f"{case}: tiles change losses by {apart:.1e}", flush=True)
        all_tiled = report["tiles"]["layers"] == [0, 1, 2, 3] and not report["tiles"]["not_tiled"]
        if not apart <= matrix.TOLERANCE[case.dtype] or not all_tiled or report["attention_recomputed"]:
            wrong.append(f"{case}: tiled {tiled}, stock {stock}, {report}")
    assert not wrong, "\n".join(wrong)


class TestTiles(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("cases", [matrix.quick_cases(1)[1::2], matrix.quick_cases(2)], ids=["whole sequences", "parts"])
    def test_stages_and_dtypes(self, cases, monkeypatch):
        monkeypatch.setattr(matrix, "LENGTH", LENGTH)
        run(cases)

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
