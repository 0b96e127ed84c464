"""Pace: whether blocks come sooner from the store than from computing them again; pure, for the scheduler's thread.

Rules:

- A load is late once it takes longer than computing its blocks would; the store is slow while one that is late is under
  way, or while the last `LOADS` together were late.
- While it is slow, every lookup is a miss; each `AGAIN_S` one request tries the store. One load in time ends this.
- An answer to a request holds until the request ends.
"""

from __future__ import annotations

from collections import deque

LOADS = 4
AGAIN_S = 5.0


class Pace:
    """See the module. Times are of one clock, in seconds."""

    def __init__(self, *, block_compute_s: float) -> None:
        """`block_compute_s`: the engine computes a block in this time. 0: not known, no store is slow."""
        self._block_compute_s = block_compute_s
        self._under_way: dict[int, tuple[int, float]] = {}
        #: Blocks that arrived, and seconds, of the last loads.
        self._seen: deque[tuple[int, float]] = deque(maxlen=LOADS)
        self._tried_s = 0.0
        self._told: dict[str, bool] = {}
        #: Requests that were sent away from a slow store.
        self.sent_away = 0

    def began(self, job_id: int, blocks: int, now_s: float) -> None:
        self._under_way[job_id] = (blocks, now_s)

    def ended(self, job_id: int, moved: int, now_s: float) -> None:
        """A load has ended, and `moved` of its blocks came."""
        _, since_s = self._under_way.pop(job_id)
        took_s = now_s - since_s
        if took_s <= moved * self._block_compute_s:
            self._seen.clear()
        self._seen.append((moved, took_s))

    def slow(self, now_s: float) -> bool:
        if not self._block_compute_s:
            return False
        if any(
            now_s - since_s > blocks * self._block_compute_s for blocks, since_s in self._under_way.values()
        ):
            return True
        return sum(s for _, s in self._seen) > self._block_compute_s * sum(blocks for blocks, _ in self._seen)

    def may_ask(self, request_id: str, now_s: float) -> bool:
        """Whether this request is to use the store."""
        told = self._told.get(request_id)
        if told is None:
            told = not self.slow(now_s) or now_s - self._tried_s >= AGAIN_S
            if told:
                self._tried_s = now_s
            self.sent_away += not told
            self._told[request_id] = told
        return told

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._told.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._told)
