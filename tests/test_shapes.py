"""Kinds of passes and the length between them."""

from __future__ import annotations

import torch

from ds_memo.shapes import HiddenShape, Length, PassKind, hidden_shape, length_between, shapes_of


def kind(*shapes: tuple[int, ...], first: bool = True) -> PassKind:
    return PassKind(tuple((shape, torch.int64) for shape in shapes), first, False)


def test_shapes_of_everything_a_model_is_called_with() -> None:
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8)
    assert shapes_of((ids,), {"extra": {"mask": mask}, "use_cache": False}) == (((2, 8), torch.int64), ((2, 8), torch.float32))


def test_one_length_wherever_it_stands() -> None:
    assert length_between(kind((2, 8), (2, 8)), kind((2, 16), (2, 16))) == Length(8, 16, ((0, 1), (1, 1)))
    assert length_between(kind((2, 8)), kind((3, 8))) == Length(2, 3, ((0, 0),))


def test_no_single_length() -> None:
    assert length_between(kind((2, 8)), kind((2, 8))) is None
    assert length_between(kind((2, 8)), kind((3, 16))) is None
    assert length_between(kind((2, 8), (2, 8)), kind((2, 16), (2, 12))) is None
    assert length_between(kind((2, 8)), kind((2, 8, 1))) is None
    assert length_between(kind((2, 8)), kind((2, 16), first=False)) is None


def test_hidden_states_stand_where_they_stood() -> None:
    def found(first: PassKind, hidden: tuple[int, ...], then: PassKind) -> tuple[int, ...] | None:
        shape = hidden_shape(first.shapes, HiddenShape(*hidden[:2], hidden[2:]), then.shapes)
        return shape and (*shape[:2], *shape.rest)

    assert found(kind((2, 8), (2, 8)), (2, 8, 64), kind((3, 16), (3, 16))) == (3, 16, 64)
    assert found(kind((2, 8, 64), (8,)), (2, 8, 64), kind((2, 9, 64), (9,))) == (2, 9, 64)
    assert found(kind((2, 8)), (2, 13, 64), kind((2, 16))) is None  # the model adds tokens before the text
    assert found(kind((2, 8), (2, 8)), (2, 8, 64), kind((2, 16), (2, 12))) is None
    assert found(kind((2, 8)), (2, 8, 64), kind((2, 16), (2, 16))) is None
    assert found(kind((2, 8)), (2, 8, 64), kind((16,))) is None
