"""Policies of other packages: what the entry points of the group `halfmoon.policies` name is installed in the core.

Each is a `Plugin` (`conductor/core/placement/policies.py`), under its own name. Called once by each process that runs a
core over a log: conductors, replay. A package that cannot be used is passed over with a warning: a log that needs it is
then refused by its name, and no other.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from halfmoon.conductor.core.placement.policies import Plugin, install

GROUP = "halfmoon.policies"
log = logging.getLogger(__name__)


def install_plugins() -> None:
    """Installs all that there are."""
    for point in entry_points(group=GROUP):
        try:
            install(_loaded(point))
        except Exception as problem:  # it is anybody's code
            log.warning("policy plug-in %s (%s): %s", point.name, point.value, problem)


def _loaded(point: EntryPoint) -> Plugin:
    """Raises ValueError, and whatever the package raises."""
    found = point.load()
    if not isinstance(found, Plugin):
        raise ValueError(f"it is {type(found).__name__}, not Plugin")
    if found.name != point.name:
        raise ValueError(f"it calls itself {found.name}")
    return found
