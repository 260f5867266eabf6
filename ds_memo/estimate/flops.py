"""Device peaks and MFU."""

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


def mfu(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the model FLOPs utilisation of one step, 0 to 1.

    Args:
        flops: Model FLOPs of the step over all ranks.
        seconds: Wall-clock time of the step.
        ranks: Devices that worked on it.
        peak: FLOP/s of one device.
    """
    return flops / (seconds * ranks * peak)
