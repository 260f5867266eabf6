"""A bias added in place right after its product (DeepSpeed's memory-efficient linear under ZeRO-3) is part of the GEMM."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap

import ds_memo
from tests.inside import gemms_of, inside
from tests.models import assert_same, compare_with_stock, step
from tests.remat.situations import BATCH, Lines, drive, toy


@pytest.mark.parametrize("alpha, residents", [(0.0, 0), (0.3, 0), (0.3, 2), (1.0, 4)])
def test_same_gradients_and_no_copy_set_aside(alpha, residents, monkeypatch):
    monkeypatch.setattr(F, "linear", zero3_linear_wrap)
    model = toy()
    expected = drive(model, 0)
    handle = ds_memo.attach(model, {"alpha": alpha, "resident_layers": residents})
    drive(model, 0)  # analysed
    hits = []

    def about_to_change(frame, tensor):
        storage = tensor.untyped_storage().data_ptr()
        hits.extend(source for source in frame.device.values() if source.untyped_storage().data_ptr() == storage)

    monkeypatch.setattr(inside(handle).engine, "about_to_change", about_to_change)
    assert_same(drive(model, 0), expected)
    assert [gemm.biased for gemm in gemms_of(handle)] == [True] * 4
    assert not hits  # no kept tensor was about to change, so none was set aside
    handle.detach()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_bias_that_was_read_before_in_a_later_call(alpha):
    """The ops and saved tensors are the same, but the recipe has the bias right after its product."""

    class Reads(Lines):
        def forward(self, x, early):
            up = x.flatten(0, 1) @ self.a.weight.t()
            if early:
                double = up * 2
                up.add_(self.a.bias)
            else:
                up.add_(self.a.bias)
                double = up * 2
            return x + self.b(F.gelu(double)).view_as(x)

    def reads(model, number):
        return step(model, BATCH, early=number in (1, 2, 4))

    compare_with_stock(toy(Reads), reads, {"alpha": alpha, "resident_layers": 1}, steps=5)


def test_a_bias_that_was_read_before_is_no_part_of_the_gemm():
    """Another op read the product before the bias came: the two values differ, and both are needed."""

    class Reads(Lines):
        def forward(self, x):
            up = x.flatten(0, 1) @ self.a.weight.t()
            early = up.sigmoid()
            with torch.no_grad():
                up.add_(self.a.bias)
            return x + self.b(up * early).view_as(x)

    config = {"alpha": 0.5, "resident_layers": 1}
    compare_with_stock(toy(Reads), drive, config)
    handle = ds_memo.attach(model := toy(Reads), config)
    drive(model, 0)
    assert not any(gemm.biased for gemm in gemms_of(handle))
    handle.detach()
