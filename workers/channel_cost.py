"""Measures a channel between two processes of this host: round trips, by the bytes that go up and come down.

The other end is a process of its own (`python -m halfmoon.workers.channel_cost`), as another worker is: it takes each
message and answers with as many bytes. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Dtype, MessageHeader, Op
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelError, ChannelLost
from halfmoon.workers.cost_fit import PartTime

log = logging.getLogger(__name__)
_TRIPS_MIN, _TRIPS_MAX, _WARM = 20, 400, 5
_WAIT_S = 20.0


class EchoOrder(msgspec.Struct, frozen=True):
    """To the other end, on its standard input."""

    secret: str
    hello: ChannelHello
    bytes_max: int


def channel_times(sizes: Sequence[int], budget_s: float) -> list[PartTime]:
    """The median round trip of each size, bytes up and as many down. Empty where no channel can be opened here."""
    hello = ChannelHello(
        worker_id="measuring-0",
        cluster="measuring",
        version="measuring",
        model="measuring",
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        exact=True,
        segment_tokens=1,
        dtype="float32",
    )
    order = EchoOrder(secrets.token_hex(16), hello, max(sizes))
    try:
        with _other_end(order) as channel:
            return [
                PartTime(0, 2 * size, _round_trip_ns(channel, size, budget_s / len(sizes))) for size in sizes
            ]
    except (ChannelError, OSError, ValueError) as problem:
        log.warning("the cost of a channel is not measured: %s", problem)
        return []


@contextlib.contextmanager
def _other_end(order: EchoOrder) -> Iterator[WorkerChannel]:
    command = [sys.executable, "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        addresses = msgspec.json.decode(process.stdout.readline(), type=list[str])
        hello = msgspec.structs.replace(order.hello, worker_id="measuring-1")
        options = ChannelOptions(secret=order.secret)
        with connect(addresses, hello, options, peer=order.hello.worker_id) as channel:
            yield channel
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _round_trip_ns(channel: WorkerChannel, size: int, budget_s: float) -> int:
    up, down = memoryview(bytearray(size)), memoryview(bytearray(size))
    until_s, took = time.monotonic() + budget_s, list[int]()
    while len(took) < _WARM + _TRIPS_MIN or (time.monotonic() < until_s and len(took) < _TRIPS_MAX):
        begin = time.perf_counter_ns()
        channel.send(MessageHeader(Op.QUERY, Dtype.F32, rows=1, step=len(took)), up)
        channel.receive(lambda _: down)
        took.append(time.perf_counter_ns() - begin)
    return round(statistics.median(took[_WARM:]))


def _echo(order: EchoOrder) -> None:
    """The other end: answers until its channel is closed, or none was opened."""
    memory = memoryview(bytearray(order.bytes_max))
    selector = ChannelSelector()
    with ChannelListener(order.hello, ChannelOptions(secret=order.secret)) as listener:
        print(msgspec.json.encode(listener.addresses).decode(), flush=True)
        selector.add(listener)
        while found := selector.wait(_WAIT_S):
            for one in found:
                if isinstance(one, WorkerChannel):
                    try:
                        header = one.receive_ready(lambda header: memory[: header.payload_bytes])
                        if header is not None:
                            answer = header._replace(op=Op.PARTIAL)
                            one.send(answer, memory[: header.payload_bytes])
                    except ChannelLost:
                        return
                elif (channel := listener.accept()) is not None:
                    selector.add(channel)


if __name__ == "__main__":
    _echo(msgspec.json.decode(sys.stdin.buffer.read(), type=EchoOrder))
