"""Measures a layer's round trip between a model worker and an attention worker, over each kind of channel: rows of q up
(H·D f32), their states down (H·D f32 and a log-sum-exp for each head).

`python benchmarks/channels.py [--json] [--save NAME] [--rounds N]`. The other end is a process that waits for its
channels with a selector, as an attention worker does, and computes nothing. Beside them, in turn, raw blocking TCP on
loopback moves the same bytes, headers included: the bound that `ratio` is held against (medians of the rounds' ratios,
so that what else the machine does hits all alike). Microseconds; SmolLM2-135M has 9 heads of 64.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

from clusters import finish, parsed, parser

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Dtype, MessageHeader, Op
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.kinds import KINDS
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions, channel_secret
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelLost

HEADS, HEAD_DIM, LAYERS = 9, 64, 30
UP, DOWN = HEADS * HEAD_DIM * 4, HEADS * HEAD_DIM * 4 + HEADS * 4
ROWS = (1, 4, 8, 16, 32)
ROWS_MAX = 512
WARM, TRIPS = 20, 100


class Contender(Protocol):
    """`trip` is one round trip of so many rows; seconds."""

    name: str

    def trip(self, rows: int) -> float: ...

    def close(self) -> None: ...


def hello(worker_id: str) -> ChannelHello:
    return ChannelHello(
        worker_id=worker_id,
        cluster="bench",
        version="bench",
        model="bench",
        layers=LAYERS,
        heads=HEADS,
        kv_heads=3,
        head_dim=HEAD_DIM,
        exact=True,
        segment_tokens=256,
        dtype="float32",
    )


def options(kind: str) -> ChannelOptions:
    return ChannelOptions(secret=channel_secret("bench"), encryption="never" if kind == "tcp" else "auto")


def attend(kind: str, pipe: Connection) -> None:
    """The attention worker's end, in a process of its own: one thread, any number of channels."""
    queries, states = (memoryview(bytearray(ROWS_MAX * size)) for size in (UP, DOWN))
    selector = ChannelSelector()
    with ChannelListener(hello("attention-0"), options(kind)) as listener:
        pipe.send([address for address in listener.addresses if address.startswith(f"{kind}:")])
        selector.add(listener)
        while True:
            for one in selector.wait(timeout_s=60.0):
                if isinstance(one, WorkerChannel):
                    try:
                        header = one.receive_ready(lambda header: queries[: header.rows * UP])
                        if header is not None:
                            answer = header._replace(op=Op.PARTIAL)
                            one.send(answer, states[: header.rows * DOWN])
                    except ChannelLost:
                        one.close()
                        return
                elif (channel := listener.accept()) is not None:
                    selector.add(channel)


class OverChannel:
    """The model worker's end of a channel."""

    def __init__(self, kind: str) -> None:
        self.name = kind
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(target=attend, args=(kind, theirs), daemon=True)
        self._process.start()
        self._channel = connect(pipe.recv(), hello("decode-0"), options(kind), peer="attention-0")
        self._queries, self._states = (memoryview(bytearray(ROWS_MAX * size)) for size in (UP, DOWN))
        self._trips = self._step = self._rows = 0

    def trip(self, rows: int) -> float:
        self._step += 1
        self._rows += rows
        queries, states = self._queries[: rows * UP], self._states[: rows * DOWN]
        started = time.perf_counter()
        header = MessageHeader(Op.QUERY, Dtype.F32, layer=3, rows=rows, step=self._step)
        self._channel.send(header, queries)
        self._channel.receive(lambda header: states)
        return time.perf_counter() - started

    def close(self) -> None:
        sent, received = self._channel.sent.by_op(), self._channel.received.by_op()
        expected = (self._step, self._rows * UP, self._step * HEADER_BYTES)
        assert sent["QUERY"] == expected, (sent, expected)
        assert received["PARTIAL"] == (self._step, self._rows * DOWN, self._step * HEADER_BYTES), received
        self._channel.close()
        self._process.join()


def echo(pipe: Connection) -> None:
    """The other end of the raw socket: how many rows come is told first, and costs no trip of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(HEADER_BYTES + ROWS_MAX * DOWN))
    rows = 1
    while connection.recv_into(memory[: HEADER_BYTES + rows * UP], 0, socket.MSG_WAITALL):
        answered, rows = rows, memory[0]  # of the next trip
        connection.sendall(memory[: HEADER_BYTES + answered * DOWN])


class RawSocket:
    """Blocking TCP, one `sendall` and one `recv_into` for each message."""

    name = "socket"

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(target=echo, args=(theirs,), daemon=True)
        self._process.start()
        self._socket = socket.create_connection(pipe.recv())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(bytearray(HEADER_BYTES + ROWS_MAX * DOWN))
        self._rows = 1

    def trip(self, rows: int) -> float:
        if rows != self._rows:
            self._go(self._rows, rows)
            self._rows = rows
        return self._go(rows, rows)

    def _go(self, rows: int, following: int) -> float:
        self._memory[0] = following
        out, back = self._memory[: HEADER_BYTES + rows * UP], self._memory[: HEADER_BYTES + rows * DOWN]
        started = time.perf_counter()
        self._socket.sendall(out)
        self._socket.recv_into(back, 0, socket.MSG_WAITALL)
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()
        self._process.join()


def summary(trips: list[list[float]], base: list[list[float]]) -> dict[str, float]:
    """`trips`: of each round."""
    ordered = sorted(trip for each in trips for trip in each)
    ratios = [statistics.median(mine) / statistics.median(raw) for mine, raw in zip(trips, base, strict=True)]
    return {
        "us_p50": round(statistics.median(ordered) * 1e6, 1),
        "us_p99": round(ordered[int(0.99 * len(ordered))] * 1e6, 1),
        "us_min": round(ordered[0] * 1e6, 1),
        "ms_step_p50": round(statistics.median(ordered) * LAYERS * 1e3, 3),
        "ratio": round(statistics.median(ratios), 2),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=20)
    args = parsed(arguments, rounds=1)
    contenders: list[Contender] = [RawSocket(), *(OverChannel(kind.name) for kind in KINDS)]
    result: dict[str, Any] = {
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "bytes_up_row": UP,
        "bytes_down_row": DOWN,
    }
    for rows in ROWS:
        found: dict[str, list[list[float]]] = {contender.name: [] for contender in contenders}
        for _ in range(args.rounds):
            for contender in contenders:
                for _ in range(WARM):
                    contender.trip(rows)
                found[contender.name].append([contender.trip(rows) for _ in range(TRIPS)])
        result[f"rows_{rows}"] = {name: summary(trips, found["socket"]) for name, trips in found.items()}
    for contender in contenders:
        contender.close()
    finish(args, result, [line(rows, result[f"rows_{rows}"]) for rows in ROWS])


def line(rows: int, found: dict[str, dict[str, float]]) -> str:
    each = [
        f"{name} {one['us_p50']:.0f} µs (p99 {one['us_p99']:.0f}, x{one['ratio']:.2f})"
        for name, one in found.items()
    ]
    return f"{rows:>2} rows: " + ", ".join(each)


if __name__ == "__main__":
    main()
