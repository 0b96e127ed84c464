"""What every kind of channel owes over its own sockets: bytes and ends. `test_channel_messages.py` has the messages."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from channel_harness import (
    NAMES,
    QUERY,
    OtherProcess,
    Raw,
    accepted,
    addresses,
    fresh,
    hello,
    in_thread,
    into,
    memory,
    nothing_is_left,
    options,
    pair,
    receives,
    shorten,
)

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Dtype, MessageHeader, Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelLost
from tests.eventually import BOUND_S, eventually_here

__all__ = ["nothing_is_left"]
MIB = 1 << 20


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def answering(kind: str) -> Iterator[OtherProcess]:
    process = OtherProcess(kind, "answer")
    yield process
    process.close()


def reach(process: OtherProcess, kind: str) -> WorkerChannel:
    return connect(process.addresses, hello("decode-0"), options(kind), peer="attention-0")


# --- messages -----------------------------------------------------------------------------------------------


def test_a_message_is_sent_from_its_buffers_and_lies_where_the_receiver_wants_it(kind: str) -> None:
    with pair(kind) as (one, two):
        out, lse = np.random.rand(4, 9, 64).astype(np.float32), np.random.rand(4, 9).astype(np.float32)
        target = np.zeros(4 * 9 * 65, np.float32)
        sent = MessageHeader(Op.PARTIAL, Dtype.F32, group=1, layer=29, parts=2, rows=2, step=2**40, slots=7)
        one.send(sent, memoryview(out), memoryview(lse))
        header = two.receive(lambda header: memoryview(target))
        assert header == sent._replace(payload_bytes=target.nbytes, sequence=2)
        assert np.array_equal(target[: out.size], out.ravel())
        assert np.array_equal(target[out.size :], lse.ravel())


def test_one_thread_sends_while_another_receives(kind: str) -> None:
    with pair(kind, window=4) as (one, two):
        count = 300

        def send(channel: WorkerChannel) -> None:
            for number in range(count):
                channel.send(MessageHeader(Op.ACTIVATION, step=number), memory(number * 37, number % 256))

        def receive(channel: WorkerChannel) -> None:
            for number in range(count):
                target = memory(number * 37)
                assert channel.receive(into(target)).step == number
                assert target == memory(number * 37, number % 256)

        ends = [in_thread(lambda work=work, at=at: work(at)) for at in (one, two) for work in (send, receive)]
        for end in ends:
            end()


def test_who_waits_lets_other_threads_run(kind: str) -> None:
    with pair(kind) as (one, two):
        waiting = in_thread(lambda: two.receive(fresh))
        receives(two)  # which this thread sees, and goes on, while that one waits
        one.send(QUERY)
        waiting()


# --- bounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 8 * MIB])
def test_two_ends_that_send_at_the_same_time_do_not_wait_for_each_other(kind: str, size: int) -> None:
    """Each in one thread, far more than any buffer of the kernel holds."""
    with pair(kind, window=4) as (one, two):

        def story(channel: WorkerChannel, fill: int) -> None:
            for number in range(4):
                channel.send(MessageHeader(Op.ACTIVATION, step=number), memory(size, fill))
            for number in range(4):
                target = memory(size)
                assert channel.receive(into(target)).step == number
                assert target[0] == target[-1] == 3 - fill

        ends = [in_thread(lambda: story(one, 1)), in_thread(lambda: story(two, 2))]
        for end in ends:
            end()


# --- peers that do not answer -------------------------------------------------------------------------------


def test_who_says_nothing_is_lost_when_the_time_is_over(kind: str) -> None:
    with pair(kind) as (one, _):
        with pytest.raises(ChannelLost, match="attention-0: nothing came for 200 ms"):
            one.receive(fresh, timeout_s=0.2)
        for call in (lambda: one.receive(fresh), lambda: one.send(QUERY), lambda: one.receive_ready(fresh)):
            with pytest.raises(ChannelLost, match="nothing came for 200 ms"):
                call()


def test_a_process_that_was_killed_is_lost_at_once(kind: str, answering: OtherProcess) -> None:
    with reach(answering, kind) as channel:
        channel.send(QUERY, memory(100, 7))
        assert channel.receive(fresh).payload_bytes == 100
        waiting = in_thread(lambda: channel.receive(fresh, timeout_s=10 * BOUND_S))
        receives(channel)
        answering.signal(signal.SIGKILL)
        with pytest.raises(ChannelLost, match="attention-0: "):
            waiting()


def test_a_process_that_stands_still_is_lost_and_holds_nobody_up(kind: str, answering: OtherProcess) -> None:
    with reach(answering, kind) as channel:
        shorten(channel, 0.5)
        answering.signal(signal.SIGSTOP)

        def flood() -> None:
            for _ in range(100):
                channel.send(QUERY, memory(4 * MIB))

        with pytest.raises(ChannelLost, match=r"attention-0: (takes nothing|has not taken)"):
            flood()


def test_a_process_that_never_receives_ends_a_wait_for_its_answer(kind: str) -> None:
    process = OtherProcess(kind, "silent")
    try:
        with reach(process, kind) as channel:
            channel.send(QUERY, memory(100))
            with pytest.raises(ChannelLost, match="nothing came for 300 ms"):
                channel.receive(fresh, timeout_s=0.3)
    finally:
        process.close()


def test_a_half_closed_connection_is_a_lost_channel(kind: str) -> None:
    import socket

    with pair(kind) as (one, two):
        socket.socket.shutdown(two._stream._socket, socket.SHUT_WR)  # type: ignore[attr-defined]
        with pytest.raises(ChannelLost, match="closed the connection"):
            one.receive(fresh)
        with pytest.raises(ChannelLost):
            two.receive(fresh)


def test_a_message_that_ends_in_the_middle(kind: str) -> None:
    for size in (10, HEADER_BYTES, HEADER_BYTES + 50):
        with pair(kind) as (one, two):
            raw = Raw(one)
            raw.send((raw.header(size=100) + bytearray(100))[:size])
            one.close()
            with pytest.raises(ChannelLost, match="in the middle of a message"):
                two.receive(fresh)


@pytest.mark.parametrize("first", [10, HEADER_BYTES + 10])
def test_a_byte_now_and_then_holds_nobody_past_the_deadline(kind: str, first: int) -> None:
    with pair(kind) as (one, two):
        shorten(two, 0.5)
        raw = Raw(one)
        message = raw.header(size=6_000) + bytearray(6_000)  # not whole when the wait for its end is over
        ended = threading.Event()
        places = iter(range(first, len(message)))

        def all_done() -> bool:
            if ended.is_set() or one.lost:
                return True
            place = next(places)
            raw.send(message[place : place + 1])
            return False

        def drip() -> None:
            raw.send(message[:first])
            eventually_here(all_done, "the other end has had enough", every_s=0.03)

        dripping = in_thread(drip)
        with pytest.raises(ChannelLost):
            two.receive(fresh)
        ended.set()
        try:
            dripping()
        except Exception as problem:  # the connection ended under it
            assert "Broken" in type(problem).__name__  # noqa: PT017


def test_closing_ends_what_other_threads_wait_for(kind: str) -> None:
    with pair(kind) as (one, two):
        waiting = in_thread(lambda: one.receive(fresh, timeout_s=10 * BOUND_S))
        receives(one)
        one.close()
        one.close()
        with pytest.raises(ChannelLost, match="closed here"):
            waiting()
        with pytest.raises(ChannelLost, match="decode-0: it closed the connection"):
            two.receive(fresh)


# --- one thread, several channels ---------------------------------------------------------------------------


def test_one_thread_serves_several_channels_and_a_slow_one_holds_up_none(kind: str) -> None:
    settings = options(kind)
    with ChannelListener(hello("attention-0"), settings) as listener:
        selector = ChannelSelector()
        selector.add(listener)
        slow, *quick = [
            connect(addresses(listener, kind), hello(f"decode-{i}"), settings, peer="attention-0")
            for i in range(4)
        ]
        target, served = memory(1000), 0
        channels: list[WorkerChannel] = []
        lost: list[str] = []
        raw = Raw(slow)
        raw.send((raw.header(size=1000) + bytearray(1000))[:500])
        for step in range(20):
            for channel in quick:
                channel.send(MessageHeader(Op.QUERY, step=step), memory(1000, step))
            waiting = len(quick)
            while waiting:
                found = selector.wait(BOUND_S)
                assert found, "they wait for the slow one"
                for one in found:
                    if one is listener:
                        channels.append(accepted(listener))
                        selector.add(channels[-1])
                        continue
                    assert isinstance(one, WorkerChannel)
                    header = one.receive_ready(into(target))
                    if header is not None:
                        one.send(MessageHeader(Op.PARTIAL, step=header.step), target)
                        waiting -= 1
                        served += 1
            for channel in quick:
                assert channel.receive(fresh).step == step
        assert served == 60
        for channel in channels:
            shorten(channel, 0.2)
        for one in selector.wait(BOUND_S):
            assert isinstance(one, WorkerChannel)
            with pytest.raises(ChannelLost, match="decode-0: no more came for 200 ms"):
                one.receive_ready(into(target))
            lost.append(one.peer.worker_id)
            selector.remove(one)
        assert lost == ["decode-0"]
        assert selector.wait(0.0) == []
        for channel in (slow, *quick, *channels):
            channel.close()
        selector.close()


def test_nobody_at_an_address_is_a_lost_channel(kind: str) -> None:
    settings = options(kind)
    with ChannelListener(hello("attention-0"), settings) as listener:
        gone = addresses(listener, kind)
    with pytest.raises(ChannelLost, match="attention-0: "):
        connect(gone, hello("decode-0"), settings, peer="attention-0")
