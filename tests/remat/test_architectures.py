"""Gradients of every causal language model of the installed Transformers that can be made small, compared with stock's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import architectures
from tests.models import Outcome, compare_with_stock, gradients

TOLERANCE = 1e-4
"""For float32: split products are summed in another order, and recurrences over a sequence amplify the difference."""
NOISE = 1e-9
"""Share of the largest gradient below which a gradient is zero in exact arithmetic (the normalised weight of a sole expert)."""
LENGTHS = (17, 17, 13, 17)
"""One per step: the first call of a length is analysed, the next follows its recipe."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # kernels that are not installed, attention that is materialised
]


@pytest.mark.parametrize("config", [{"alpha": 0.5, "resident_layers": 0}, {"alpha": 0.0, "resident_layers": 1}], ids=str)
@pytest.mark.parametrize("name", architectures.NAMES)
def test_gradients(name: str, config: dict[str, Any]) -> None:
    if name in architectures.NOT_COMPARED:
        pytest.skip(architectures.NOT_COMPARED[name])
    compare_with_stock(architectures.build(name), drive, config, steps=len(LENGTHS), tolerance=TOLERANCE)


def drive(model: nn.Module, number: int) -> Outcome:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, architectures.VOCAB, (2, LENGTHS[number]), generator=generator)
    torch.manual_seed(number)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = gradients(model)
    largest = max(float(gradient.norm()) for gradient in found.values() if gradient is not None)
    return Outcome(loss.detach(), {name: g for name, g in found.items() if g is None or g.norm() > NOISE * largest})
