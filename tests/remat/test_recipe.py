"""Fingerprints, which reveal writes that PyTorch does not show, and the number of recipes that a layer remembers."""

import pytest
import torch

from ds_memo.remat.checkpoint import _RECIPES, Layer
from ds_memo.remat.recipe import Observed, fingerprint, make_recipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_changes_with_a_value(dtype):
    value = torch.ones(3, 5).to(dtype)
    before = fingerprint((value.T, None, 7))
    assert torch.equal(before, fingerprint((value.T, None, 7)))
    value[2, 3] = 0
    assert not torch.equal(before, fingerprint((value.T, None, 7)))


def test_tensors_on_another_device_do_not_count():
    """Memory-efficient attention returns its random seed on the host."""
    out, elsewhere = torch.randn(4), torch.zeros(1, device="meta")
    number = fingerprint((out, elsewhere))
    assert number.device == out.device
    assert torch.equal(number, fingerprint(out))


def test_of_nothing():
    assert fingerprint((None, torch.empty(0))).item() == 0


def test_a_recipe_that_is_made_again_displaces_no_other():
    layer, recipe = Layer(0, "blocks.0", None), make_recipe(Observed(), 1.0)[0]
    for length in range(_RECIPES):
        layer.remember(length, recipe)
    layer.remember(_RECIPES - 1, recipe)
    assert len(layer.recipes) == _RECIPES
    layer.remember(_RECIPES, recipe)
    assert len(layer.recipes) == _RECIPES and 0 not in layer.recipes
