"""`make golden`: records the logs in tests/replay/golden anew, by real clusters that lose workers and refuse
requests.

To be done when the core is meant to decide otherwise, or when messages change; every commit in between must
replay what is there. `smollm2` serves the real model from two prefill and two decode nodes under one
conductor: conversations that share their beginning, so that KV is fetched; requests with an objective that
cannot be held; one that is cancelled; a decode and a prefill worker that are killed under load. `null`
computes nothing, under three conductors of which one is killed; its policy is changed on the way. In `lending` two
decode workers with caches of six blocks hold parts of each other's requests, and one is killed; in `attention` the KV
of all requests lies at two attention workers, of which one is killed, and so is a decode worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import orjson

from halfmoon.schemas import subjects
from halfmoon.schemas.events import DecodeStarted, WorkerLeft
from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.steering import last_seq, told

GOLDEN = Path(__file__).parent / "golden"


async def ask(nc: Any, **fields: Any) -> dict[str, Any]:
    """One request; the body of its answer, an error too."""
    reply = await nc.request(f"{subjects.API}.generate", orjson.dumps(fields), timeout=180)
    return dict(orjson.loads(reply.data))


async def smollm2(cluster: Cluster) -> None:
    nc = await cluster.connect()
    common = prompt(900)
    turns = [common[: 520 + 60 * turn] + prompt(100 + turn)[:40] for turn in range(6)]
    await ask(nc, prompt=turns[0], max_tokens=8)
    work: list[Awaitable[Any]] = [ask(nc, prompt=turn, max_tokens=24) for turn in turns[1:]]
    work += [ask(nc, prompt=prompt(length), max_tokens=16) for length in (40, 257, 600)]
    work += [ask(nc, prompt=prompt(1_500), max_tokens=4, slo={"ttft_ms": 1}) for _ in range(3)]
    after = await last_seq(cluster)
    running = asyncio.gather(*work)
    await told(cluster, after, DecodeStarted, 2)
    cluster.kill("decode-1")
    await running
    after = await last_seq(cluster)
    again = asyncio.gather(*(ask(nc, prompt=turn, max_tokens=12) for turn in turns[2:]))
    await told(cluster, after, DecodeStarted, 1)
    cluster.kill("prefill-0")
    request = orjson.dumps({"prompt": prompt(800), "max_tokens": 64, "stream": True})
    inbox = nc.new_inbox()
    stream = await nc.subscribe(inbox)
    await nc.publish(f"{subjects.API}.generate", request, reply=inbox)
    first = orjson.loads((await stream.next_msg(60)).data)
    await nc.request(f"{subjects.API}.cancel", orjson.dumps({"id": first["id"]}), timeout=10)
    await again
    await ask(nc, prompt=turns[3], max_tokens=4)
    await nc.close()


async def null(cluster: Cluster) -> None:
    nc = await cluster.connect()
    change = [
        sys.executable,
        "-m",
        "halfmoon.cli.main",
        "policy",
        "set",
        "--nats",
        cluster.nats,
        "digest_events=100",
        "ttft_slo_ns=20s",
    ]
    await asyncio.to_thread(
        subprocess.run, change, check=True, stdout=subprocess.DEVNULL, env=cluster.environment
    )
    await asyncio.gather(*(ask(nc, prompt=prompt(20 + number), max_tokens=3) for number in range(40)))
    after = await last_seq(cluster)
    long = [ask(nc, prompt=prompt(300), max_tokens=20_000) for _ in range(6)]
    load = asyncio.gather(
        *long, *(ask(nc, prompt=prompt(30 + number), max_tokens=4_000) for number in range(40))
    )
    await told(cluster, after, DecodeStarted, 40)
    cluster.kill("conductor-1")
    cluster.kill("decode-0")
    await told(cluster, after, DecodeStarted, 60)
    cluster.kill("prefill-1", signal.SIGKILL)
    await load
    await asyncio.gather(*(ask(nc, prompt=prompt(40 + number), max_tokens=2) for number in range(40)))
    await nc.close()


async def busy(nc: Any, lengths: Sequence[int], **fields: Any) -> list[dict[str, Any]]:
    """All at once, each twice."""
    return await asyncio.gather(
        *(ask(nc, prompt=prompt(length + n), **fields) for length in lengths for n in (0, 1))
    )


async def lending(cluster: Cluster) -> None:
    nc = await cluster.connect()
    await ask(nc, prompt=prompt(1_700), max_tokens=8)
    await busy(nc, (40, 60, 80), max_tokens=24)
    after = await last_seq(cluster)
    load = asyncio.gather(
        ask(nc, prompt=prompt(1_400), max_tokens=60),
        ask(nc, prompt=prompt(1_100), max_tokens=90),
        busy(nc, (100, 200, 300), max_tokens=40),
    )
    await told(cluster, after, DecodeStarted, 3)
    cluster.kill("decode-1")
    await load
    await asyncio.gather(
        ask(nc, prompt=prompt(1_250), max_tokens=120), busy(nc, (120, 250, 260, 270), max_tokens=60)
    )
    await nc.close()


async def attention(cluster: Cluster) -> None:
    nc = await cluster.connect()
    await busy(nc, (40, 300, 600), max_tokens=12)
    after = await last_seq(cluster)
    load = asyncio.gather(busy(nc, (50, 200, 310, 700), max_tokens=60))
    await told(cluster, after, DecodeStarted, 2)
    cluster.kill("decode-0")
    await told(cluster, after, WorkerLeft, 1)
    await told(cluster, after, DecodeStarted, 4)
    cluster.kill("attention-1")
    await load
    await busy(nc, (45, 210), max_tokens=24)
    await nc.close()


_SMALL = ("--dtype", "float32", "--pool-mib", "512", "--prefill", "1", "--decode", "2")
SCENES = {
    "lending": (lending, (*_SMALL, "--lend", "--decode-kv-blocks", "6")),
    "attention": (attention, (*_SMALL, "--attention", "2")),
    "smollm2": (smollm2, ("--dtype", "float32", "--kv-blocks", "32", "--pool-mib", "512")),
    "null": (null, ("--engine", "null", "--conductors", "3")),
}


def record(name: str) -> None:
    scene, flags = SCENES[name]
    with tempfile.TemporaryDirectory() as state:
        with running(Path(state) / name, *flags) as cluster:
            asyncio.run(scene(cluster))
            file = GOLDEN / f"{name}.jsonl.zst"
            save = [sys.executable, "-m", "halfmoon.cli.main", "events", "save", str(file)]
            words = [*save, "--nats", cluster.nats, "--cluster", f"golden-{name}"]
            subprocess.run(words, check=True, env=cluster.environment)
        subprocess.run([sys.executable, "-m", "halfmoon.cli.main", "replay", str(file)], check=True)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SCENES:
        print(f"{name}: recording", flush=True)
        with contextlib.suppress(OSError):
            os.nice(5)
        record(name)


if __name__ == "__main__":
    main()
