"""The make-believe clusters of `tests/conductor` are found by their names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conductor"))
sys.path.insert(0, str(Path(__file__).parent))
