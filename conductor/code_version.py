"""The version of the code that decides: that of the package, and a fingerprint of the core's own sources.

Equal code decides alike from equal logs. So conductors name their code when they compare states, and a log names the
code that began it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

#: Meaning of the events; those of older logs are understood too.
LOG_VERSION = 2
LOG_VERSIONS_READ = (1, 2)
#: The packages that decide: the core, and the messages that it is made of.
DECIDING = ("halfmoon.conductor.core", "halfmoon.schemas")


@cache
def code_version() -> str:
    """For example `0.1.0+5f0c2a91`."""
    sources = blake2b(digest_size=4)
    for package in DECIDING:
        for source in _sources(files(package)):
            sources.update(source.read_bytes())
    return f"{importlib.metadata.version('halfmoon')}+{sources.hexdigest()}"


def _sources(folder: Traversable) -> Iterator[Traversable]:
    """The Python files in it and in the folders below it, in the order of their names."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry
