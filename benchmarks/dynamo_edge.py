"""Requests a second over HTTP, streamed, beside NVIDIA Dynamo: both systems are up at once and are loaded by turns with
the same bodies. Neither computes: ours with the null engine, Dynamo with its mocker, made so fast that its pretended
times vanish, and its KV router. Each has four workers (ours two of each role).

HALFMOON_DYNAMO names the Python of an environment with `ai-dynamo`; HALFMOON_DYNAMO_MODEL is a Hugging Face directory,
whose tokenizer both use. No two prompts begin alike, so nothing is found in a cache.

A row is a kind of load. In each round both systems are loaded for `--seconds`, in a closed loop over `connections`
that are kept; the ratio is of one round. The client shares the cores with both: it prepares bodies from ready bytes and
looks for the end of an answer alone. `cpu_ms` is the processor time that all processes of a system took for a request,
`cpu_ms_of` that of each kind of process; `cores` is what they took of the machine: a system that leaves much of it idle
waits for something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvloop
from clusters import cluster, cpu_by_process, finish, parsed, parser

from halfmoon.bus.embedded import free_port

#: What an answer ends with: the last event, and the chunk that ends the body.
DONE, LAST_CHUNK = b"data: [DONE]", b"0\r\n\r\n"
OK = b"HTTP/1.1 200"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
START_S = 120.0
#: In 1.6.1 a ratio of 0, "no delays", is one of 1 for prompts: a prompt of 12,288 tokens takes a quarter of a second.
NO_DELAY = "--speedup-ratio 1000000 --max-num-batched-tokens 1000000"
MODEL = "bench"


class Load(NamedTuple):
    """`tokens` of a prompt, `output` tokens of its answer."""

    kind: str
    tokens: int
    output: int
    connections: int

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}, {self.output} out, {self.connections} connections"


LOADS = [
    Load("text", 128, 1, 32),
    Load("ids", 128, 1, 32),
    Load("text", 128, 32, 32),
    Load("text", 2048, 1, 32),
    Load("ids", 2048, 1, 32),
    Load("text", 12288, 1, 32),
    Load("ids", 12288, 1, 32),
    Load("text", 128, 1, 1),
    Load("text", 128, 32, 1),
    Load("ids", 2048, 1, 1),
]  # fmt: skip
BRIEF_LOADS = [Load("text", 128, 2, 4), Load("ids", 128, 1, 1)]


class Words:
    """Words of a tokenizer that are one token each behind a space: text of a known number of tokens."""

    def __init__(self, directory: Path) -> None:
        vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
        self.ids = {
            word[1:]: number
            for word, number in sorted(vocabulary.items())
            if re.fullmatch("Ġ[a-z]{4,8}", word)
        }
        if len(self.ids) < 1000:
            raise SystemExit(f"{directory}: its tokenizer has no byte-level words")

    def bodies(self, load: Load, seed: int) -> Iterator[bytes]:
        """Requests over HTTP, each with a beginning of its own."""
        draw = random.Random(f"{load} {seed}")
        words = list(self.ids)
        fields = f',"max_tokens":{load.output},"temperature":0,"stream":true,"ignore_eos":true}}'
        rest = draw.choices(words, k=load.tokens - 4)
        text = load.kind == "text"
        tail = (
            " " + " ".join(rest) + '"' if text else "".join(f",{self.ids[word]}" for word in rest) + "]"
        ) + fields
        while True:
            own = draw.choices(words, k=4)
            start = (
                '"' + "".join(f" {word}" for word in own)
                if text
                else "[" + ",".join(str(self.ids[word]) for word in own)
            )
            body = f'{{"model":"{MODEL}","prompt":{start}{tail}'.encode()
            yield HEAD % len(body) + body


class Connection(asyncio.Protocol):
    """One request after the other until `until`; `answers` counts those that ended by then."""

    def __init__(self, requests: Iterator[bytes], until: float) -> None:
        self.requests, self.until = requests, until
        self.answers = 0
        self.first_ms: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = bytearray()
        self._sent = 0.0
        self._first = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._first and b"data:" in self._answer:
            self._first = False
            self.first_ms.append((time.monotonic() - self._sent) * 1e3)
        if not (self._answer.endswith(LAST_CHUNK) and DONE in self._answer[-64:]):
            if not self._answer.startswith(OK[: len(self._answer)]):
                self._end(f"an answer begins with {bytes(self._answer[:300])!r}")
            return
        now = time.monotonic()
        if now >= self.until:
            self._end()
        else:
            self.answers += 1
            self._send()

    def connection_lost(self, problem: Exception | None) -> None:
        self._end(f"the connection ended ({problem}) after {bytes(self._answer[-300:])!r}")

    def _send(self) -> None:
        self._answer.clear()
        self._first, self._sent = True, time.monotonic()
        self._transport.write(next(self.requests))

    def _end(self, problem: str = "") -> None:
        if not self.ended.done():
            if problem:
                self.ended.set_exception(SystemExit(problem))
            else:
                self.ended.set_result(None)
            self._transport.close()


class System(NamedTuple):
    """`root`: its processes are this one's descendants, itself included."""

    name: str
    http: str
    root: int


async def run_load(
    http: str, load: Load, requests: Iterator[bytes], seconds: float
) -> tuple[int, list[float]]:
    address = urlsplit(http)
    until = time.monotonic() + seconds
    made = [
        await asyncio.get_running_loop().create_connection(
            lambda: Connection(requests, until), address.hostname, address.port
        )
        for _ in range(load.connections)
    ]
    connections = [connection for _, connection in made]
    for connection in connections:
        await connection.ended
    return sum(one.answers for one in connections), [ms for one in connections for ms in one.first_ms]


class Measured(NamedTuple):
    """One system in one round. `cpu_ms_of`: milliseconds of CPU a request by the process's name."""

    figures: dict[str, float]
    cpu_ms_of: dict[str, float]


def measured(system: System, load: Load, requests: Iterator[bytes], seconds: float) -> Measured:
    before = cpu_by_process(system.root)
    answers, first_ms = uvloop.run(run_load(system.http, load, requests, seconds))
    if not answers:
        raise SystemExit(f"{system.name} answered nothing of {load} in {seconds} s")
    used_s = {name: taken - before.get(name, 0.0) for name, taken in cpu_by_process(system.root).items()}
    figures = {
        "requests_per_s": answers / seconds,
        "first_ms": statistics.median(first_ms),
        "cpu_ms": sum(used_s.values()) / answers * 1e3,
        "cores": sum(used_s.values()) / seconds,
    }
    return Measured(figures, {name: taken / answers * 1e3 for name, taken in used_s.items()})


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each field."""
    return {field: round(statistics.median(row[field] for row in rows), 2) for field in rows[0]}


@contextlib.contextmanager
def dynamo(python: str, model: Path) -> Iterator[System]:
    """A frontend with its KV router and four mocked workers, found by files, without a broker."""
    port = free_port()
    plane = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
    mocker = f"{python} -m dynamo.mocker --model-path {model} --model-name {MODEL} --num-workers 4 {NO_DELAY}"
    frontend = f"{python} -m dynamo.frontend --http-port {port} --router-mode kv"
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "DYN_FILE_KV": state, "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
        with (Path(state) / "said").open("wb") as said:
            # One shell above both, whose descendants they are.
            shell = subprocess.Popen(
                ["sh", "-c", f"{mocker} {' '.join(plane)} & {frontend} {' '.join(plane)} & wait"],
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, cwd=state,
            )  # fmt: skip
        try:
            until = time.monotonic() + START_S
            while not served(f"http://127.0.0.1:{port}"):
                if shell.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"Dynamo did not start:\n{(Path(state) / 'said').read_text()[-2000:]}")
                time.sleep(0.2)
            yield System("dynamo", f"http://127.0.0.1:{port}", shell.pid)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(30)


def served(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return any(each["id"] == MODEL for each in json.load(answer)["data"])
    except (urllib.error.URLError, ConnectionError):
        return False


def checked(system: System, load: Load, request: bytes) -> dict[str, int]:
    """The tokens that the system counts in one request. Raises SystemExit unless the answer is as long as asked for."""
    body = {**json.loads(request.partition(b"\r\n\r\n")[2]), "stream": False}
    asked = urllib.request.Request(
        f"{system.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        usage: dict[str, int] = json.load(answer)["usage"]
    if usage["completion_tokens"] != load.output:
        raise SystemExit(f"{system.name}: {usage} where {load.output} tokens were asked for")
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def rounds_of(systems: list[System], load: Load, words: Words, rounds: int, seconds: float) -> dict[str, Any]:
    counted = [checked(system, load, next(words.bodies(load, -1))) for system in systems]
    if counted[0] != counted[1]:
        raise SystemExit(f"{load}: the systems count {counted}")
    found: dict[str, list[Measured]] = {system.name: [] for system in systems}
    seeds = itertools.count()
    for turn in range(rounds):
        # Who is first changes: what the one leaves warm or busy meets both alike.
        for system in systems if turn % 2 else reversed(systems):
            found[system.name].append(measured(system, load, words.bodies(load, next(seeds)), seconds))
    ratios = [
        ours.figures["requests_per_s"] / theirs.figures["requests_per_s"]
        for ours, theirs in zip(found["halfmoon"], found["dynamo"], strict=True)
    ]
    row: dict[str, Any] = {**load._asdict(), **counted[0]}
    for name, each in found.items():
        row[name] = {
            **medians([one.figures for one in each]),
            "cpu_ms_of": medians([one.cpu_ms_of for one in each]),
        }
    row["ratio"] = round(statistics.median(ratios), 3)
    row["ratio_min"], row["ratio_max"] = round(min(ratios), 3), round(max(ratios), 3)
    return row


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=4.0, help="of one system in one round")
    args = parsed(options, rounds=1, seconds=1.0)
    python, model = (os.environ.get(name, "") for name in ("HALFMOON_DYNAMO", "HALFMOON_DYNAMO_MODEL"))
    if not python or not model:
        raise SystemExit(
            "HALFMOON_DYNAMO names no Python with ai-dynamo, or HALFMOON_DYNAMO_MODEL no directory"
        )
    words = Words(Path(model))
    rows = []
    flags = (
        "--engine",
        "null",
        "--model",
        model,
        "--served-model-name",
        MODEL,
        "--prefill",
        "2",
        "--decode",
        "2",
    )
    with cluster(*flags) as addresses, dynamo(python, Path(model)) as theirs:
        ours = System("halfmoon", addresses["http"], addresses["pid"])
        for load in BRIEF_LOADS if args.brief else LOADS:
            rows.append(rounds_of([ours, theirs], load, words, args.rounds, args.seconds))
    result = {"rounds": args.rounds, "seconds": args.seconds, "rows": rows}
    finish(args, result, [line(row) for row in rows])


def line(row: dict[str, Any]) -> str:
    load = Load(**{name: row[name] for name in Load._fields})
    sides = "; ".join(
        f"{name} {took['requests_per_s']:,.0f}/s, first after {took['first_ms']:.1f} ms, {took['cpu_ms']:.2f} ms of CPU"
        for name, took in ((name, row[name]) for name in ("halfmoon", "dynamo"))
    )
    return f"{load}: {sides}; ratio {row['ratio']} ({row['ratio_min']} to {row['ratio_max']})"


if __name__ == "__main__":
    main()
