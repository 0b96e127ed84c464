"""What requests feel of conductors that die: latency in peace, and while two of three are killed at any moment.

Requests come over NATS in a steady pace, to an engine that computes nothing; the time counts from when one was due.
`late_ms` says by how much the pace itself was missed at most, as where the machine had other things to do.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import nats
import orjson
import uvloop
from clusters import bus_config, cluster, finish, parsed, parser, spread

from halfmoon.schemas import subjects

CONDUCTORS = 3
BODY = orjson.dumps({"prompt": "the moon", "max_tokens": 4, "ignore_eos": True})
#: A conductor is started again after at most two seconds, and reads the log.
REST_S = 5.0
TIMEOUT_S = 60.0


def process_ids(parent: int) -> list[int]:
    """Of the conductors that `halfmoon up` has at the moment."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if b"conductor" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:5]:
                found.append(pid)
    return found


class Load:
    """Requests in a steady pace, whatever their answers take."""

    def __init__(self, nc: nats.NATS, pace: int) -> None:
        self.late_ms = 0.0
        self._nc = nc
        self._pace = pace

    async def run(self, seconds: float) -> list[float]:
        """The latencies in ms of those that were due in so many seconds."""
        started = time.perf_counter()
        asked = []
        for number in range(int(seconds * self._pace)):
            due = started + number / self._pace
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.late_ms = max(self.late_ms, (time.perf_counter() - due) * 1e3)
            asked.append(asyncio.create_task(self._one(due)))
        return list(await asyncio.gather(*asked))

    async def _one(self, due: float) -> float:
        reply = await self._nc.request(f"{subjects.API}.generate", BODY, timeout=TIMEOUT_S)
        answer = orjson.loads(reply.data)
        assert answer["usage"]["completion_tokens"] == 4, answer
        return (time.perf_counter() - due) * 1e3


async def kill_two(parent: int, draw: random.Random) -> int:
    await asyncio.sleep(draw.random() * 0.5)
    chosen = draw.sample(process_ids(parent), CONDUCTORS - 1)
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(draw.choice([0, 0.02, 0.2]))
    return len(chosen)


async def measure(addresses: dict[str, Any], args: Any) -> dict[str, Any]:
    draw = random.Random(args.seed)
    seed = bus_config(addresses, "client").nkey_seed_file
    nc = await nats.connect(addresses["nats"], nkeys_seed=seed)
    load = Load(nc, args.pace)
    await load.run(1.0)
    calm: list[float] = []
    killed: list[float] = []
    kills = 0
    for _ in range(args.rounds):
        calm += await load.run(1.0)
        meanwhile, more = await asyncio.gather(load.run(1.0), kill_two(addresses["pid"], draw))
        killed += meanwhile
        kills += more
        await asyncio.sleep(REST_S)
    await nc.close()
    return {
        "kills": kills,
        "calm_ms": spread(calm),
        "killed_ms": spread(killed),
        "late_ms": round(load.late_ms, 1),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--pace", type=int, default=40, help="requests a second")
    options.add_argument("--seed", type=int, default=20)
    args = parsed(options, rounds=1)
    with cluster("--engine", "null", "--conductors", str(CONDUCTORS)) as addresses:
        found = uvloop.run(measure(addresses, args))
    calm, killed = found["calm_ms"], found["killed_ms"]
    line = (
        f"latency of {calm['n']} requests in peace: {calm['p50']:.1f} ms, at most {calm['max']:.1f}; "
        f"of {killed['n']} while {found['kills']} conductors were killed: {killed['p50']:.1f} ms, "
        f"at most {killed['max']:.1f}; the pace was missed by at most {found['late_ms']:.1f} ms"
    )
    finish(args, found, [line])


if __name__ == "__main__":
    main()
