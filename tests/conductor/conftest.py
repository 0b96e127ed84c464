"""Lets the tests of the conductor share `conductor_scripts`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
