"""A whole cluster is sent everything that is wrong, on both edges, while good requests go through it.

The engine computes nothing: what is tested is that no process minds and nothing of a refused request stays
anywhere.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from nats.errors import NoRespondersError

from halfmoon.schemas.events import RequestArrived, RequestFinished
from tests.api_fields import CHATS, FIELDS, NO_JSON, PROMPTS
from tests.cluster.harness import Cluster, children, running
from tests.eventually import BOUND_S, eventually

CONTEXT = 131_072
#: (body, status, field)
WRONG: list[tuple[dict[str, Any], int, str]] = [
    *(
        ({"prompt": "x", name: value}, 400, name)
        for name, (refused, _) in FIELDS.items()
        for value in refused
    ),
    *(({"prompt": prompt}, status, "prompt") for prompt, status in PROMPTS),
    ({"prompt": "x", "model": "gpt-9"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [10**6]}, 400, "prompt"),
    ({"prompt": "x", "max_tokens": CONTEXT}, 400, "max_tokens"),
    ({"prompt": [7] * CONTEXT}, 400, "prompt"),
    ({"prompt": "word " * 400_000}, 400, "prompt"),
]


class Client:
    """Both edges of one cluster."""

    def __init__(self, cluster: Cluster, nc: Any, http: aiohttp.ClientSession) -> None:
        self.cluster, self.nc, self.http = cluster, nc, http

    async def over_http(self, path: str, payload: bytes) -> tuple[int, dict[str, Any]]:
        headers = {"content-type": "application/json"}
        async with self.http.post(self.cluster.http + path, data=payload, headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def over_nats(self, verb: str, payload: bytes) -> tuple[int, dict[str, Any]]:
        reply = await self.nc.request(f"halfmoon.v1.{verb}", payload, timeout=BOUND_S)
        return int((reply.headers or {}).get("Nats-Service-Error-Code", "200")), orjson.loads(reply.data)

    async def good(self) -> None:
        body = orjson.dumps({"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True})
        for status, answer in (
            await self.over_http("/v1/completions", body),
            await self.over_nats("generate", body),
        ):
            assert (status, answer["usage"]["completion_tokens"]) == (200, 5), answer


async def send_all_that_is_wrong(client: Client) -> None:
    for body, status, field in WRONG:
        payload = json.dumps(body).encode()
        for got, answer in (
            await client.over_http("/v1/completions", payload),
            await client.over_nats("generate", payload),
        ):
            error = answer["error"]
            assert (got, (error["param"] or "").partition(".")[0]) == (status, field), (payload[:200], answer)
            assert field in error["message"] or status in (404, 413, 422), answer
    for messages in CHATS:
        payload = json.dumps({"messages": messages}).encode()
        for got, answer in (
            await client.over_http("/v1/chat/completions", payload),
            await client.over_nats("chat", payload),
        ):
            assert (got, answer["error"]["param"]) == (400, "messages"), (payload[:200], answer)
    for payload in (*NO_JSON, b"\xff" * (2 << 20)):
        for got, answer in (
            await client.over_http("/v1/completions", payload),
            await client.over_nats("generate", payload),
        ):
            assert (got, answer["error"]["code"]) == (400, "invalid_json"), (payload[:40], answer)
    got, answer = await client.over_http("/v1/nonsense", b"{}")
    assert (got, answer["error"]["code"]) == (404, "unknown_url")
    with pytest.raises(NoRespondersError):
        await client.nc.request("halfmoon.v1.nonsense", b"{}", timeout=BOUND_S)


async def idle(cluster: Cluster) -> bool:
    """All nodes are ready, and idle by their heartbeats."""
    nodes = (await cluster.status())["nodes"]
    # No zero is sent.
    busy = [n for n in nodes if n["state"] != "ready" or n.get("running") or n.get("queued")]
    return bool(nodes) and not busy


@pytest.mark.slow
async def test_a_whole_cluster_refuses_all_that_is_wrong_and_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, "--engine", "null") as cluster:
        processes = sorted(children(cluster.process.pid))
        nc = await cluster.connect("client")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            client = Client(cluster, nc, http)
            sending = asyncio.create_task(send_all_that_is_wrong(client))
            good = 0
            while not sending.done():
                await client.good()
                good += 2
            await sending
            await client.good()
            good += 2
        await nc.close()
        events = [stamped.event for stamped in await cluster.events()]
        assert sum(isinstance(event, RequestArrived) for event in events) == good
        assert sum(isinstance(event, RequestFinished) for event in events) == good
        assert sorted(children(cluster.process.pid)) == processes  # none died, none was started again
        await eventually(lambda: idle(cluster), "all nodes are idle", every_s=0.1)
        assert "Traceback" not in "".join(cluster.output(name) for name in cluster.names())
