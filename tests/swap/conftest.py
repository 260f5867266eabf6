"""Helpers here are imported as siblings; so is the benchmark whose bars test_memory.py holds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
