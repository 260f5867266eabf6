"""Tensors of more than 2³¹ elements: every index and size of ours on the way to the host and back. One byte each stands in."""

from __future__ import annotations

import pytest
import torch

from ds_memo.memory.host import available_bytes
from ds_memo.remat.op_policy import compute_rows
from ds_memo.remat.recipe import fingerprint
from ds_memo.spans import spans
from ds_memo.swap.pinned_segments import PAGE
from ds_memo.tiles.slices import fill, part
from tests.swap.by_hand import Rig

WIDTH = 4096
ROWS = (1 << 31) // WIDTH + 3
pytestmark = [pytest.mark.slow, pytest.mark.skipif(available_bytes() < 8 << 30, reason="takes 4.3 GB of host memory")]
MARKS = (0, (1 << 31) - 1, 1 << 31, ROWS * WIDTH - 1)
"""Elements that differ from the others."""


def marked() -> torch.Tensor:
    """Zeros take no memory until they are written."""
    tensor = torch.zeros(ROWS, WIDTH, dtype=torch.int8)
    for number, at in enumerate(MARKS, 1):
        tensor.view(-1)[at] = number
    return tensor


def test_a_frame_goes_to_the_host_and_comes_back() -> None:
    """All of it but the last row."""
    rig = Rig(pages=ROWS * WIDTH // PAGE + 1)
    frame = rig.layer_of([marked()], rows=ROWS - 1)
    rig.engine.let_go_but(0)
    rig.engine.bring_back(frame)
    (kept,) = frame.layout.kept
    found = frame.tensor(kept).view(-1)
    assert [int(found[at]) for at in MARKS[:3]] == [1, 2, 3]
    assert int(found[:-WIDTH].count_nonzero()) == 3
    rig.engine.replayed(frame)


def test_the_last_rows_of_a_gemm_are_computed_in_place() -> None:
    out = marked()
    left, right = torch.ones(ROWS, 2, dtype=torch.int8), torch.ones(2, WIDTH, dtype=torch.int8)
    compute_rows(torch.ops.aten.mm.default, (left, right), {}, ROWS - 1, out)
    assert out[-1].eq(2).all() and not out[-2].any() and int(out[-4, -1]) == 2


def test_the_last_tile_of_a_layer() -> None:
    whole = marked().unsqueeze(0)
    *_, last = spans(1, ROWS, 128)
    tile = part(whole, last, 1)
    assert int(tile[0, -1, -1]) == len(MARKS)
    fill(tile, torch.full_like(tile, 7))
    assert int(whole[0, -1, -1]) == 7 and int(whole[0, last.tokens.start - 1].sum()) in (0, 2)


def test_a_change_of_the_last_element_is_seen() -> None:
    tensor = marked()
    before = fingerprint(tensor)
    tensor[-1, -1] += 1
    assert fingerprint(tensor) != before
