"""The scripts of launch/ import each other as siblings; so do their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
sys.path.insert(0, str(Path(__file__).parent))
