"""A fleet of engines behind the conductor: 100, with the HTTP and the KV events of vLLM and SGLang by turns, and a
given rate of requests.

The engines are doubles that compute nothing (`engine_doubles.py`), in one process. Each has an adapter of its own, by
the command's own code (`halfmoon adapt`), but many of these share a process: 100 processes do not fit two cores.
`halfmoon up` has one as a process, the conductors and a frontend; further frontends stand beside it, one real
nats-server under all.

Requests come when they are due, whatever the answers take (an open loop): each is one of some prefixes, the popular
ones more often, and tokens of its own. A share of the engines lies, each in one way. A request without an answer is
lost, and one with tokens that no engine says is wrong; either ends this with an error. Where the machine does not carry
the rate, the rate reached counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import nats
import orjson
import uvloop
from clusters import cluster, cpu_s, finish, parsed, parser, pid_of, spread
from engine_doubles import FAULTS, EngineShape, answer_of, serve, wire_of

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.cli.commands import parser_of
from halfmoon.cli.processes import adapt
from halfmoon.conductor.core.machine import Core
from halfmoon.schemas import subjects
from halfmoon.schemas.codec import decode
from halfmoon.schemas.decisions import Ordered, StartMixed
from halfmoon.schemas.events import (
    Event,
    FrontendJoined,
    PrefillFinished,
    RequestArrived,
    Stamped,
    StoreHeartbeat,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.workers.model.text.tokenizer import Tokenizer

MODEL = ("--model", "smollm2-135m-instruct", "--dtype", "float32")
BLOCK_TOKENS = 256
START_S = 300.0
#: For the answers of those that came last.
ANSWER_S = 120.0
IDS = range(200, 40_000)
#: Of a kind of engines: the conductor's orders, the adapters' reports, and the engines' own counts.
HITS = (
    "engines", "orders", "ordered_tokens", "believed_tokens", "reported_tokens",
    "requests", "prompt_tokens", "cached_tokens", "broken", "connections",
)  # fmt: skip


class Engine(NamedTuple):
    """One double: the name of its worker, what it speaks, its address, and how it lies ("": it does not)."""

    name: str
    wire: str
    url: str
    fault: str


def name_of(number: int) -> str:
    """The worker of the engine of that number."""
    return f"{wire_of(number)}-{number}"


# --- the processes ------------------------------------------------------------------------------------------


def adapters(nats_url: str, engines: Sequence[Engine], directory: str, output: str) -> None:
    """A process of adapters, each as its command runs it. `directory`: of `halfmoon up`."""
    with Path(output).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    # Each would load its model's tokenizer, and all the others on this loop would wait for it.
    Tokenizer.load = functools.cache(Tokenizer.load)  # type: ignore[method-assign]

    async def run() -> None:
        words = parser_of("adapt")
        flags = ("--nats", nats_url, *MODEL, "--layout-file", f"{directory}/layout.json")
        await asyncio.gather(
            *(
                adapt.run(words.parse_args([one.wire, "--id", one.name, "--url", one.url, *flags]))
                for one in engines
            )
        )

    uvloop.run(run())


@contextlib.contextmanager
def doubles(faults: Sequence[str], shape: EngineShape) -> Iterator[tuple[list[Engine], Connection, int]]:
    """The engines, whoever answers with their counts, and its process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(faults, shape, ours, theirs))
    process.start()
    theirs.close()
    try:
        ports = ours.recv()
        engines = [
            Engine(name_of(number), wire_of(number), f"http://127.0.0.1:{port}", fault)
            for number, (port, fault) in enumerate(zip(ports, faults, strict=True))
        ]
        assert process.pid is not None
        yield engines, ours, process.pid
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(faults: Sequence[str], shape: EngineShape, others: Connection, ours: Connection) -> None:
    others.close()
    serve(faults, shape, ours)


class Fleet(NamedTuple):
    """What runs: addresses of the cluster, and process ids by what they are."""

    addresses: dict[str, Any]
    pids: dict[str, list[int]]


@contextlib.contextmanager
def fleet(args: argparse.Namespace, engines: Sequence[Engine]) -> Iterator[Fleet]:
    """A cluster over the engines; all of it has begun, and nothing has joined yet but what `up` waits for."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        server = EmbeddedServer.start(Path(directory) / "nats")
        running.callback(server.stop)
        ours, *others = engines
        flags = ("--nats", server.url, *MODEL, "--conductors", str(args.conductors), "--admission", "none")
        addresses = running.enter_context(cluster(*flags, "--adapt-vllm", ours.url))
        up = addresses["pid"]
        pids = {
            "conductors": [pid_of(up, f"conductor-{number}") for number in range(args.conductors)],
            "frontends": [pid_of(up, "frontend-0")],
            "nats": [server.process.pid],
            "adapters": [pid_of(up, ours.name)],
        }
        for number in range(1, args.frontends):
            pids["frontends"].append(
                running.enter_context(_frontend(number, server.url, addresses["directory"]))
            )
        for number in range(args.adapter_processes):
            some = others[number :: args.adapter_processes]
            output = f"{directory}/adapters-{number}.log"
            own = (server.url, some, addresses["directory"], output)
            process = multiprocessing.Process(target=adapters, args=own, daemon=True)
            process.start()
            running.callback(process.join)
            running.callback(process.kill)
            pids["adapters"].append(process.pid or 0)
        yield Fleet(addresses, pids)


@contextlib.contextmanager
def _frontend(number: int, nats_url: str, directory: str) -> Iterator[int]:
    """One more, beside that of `up`."""
    words = [
        sys.executable, "-m", "halfmoon.cli.main", "frontend", "--id", f"frontend-{number}", "--nats", nats_url, *MODEL,
        "--layout-file", f"{directory}/layout.json", "--secret-file", f"{directory}/secret", "--http-port", "0",
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


async def all_joined(bus: Bus, args: argparse.Namespace) -> None:
    """Returns when each engine and each frontend is in the log."""
    missing = {name_of(number) for number in range(args.engines)}
    missing |= {f"frontend-{number}" for number in range(args.frontends)}
    try:
        async with asyncio.timeout(START_S):
            async for stamped in bus.events(after=0, kinds=(WorkerJoined, FrontendJoined)):
                missing.discard(getattr(stamped.event, "worker_id", "") or stamped.event.frontend_id)
                if not missing:
                    return
    except TimeoutError:
        raise SystemExit(f"these have not joined in {START_S:.0f} s: {', '.join(sorted(missing))}") from None


# --- the load -----------------------------------------------------------------------------------------------


class Load:
    """Requests in an open loop, and what became of each."""

    def __init__(self, nc: nats.NATS, args: argparse.Namespace) -> None:
        self._nc, self._args = nc, args
        self._draw = random.Random(args.seed)
        self._prefixes = [self._draw.choices(IDS, k=args.prefix_tokens) for _ in range(args.prefixes)]
        self._popular = list(itertools.accumulate(1 / (1 + place) for place in range(args.prefixes)))
        #: "answered", "failed", "lost", "wrong", "prompt_tokens", "cached_tokens".
        self.counts: Counter[str] = Counter()
        #: Why some failed.
        self.errors: Counter[str] = Counter()
        self.answer_ms: list[float] = []
        self.late_ms = 0.0

    async def run(self, requests: int, rate: float) -> float:
        """Seconds until the last of so many is answered."""
        # Drawn before: the load shares its cores with what is measured.
        bodies = [self._body(self._prompt()) for _ in range(requests)]
        started, asked = time.perf_counter(), []
        for number, (body, expected) in enumerate(bodies):
            due = started + number / rate
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            self.late_ms = max(self.late_ms, (time.perf_counter() - due) * 1e3)
            asked.append(asyncio.create_task(self._one(body, expected, due)))
            if number % 10 == 0:
                await asyncio.sleep(0)  # also where the pace is missed
        await asyncio.gather(*asked)
        return time.perf_counter() - started

    def _prompt(self) -> list[int]:
        (prefix,) = self._draw.choices(self._prefixes, cum_weights=self._popular)
        return [*prefix, *self._draw.choices(IDS, k=self._args.own_tokens)]

    def _body(self, prompt: list[int]) -> tuple[bytes, list[int]]:
        """The request, and what any engine answers."""
        body = {"prompt": prompt, "max_tokens": self._args.tokens, "temperature": 0}
        return orjson.dumps(body), answer_of(prompt, self._args.tokens)

    async def _one(self, body: bytes, expected: list[int], due: float) -> None:
        try:
            reply = await self._nc.request(f"{subjects.API}.generate", body, timeout=ANSWER_S)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            self.counts["lost"] += 1
            return
        answer = orjson.loads(reply.data)
        if "error" in answer:
            self.counts["failed"] += 1
            self.errors[f"{answer['error'].get('code')}: {answer['error'].get('message')}"[:200]] += 1
            return
        self.answer_ms.append((time.perf_counter() - due) * 1e3)
        self.counts.update(
            answered=1,
            wrong=answer["token_ids"] != expected,
            prompt_tokens=answer["usage"]["prompt_tokens"],
            cached_tokens=answer["usage"]["cached_tokens"],
        )


# --- what the log says --------------------------------------------------------------------------------------


class Log(NamedTuple):
    """Both streams: events with place and time, decisions with the time when they were stored."""

    events: list[Stamped]
    decisions: list[tuple[int, Ordered]]


async def read_log(bus: Bus) -> Log:
    events, decisions = [], []
    for stream, wanted, kind in (
        (subjects.EVENTS_STREAM, subjects.EVENTS_ALL, Event),
        (subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, Ordered),
    ):
        last = await bus.last_seq(stream)
        async for message in bus.read(stream, wanted):
            found = decode(message.payload, kind)
            if kind is Event:
                events.append(Stamped(seq=message.seq, at_ns=message.at_ns, event=found))
            else:
                decisions.append((message.at_ns, found))
            if message.seq >= last:
                break
    return Log(events, decisions)


def decision_times(log: Log, after: int) -> dict[str, Any]:
    """Of requests that arrived after that place: µs of CPU in which the core steps over the arrival, by stepping over
    the whole log here; and ms from when the server stored the arrival until it stored the order.
    """
    core, step_us, arrived_ns = Core(), [], {}
    for stamped in log.events:
        counted = stamped.seq > after and isinstance(stamped.event, RequestArrived)
        started_ns = time.thread_time_ns()
        core.step(stamped)
        if counted:
            step_us.append((time.thread_time_ns() - started_ns) / 1e3)
            arrived_ns[stamped.seq] = stamped.at_ns
    order_ms = [
        (at_ns - arrived_ns[ordered.cause_seq]) / 1e6
        for at_ns, ordered in log.decisions
        if isinstance(ordered.decision, StartMixed) and ordered.cause_seq in arrived_ns
    ]
    return {"step_us": spread(step_us), "order_ms": spread(order_ms)}


def hits(log: Log, after: int, engines: Sequence[Engine], own: Sequence[dict[str, int]]) -> dict[str, Any]:
    """By how engines lie ("": the honest ones): tokens of prompts that the conductor believed to be cached when it
    placed them, that the adapter reported, and that the engine itself counted. All in whole blocks of the cluster's.
    """
    fault_of = {one.name: one.fault for one in engines}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for _, ordered in log.decisions:
        if isinstance(order := ordered.decision, StartMixed) and ordered.cause_seq > after:
            found[fault_of[order.worker_id]].update(
                orders=1,
                ordered_tokens=order.prompt_tokens,
                believed_tokens=order.local_blocks * BLOCK_TOKENS,
            )
    for stamped in log.events:
        if isinstance(event := stamped.event, PrefillFinished) and stamped.seq > after:
            found[fault_of[event.worker_id]]["reported_tokens"] += event.cached_local_tokens
    for one, counts in zip(engines, own, strict=True):
        found[one.fault].update(engines=1, **counts)
    return {fault: {what: found[fault][what] for what in HITS} for fault in ("", *FAULTS) if fault in found}


def share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


# --- a run --------------------------------------------------------------------------------------------------


async def stream_bytes(bus: Bus) -> dict[str, int]:
    found = {}
    for stream in (subjects.EVENTS_STREAM, subjects.DECISIONS_STREAM):
        found[stream.lower()] = (await bus.jetstream.ask(f"STREAM.INFO.{stream}"))["state"]["bytes"]
    return found


def cpu_of(pids: dict[str, list[int]]) -> dict[str, float]:
    """Of each kind of process so far, and of this one, which loads them, in seconds."""
    return {**{what: sum(map(cpu_s, each)) for what, each in pids.items()}, "load": time.process_time()}


async def measure(
    args: argparse.Namespace, running: Fleet, engines: Sequence[Engine], pipe: Connection
) -> dict[str, Any]:
    url = running.addresses["nats"]
    bus = await Bus.connect(BusConfig(url=url), name=subjects.SUPERVISOR)
    nc = await nats.connect(url)
    await all_joined(bus, args)
    idle = cpu_of(running.pids)
    await asyncio.sleep(args.idle_s)
    idle = {what: (used - idle[what]) / args.idle_s for what, used in cpu_of(running.pids).items()}
    load = Load(nc, args)
    await Load(nc, args).run(args.warm, args.rate / 2)
    after, bytes_before = await bus.last_seq(), await stream_bytes(bus)
    counts_before, before = own_counts(pipe), cpu_of(running.pids)
    requests = int(args.rate * args.seconds)
    took_s = await load.run(requests, args.rate)
    used = {what: used - before[what] for what, used in cpu_of(running.pids).items()}
    await asyncio.sleep(1.0)  # what follows from the last answers is in the log
    bytes_after, counts_after = await stream_bytes(bus), own_counts(pipe)
    log = await read_log(bus)
    await nc.close()
    await bus.close()
    own = [
        {name: now.get(name, 0) - was.get(name, 0) for name in now}
        for was, now in zip(counts_before, counts_after, strict=True)
    ]
    heartbeats = sum(
        isinstance(one.event, WorkerHeartbeat | StoreHeartbeat) for one in log.events if one.seq > after
    )
    counts = load.counts
    return {
        "engines": args.engines, "adapter_processes": args.adapter_processes + 1, "conductors": args.conductors,
        "frontends": args.frontends, "offered_per_s": args.rate, "requests": requests, "seconds": round(took_s, 2),
        "reached_per_s": round(counts["answered"] / took_s, 1),
        **{what: counts[what] for what in ("answered", "failed", "lost", "wrong")},
        "errors": dict(load.errors),
        "left": sum(isinstance(one.event, WorkerLeft) for one in log.events if one.seq > after),
        "late_ms": round(load.late_ms, 1),
        "answer_ms": spread(load.answer_ms or [0.0]),
        "cached_share_told": share(counts["cached_tokens"], counts["prompt_tokens"]),
        "cpu_ms_a_request": {what: round(1e3 * cpu / requests, 3) for what, cpu in used.items()},
        "cores": {what: round(cpu / took_s, 3) for what, cpu in used.items()},
        "cores_idle": {what: round(cpu, 3) for what, cpu in idle.items()},
        **decision_times(log, after),
        "log_bytes_a_request": {
            stream: round((size - bytes_before[stream]) / requests) for stream, size in bytes_after.items()
        },
        "events_a_request": round((log.events[-1].seq - after - heartbeats) / requests, 2),
        "heartbeats_per_s": round(heartbeats / took_s, 1),
        "hits": hits(log, after, engines, own),
    }  # fmt: skip


def own_counts(pipe: Connection) -> list[dict[str, int]]:
    pipe.send(None)
    found: list[dict[str, int]] = pipe.recv()
    return found


def told(result: dict[str, Any]) -> list[str]:
    order, step = result["order_ms"], result["step_us"]
    log, cpu = result["log_bytes_a_request"], result["cpu_ms_a_request"]
    lines = [
        f"{result['engines']} engines, {result['offered_per_s']:g} requests/s offered, {result['reached_per_s']:g} "
        f"reached: of {result['requests']} requests {result['answered']} answered, {result['failed']} failed, "
        f"{result['lost']} lost, {result['wrong']} wrong; {result['left']} adapters left; "
        f"answer {result['answer_ms']['p50']:.0f} ms p50",
        f"conductors: {cpu['conductors']:.2f} ms of CPU a request, {result['cores']['conductors']:.2f} of a core "
        f"({result['cores_idle']['conductors']:.2f} with no request); a decision takes {step['p50']:.0f} µs of CPU "
        f"p50, {step['p99']:.0f} p99, and from arrival to order in the log {order['p50']:.1f} ms, {order['p99']:.1f}",
        f"CPU a request: {', '.join(f'{what} {ms:.2f} ms' for what, ms in cpu.items())}",
        f"log: {log['events']} bytes of events and {log['decisions']} of decisions a request, "
        f"{result['events_a_request']} events, and {result['heartbeats_per_s']:.0f} heartbeats/s",
    ]
    for fault, row in result["hits"].items():
        lines.append(
            f"{row['engines']} engines, {fault or 'honest'}: {row['orders']} orders; cached by the conductor "
            f"{share(row['believed_tokens'], row['ordered_tokens']):.1%}, by the adapter "
            f"{share(row['reported_tokens'], row['ordered_tokens']):.1%}, by the engine "
            f"{share(row['cached_tokens'], row['prompt_tokens']):.1%}"
        )
    return lines + [f"{count} failed: {why}" for why, count in result["errors"].items()]


def options() -> argparse.ArgumentParser:
    words = parser(__doc__ or "")
    words.add_argument("--engines", type=int, default=100)
    words.add_argument("--rate", type=float, default=500.0, help="requests a second that are offered")
    words.add_argument("--seconds", type=float, default=30.0)
    words.add_argument("--conductors", type=int, default=1)
    words.add_argument("--frontends", type=int, default=2)
    words.add_argument("--adapter-processes", type=int, default=2, help="beside the one of `halfmoon up`")
    words.add_argument("--lying", type=float, default=0.2, help="share of the engines")
    words.add_argument("--prefixes", type=int, default=400, help="that prompts share")
    words.add_argument("--prefix-tokens", type=int, default=2 * BLOCK_TOKENS)
    words.add_argument("--own-tokens", type=int, default=BLOCK_TOKENS + 8, help="of each prompt")
    words.add_argument("--tokens", type=int, default=4, help="of an answer")
    words.add_argument("--blocks", type=int, default=512, help="of an engine's cache, of 64 tokens each")
    words.add_argument(
        "--token-us", type=float, default=200.0, help="an engine's time for a token of a prompt"
    )
    words.add_argument("--step-ms", type=float, default=10.0, help="and for a step of an answer")
    words.add_argument("--warm", type=int, default=500, help="requests before those that count")
    words.add_argument("--idle-s", type=float, default=5.0, help="without requests, before these")
    words.add_argument("--seed", type=int, default=17)
    return words


def main() -> None:
    args = parsed(
        options(), engines=8, lying=0.75, rate=60.0, seconds=4.0, conductors=2, adapter_processes=1, prefixes=8,
        token_us=500.0, warm=20, idle_s=1.0,
    )  # fmt: skip
    lying = int(args.lying * args.engines)
    lies = [*(FAULTS[number % len(FAULTS)] for number in range(lying)), *[""] * (args.engines - lying - 1)]
    random.Random(args.seed).shuffle(lies)
    faults = ["", *lies]  # the one of `up` does not lie
    shape = EngineShape(
        block_tokens=64,
        blocks=args.blocks,
        counted_tokens=BLOCK_TOKENS,
        token_us=args.token_us,
        step_ms=args.step_ms,
    )
    with doubles(faults, shape) as (engines, pipe, pid), fleet(args, engines) as running:
        running.pids["engines"] = [pid]
        result = uvloop.run(measure(args, running, engines, pipe))
    finish(args, result, told(result))
    if result["lost"] or result["wrong"]:
        raise SystemExit(f"{result['lost']} requests lost, {result['wrong']} answered wrongly")


if __name__ == "__main__":
    main()
