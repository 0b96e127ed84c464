"""Lets the tests of chaos import the world as it is imported elsewhere: as `tests.chaos`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
