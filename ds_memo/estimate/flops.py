"""Model FLOPs of one training step, device peaks, and MFU.

The counts are the paper's (MEMO, SIGMOD 2025): forward and backward of the model, with causal attention at half its
square; recomputation never counts. Symbols: s tokens in a sequence, n layers, h attention width (heads × head
size; the hidden size in most models), V vocabulary, P parameters that multiply every token.
"""

from __future__ import annotations

from ds_memo.estimate import hardware

# Chips with the same peak as one in hardware_data/.
_SAME_PEAK = {"h800": "h100", "gh200": "h200"}
# PCIe cards have a smaller power budget (NVIDIA's data sheets: dense bf16).
_PCIE_PEAK = {"h100": 756e12}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device, or None if it is not known.

    Args:
        device_name: The result of torch.cuda.get_device_name(), e.g. "NVIDIA H200" or "NVIDIA A100-SXM4-80GB".

    Returns:
        FLOP/s of one device.
    """
    words = hardware.words(device_name)
    name = next((chip for word in words if (chip := _SAME_PEAK.get(word, word)) in hardware.names()), None)
    if "pcie" in words and name in _PCIE_PEAK:
        return _PCIE_PEAK[name]
    return hardware.load(name).peak if name else None


def sequence_flops(seq_length: int, parameters: int, layers: int, attention_width: int) -> float:
    """Return the FLOPs to train on one sequence: 6·s·P for the matrices, 6·n·h·s² for causal attention.

    Args:
        seq_length: s, in tokens.
        parameters: P. Leave out an embedding table that is only looked up, and experts that a token does not visit.
        layers: n.
        attention_width: h, in elements: heads × head size.
    """
    return 6.0 * seq_length * parameters + 6.0 * layers * attention_width * seq_length**2


def mfu(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the model FLOPs utilisation of one step, 0 to 1.

    Args:
        flops: Model FLOPs of the step over all ranks.
        seconds: Wall-clock time of the step.
        ranks: Devices that worked on it.
        peak: FLOP/s of one device.
    """
    return flops / (seconds * ranks * peak)
