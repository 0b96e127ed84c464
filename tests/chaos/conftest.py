"""Lets the tests of chaos share the world, and what the conductor's tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conductor"))
sys.path.insert(0, str(Path(__file__).parent))
