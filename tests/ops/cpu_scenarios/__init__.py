"""Situations that end a process or spoil memory if the op is wrong. test_allocator_cpu.py runs each of SCENARIOS in a process
of its own. Results from the arena are compared bitwise with the same pass without the op.
"""

from tests.ops.cpu_scenarios import arenas, threads  # noqa: F401 (each adds its scenarios to the table)
from tests.ops.cpu_scenarios.controls import CONTROLS
from tests.ops.cpu_scenarios.table import RAW_BLOCKS, SCENARIOS

__all__ = ["CONTROLS", "RAW_BLOCKS", "SCENARIOS"]
