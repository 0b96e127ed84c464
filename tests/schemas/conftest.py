"""Hypothesis without a deadline: how long one example takes says more about the machine than about the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("halfmoon", deadline=None, print_blob=True)
settings.load_profile("halfmoon")
