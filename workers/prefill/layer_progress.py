"""How far the cached layers of one prompt have come: fetched into the node's pool, loaded into the engine's
cache.

Shared by three threads: the loop hears of fetches, the copy thread loads, the compute thread waits for its
layer.

Source: Mooncake (FAST'25), section 5.2: before layer i, wait for its load; the load of layer i+1 is under
way.
"""

from __future__ import annotations

import threading

PATIENCE_S = 60.0


class LoadFailed(Exception):
    """The layers will not come."""


class LayerLoads:
    """`fetched` True: all layers are in the pool from the start."""

    def __init__(self, layers: int, *, fetched: bool = False) -> None:
        self._fetched = layers - 1 if fetched else -1
        self._loaded = -1
        self._failure = ""
        self._changed = threading.Condition()

    def fetched_up_to(self, layer: int) -> None:
        with self._changed:
            self._fetched = max(self._fetched, layer)
            self._changed.notify_all()

    def loaded_up_to(self, layer: int) -> None:
        with self._changed:
            self._loaded = max(self._loaded, layer)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def wait_fetched(self, layer: int) -> None:
        """Returns when `layer` is readable in the pool. Raises LoadFailed."""
        self._wait(lambda: self._fetched >= layer)

    def wait_loaded(self, layer: int) -> None:
        """Returns when `layer` is in the engine's cache. Raises LoadFailed."""
        self._wait(lambda: self._loaded >= layer)

    def _wait(self, arrived: object) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: self._failure or arrived(), PATIENCE_S)  # type: ignore[operator]
            if self._failure:
                raise LoadFailed(self._failure)
            if not ended:
                self._failure = f"nothing came for {PATIENCE_S} s"
                raise LoadFailed(self._failure)
