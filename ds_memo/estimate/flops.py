"""Model FLOPs of one training step and the peaks they are held against (MFU).

The counts are the paper's (MEMO, SIGMOD 2025): what the model needs, forward and backward, with causal attention at
half its square; recomputation never counts. Symbols: s tokens in a sequence, n layers, h attention width (heads × head
size; the hidden size in most models), V vocabulary, P parameters that multiply every token.
"""

from __future__ import annotations

import re

# Dense bf16 FLOP/s by a word of the device name, from NVIDIA's data sheets (half of their headline, which is sparse).
PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
}
# The same chip on a smaller power budget.
PEAK_FLOPS_PCIE = {"H100": 756e12, "H800": 756e12}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a device, or None where it is not known.

    Args:
        device_name: As torch.cuda.get_device_name() gives it, e.g. "NVIDIA H200" or "NVIDIA A100-SXM4-80GB".

    Returns:
        FLOP/s of one device.
    """
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    table = PEAK_FLOPS | PEAK_FLOPS_PCIE if "PCIe" in words else PEAK_FLOPS
    return next((table[word] for word in words if word in table), None)


def sequence_flops(seq_length: int, parameters: int, layers: int, attention_width: int) -> float:
    """FLOPs to train on one sequence: 6·s·P for the matrices, 6·n·h·s² for causal attention.

    Args:
        seq_length: s, in tokens.
        parameters: P. Leave out an embedding table that is only looked up, and experts that a token does not visit.
        layers: n.
        attention_width: h, in elements: heads × head size.
    """
    return 6.0 * seq_length * parameters + 6.0 * layers * attention_width * seq_length**2


def mfu(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Model FLOPs utilisation of one step, 0 to 1.

    Args:
        flops: Model FLOPs of the step over all ranks.
        seconds: Wall-clock time of the step.
        ranks: Devices that worked on it.
        peak: FLOP/s of one device.
    """
    return flops / (seconds * ranks * peak)
