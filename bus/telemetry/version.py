"""The version of the installed package."""

from __future__ import annotations

import importlib.metadata

VERSION = importlib.metadata.version("halfmoon")
