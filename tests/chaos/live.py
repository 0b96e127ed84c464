"""`python tests/chaos/live.py --seconds 600`: `kill -9` and SIGSTOP of random processes of a real cluster
under load.

Every request that a frontend took must end: with the text of a cluster in peace, or with a clear error. At
the end, when nothing is disturbed any more, everything is there again, all conductors have the same state,
and nothing is left: no open request, no lease, no reserved or condemned slot, no push, and after the cluster
has stopped no segment and no process. nats-server is among the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).parents[2]))

from halfmoon.schemas.store import StoreStatus
from tests.cluster.harness import Cluster, running
from tests.cluster.prompts import prompt

FLAGS = ("--conductors", "3", "--prefill", "2", "--decode", "2", "--pool-mib", "192")
LENGTHS = (30, 120, 300, 520)
TOKENS = 12
#: A request that has not ended by then counts as one that never ends.
SILENCE_S = 120.0
WRONG = ("never ended", "wrong text", "no clear error", "lost though the frontend was well")
REST_S = 90.0


class Load:
    """Clients that ask one request after another, and count how each ended."""

    def __init__(self, cluster: Cluster, draw: random.Random, clients: int) -> None:
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self.frontend_hit_at = -1e9
        self._cluster = cluster
        self._draw = draw
        self._clients = clients
        self._texts: dict[int, str] = {}
        self._stop = False

    async def learn(self) -> None:
        """What each prompt is answered with in peace."""
        async with aiohttp.ClientSession() as session:
            for length in LENGTHS:
                how, text = await self._once(session, length, stream=False)
                assert how == "finished", (how, text)
                self._texts[length] = text

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._clients)))

    def stop(self) -> None:
        self._stop = True

    async def _client(self) -> None:
        async with aiohttp.ClientSession() as session:
            while not self._stop:
                length, stream = self._draw.choice(LENGTHS), self._draw.random() < 0.5
                started = time.monotonic()
                try:
                    async with asyncio.timeout(SILENCE_S):
                        how, text = await self._once(session, length, stream=stream)
                except TimeoutError:
                    how, text = "never ended", ""
                took_s = time.monotonic() - started
                if how == "connection lost" and self.frontend_hit_at < started - 1:
                    how = "lost though the frontend was well"
                if how == "finished":
                    self.slowest_s = max(self.slowest_s, took_s)
                    if text != self._texts[length]:
                        how = "wrong text"
                if how in WRONG:
                    self.wrong.append(
                        f"{how} after {took_s:.1f} s, {length} tokens, stream {stream}: {text[:200]!r}"
                    )
                self.ended[how] += 1
                if how != "finished":
                    await asyncio.sleep(0.2)

    async def _once(self, session: aiohttp.ClientSession, length: int, *, stream: bool) -> tuple[str, str]:
        """How it ended, and the text or what was said instead."""
        body = {
            "prompt": prompt(length),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        try:
            async with session.post(f"{self._cluster.http}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    return _refusal(reply.status, await reply.read())
                if not stream:
                    return "finished", orjson.loads(await reply.read())["choices"][0]["text"]
                return await _streamed(reply)
        except aiohttp.ClientConnectorError:
            return "nobody listens", ""
        except aiohttp.ClientError as problem:
            return "connection lost", str(problem)


def _refusal(status: int, body: bytes) -> tuple[str, str]:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        error = orjson.loads(body)["error"]
        if error["message"]:
            return f"error {status} {error.get('code') or error['type']}", error["message"]
    return "no clear error", f"{status} {body!r}"


async def _streamed(reply: aiohttp.ClientResponse) -> tuple[str, str]:
    text = ""
    async for raw in reply.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return "finished", text
        if line.startswith("data: "):
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                return f"error in stream {chunk['error'].get('code')}", chunk["error"]["message"]
            text += "".join(choice.get("text", "") for choice in chunk["choices"])
    return "connection lost", text


async def disturb(
    cluster: Cluster, load: Load, draw: random.Random, seconds: float, counts: Counter[str]
) -> None:
    """One fault after another; those that are stopped go on after a while."""
    until = time.monotonic() + seconds
    going_on: list[asyncio.Task[None]] = []
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(1, 7))
        name = draw.choice(["nats-server", *cluster.names()])
        number = signal.SIGKILL if draw.random() < 0.6 else signal.SIGSTOP
        try:
            pid = cluster.kill_server(number) if name == "nats-server" else cluster.kill(name, number)
        except (AssertionError, StopIteration, ProcessLookupError):
            continue  # being started again
        role = name.rpartition("-")[0] if name[-1].isdigit() else name
        role = "store" if role.startswith("store") else role
        if role == "frontend":
            load.frontend_hit_at = time.monotonic()
        if number == signal.SIGKILL:
            counts[f"killed: {role}"] += 1
        else:
            counts[f"stopped: {role}"] += 1
            going_on.append(asyncio.create_task(_go_on(pid, draw.uniform(0.1, 8))))
    await asyncio.gather(*going_on)


async def _go_on(pid: int, after_s: float) -> None:
    await asyncio.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def at_rest(cluster: Cluster) -> str:
    """What is still missing or held; "" when all is well."""
    nc = await cluster.connect()
    try:
        conductors = await cluster.conductors(nc)
    finally:
        await nc.close()
    if len(conductors) < 3:
        return f"{len(conductors)} conductors answer"
    if len({(state.seq, state.digest) for state in conductors}) > 1:
        return f"conductors differ: {[(state.conductor_id, state.seq, state.digest) for state in conductors]}"
    state = conductors[0]
    roles = sorted(node.role for node in state.nodes if node.state == "ready")
    if roles != ["decode"] * 2 + ["frontend"] + ["prefill"] * 2 + ["store"] * 4:
        return f"there are {roles}"
    busy = [
        (node.id, node.orders, node.queued, node.running)
        for node in state.nodes
        if node.orders or node.running
    ]
    if busy or state.requests_in_flight:
        return f"{state.requests_in_flight} requests, {busy}"
    held = {node: _held(status) for node, status in (await cluster.stores()).items()}
    return "" if not any(map(any, held.values())) else f"held: {held}"


def _held(status: StoreStatus) -> tuple[int, ...]:
    return (
        status.holds,
        status.slots_reserved,
        status.slots_leased,
        status.slots_condemned,
        status.pushes_open,
    )


async def play(cluster: Cluster, seconds: float, seed: int, clients: int) -> list[str]:
    """What went wrong."""
    draw, counts = random.Random(seed), Counter[str]()
    load = Load(cluster, draw, clients)
    await load.learn()
    running_load = asyncio.create_task(load.run())
    await disturb(cluster, load, draw, seconds, counts)
    load.stop()
    await running_load
    problems = list(load.wrong)
    deadline, missing = time.monotonic() + REST_S, "not looked yet"
    while missing and time.monotonic() < deadline:
        await asyncio.sleep(1)
        try:
            missing = await at_rest(cluster)
        except Exception as problem:  # a process that is just starting
            missing = f"{type(problem).__name__}: {problem}"
    if missing:
        problems.append(f"{REST_S:.0f} s after the last fault: {missing}")
    log = await cluster.events()
    asked = sum(load.ended.values())
    print(f"seed {seed}: {asked} requests, slowest answer {load.slowest_s:.1f} s, {len(log):,} events")
    for title, some in (("faults", counts), ("ends", load.ended)):
        print(f"  {title}: " + ", ".join(f"{what} {count}" for what, count in sorted(some.items())))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument(
        "--keep", metavar="DIR", default="", help="where the cluster keeps its files, to look at"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        problems: list[str] = []
        with running(Path(args.keep or directory), *FLAGS) as cluster:
            problems += asyncio.run(play(cluster, args.seconds, args.seed, args.clients))
        for problem in problems:
            print(f"  WRONG: {problem}")
    print("nothing is left behind" + ("" if problems else "; nothing went wrong"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
