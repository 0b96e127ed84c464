"""The source of the cluster's page, on a whole cluster: the stream, and the story of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import explained
from halfmoon.conductor.replay.histories import request_histories
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.save import save
from halfmoon.conductor.replay.verify import Replay
from tests.cluster.harness import Cluster, running
from tests.eventually import BOUND_S

SECRET = "xylophonic marmalade"


async def test_a_request_is_seen_and_explained_as_replay_does_and_no_word_of_it_is_told(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "state", "--prefill", "1", "--decode", "1", "--engine", "null") as cluster:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=BOUND_S)) as http:
            before = await complete(http, cluster)  # nobody looks
            async with http.get(f"{cluster.http}/page/stream") as stream:
                views = [await anext_view(stream)]
                seen = await complete(http, cluster)
                while not any(row["request_id"] == seen for row in views[-1].get("requests", [])):
                    views.append(await anext_view(stream))
                while views[-1]["recent"].get("finished") != 2:
                    views.append(await anext_view(stream))
                told = {name: await explain(http, cluster, name) for name in (before, seen)}
        file = tmp_path / "run.jsonl"
        bus = await cluster.bus()
        await save(bus, file)
        await bus.close()
        found = request_histories(Replay(LogFile(file), explain_requests=explain_all))
        for name, story in told.items():
            assert story["text"] == explained(found.of[name])
            assert story["request"]["ending"] == "finished"
    assert [node["id"] for node in views[-1]["nodes"]] == ["decode-0", "prefill-0", "frontend-0"]
    everything = json.dumps([views, told])
    assert seen in everything
    assert not any(word in everything for word in SECRET.split())


async def complete(http: aiohttp.ClientSession, cluster: Cluster) -> str:
    body = {"model": "smollm2-135m-instruct", "prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    async with http.post(f"{cluster.http}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-request-id"]


async def anext_view(stream: aiohttp.ClientResponse) -> Any:
    while True:
        line = await stream.content.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            return json.loads(line[6:])


async def explain(http: aiohttp.ClientSession, cluster: Cluster, request_id: str) -> Any:
    async with http.get(f"{cluster.http}/page/explain", params={"request": request_id}) as response:
        assert response.status == 200, await response.text()
        return await response.json()
