"""The version of what is installed."""

from __future__ import annotations

import importlib.metadata

VERSION = importlib.metadata.version("halfmoon")
