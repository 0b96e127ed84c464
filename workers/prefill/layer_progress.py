"""Progress of the cached layers of one prompt: fetched into the node's pool, loaded into the engine's cache.

Three threads share it: the loop hears of fetches, the copy thread loads, the compute thread waits for its layer.

Source: Mooncake (FAST'25), section 5.2: before layer i, wait for its load; the load of layer i+1 is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

#: A layer that takes longer does not come.
LAYER_S_MAX = 60.0


class LayersMissing(Exception):
    """The layers will not come."""


class StageGone(Exception):
    """Another worker, which computes some of the layers, is lost or does not do its part."""

    def __init__(self, worker_id: str, reason: str) -> None:
        super().__init__(f"stage {worker_id}: {reason}")
        self.worker_id = worker_id


class LayerLoads:
    """At first no layer is fetched."""

    def __init__(self) -> None:
        self._fetched = -1
        self._loaded = -1
        self._failure = ""
        self._changed = threading.Condition()

    @property
    def failure(self) -> str:
        """Why layers will not come; "": nothing is known against it."""
        return self._failure

    def fetched_up_to(self, layer: int) -> None:
        """Layers up to and including `layer` are readable in the pool."""
        with self._changed:
            self._fetched = max(self._fetched, layer)
            self._changed.notify_all()

    def loaded_up_to(self, layer: int) -> None:
        """Layers up to and including `layer` are in the engine's cache."""
        with self._changed:
            self._loaded = max(self._loaded, layer)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Every wait, of now and of later, raises LayersMissing."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def wait_fetched(self, layer: int) -> None:
        """Returns when `layer` is readable in the pool. Raises LayersMissing."""
        self._wait(lambda: self._fetched >= layer)

    def wait_loaded(self, layer: int) -> None:
        """Returns when `layer` is in the engine's cache. Raises LayersMissing."""
        self._wait(lambda: self._loaded >= layer)

    def _wait(self, arrived: Callable[[], bool]) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: self._failure or arrived(), LAYER_S_MAX)
            if self._failure:
                raise LayersMissing(self._failure)
            if not ended:
                self._failure = f"nothing came for {LAYER_S_MAX} s"
                raise LayersMissing(self._failure)
