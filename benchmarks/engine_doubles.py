"""Doubles of vLLMs and SGLangs by turns, many in one process: HTTP completions and KV events over ZMQ, as an adapter
asks for them.

They compute nothing. Time passes as if they did: prompts one after another, so much for each token that is not cached,
then the steps of the answer. An answer comes in two writes and its end in a third; its tokens follow from the last
token and the length before them, so one that goes on at another engine is the same.

Some lie, each in one way (`FAULTS`): of blocks that they never stored, by batches that nobody can have, by numbers that
begin anew, by replays out of order, by nonsense, and by answers that break off or make no sense.

The tests have a double of their own (`tests/adapters/fake_engine.py`), which tells what it was asked and can be held at
a token. These do as little as they can instead: a hundred share the cores with what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec
import uvloop
import zmq
import zmq.asyncio

WIRES = ("vllm", "sglang")
FAULTS = ("unstored", "gaps", "resets", "replays", "malformed", "answers")
MODEL = "double"
CONTEXT_TOKENS = 8_192
#: Of those that lie: each so many batches or answers is a lie; the engine begins anew after so many.
LIE_EVERY, RESET_EVERY = 4, 40
KEPT_BATCHES = 1_000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """One for all engines of a run. `counted_tokens`: of a block of the cluster's, by which hits are counted."""

    block_tokens: int
    blocks: int
    counted_tokens: int
    token_us: float
    step_ms: float


class Asked(msgspec.Struct):
    """A completion's body, as much of it as matters."""

    prompt: list[int]
    max_tokens: int
    cache_salt: str = ""
    ignore_eos: bool = False


def wire_of(number: int) -> str:
    """The wire of the engine of that number."""
    return WIRES[number % len(WIRES)]


def next_token(last: int, length: int) -> int:
    """The token behind `length` tokens, of which `last` is the last one."""
    return 1_000 + (last * 31 + length * 7_919) % 40_000


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    """What any engine says."""
    drawn, last = [], prompt[-1]
    for length in range(len(prompt), len(prompt) + tokens):
        last = next_token(last, length)
        drawn.append(last)
    return drawn


class Engine:
    """One engine. `wire`: one of `WIRES`. `heard`: the newest prompts of all engines in the process, with their
    salts.
    """

    def __init__(
        self, shape: EngineShape, wire: str, fault: str, heard: deque[Asked], context: zmq.asyncio.Context
    ) -> None:
        self.shape, self.wire, self.fault, self.heard = shape, wire, fault, heard
        #: "requests", "prompt_tokens", "cached_tokens", "broken", "connections": the adapter's probe is left out.
        self.counts: Counter[str] = Counter()
        #: By name, the least recently used first; a prompt's last block is older than its first.
        self.cache: OrderedDict[int, None] = OrderedDict()
        self._waiting: deque[tuple[Asked, Callable[[], None]]] = deque()
        self._computing = False
        self._running = 0
        self._batches = self._answers = self._seq = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._pub = zmq.Socket(context, zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self._events, self._replay = (
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (self._pub, self._router)
        )

    # --- prompts, one after another -------------------------------------------------------------------------

    def compute(self, asked: Asked, computed: Callable[[], None]) -> None:
        self._waiting.append((asked, computed))
        if not self._computing:
            self._next()

    def _next(self) -> None:
        self._computing = bool(self._waiting)
        if not self._computing:
            return
        asked, computed = self._waiting.popleft()
        names = self._names(asked)
        here = sum(1 for _ in itertools.takewhile(self.cache.__contains__, names))
        cached = min(here * self.shape.block_tokens, len(asked.prompt) - 1)
        if not asked.ignore_eos:
            whole = cached // self.shape.counted_tokens * self.shape.counted_tokens
            self.counts.update(requests=1, prompt_tokens=len(asked.prompt), cached_tokens=whole)
        took_s = (len(asked.prompt) - cached) * self.shape.token_us / 1e6
        asyncio.get_running_loop().call_later(took_s, self._computed, asked, names, here, computed)

    def _computed(self, asked: Asked, names: list[int], here: int, computed: Callable[[], None]) -> None:
        self._store(asked, names, here)
        computed()
        self._next()

    def _names(self, asked: Asked) -> list[int]:
        """Of each whole block."""
        size, parent, names = self.shape.block_tokens, hash(asked.cache_salt), []
        for start in range(0, len(asked.prompt) - size + 1, size):
            parent = hash((parent, *asked.prompt[start : start + size]))
            names.append(parent)
        return names

    # --- KV events ------------------------------------------------------------------------------------------

    def _store(self, asked: Asked, names: list[int], here: int) -> None:
        self._batches += 1
        if self.fault == "resets" and self._batches % RESET_EVERY == 0:
            here = self._seq = 0
            self.cache.clear()
            self._kept.clear()
        events: list[dict[str, Any]] = []
        while len(self.cache) + len(names) - here > self.shape.blocks:
            gone, _ = self.cache.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU", "group_idx": 0})
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        if len(names) > here:
            events.append(self._stored(asked, names, here))
        if self.fault == "unstored" and self.heard:
            lie = self.heard[self._batches % len(self.heard)]
            events.append(self._stored(lie, [name ^ 1 for name in self._names(lie)], 0))
        if names and not asked.ignore_eos:
            self.heard.append(asked)
        if events:
            self._publish(msgspec.msgpack.encode([time.time(), events, 0]))

    def _stored(self, asked: Asked, names: list[int], first: int) -> dict[str, Any]:
        size = self.shape.block_tokens
        told = {
            "type": "BlockStored", "block_hashes": names[first:],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": asked.prompt[first * size : len(names) * size], "block_size": size,
            "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        if self.wire == "sglang":
            return {**told, "cache_salt": asked.cache_salt}
        salts: list[list[str] | None] = [None] * (len(names) - first)
        if first == 0:
            salts[0] = [asked.cache_salt]
        own = {"lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        return {**told, "extra_keys": salts, **own}

    def _publish(self, payload: bytes) -> None:
        lies = self._batches % LIE_EVERY == 0
        if self.fault == "malformed" and lies:
            for frames in _nonsense(self._seq):
                self._pub.send_multipart(frames)
            self._seq += 1
        if not (self.fault == "gaps" and lies):
            self._kept.append((self._seq, payload))
        if not (self.fault in ("gaps", "replays") and lies):
            self._pub.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    async def answer_replays(self) -> None:
        while True:
            who, _, start = await self._router.recv_multipart()
            past = [each for each in self._kept if each[0] >= int.from_bytes(start, "big")]
            if self.fault == "replays":
                past = [*past[::-1], *past[::2]]
            for seq, payload in past:
                await self._router.send_multipart([who, b"", b"", seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    # --- HTTP -----------------------------------------------------------------------------------------------

    def fault_of_answer(self) -> int | None:
        """Which one the next answer has; None: none."""
        self._answers += 1
        if self.fault != "answers" or self._answers % LIE_EVERY:
            return None
        self.counts["broken"] += 1
        return self._answers // LIE_EVERY % len(_BROKEN)

    def began(self) -> None:
        self._running += 1

    def ended(self) -> None:
        self._running -= 1

    def look(self, path: bytes) -> bytes:
        """An answer that needs no computing; b"": there is none at this path."""
        if path == b"/v1/models":
            return msgspec.json.encode({"data": [{"id": MODEL, "max_model_len": CONTEXT_TOKENS}]})
        used = len(self.cache) / self.shape.blocks
        return self._look_sglang(path, used) if self.wire == "sglang" else self._look_vllm(path, used)

    def _look_vllm(self, path: bytes, used: float) -> bytes:
        match path:
            case b"/health":
                return b"{}"
            case b"/metrics":
                sizes = f'block_size="{self.shape.block_tokens}",num_gpu_blocks="{self.shape.blocks}"'
                return (
                    f"vllm:cache_config_info{{{sizes}}} 1.0\n"
                    f'vllm:num_requests_running{{model_name="{MODEL}"}} {self._running}\n'
                    f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} {used:.4f}\n'
                ).encode()
            case b"/kv_event_sources":
                source = {"enable_kv_cache_events": True, "endpoint": self._events, "topic": ""}
                return msgspec.json.encode({"0": {**source, "replay_endpoint": self._replay}})
            case _:
                return b""

    def _look_sglang(self, path: bytes, used: float) -> bytes:
        match path:
            case b"/model_info":
                return b"{}"
            case b"/v1/loads?include=core":
                return msgspec.json.encode({"loads": [{"token_usage": used}]})
            case b"/server_info":
                ports = [int(each.rpartition(":")[2]) for each in (self._events, self._replay)]
                source = {"endpoint_host": "127.0.0.1", "endpoint_port_base": ports[0], "dp_size": 1}
                size, tokens = self.shape.block_tokens, self.shape.block_tokens * self.shape.blocks
                info = {"page_size": size, "max_total_num_tokens": tokens, "chunked_prefill_size": 2_048}
                source |= {"replay_endpoint_port_base": ports[1], "block_size": size, "topic": ""}
                return msgspec.json.encode({**info, "kv_events": source})
            case _:
                return b""


def _nonsense(seq: int) -> list[list[bytes]]:
    """Messages that are no batches, and one that is numbered as one is and has no event that can be read."""
    number, now_s = seq.to_bytes(8, "big"), time.time()
    events = [
        {"type": "BlockStored", "block_hashes": ["x"]},
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [1],
            "block_size": 3,
        },
        {"type": "Unheard"},
        7,
    ]
    return [[b"x"], [b"", b"short", b""], [b"", number, msgspec.msgpack.encode([now_s, events, 0])]]


def _line(tokens: list[int], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish_reason}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
#: What may follow the first token instead of the answer; b"": the connection breaks.
_BROKEN = (b"", b"data: {nonsense\n\n", _line([2**31]), _line([], "of its own"))


class Client(asyncio.Protocol):
    """One connection to an engine: a request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unread = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._engine.counts["connections"] += 1

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None

    def data_received(self, received: bytes) -> None:
        self._unread += received
        head, found, body = self._unread.partition(b"\r\n\r\n")
        length = int(said[1]) if (said := _LENGTH.search(head)) else 0
        if not found or len(body) < length:
            return
        self._unread = b""
        path = head.split(b" ", 2)[1]
        if path == b"/v1/completions":
            self._complete(msgspec.json.decode(body, type=Asked))
            return
        answer = self._engine.look(path)
        status = b"200 OK" if answer else b"404 Not Found"
        self._write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))

    def _write(self, answer: bytes) -> None:
        if self._transport is not None:
            self._transport.write(answer)

    def _complete(self, asked: Asked) -> None:
        fault = None if asked.ignore_eos else self._engine.fault_of_answer()
        self._engine.began()
        self._engine.compute(asked, lambda: self._computed(asked, fault))

    def _computed(self, asked: Asked, fault: int | None) -> None:
        tokens = answer_of(asked.prompt, asked.max_tokens)
        self._write(_STREAM + _chunk(_line(tokens[:1], None if tokens[1:] else "length")))
        took_s = (len(tokens) - 1) * self._engine.shape.step_ms / 1e3
        asyncio.get_running_loop().call_later(took_s, self._end, tokens[1:], fault)

    def _end(self, tokens: list[int], fault: int | None) -> None:
        self._engine.ended()
        if fault is not None:
            if _BROKEN[fault]:
                self._write(_chunk(_BROKEN[fault]))
            elif self._transport is not None:
                self._transport.abort()
            return
        if tokens:
            self._write(_chunk(_line(tokens, "length")))
        # As an engine does, in a write of its own.
        asyncio.get_running_loop().call_soon(self._write, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(faults: Sequence[str], shape: EngineShape, pipe: Connection) -> None:
    """A process of engines, one for each of `faults` ("": it tells the truth). Sends their ports, then all counts each
    time it is asked; ends with the pipe.
    """

    async def run() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        context, heard = zmq.asyncio.Context(), deque[Asked](maxlen=200)
        context.set(zmq.MAX_SOCKETS, 4 * len(faults) + 16)
        engines = [
            Engine(shape, wire_of(number), fault, heard, context) for number, fault in enumerate(faults)
        ]
        servers = [
            await loop.create_server(lambda engine=each: Client(engine), "127.0.0.1", 0) for each in engines
        ]
        replays = [asyncio.create_task(each.answer_replays()) for each in engines]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])

        def asked() -> None:
            try:
                pipe.recv()
            except EOFError:
                over.set()
                loop.remove_reader(pipe.fileno())
            else:
                pipe.send([dict(each.counts) for each in engines])

        loop.add_reader(pipe.fileno(), asked)
        await over.wait()
        for task in replays:
            task.cancel()
        context.destroy(linger=0)

    uvloop.run(run())
