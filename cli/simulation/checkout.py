"""The papers' own systems and experiments, which a checkout of the repository has beside the package.

They stand in `benchmarks/papers`. They are compared with, and serve nobody: an installed halfmoon is without them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def papers(module: str) -> ModuleType | None:
    """`benchmarks.papers.<module>`; None where there is no checkout."""
    if not (ROOT / "benchmarks" / "papers").is_dir():
        return None
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"benchmarks.papers.{module}")
