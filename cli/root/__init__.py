"""A distributed KVCache and an LLM served around it. `halfmoon.__version__` is the installed version.

This is `halfmoon/__init__.py` of a wheel and of an editable install (`package-dir` in pyproject.toml); the packages
beside it are those at the top of a checkout.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up when it is asked for: that takes 30 ms
        from importlib.metadata import version

        return version("halfmoon")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
