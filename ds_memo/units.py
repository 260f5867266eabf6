"""Bytes and tokens in units and as text, and numbers rounded up. Imports nothing, so every part can use it."""

MIB = 1 << 20
GIB = 1 << 30
ALIGN = 256
"""Bytes; host rows and buffer slots begin on multiples of it, as CUDA allocations do."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def size(nbytes: float) -> str:
    """Return bytes as text: 512 B, 3.266 MiB, 18.88 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.4g} {units[0]}" if nbytes < 1000 else f"{nbytes:.0f} {units[0]}"


def short(length: int) -> str:
    """Return a number of tokens as text: 64 Ki, 1 Mi, 1,000."""
    for factor, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if length >= factor and length * 8 % factor == 0:
            return f"{length / factor:g} {unit}"
    return f"{length:,}"
