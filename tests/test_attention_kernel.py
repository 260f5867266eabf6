"""The choice of attention's kernel, row by row."""

import pytest

from ds_memo.attention_kernel import DOCUMENTS, FA3, FA4, TENSOR, WINDOW, Attention, attention_kernel

BOTH = FA3, FA4
HALF = Attention("bfloat16", 128, 128)
AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("capability", "call", "installed", "configured", "expected"),
    [
        (None, HALF, (), None, "cpu"),
        (None, HALF._replace(softcap=True), (), None, "math"),
        ((7, 5), HALF, BOTH, None, "efficient"),
        (AMPERE, HALF, BOTH, None, "flash"),
        (HOPPER, HALF, (), None, "cudnn"),
        (HOPPER, HALF, BOTH, None, "flash_attn_3"),
        (HOPPER, HALF, BOTH, "flash_attn_4", "flash_attn_4"),
        (HOPPER, HALF, BOTH, "cudnn", "cudnn"),
        (HOPPER, HALF, BOTH, "flash", "flash"),
        (HOPPER, HALF, (), "flash_attn_2", "flash"),
        (BLACKWELL, HALF, (), None, "cudnn"),
        (BLACKWELL, HALF, BOTH, None, "flash_attn_4"),
        (GEFORCE, HALF, BOTH, None, "flash"),
        # what a kernel lacks
        (HOPPER, HALF._replace(mask=WINDOW), (), None, "flash"),
        (HOPPER, HALF._replace(mask=DOCUMENTS), (), None, "flash"),
        (HOPPER, HALF._replace(mask=WINDOW), BOTH, None, "flash_attn_3"),
        (HOPPER, HALF._replace(mask=TENSOR), BOTH, None, "cudnn"),
        (HOPPER, HALF._replace(dropout=True), BOTH, None, "cudnn"),
        (HOPPER, HALF._replace(deterministic=True), (), None, "flash"),
        (BLACKWELL, HALF._replace(mask=WINDOW), BOTH, None, "flash"),
        (BLACKWELL, HALF._replace(mask=DOCUMENTS), BOTH, None, "flash_attn_4"),
        (BLACKWELL, HALF._replace(deterministic=True), BOTH, None, "flash"),
        # sizes of heads
        (HOPPER, Attention("bfloat16", 192, 128), (), None, "cudnn"),
        (HOPPER, Attention("bfloat16", 192, 192), (), None, "flash"),
        (HOPPER, Attention("bfloat16", 72, 72), (), None, "cudnn"),
        (HOPPER, Attention("bfloat16", 60, 60), (), None, "flash"),
        (HOPPER, Attention("bfloat16", 264, 264), BOTH, None, "efficient"),
        (BLACKWELL, Attention("bfloat16", 192, 128), BOTH, None, "cudnn"),
        (ADA, Attention("bfloat16", 192, 192), (), None, "flash"),
        (ADA, Attention("bfloat16", 193, 193), (), None, "efficient"),
        (GEFORCE, Attention("float16", 224, 128), (), None, "efficient"),
        (GEFORCE, Attention("float16", 225, 225), (), None, "flash"),
        (GEFORCE, Attention("float16", 225, 225, dropout=True), (), None, "efficient"),
        (AMPERE, Attention("float16", 224, 224), (), None, "flash"),
        # numbers
        (HOPPER, Attention("float32", 128, 128), BOTH, None, "efficient"),
        (HOPPER, Attention("float64", 128, 128), BOTH, None, "math"),
    ],
    ids=str,
)
def test_each_row(capability, call, installed, configured, expected):
    kernel = attention_kernel(call, capability, frozenset(installed), configured)
    assert kernel.name == expected and kernel.reason and kernel.instead_of is None


@pytest.mark.parametrize(
    ("capability", "call", "installed", "configured", "expected"),
    [
        (HOPPER, HALF, (), "flash_attn_3", "cudnn"),
        (AMPERE, HALF, BOTH, "flash_attn_3", "flash"),
        (HOPPER, HALF._replace(mask=WINDOW), (), "cudnn", "flash"),
        (BLACKWELL, HALF._replace(mask=WINDOW), BOTH, "flash_attn_4", "flash"),
        (HOPPER, Attention("bfloat16", 264, 264), (), "flash", "efficient"),
    ],
    ids=str,
)
def test_a_configured_kernel_that_cannot_serve_is_named(capability, call, installed, configured, expected):
    kernel = attention_kernel(call, capability, frozenset(installed), configured)
    assert (kernel.name, kernel.instead_of) == (expected, configured) and "cannot" in kernel.reason


def test_pytorch_s_own_order_counts():
    """An older cuDNN, or TORCH_CUDNN_SDPA_DEPRIORITIZED."""
    assert attention_kernel(HALF, HOPPER, cudnn_first=False).name == "flash"
    assert attention_kernel(HALF, AMPERE, cudnn_first=True).name == "cudnn"
