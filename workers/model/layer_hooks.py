"""Hooks around the layers of a chunk. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfmoon.workers.model.attention.exact import Elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHooks:
    """Called on the compute thread around each layer of a chunk. None: nothing is to be done there."""

    before_layer: Callable[[int], None] | None = None
    """Returns when the layer of the earlier KV is in the cache. The chunk's own projection needs none of it, and runs
    before.
    """
    after_layer: Callable[[int], None] | None = None
    """The layer of the chunk's KV is in the cache."""
    should_stop: Callable[[], bool] | None = None
    """True: the chunk ends before its next layer, and its KV stays incomplete."""
    elsewhere: Elsewhere | None = None
    """Attends to the segments whose blocks are AWAY in the table, in exact mode."""


NO_HOOKS = LayerHooks()
