"""Planned addresses while training."""

UNPLANNED_OVERHEAD = 1.1
"""Bytes that torch's allocator takes for each byte of a pass whose addresses are not planned. With less room than that it asks
CUDA for memory, and gives some back, in every step."""
