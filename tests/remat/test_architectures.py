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
_TOWER = "it has a tower, or tables, that no setting of its configuration makes small"
NOT_COMPARED = {
    **dict.fromkeys(
        ("dots3_note_text", "fuyu", "gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"), _TOWER
    ),
    **dict.fromkeys(("dots3_note", "qwen4_exp"), "its text part, a type of its own, needs sizes that it is not given inside"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it needs caches of the model that it assists"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "Transformers cannot make it of its configuration: that has no dropout"),
    "gemma3n": "it needs the package timm",
    "reformer": "it draws seeds of its own: no two runs of stock are alike",
    "xlm": "parts of a layer lie in lists of their own: memo.layers must name layers",
    "xmod": "it wants a language to be set",
    "zamba": "Transformers cannot tie the weights of one this small",
}
"""Model types that are not compared, and why. Any other that cannot be made small fails."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # kernels that are not installed, attention that is materialised
]


@pytest.mark.parametrize("config", [{"alpha": 0.5, "resident_layers": 0}, {"alpha": 0.0, "resident_layers": 1}], ids=str)
@pytest.mark.parametrize("name", architectures.NAMES)
def test_gradients(name: str, config: dict[str, Any]) -> None:
    if name in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[name])
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
