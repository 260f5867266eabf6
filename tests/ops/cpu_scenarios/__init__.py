"""Situations that would end a process or spoil memory if the op were wrong. test_allocator_cpu.py runs each of SCENARIOS in a
process of its own. What is in an arena is compared to the bit with what the same pass gives without the op.
"""

from tests.ops.cpu_scenarios import arenas, threads  # noqa: F401 (each notes its scenarios in the table)
from tests.ops.cpu_scenarios.controls import CONTROLS
from tests.ops.cpu_scenarios.table import RAW_BLOCKS, SCENARIOS

__all__ = ["CONTROLS", "RAW_BLOCKS", "SCENARIOS"]
