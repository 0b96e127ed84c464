"""The event log takes nothing, or its disk is nearly full: new requests are told so, and accepted ones only wait."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from nats.aio.msg import Msg

from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.config import FrontendConfig
from tests.eventually import eventually

BODY = {"prompt": "Once", "max_tokens": 5}


@contextlib.asynccontextmanager
async def nothing_stored(cluster: Any) -> AsyncIterator[None]:
    """As on a full disk: what is published is accepted, and nothing is answered."""

    async def deaf(_: Msg) -> None:
        return

    ask, stream = cluster.client.jetstream.ask, subjects.EVENTS_STREAM
    listening = await cluster.client.nc.subscribe(subjects.EVENTS_ALL, cb=deaf)
    config = (await ask(f"STREAM.INFO.{stream}"))["config"]
    await ask(f"STREAM.UPDATE.{stream}", {**config, "subjects": ["halfmoon.nowhere"]})
    try:
        yield
    finally:
        await ask(f"STREAM.UPDATE.{stream}", config)
        await listening.unsubscribe()


async def until_ready(cluster: Any, status: int) -> Any:
    """The body of `/ready`."""

    async def told() -> Any:
        code, headers, body = await cluster.http_get("/ready")
        return (headers, orjson.loads(body)) if code == status else None

    return await eventually(told, f"/ready says {status}", every_s=0.1)


def test_a_log_that_stores_nothing_is_a_503_with_a_reason_and_accepted_requests_wait(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        async with nothing_stored(cluster):
            waiting = asyncio.ensure_future(cluster.post("/v1/completions", BODY))
            headers, told = await until_ready(cluster, 503)
            assert told["error"]["code"] == "log_not_stored"
            assert headers["retry-after"] == "1"
            status, headers, told = await cluster.post("/v1/completions", BODY)
            assert (status, told["error"]["code"], headers["retry-after"]) == (503, "log_not_stored", "1")
            assert told["error"]["message"].startswith("the event log has stored nothing for")
            headers, told = await cluster.ask("generate", BODY)
            assert (headers["Nats-Service-Error-Code"], told["error"]["code"]) == ("503", "log_not_stored")
            _, status = await cluster.ask("status", {})
            assert status["ready"] is False
            assert status["problem"].startswith("the event log has stored nothing for")
            assert not waiting.done()
        assert (await waiting)[0] == 200

        async def taken_again() -> bool:
            return (await cluster.post("/v1/completions", BODY))[0] == 200

        await eventually(taken_again, "new requests are taken again")

    # Without heartbeats the first request is the oldest that is not stored: it is not refused itself.
    run(scenario, unstored_ns_max=SECOND_NS, heartbeat_ns=600 * SECOND_NS)


@pytest.mark.pure
def test_before_the_disk_of_the_log_is_full_new_requests_are_refused(run: Any, tmp_path: Path) -> None:
    """Nothing has failed yet, so they are taken again at once when there is room."""
    free = shutil.disk_usage(tmp_path).free

    async def refused(cluster: Any) -> None:
        status, headers, told = await cluster.post("/v1/completions", BODY)
        assert (status, told["error"]["code"], headers["retry-after"]) == (503, "log_disk_full", "1")
        assert "MiB left" in told["error"]["message"]
        _, told = await until_ready(cluster, 503)
        assert told["error"]["code"] == "log_disk_full"
        _, _, shown = await cluster.http_get("/metrics")
        assert b"\nhalfmoon_log_disk_free_bytes " in shown

    async def taken(cluster: Any) -> None:
        assert (await cluster.post("/v1/completions", BODY))[0] == 200

    run(refused, log_directory=str(tmp_path), log_free_mib_min=free >> 19)
    run(taken, log_directory=str(tmp_path), log_free_mib_min=1)
    run(taken, log_directory=str(tmp_path / "gone"), log_free_mib_min=free >> 19)


@pytest.mark.pure
def test_limits_that_mean_nothing_are_refused() -> None:
    for wrong in ({"unstored_ns_max": 1}, {"log_free_mib_min": -1}):
        with pytest.raises(ValueError, match="unstored_ns_max must be at least a second"):
            FrontendConfig(frontend_id="f", model="m", **wrong)
