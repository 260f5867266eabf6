"""The paper's program for alpha (MEMO, SIGMOD 2025, section 4.1), unchanged."""

from __future__ import annotations


def paper_alpha(
    input_bytes: int,
    attention_bytes: int,
    other_bytes: int,
    bandwidth: float,
    layer_forward_s: float,
    layers: int,
    host_bytes: float,
) -> float | None:
    """Return the largest alpha at which a layer's copy hides behind one layer's forward and all copies fit the host.

        maximise alpha  subject to  (S_input + S_attn + alpha · S_others) / B ≤ T_layer
                                    (n - 2) · (S_input + S_attn + alpha · S_others) ≤ M_host
                                    0 ≤ alpha ≤ 1

    One variable, so its optimum is the smallest of the bounds.

    Args:
        input_bytes, attention_bytes, other_bytes: bytes of one layer's skeletal tensors.
        bandwidth: bytes a second, device to host.
        layer_forward_s: seconds of one layer, without copies.
        layers: n; the last two are not swapped.
        host_bytes: host memory of this rank.

    Returns:
        Alpha, or None where not even 0 satisfies both constraints.
    """
    whole = input_bytes + attention_bytes
    room = bandwidth * layer_forward_s - whole
    if layers > 2:
        room = min(room, host_bytes / (layers - 2) - whole)
    if room < 0:
        return None
    return min(1.0, room / other_bytes) if other_bytes else 1.0
