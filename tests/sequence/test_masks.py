"""The plan of attention against a dense mask, over random layouts: each pair that is to be seen is computed once, no other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ds_memo.sequence import masks
from ds_memo.sequence.masks import Band, Mask, plan
from ds_memo.sequence.parts import SequenceParts
from tests.faults import put_in
from tests.sequence.layouts import SHAPES, dense, of_all, random_documents, striped

KINDS = ("causal", "window", "chunk", "both", "table")
LENGTHS = (1, 2, 7, 24, 41, 45, 67)


def of_band(band: Band) -> torch.Tensor:
    """(queries, keys) of a band."""
    a = torch.arange(band.queries[1] - band.queries[0])[:, None]
    c = torch.arange(band.keys[1] - band.keys[0])[None, :]
    seen = torch.ones(len(a), c.shape[1], dtype=torch.bool)
    if band.before is not None:
        seen &= c >= a - band.before
    if band.after is not None:
        seen &= c <= a + band.after
    return seen


def computed(everywhere: list[SequenceParts], mask: Mask, rows: int) -> torch.Tensor:
    """How often each pair (rows, queries, keys) is computed by the ranks of Ulysses number 0, padding with it."""
    length, ring, ulysses = everywhere[0].length, everywhere[0].ranks.ring, everywhere[0].ranks.ulysses
    pairs = torch.zeros(rows, length, length, dtype=torch.int)
    tokens = [torch.cat([torch.arange(*piece) for piece in everywhere[0].pieces_of_ring(number)]) for number in range(ring)]
    for own, parts in enumerate(everywhere[::ulysses]):
        steps = plan(parts, mask).steps
        assert len(steps) == ring
        for step, bands in enumerate(steps):
            for band in bands:
                seen = of_band(band)
                assert seen.any(0).all() and seen.any(1).all(), f"{band} has a query or a key for nothing"
                assert not (band.before is not None and band.before >= len(seen) - 1), f"{band} has a limit that limits nothing"
                assert not (band.after is not None and band.after >= seen.shape[1] - 1), f"{band} has a limit that limits nothing"
                queries = tokens[own][slice(*band.queries)]
                keys = tokens[(own - step) % ring][slice(*band.keys)]
                assert seen.shape == (len(queries), len(keys)), f"{band} reaches beyond the rank's tokens"
                for row in range(rows) if band.row is None else [band.row]:
                    pairs[row, queries[:, None], keys[None, :]] += seen
    return pairs


def random_table(generator: random.Random, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Intervals as models have them: blocks of image tokens among causal ones; or any that hold their query."""
    lo, hi = torch.zeros(rows, length, dtype=torch.long), torch.arange(length).repeat(rows, 1)
    for row in range(rows):
        if generator.random() < 0.5:
            for _ in range(3):
                first, last = sorted(generator.choices(range(length), k=2))
                hi[row, first : last + 1] = hi[row, first : last + 1].clamp(min=last)
            size = generator.choice((1, 5, length))
            lo[row] = (torch.arange(length) - size + 1).clamp(min=0)
        else:
            lo[row] = torch.tensor([generator.randint(0, query) for query in range(length)])
            hi[row] = torch.tensor([generator.randint(query, length - 1) for query in range(length)])
    return lo, hi


def differs(generator: random.Random, ulysses: int, ring: int, kind: str, tile: int = 0) -> bool:
    """Plan attention of a random batch; return True if it computes other pairs than it should, or padding sees or is seen.

    Args:
        tile: tokens of tiles, if ranks have their tokens in the order of these.
    """
    length, rows, zigzag = generator.choice(LENGTHS), generator.choice((1, 2, 3)), generator.random() < 0.8
    documents = ((0,),) if generator.random() < 0.3 or length == 1 else random_documents(generator, length, rows)
    table = random_table(generator, length, generator.choice((1, rows))) if kind == "table" else None
    mask = Mask(kind, generator.choice((1, 3, 8, 100)), table, None if table is None else {})
    rows = max(len(documents), 1 if table is None else len(table[0]))
    documents = documents * (rows // len(documents))
    want = dense(mask, length, documents)
    everywhere = of_all(ulysses, ring, length, documents, zigzag)
    pairs = computed(striped(everywhere, tile) if tile else everywhere, mask, rows)
    padding_meets = pairs[:, length:, :length].any() or pairs[:, :length, length:].any()
    return bool(padding_meets) or not torch.equal(pairs[:, :length, :length], want.int())


@pytest.mark.parametrize("ulysses, ring", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_visible_pair_once(ulysses, ring, kind):
    for seed in range(10):
        assert not differs(random.Random(f"{seed} {kind}"), ulysses, ring, kind), seed


@pytest.mark.parametrize("ulysses, ring", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_visible_pair_once_in_stripes(ulysses, ring, kind):
    for seed in range(10):
        generator = random.Random(f"{seed} {kind}")
        assert not differs(generator, ulysses, ring, kind, tile=generator.choice((3, 5, 8))), seed


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_pieces_would_show(kind, monkeypatch):
    """A plan for zigzag pieces in the other order computes pairs that are not to be seen."""

    def planned_swapped(right, parts, mask):
        with monkeypatch.context() as patch:
            put_in(patch, SequenceParts, "pieces_of_ring", lambda right, parts, number: right(parts, number)[::-1])
            return right(parts, mask)

    put_in(monkeypatch, masks, "_plan", planned_swapped)
    assert any(differs(random.Random(f"{seed} {kind}"), 1, 2, kind) for seed in range(25))


def test_few_kernel_calls():
    """Causal attention of one document: three bands at home, one or two of each other rank, for all rows together."""
    for ring in (1, 2, 3, 4, 8):
        for parts in of_all(1, ring, 64 * ring, ((0,),) * 3):
            sizes = [len(bands) for bands in plan(parts, Mask()).steps]
            assert sizes[0] == (1 if ring == 1 else 3) and max(sizes[1:], default=0) <= 2
            assert all(band.row is None for band in itertools.chain(*plan(parts, Mask()).steps))


def test_windows_need_no_keys_from_afar():
    """A rank whose queries see none of a step's keys has nothing to compute in it."""
    for parts in of_all(1, 8, 64 * 8, zigzag=False):
        assert [len(bands) for bands in plan(parts, Mask("window", 10)).steps] == [1, int(parts.ranks.number > 0)] + 6 * [0]


def test_a_plan_is_worked_out_once():
    parts = of_all(1, 2, 64)[0]
    assert plan(parts, Mask("window", 8)) is plan(parts, Mask("window", 8)) is not plan(parts, Mask("window", 9))


def test_few_runs_of_a_table():
    """Text, an image whose tokens see each other, text: three runs. The plan of a table ends with it."""
    parts = of_all(1, 1, 64)[0]
    lo, hi = torch.zeros(1, 64, dtype=torch.long), torch.arange(64)[None].clone()
    hi[:, 20:30] = 29
    mask = Mask("table", table=(lo, hi), plans={})
    assert [len(of_row) for of_row in masks.runs(parts, mask)] == [3]
    assert plan(parts, mask) is plan(parts, mask) and not parts.plans
    window = (torch.arange(64)[None] - 9).clamp(min=0), torch.arange(64)[None]
    assert [len(of_row) for of_row in masks.runs(parts, Mask("table", table=window, plans={}))] == [2]
