"""What the control plane costs: a cluster whose engine computes nothing, driven over NATS or HTTP.

Latency is request to first token at one request at a time; throughput is whole requests at 32 at a time.
Client, frontend, nats-server, conductor and four workers share the machine's cores. Because others may share
them too, each run is preceded by two yardsticks: a fixed loop on every core at once, and a bare request and
reply through the same nats-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import nats
import orjson
import uvloop
from clusters import bus_config, cluster, finish, parsed, parser, spread

#: A subject that frontends may serve and clients may ask on; nobody of halfmoon does.
ECHO = "halfmoon.v1.echo"
#: Requests one at a time: not counted, and counted.
WARM, ALONE = 50, 400
WORDS = "the moon rises over the quiet sea and the tide turns again "


class HttpClient:
    """One kept-alive connection that speaks just enough HTTP/1.1 to time an answer; lighter than a library."""

    async def open(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.reader, self.writer = await asyncio.open_connection(parts.hostname, parts.port)

    async def post(self, path: str, body: bytes) -> tuple[float, float]:
        """(seconds to the first byte of the body's first event, seconds to the end)."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        started = time.perf_counter()
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await self.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in status.split(b"\r\n", 1)[0], status
        length = -1
        for line in status.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if length >= 0:
            await self.reader.readexactly(length)
            now = time.perf_counter()
            return now - started, now - started
        first = 0.0
        while True:
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            await self.reader.readexactly(size + 2)
            first = first or time.perf_counter()
            if size == 0:
                return first - started, time.perf_counter() - started


def spin(_: int = 0) -> float:
    """Milliseconds of a fixed loop."""
    started = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number * number
    return (time.perf_counter() - started) * 1000


def spin_all() -> list[float]:
    """The fixed loop on every core at once, the median of three on each."""
    cores = os.cpu_count() or 1
    with multiprocessing.Pool(cores) as pool:
        rounds = [pool.map(spin, range(cores), chunksize=1) for _ in range(3)]
    return [round(statistics.median(column), 1) for column in zip(*rounds, strict=True)]


async def connected(addresses: dict[str, Any], name: str) -> nats.NATS:
    config = bus_config(addresses, name)
    return await nats.connect(config.url, nkeys_seed=config.nkey_seed_file)


def echo(addresses: dict[str, Any]) -> None:
    """A process that answers every request with itself."""

    async def serve() -> None:
        nc = await connected(addresses, "frontend-0")

        async def answer(msg: Any) -> None:
            await nc.publish(msg.reply, msg.data)

        await nc.subscribe(ECHO, cb=answer)
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextlib.contextmanager
def echoing(addresses: dict[str, Any]) -> Iterator[None]:
    process = multiprocessing.Process(target=echo, args=(addresses,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


async def bare_ms(addresses: dict[str, Any]) -> float:
    """p50 of a bare request and reply, one at a time."""
    nc = await connected(addresses, "client")
    took = []
    while len(took) < 500:
        started = time.perf_counter()
        with contextlib.suppress(nats.errors.NoRespondersError):  # it is only just starting
            await nc.request(ECHO, b"x" * 200, timeout=5)
            took.append((time.perf_counter() - started) * 1000)
    await nc.close()
    return round(statistics.median(took), 3)


async def nats_once(nc: nats.NATS, body: bytes) -> tuple[float, float]:
    started = time.perf_counter()
    reply = await nc.request("halfmoon.v1.generate", body, timeout=30)
    assert b'"error"' not in reply.data[:20], reply.data
    took = time.perf_counter() - started
    return took, took


async def measure(
    addresses: dict[str, Any], how: str, prompt_tokens: int, tokens: int, seconds: float, alone: int = ALONE
) -> dict[str, Any]:
    """Latency at one in `alone` requests after WARM others, then throughput at 32."""
    words = WORDS.split()
    # A word is a token of this vocabulary.
    prompt = " ".join(words[i % len(words)] for i in range(prompt_tokens))
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    if how == "nats":
        body = orjson.dumps(fields)
        clients: list[HttpClient] = []
        connections = [await connected(addresses, "client")]
        once = [lambda: nats_once(connections[0], body)] * 32
    else:
        body = orjson.dumps({**fields, "model": "smollm2-135m-instruct", "stream": True})
        clients = [HttpClient() for _ in range(32)]
        await clients[0].open(addresses["http"])
        once = [lambda c=client: c.post("/v1/completions", body) for client in clients]
    for _ in range(WARM):
        await once[0]()
    one_by_one = [await once[0]() for _ in range(alone)]
    for client in clients[1:]:  # not before: a connection on which no request comes is closed
        await client.open(addresses["http"])
    deadline = time.perf_counter() + seconds
    together: list[tuple[float, float]] = []

    async def loop(one: Any) -> None:
        while time.perf_counter() < deadline:
            together.append(await one())

    started = time.perf_counter()
    await asyncio.gather(*(loop(one) for one in once))
    rate = len(together) / (time.perf_counter() - started)
    return {
        "over": how,
        "prompt_tokens": prompt_tokens,
        "max_tokens": tokens,
        "first_token_ms_at_1": spread([first * 1000 for first, _ in one_by_one]),
        "whole_ms_at_1": spread([whole * 1000 for _, whole in one_by_one]),
        "requests_per_s_at_32": round(rate, 1),
        "first_token_ms_at_32": spread([first * 1000 for first, _ in together]),
    }


def main() -> None:
    args_parser = parser(__doc__ or "")
    args_parser.add_argument("--seconds", type=float, default=5.0, help="of each throughput run")
    args_parser.add_argument("--runs", type=int, default=3)
    args_parser.add_argument("--cases", type=int, default=6, help="only the first so many")
    args_parser.add_argument("--alone", type=int, default=ALONE, help="requests one at a time, in each run")
    args = parsed(args_parser, seconds=0.5, runs=1, cases=3, alone=20)
    cases = [
        ("nats", 8, 1),
        ("nats", 128, 1),
        ("http", 128, 1),
        ("http", 128, 32),
        ("http", 2048, 1),
        ("http", 12288, 1),
    ]
    rows: list[dict[str, Any]] = []
    with (
        cluster("--engine", "null", "--admission", "none") as addresses,
        echoing(addresses),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for case in cases[: args.cases]:
            some = []
            for _ in range(args.runs):
                yardsticks = {"spin_ms": spin_all(), "bare_ms": runner.run(bare_ms(addresses))}
                some.append({**runner.run(measure(addresses, *case, args.seconds, args.alone)), **yardsticks})
            yardsticks_all = [{"spin_ms": one["spin_ms"], "bare_ms": one["bare_ms"]} for one in some]
            rates = [one["requests_per_s_at_32"] for one in some]
            row = sorted(some, key=lambda one: one["requests_per_s_at_32"])[len(some) // 2]
            row["requests_per_s_at_32_all"] = rates
            row["first_token_p50_ms_at_1_all"] = [one["first_token_ms_at_1"]["p50"] for one in some]
            row["first_token_p50_ms_at_1"] = statistics.median(row["first_token_p50_ms_at_1_all"])
            row["first_token_over_bare"] = round(
                statistics.median(one["first_token_ms_at_1"]["p50"] / one["bare_ms"] for one in some), 2
            )
            row["yardsticks_all"] = yardsticks_all
            rows.append(row)
    lines = [
        f"{row['over']:>5} prompt {row['prompt_tokens']:>5} tokens, answer {row['max_tokens']:>2}: "
        f"first token {row['first_token_p50_ms_at_1']:6.2f} ms p50 at one, whole "
        f"{row['whole_ms_at_1']['p50']:6.2f} ms; {row['requests_per_s_at_32']:7.0f} requests/s at 32; "
        f"{row['first_token_over_bare']:.1f} times a bare request ({row['bare_ms']:.2f} ms)"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
