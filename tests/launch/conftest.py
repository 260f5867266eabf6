"""The scripts of launch/ import each other as siblings; their tests import them so, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
