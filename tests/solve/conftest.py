"""Helpers here are imported as siblings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
