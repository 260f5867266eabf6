"""Profiles of layers with known sizes and times."""

from __future__ import annotations

from ds_memo.profile.layer_sample import LayerSample
from ds_memo.profile.run_profile import LayerProfile, RunProfile
from ds_memo.solve.run_costs import Output, PeakBytes

HIDDEN = 2 * 64
"""Bytes of one token's hidden states."""


def make_sample(
    length: int = 1024,
    batch: int = 1,
    working: int | None = None,
    overhead: float = 0.0,
    slower: float = 1.0,
    hidden: int = HIDDEN,
) -> LayerSample:
    """A sample with times a + b·t, attention b·t + c·t·s, bytes b·t.

    Args:
        working: bytes per token; by default 20 hidden states.
        overhead: seconds added to each time.
        hidden: bytes of one token's hidden states.
    """
    tokens, working = batch * length, 20 * hidden if working is None else working
    attention = slower * (2e-7 * tokens + 1e-10 * tokens * length)
    rest = overhead + slower * 1e-6 * tokens

    def born(share: float, behind: bool) -> float:
        return (share * rest + attention * behind) / (rest + attention)

    return LayerSample(
        batch=batch,
        length=length,
        forward_s=rest + attention,
        attention_s=attention,
        backward_s=overhead + slower * 2e-6 * tokens + 2.5 * attention,
        attention_backward_s=2.5 * attention,
        replay_s=overhead + slower * 1e-7 * tokens,
        gemm_s=slower * 6e-7 * tokens,
        all_gemms_s=slower * 9e-7 * tokens,
        gemm_flops=1000 * tokens,
        attention_flops=10 * tokens * length,
        no_recompute_bytes=16 * hidden * tokens,
        working=PeakBytes(working * tokens, working * tokens),
        working_at_0=PeakBytes(working * tokens, working * tokens + 8 * hidden * tokens),
        working_without_attention=PeakBytes(working * tokens, working * tokens + 8 * hidden * tokens),
        outputs=(
            Output("input", 1, hidden * tokens, 0.0),
            Output("gemm", tokens, 3 * hidden, born(0.2, False)),
            Output("attention", 1, hidden * tokens, born(0.5, True)),
            Output("gemm", tokens, 5 * hidden, born(0.9, True)),
        ),
    )


def make_profile(
    layers: int = 4, link: float = 20e9, lengths: tuple[int, ...] = (1024, 2048), working: int = 20 * HIDDEN
) -> RunProfile:
    kind = LayerProfile("layer 0", tuple(make_sample(length, working=working) for length in lengths))
    return RunProfile({}, "fit", (kind,), (0,) * layers, link, link, 1)
