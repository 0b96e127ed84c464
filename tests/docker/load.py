"""Clients of both frontends, and when each of their requests began and ended."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.live_load import WRONG, Load
from tests.docker.stack import Stack
from tests.eventually import eventually_here, noted_where_late

CLIENTS = 3


class BothFrontends:
    """In turn, as a load balancer would."""

    def __init__(self, stack: Stack) -> None:
        self._ports = itertools.cycle(stack.ports)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{next(self._ports)}"


class RunningLoad:
    """A load in a thread of its own, so that the test may call `docker` meanwhile."""

    def __init__(self, stack: Stack) -> None:
        both = BothFrontends(stack)
        self.load = Load(both, random.Random(1), CLIENTS, steady=True)  # type: ignore[arg-type]
        self.finished: list[tuple[float, float]] = []
        self._stack = stack
        once = self.load._over_http

        async def timed(*words: object, **more: object) -> tuple[str, str]:
            started = time.monotonic()
            how, text = await once(*words, **more)  # type: ignore[arg-type]
            if how == "finished":
                self.finished.append((started, time.monotonic()))
            return how, text

        self.load._over_http = timed  # type: ignore[method-assign]
        self._thread = threading.Thread(target=lambda: asyncio.run(self.load.run()), daemon=True)

    def start(self) -> None:
        asyncio.run(self.load.learn())
        self._thread.start()

    def stop(self) -> None:
        self.load.stop()
        self._thread.join(180)
        assert not self._thread.is_alive()

    def first_after(self, at: float) -> float:
        """Seconds from `at` to the first good end of a request that began later."""
        return min(self.answered(at, 1)) - at

    def answered(self, at: float, count: int) -> list[float]:
        """When requests that began after `at` had their good ends; waits for so many."""

        def ends() -> list[float]:
            found = [end for begin, end in list(self.finished) if begin >= at]
            return found if len(found) >= count else []

        with noted_where_late(lambda: f"requests ended: {self.load.ended}"):
            return eventually_here(ends, f"{count} requests that begin now are answered", every_s=0.05)

    def slowest_since(self, at: float) -> float:
        return max((end - begin for begin, end in list(self.finished) if end >= at), default=0.0)

    def mark(self) -> SimpleNamespace:
        return SimpleNamespace(at=time.monotonic(), ended=self.load.ended.copy())

    def since(self, mark: SimpleNamespace) -> dict[str, int]:
        """How requests ended since. Raises when one ended wrongly, and keeps the event log and the
        containers' logs.
        """
        ended = {
            how: count - mark.ended[how] for how, count in self.load.ended.items() if count > mark.ended[how]
        }
        if any(how in WRONG for how in ended):
            place = Path(tempfile.mkdtemp(prefix="halfmoon-docker-fault-"))
            (place / "run.jsonl").write_text(self._stack.saved_log())
            (place / "containers.log").write_text(self._stack.command("logs", "--no-color", "-t"))
            raise AssertionError(f"{ended}, {self.load.wrong}; see {place}")
        return ended
