"""Tokens a second of two decode workers with small caches, with and without `--lend`, under skew and without, by turns.

    python benchmarks/lending.py [--rounds N] [--only skew|equal] [--save NAME]

Two clusters, alike but for `--lend`, of one prefill and two decode workers: the built-in model, f32, exact numerics,
caches of 16 blocks of 256 tokens. All requests are queued, and dealt in turn among workers with room. *Skew*: a prompt
of 3,330 tokens, which takes 14 blocks, with an answer of 250 to one worker, and one with an answer of 10 to the other;
ten short prompts with answers of 200 tokens come while both caches are full, and are queued at both alike. So the first
worker has a long request and a queue of short ones, and the other soon short ones only. *Equal*: twelve prompts of 520
tokens, of which five fit a cache, with answers of 100. The pools have the long prompts already. One cluster computes at
a time; its tokens a second are those of all answers, over the time from the first request to the last answer.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import aiohttp
from clusters import bus_config, cluster, finish, parser, spread
from simulation_live import read_log

from halfmoon.schemas.events import KvMoved, RequestFinished

FLAGS = (
    *("--prefill", "1", "--decode", "2", "--dtype", "float32", "--numerics", "exact"),
    *("--decode-kv-blocks", "16", "--prefill-kv-blocks", "16", "--batch-max", "16"),
    *("--http-port", "0", "--policy", "round_robin", "--admission", "none", "--move-period-s", "0.2"),
)
LONG, SHORT, EVEN = 3_330, 30, 520


class Kind(NamedTuple):
    """Requests of one kind: how many, and tokens of prompt and answer of each."""

    requests: int
    prompt: int
    answer: int


LOADS = {
    "skew": (Kind(1, LONG, 250), Kind(1, LONG, 10), Kind(10, SHORT, 200)),
    "equal": (Kind(12, EVEN, 100),),
}


def prompt(kind: Kind, number: int) -> list[int]:
    """Of those that the pool is to have, the same each time."""
    draw = random.Random(number if kind.prompt == SHORT else kind.prompt)
    return [draw.randrange(100, 40_000) for _ in range(kind.prompt)]


async def ask(http: aiohttp.ClientSession, url: str, kind: Kind, number: int) -> int:
    """Tokens of the answer to one request."""
    body = {
        "prompt": prompt(kind, number),
        "max_tokens": kind.answer,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        found: int = (await answer.json())["usage"]["completion_tokens"]
        return found


async def load(addresses: dict[str, Any], kinds: Sequence[Kind]) -> float:
    """Tokens a second of all answers."""
    url, timeout = addresses["http"], aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        for kind in kinds:
            if kind.prompt != SHORT:
                await ask(http, url, kind._replace(answer=1), 0)
        await settled(addresses)
        tasks: list[asyncio.Task[int]] = []
        began = time.perf_counter()
        for kind in kinds:
            for _ in range(kind.requests):
                tasks.append(asyncio.create_task(ask(http, url, kind, len(tasks))))
                await asyncio.sleep(0.05)
        tokens = sum(await asyncio.gather(*tasks))
        return tokens / (time.perf_counter() - began)


async def settled(addresses: dict[str, Any]) -> None:
    """No request is in flight any more."""
    open_requests = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{addresses['http']}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            if not any(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(open_requests)):
                return
            await asyncio.sleep(0.1)


async def counted(addresses: dict[str, Any]) -> dict[str, int]:
    """By the log as it stands."""
    events = [stamped.event for stamped in await read_log(bus_config(addresses))]
    moved = [one for one in events if isinstance(one, KvMoved)]
    return {
        "moves": len(moved),
        "moved_bytes": sum(one.moved_bytes for one in moved),
        "answers": sum(isinstance(one, RequestFinished) for one in events),
    }


def compared(rates: dict[str, dict[str, list[float]]]) -> tuple[dict[str, Any], list[str]]:
    result: dict[str, Any] = {}
    lines = []
    for name, of in rates.items():
        ratios = [lent / alone for lent, alone in zip(of["lend"], of["alone"], strict=True)]
        result[name] = {
            "lend_tokens_s": spread(of["lend"]),
            "alone_tokens_s": spread(of["alone"]),
            "lend_over_alone": spread(ratios),
        }
        with_s, without_s = (statistics.median(of[way]) for way in ("lend", "alone"))
        lines.append(
            f"{name}: {with_s:.1f} tokens/s with --lend, {without_s:.1f} without: "
            f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"
        )
    return result, lines


async def rounds(
    ways: dict[str, dict[str, Any]], count: int, names: Sequence[str], say: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    rates: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in names}
    for number in range(count):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for name in names:
            for way in order:
                rates[name][way].append(await load(ways[way], LOADS[name]))
                say(f"{name}, {way}: {rates[name][way][-1]:.1f} tokens/s")
    return rates


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--only", choices=tuple(LOADS), help="of the two loads")
    options = words.parse_args()
    say = (lambda _: None) if options.json else partial(print, flush=True)
    with cluster(*FLAGS, "--lend") as lend, cluster(*FLAGS) as alone:
        ways = {"lend": lend, "alone": alone}
        names = [options.only] if options.only else list(LOADS)
        rates = asyncio.run(rounds(ways, options.rounds, names, say))
        moves = asyncio.run(counted(lend))
    result, lines = compared(rates)
    lines.append(
        f"{moves['moves']} moves, {moves['moved_bytes'] / 2**20:.0f} MiB, {moves['answers']} answers"
    )
    finish(options, {**result, "moves": moves}, lines)


if __name__ == "__main__":
    main()
