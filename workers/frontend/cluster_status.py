"""How the cluster is, as its conductors say: for `halfmoon status`, `/ready`, `/status` and the page.

All conductors answer on one common subject; what comes within a short while counts. They hold the same state
at the same sequence, so the one that is furthest on speaks for the cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from nats.aio.msg import Msg

from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.status import ConductorStatus, ElasticStatus, StatusRequest
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.log_health import LogHealth

#: After the first answer the others have this long.
GATHER_S = 0.03
ANSWER_S = 0.5
CACHED_S = 0.25


class ClusterStatus:
    """`read` asks at most every `CACHED_S`, and once for all who wait; the newest answer goes to `learn` too."""

    def __init__(
        self,
        bus: Bus,
        config: FrontendConfig,
        health: LogHealth,
        learn: Callable[[ConductorStatus], None],
    ) -> None:
        self.http_url = ""
        self._health = health
        self._bus = bus
        self._config = config
        self._learn = learn
        self._last: dict[str, Any] | None = None
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def read(self) -> dict[str, Any]:
        """The JSON of `halfmoon status`, and a few figures more."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._read_at > CACHED_S:
                self._last = self._describe(await self._gather())
                self._read_at = time.monotonic()
            refusal = self._health.refusal()
            return (
                self._last if refusal is None else {**self._last, "ready": False, "problem": refusal.message}
            )

    def inexact(self) -> list[str]:
        """Workers on whose CPU exact numerics do not hold, as far as was read."""
        nodes = self._last["nodes"] if self._last is not None else []
        return [node["id"] for node in nodes if node["exact_numerics"] == "not_held"]

    async def _gather(self) -> list[ConductorStatus]:
        answers: dict[str, ConductorStatus] = {}
        first = asyncio.Event()

        async def receive(msg: Msg) -> None:
            try:
                answer: ConductorStatus = decode(msg.data, ConductorStatus)
            except MessageInvalid:
                first.set()  # "nobody serves this", or no conductor of our version
                return
            answers[answer.conductor_id] = answer
            first.set()

        nc = self._bus.nc
        if not nc.is_connected:
            return []
        inbox = nc.new_inbox()
        subscription = await nc.subscribe(inbox, cb=receive)
        try:
            await nc.publish(
                subjects.status(subjects.CONDUCTORS), encode(StatusRequest(digest=True)), reply=inbox
            )
            async with asyncio.timeout(ANSWER_S):
                await first.wait()
            if answers:
                await asyncio.sleep(GATHER_S)
        except TimeoutError:
            pass
        finally:
            if not nc.is_closed:
                await subscription.unsubscribe()
        return [answers[name] for name in sorted(answers)]

    def _describe(self, conductors: list[ConductorStatus]) -> dict[str, Any]:
        status: dict[str, Any] = {
            "ready": any(conductor.ready for conductor in conductors),
            "problem": "",
            "nats": self._nats_url(),
            "http": self.http_url,
            "model": self._config.model,
            "nodes": [],
            "conductors": [
                {"id": conductor.conductor_id, "seq": conductor.seq, "digest": conductor.digest}
                for conductor in conductors
            ],
        }
        if not conductors:
            return status
        newest = max(conductors, key=lambda conductor: conductor.seq)
        self._learn(newest)
        if not status["ready"]:
            status["problem"] = newest.lacks
        status["paused"] = newest.paused
        status["weight_version"] = newest.weight_version
        status["request_tokens_max"] = newest.request_tokens_max
        status["nodes"] = [
            {
                "id": node.id,
                "role": node.role,
                "state": node.state,
                "queued": node.queued,
                "running": node.running,
                "kv_used": node.kv_used,
                "kv_total": node.kv_total,
                "kv_lent": node.kv_lent,
                "groups": node.groups,
                "splits": node.splits,
                "no_attention": node.no_attention,
                "slow_wait_ms": round(node.slow_wait_ns / 1e6, 1),
                "slow_expected_ms": round(node.slow_expected_ns / 1e6, 1),
                "exact_numerics": node.exact_numerics,
                "becomes": node.becomes,
            }
            for node in newest.nodes
        ]
        counts = newest.counts
        status["requests"] = {
            "in_flight": newest.requests_in_flight,
            "parked": newest.requests_parked,
            "arrived": counts.arrived,
            "finished": counts.finished,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "rejected": counts.rejected,
        }
        status["cache"] = {
            "blocks": newest.index_blocks,
            "prompt_tokens": counts.prompt_tokens,
            "cached_local_tokens": counts.cached_local_tokens,
            "cached_fetched_tokens": counts.cached_fetched_tokens,
            "similar_requests": counts.similar_requests,
            "similar_tokens": counts.similar_tokens,
            "similar_computed_tokens": counts.similar_computed_tokens,
        }
        status["moves"] = {
            "done": counts.moves,
            "refused": counts.moves_refused,
            "tokens": counts.moved_tokens,
            "bytes": counts.moved_bytes,
        }
        status["roles"] = _roles(newest.elastic)
        status["policy"] = newest.policy.name
        return status

    def _nats_url(self) -> str:
        """The server that we are connected to, without credentials."""
        url = self._bus.nc.connected_url
        if url is None:
            return ""
        parts = urlsplit(url.geturl())
        return f"{parts.scheme}://{parts.hostname}:{parts.port}"


def _roles(elastic: ElasticStatus) -> dict[str, Any]:
    """Workers that the pools want, and what was made of it."""
    roles: dict[str, Any] = {
        "elastic": elastic.mode,
        "changes": elastic.changes,
        "pools": {
            pool.role: {"wanted": pool.wanted, "workers": pool.workers, "needed": pool.needed / 1_000}
            for pool in elastic.pools
        },
    }
    if elastic.advised_worker:
        roles["advised"] = {
            "worker": elastic.advised_worker,
            "role": elastic.advised_role,
            "reason": elastic.reason,
        }
    return roles
