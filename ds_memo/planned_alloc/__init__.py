"""Planned addresses while training."""

UNPLANNED_OVERHEAD = 1.1
"""Bytes that torch's allocator takes for each byte of a pass without planned addresses. With less room it calls cudaMalloc and
cudaFree in every step."""
