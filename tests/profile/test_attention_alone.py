"""Which call of attention can run alone at more tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_memo.profile.attention_alone import _Catches
from ds_memo.remat import cudnn  # noqa: F401  (its op)


def test_an_op_of_ds_memo_is_not_called_alone() -> None:
    """Ranks' attention is one. Its backward is that of a function around it, and its plan is for one length."""
    with torch.device("meta"):
        q, k = (torch.empty(1, heads, 256, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
    with _Catches() as caught:
        F.scaled_dot_product_attention(*(torch.empty(1, 4, 256, 64, requires_grad=True) for _ in range(3)), is_causal=True)
        assert caught.call is not None and caught.call.tokens == 256
        torch.ops.ds_memo.cudnn_attention(q, k, k, None, True, 1.0)
    assert caught.call is None
