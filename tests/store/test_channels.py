"""The contract of channels: the same sentences about every kind of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    options,
    pair,
    receives,
    shorten,
)

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Dtype, MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelFull, ChannelLost, ChannelRefused, ProtocolBroken
from tests.eventually import BOUND_S, eventually_here

MIB = 1 << 20


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, no file, and no thread that ended by an exception."""
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    files, threads = set(open_files()), threading.active_count()
    yield
    eventually_here(lambda: threading.active_count() <= threads, "no thread is left")
    eventually_here(lambda: set(open_files()) <= files, "no file is left")
    assert not raised


def open_files() -> list[str]:
    return [file.name for file in Path("/proc/self/fd").iterdir() if file.exists()]


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


def test_messages_come_once_in_order_and_are_counted_by_op(kind: str) -> None:
    rows, q, partial = 3, 9 * 64 * 4, (9 * 64 + 9) * 4
    with pair(kind) as (one, two):
        for step in range(50):
            for layer in range(4):
                one.send(
                    MessageHeader(Op.QUERY, Dtype.F32, layer=layer, rows=rows, step=step),
                    memory(rows * q, layer),
                )
                got = memory(rows * q)
                header = two.receive(into(got))
                assert (header.step, header.layer, got[0], got[-1]) == (step, layer, layer, layer)
                two.send(
                    MessageHeader(Op.PARTIAL, Dtype.F32, layer=layer, rows=rows, step=step),
                    memory(rows * partial),
                )
                assert one.receive(fresh).layer == layer
        for sender, receiver, op, size in ((one, two, Op.QUERY, q), (two, one, Op.PARTIAL, partial)):
            for counts in (sender.sent, receiver.received):
                assert counts.messages(op) == 200
                assert counts.payload_bytes(op) == 200 * rows * size
                assert counts.header_bytes(op) == 200 * HEADER_BYTES
                # Answers tell what was taken: no message but these.
                assert set(counts.by_op()) == {"HELLO", op.name}


def test_a_message_without_payload_and_the_longest_one(kind: str) -> None:
    with pair(kind, message_bytes_max=3 * MIB) as (one, two):
        one.send(MessageHeader(Op.DROP, slots=4))
        assert two.receive(fresh).slots == 4
        longest = np.random.bytes(3 * MIB)
        sending = in_thread(lambda: one.send(MessageHeader(Op.APPEND), memoryview(longest)))
        target = memory(3 * MIB)
        two.receive(into(target))
        sending()
        assert target == longest
        with pytest.raises(
            ValueError, match=f"payload_bytes: {3 * MIB + 1}, and attention-0 takes {3 * MIB}"
        ):
            one.send(MessageHeader(Op.APPEND), memory(3 * MIB + 1))
        with pytest.raises(ValueError, match="CREDIT is the channel's own"):
            one.send(MessageHeader(Op.CREDIT))
        with pytest.raises(ValueError, match="layer=70000"):
            one.send(MessageHeader(Op.QUERY, layer=70_000))
        one.send(QUERY)
        assert two.receive(fresh).op is Op.QUERY


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


def test_a_window_is_all_that_is_sent_ahead(kind: str) -> None:
    with pair(kind, window=4) as (one, two):
        shorten(one, 0.3)
        for _ in range(4):
            one.send(QUERY)
        with pytest.raises(ChannelLost, match="attention-0: has not taken 4 messages"):
            one.send(QUERY)
        with pytest.raises(ChannelLost, match="attention-0: has not taken 4 messages"):
            one.send(QUERY)
        assert two.receive(fresh).op is Op.QUERY


def test_who_only_receives_gives_credit_all_the_same(kind: str) -> None:
    with pair(kind, window=4) as (one, two):
        sending = in_thread(lambda: [one.send(MessageHeader(Op.APPEND, step=step)) for step in range(100)])
        assert [two.receive(fresh).step for _ in range(100)] == list(range(100))
        sending()
        assert two.sent.messages(Op.CREDIT) <= 50
        assert two.sent.payload_bytes(Op.CREDIT) == 0


def test_where_both_have_sent_all_they_may_an_error_says_to_receive(kind: str) -> None:
    with pair(kind, window=4) as (one, two):
        for channel in (one, two):
            for step in range(4):
                channel.send(MessageHeader(Op.QUERY, step=step))
        ends = [in_thread(lambda at=at: at.send(QUERY)) for at in (one, two)]
        for end in ends:
            with pytest.raises(ChannelFull, match="receive first"):
                end()
        for channel in (one, two):
            assert [channel.receive(fresh).step for _ in range(4)] == [0, 1, 2, 3]
        for channel in (one, two):
            channel.send(MessageHeader(Op.DROP))
            assert channel.sent.messages(Op.QUERY) == 4
        assert one.receive(fresh).op is two.receive(fresh).op is Op.DROP


def test_a_message_that_came_while_sending_is_received_and_refused_as_any_other(kind: str) -> None:
    with pair(kind) as (one, two):
        for step in (1, 2):
            two.send(MessageHeader(Op.PARTIAL, step=step), memory(10, step))
        sending = in_thread(lambda: one.send(MessageHeader(Op.ACTIVATION), memory(8 * MIB)))
        eventually_here(lambda: len(one._inbox._stored) == 2, "both are stored")
        assert two.receive(fresh).payload_bytes == 8 * MIB
        sending()
        target = memory(10)
        assert one.receive(into(target)).step == 1
        assert target == memory(10, 1)
        with pytest.raises(ProtocolBroken, match="PARTIAL of 10 where 5 were due"):
            one.receive(lambda header: memory(5))


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


# --- peers that break the rules ------------------------------------------------------------------------------


def receive_all(channel: WorkerChannel) -> None:
    while True:
        channel.receive(fresh)


def for_ever_send(channel: WorkerChannel) -> None:
    while True:
        channel.send(MessageHeader(Op.PARTIAL), memory(4 * MIB))


def changed(raw: bytearray, place: int, byte: int) -> bytearray:
    raw[place] = byte
    return raw


BROKEN: dict[str, Any] = {
    "version: ": lambda raw: raw.seal(changed(raw.header(sealed=False), 2, 9)),
    "version: 0x0000": lambda raw: raw.seal(changed(changed(raw.header(sealed=False), 0, 0), 1, 0)),
    "op: 99 is none": lambda raw: raw.seal(changed(raw.header(sealed=False), 3, 99)),
    "dtype: 77 is none": lambda raw: raw.seal(changed(raw.header(sealed=False), 4, 77)),
    "op: HELLO out of place": lambda raw: raw.header(MessageHeader(Op.HELLO)),
    "sequence: 9 where 2": lambda raw: raw.header(sequence=9),
    "sequence: 2 where 3": lambda raw: raw.header() + raw.header(sequence=2),
    "payload_bytes: QUERY of 4294967295": lambda raw: raw.header(size=2**32 - 1),
    "payload_bytes: CREDIT of 1": lambda raw: raw.header(MessageHeader(Op.CREDIT), size=1),
    "payload_bytes: ERROR of 301": lambda raw: raw.header(MessageHeader(Op.ERROR), size=301),
    "consumed: 1 messages": lambda raw: raw.header(consumed=1),
    "consumed: 18446744073709551615": lambda raw: raw.header(consumed=2**64 - 1),
    "version: 0x2020": lambda raw: raw.seal(bytearray(b" " * HEADER_BYTES)),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_no_message_breaks_the_channel_and_says_why(kind: str, reason: str) -> None:
    with pair(kind) as (one, two):
        raw = Raw(one)
        raw.send(BROKEN[reason](raw))
        with pytest.raises(ProtocolBroken, match=f"decode-0: {reason}"):
            receive_all(two)
        with pytest.raises(ChannelLost, match=f"attention-0: gave the channel up: {reason}"):
            one.receive(fresh)


def test_more_than_the_window_breaks_the_channel_and_is_not_stored(kind: str) -> None:
    with pair(kind, window=4) as (one, two):
        raw = Raw(one)
        for _ in range(6):
            raw.send(raw.header())
        with pytest.raises(ProtocolBroken, match="window: more than 4 messages at once"):
            for_ever_send(two)  # it stores what comes while it has no room


def test_who_receives_may_refuse_and_the_other_end_hears_why(kind: str) -> None:
    with pair(kind) as (one, two):

        def refuse(header: MessageHeader) -> memoryview:
            raise MessageRefused(f"rows: {header.rows}, and there is room for 4")

        one.send(MessageHeader(Op.QUERY, Dtype.F32, rows=99), memory(99))
        with pytest.raises(ProtocolBroken, match="QUERY: rows: 99, and there is room for 4"):
            two.receive(refuse)
        with pytest.raises(
            ChannelLost, match="gave the channel up: QUERY: rows: 99, and there is room for 4"
        ):
            one.receive(fresh)


def test_a_fault_of_the_receiver_ends_the_channel(kind: str) -> None:
    """Who asked again would get half of a message."""
    with pair(kind) as (one, two):
        one.send(QUERY, memory(10))
        with pytest.raises(ZeroDivisionError):
            two.receive(lambda header: memory(1 // 0))
        with pytest.raises(ChannelLost, match="interrupted"):
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


# --- the hello ----------------------------------------------------------------------------------------------

OTHER = {
    "cluster": "d",
    "version": "2",
    "model": "n",
    "layers": 32,
    "heads": 12,
    "kv_heads": 9,
    "head_dim": 32,
    "exact": False,
    "segment_tokens": 512,
    "dtype": "bfloat16",
    "head_shares": 3,
}


@pytest.mark.parametrize("field", OTHER)
def test_a_peer_of_another_model_or_build_is_refused_by_the_name_of_the_field(kind: str, field: str) -> None:
    settings = options(kind)
    with ChannelListener(hello("attention-0"), settings) as listener:
        other = hello("decode-0", **{field: OTHER[field]})
        with pytest.raises(
            ChannelRefused, match=f"^{field}: {OTHER[field]!r} at 'decode-0', .* at 'attention-0'$"
        ):
            connect(addresses(listener, kind), other, settings, peer="attention-0")
        eventually_here(lambda: bool(listener.counters), "it is counted")
        assert dict(listener.counters) == {f"refused_{field}": 1}
        assert listener.accept() is None


@pytest.mark.pure
def test_every_field_of_a_hello_is_compared_or_an_ends_own() -> None:
    assert {*OTHER, "worker_id", "window", "message_bytes_max"} == set(hello("a").__struct_fields__)


@pytest.mark.pure
def test_heads_that_cannot_be_split_so_are_refused() -> None:
    for changes, reason in (
        ({"head_shares": 2}, "head_shares: 2 do not divide 3 KV heads"),
        ({"heads": 10}, "kv_heads: 3 do not divide 10 heads"),
    ):
        with pytest.raises(ChannelRefused, match=reason):
            ChannelListener(hello("attention-0", **changes), options("unix"))
        with pytest.raises(ChannelRefused, match=reason):
            connect(["unix:x/y"], hello("decode-0", **changes), options("unix"), peer="a")


def test_another_worker_than_was_called_is_refused(kind: str) -> None:
    settings = options(kind)
    with (
        ChannelListener(hello("attention-1"), settings) as listener,
        pytest.raises(ChannelRefused, match=r"worker_id: 'attention-1' at .*, not 'attention-0'"),
    ):
        connect(addresses(listener, kind), hello("decode-0"), settings, peer="attention-0")


def test_nobody_at_an_address_is_a_lost_channel(kind: str) -> None:
    settings = options(kind)
    with ChannelListener(hello("attention-0"), settings) as listener:
        gone = addresses(listener, kind)
    with pytest.raises(ChannelLost, match="attention-0: "):
        connect(gone, hello("decode-0"), settings, peer="attention-0")
