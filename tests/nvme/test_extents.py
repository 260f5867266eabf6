"""Space against a model: one flag for each page."""

from __future__ import annotations

import random

import pytest

from ds_memo.nvme.extents import Space
from tests.everyday import everyday


def lowest_gap(used: list[bool], pages: int) -> int | None:
    return next((at for at in range(len(used) - pages + 1) if not any(used[at : at + pages])), None)


@pytest.mark.parametrize("seed", everyday(range(20), [0, 1]))
def test_random_use_against_a_model(seed):
    draw, space, used, mine = random.Random(seed), Space(), [], []
    for _ in range(400):
        action = draw.random()
        if action < 0.05:
            space.grow(pages := draw.randint(1, 40))
            used += [False] * pages
        elif action < 0.6:
            pages = draw.randint(1, 12)
            expected, extent = lowest_gap(used, pages), space.allocate(pages)
            assert (extent and extent.begin) == expected
            if extent is not None:
                assert extent.nbytes == pages
                used[extent.begin : extent.begin + pages] = [True] * pages
                mine.append(extent)
            else:
                tail = next((at for at in range(len(used), 0, -1) if used[at - 1]), 0)
                assert space.missing_for == len(used) - tail
        elif mine:
            extent = mine.pop(draw.randrange(len(mine)))
            space.free(extent)
            used[extent.begin : extent.begin + extent.nbytes] = [False] * extent.nbytes
        assert space.extents == mine or set(space.extents) == set(mine)
        assert space.size == len(used)
    for extent in mine:
        space.free(extent)
    assert space.missing_for == space.size == len(used)


def test_an_extent_that_is_freed_twice_frees_no_others():
    space = Space()
    space.grow(10)
    first = space.allocate(4)
    space.free(first)
    second = space.allocate(4)
    space.free(first)
    assert space.extents == [second]
    assert space.allocate(6) is not None and space.allocate(1) is None
