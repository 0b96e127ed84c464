"""What the distributed KVCache gains: time to first token of a 2,000-token prompt, cold and with its first
1,900 tokens cached on another node only; and how long a decode worker waits for KV after prefill, layer by
layer and all at the end.

Every figure is read from the cluster's own answers and events. Pairs are measured in turn, in one run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import nats
import orjson
import uvloop
from clusters import bus_config, cluster, finish, parsed, parser, spread

from halfmoon.bus.connection import Bus
from halfmoon.bus.streams import StreamLimits
from halfmoon.schemas.events import DecodeStarted, PrefillFinished, WorkerDraining, WorkerJoined

PROMPT_TOKENS, SHARED_TOKENS = 2000, 1900


class Steered:
    """Sends requests to the prefill worker that the measurement wants: the others drain meanwhile."""

    def __init__(self, nc: nats.NATS, bus: Bus, addresses: dict[str, Any]) -> None:
        self.nc, self.bus, self.addresses = nc, bus, addresses

    async def read(self, kinds: tuple[type, ...], request_id: str = "") -> list[Any]:
        found, last = [], await self.bus.last_seq()
        async for stamped in self.bus.events():
            event = stamped.event
            if isinstance(event, kinds) and request_id in ("", getattr(event, "request_id", "")):
                found.append(event)
            if stamped.seq >= last:
                return found
        return found

    async def ask(self, prompt: list[int], salt: str, *, only: str = "") -> dict[str, Any]:
        joined = await self.read((WorkerJoined,))
        others = {
            e.worker_id: e.incarnation for e in joined if e.role == "prefill" and only and e.worker_id != only
        }
        for draining in (True, False):
            for worker_id, incarnation in others.items():
                event = WorkerDraining(worker_id=worker_id, incarnation=incarnation, draining=draining)
                await self.say(event, worker_id)  # only a worker says it of itself
            if draining:
                await asyncio.sleep(0.1)
                fields = {
                    "prompt": prompt,
                    "max_tokens": 2,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_salt": salt,
                }
                reply = await self.nc.request("halfmoon.v1.generate", orjson.dumps(fields), timeout=120)
        answer: dict[str, Any] = orjson.loads(reply.data)
        assert "error" not in answer, answer
        await asyncio.sleep(0.5)  # the last events of the request
        return answer

    async def say(self, event: WorkerDraining, worker_id: str) -> None:
        config = bus_config(self.addresses, worker_id)
        worker = await Bus.connect(config, name=worker_id, limits=StreamLimits(replicas=0))
        await worker.append(event, source_id=worker_id)
        await worker.close()

    async def close(self) -> None:
        await self.bus.close()
        await self.nc.close()


async def connect(addresses: dict[str, Any]) -> Steered:
    config = bus_config(addresses)
    bus = await Bus.connect(config, name="operator", limits=StreamLimits(replicas=0))
    nc = await nats.connect(config.url, nkeys_seed=config.nkey_seed_file)
    return Steered(nc, bus, addresses)


async def reuse(addresses: dict[str, Any], runs: int) -> list[dict[str, float]]:
    cluster_, draw = await connect(addresses), random.Random(7)
    rows = []
    for run in range(runs):
        shared = [draw.randrange(1000, 40000) for _ in range(SHARED_TOKENS)]
        first, second = ([*shared, *(draw.randrange(1000, 40000) for _ in range(100))] for _ in range(2))
        cold = await cluster_.ask(first, f"run {run}", only="prefill-0")
        warm = await cluster_.ask(second, f"run {run}", only="prefill-1")
        (went,) = await cluster_.read((PrefillFinished,), warm["id"])
        assert cold["usage"]["cached_tokens"] == 0, cold
        assert went.cached_local_tokens == 0, went
        assert went.cached_fetched_tokens == SHARED_TOKENS // 256 * 256, went
        rows.append(
            {
                "cold_ttft_ms": cold["timing_ms"]["ttft"],
                "fetched_ttft_ms": warm["timing_ms"]["ttft"],
                "fetch_ms": went.fetch_ns / 1e6,
                "fetched_mib": went.fetched_bytes / 2**20,
                "ratio": warm["timing_ms"]["ttft"] / cold["timing_ms"]["ttft"],
            }
        )
    await cluster_.close()
    return rows


async def overlap(addresses: dict[str, Any], runs: int) -> list[dict[str, float]]:
    cluster_, draw = await connect(addresses), random.Random(8)
    rows = []
    for run in range(runs):
        prompt = [draw.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
        answer = await cluster_.ask(prompt, f"overlap {run}")
        started, finished = await cluster_.read((DecodeStarted, PrefillFinished), answer["id"])
        if isinstance(started, PrefillFinished):
            started, finished = finished, started
        rows.append({"wait_ms": started.wait_ns / 1e6, "pushed_mib": finished.pushed_bytes / 2**20})
    await cluster_.close()
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--runs", type=int, default=5)
    args = parsed(options, runs=1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with cluster("--dtype", "float32") as addresses:
            rows = runner.run(reuse(addresses, args.runs))
            streamed = runner.run(overlap(addresses, args.runs))
        with cluster("--dtype", "float32", "--no-stream-layers") as addresses:
            at_end = runner.run(overlap(addresses, args.runs))
    all_layers_ms = statistics.median(row["wait_ms"] for row in at_end)
    two_layers_ms = all_layers_ms * 2 / 30
    result = {
        "reuse": {key: spread([row[key] for row in rows]) for key in rows[0]},
        "wait_for_kv_ms": {
            "streamed": spread([row["wait_ms"] for row in streamed]),
            "all_at_the_end": spread([row["wait_ms"] for row in at_end]),
            "two_of_30_layers": round(two_layers_ms, 3),
        },
        "pushed_mib": streamed[0]["pushed_mib"],
    }
    ratio, wait = result["reuse"]["ratio"], result["wait_for_kv_ms"]
    lines = [
        f"time to first token, {PROMPT_TOKENS} tokens: cold {result['reuse']['cold_ttft_ms']['p50']:.0f} ms, "
        f"{SHARED_TOKENS} tokens on another node {result['reuse']['fetched_ttft_ms']['p50']:.0f} ms "
        f"(ratio {ratio['p50']:.3f}, {ratio['min']:.3f} to {ratio['max']:.3f}; "
        f"fetch of {result['reuse']['fetched_mib']['p50']:.0f} MiB {result['reuse']['fetch_ms']['p50']:.0f} ms)",
        f"wait for KV after prefill: layer by layer {wait['streamed']['p50']:.2f} ms "
        f"({wait['streamed']['min']:.2f} to {wait['streamed']['max']:.2f}), all at the end "
        f"{wait['all_at_the_end']['p50']:.1f} ms; two of 30 layers would be {two_layers_ms:.2f} ms",
    ]
    finish(args, result, lines)


if __name__ == "__main__":
    main()
