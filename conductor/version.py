"""Which code decides: the version of what is installed, and a fingerprint of the core's own sources.

Equal code decides alike from equal logs. So conductors say which one they run when they compare states, and a log says
which one began it.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from hashlib import blake2b
from importlib.resources import files

#: All of ours that the core consists of (a test compares with what `machine` imports), by package.
CORE = {
    "halfmoon.conductor": (
        "admission",
        "cost",
        "explanation",
        "fetching",
        "index",
        "invariants",
        "losses",
        "machine",
        "members",
        "orders",
        "overload",
        "placement",
        "policy",
        "pools",
        "replication",
        "state",
    ),
    "halfmoon.schemas": ("decisions", "events", "policy", "types"),
}


@cache
def code_version() -> str:
    """For example `0.1.0+5f0c2a91`."""
    sources = blake2b(digest_size=4)
    for package, modules in CORE.items():
        for module in modules:
            sources.update(files(package).joinpath(f"{module}.py").read_bytes())
    return f"{importlib.metadata.version('halfmoon')}+{sources.hexdigest()}"
