"""The version of the code that decides: that of the package, and a fingerprint of the core's own sources.

Equal code decides alike from equal logs. So conductors say which one they run when they compare states, and a log says
which one began it.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from hashlib import blake2b
from importlib.resources import files

#: Meaning of the events; those of older logs are understood too.
LOG_VERSION = 2
LOG_VERSIONS_READ = (1, 2)
#: What decides: the core, and the messages that it is made of.
DECIDING = ("halfmoon.conductor.core", "halfmoon.schemas")


@cache
def code_version() -> str:
    """For example `0.1.0+5f0c2a91`."""
    sources = blake2b(digest_size=4)
    for package in DECIDING:
        for entry in sorted(files(package).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                sources.update(entry.read_bytes())
    return f"{importlib.metadata.version('halfmoon')}+{sources.hexdigest()}"
