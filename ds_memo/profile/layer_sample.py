"""One kind of layer, measured at one length. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ds_memo.solve.run_costs import Output

DEVICE_BYTES = (
    "working_bytes",
    "working_bytes_at_0",
    "working_bytes_without_attention",
    "forward_bytes",
    "forward_bytes_at_0",
)
"""Fields of a sample with peak device bytes."""


@dataclass(frozen=True)
class LayerSample:
    """One kind of layer, measured at one length. Seconds and bytes are those of one rank."""

    batch: int
    length: int
    """Tokens of each sequence on this rank."""
    forward_s: float
    attention_s: float
    """Part of the forward in attention kernels."""
    backward_s: float
    """Without checkpointing."""
    attention_backward_s: float
    """Part of the backward in attention kernels."""
    replay_s: float
    """Seconds that the replay of a resident layer adds to the backward."""
    gemm_s: float
    """Part of the forward in the GEMMs whose rows alpha splits."""
    all_gemms_s: float
    """Part of the forward in all GEMMs."""
    gemm_flops: int
    """FLOPs of all GEMMs in the forward."""
    attention_flops: int
    """FLOPs of attention in the forward, counted as causal."""
    no_recompute_bytes: int
    """Bytes that autograd saves without ds_memo."""
    working_bytes: int
    """Peak bytes of a replay and backward, without kept outputs."""
    working_bytes_at_0: int
    """The same at alpha 0, where GEMM outputs are not kept."""
    working_bytes_without_attention: int
    """The same where the attention output is not kept either."""
    forward_bytes: int
    """Peak bytes of a forward: its input, kept outputs and temporaries."""
    forward_bytes_at_0: int
    """The same at alpha 0."""
    outputs: tuple[Output, ...]
    """Kept outputs at this length."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length
