"""Bytes in units, and numbers rounded up. Imports nothing, so every part can use it."""

MIB = 1 << 20
GIB = 1 << 30
ALIGN = 256
"""Bytes; host rows and buffer slots begin on multiples of it, as CUDA allocations do."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
