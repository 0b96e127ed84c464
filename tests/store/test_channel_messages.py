"""Channels in memory: messages, windows, refusals and the hello. `test_channels.py` has sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from channel_harness import (
    QUERY,
    Raw,
    fresh,
    hello,
    in_thread,
    into,
    memory,
    nothing_is_left,
    options,
    pair,
    shorten,
)

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Dtype, MessageHeader, Op
from halfmoon.store.channels.inbox import MessageRefused
from halfmoon.store.channels.opening import connect
from halfmoon.store.errors import ChannelFull, ChannelLost, ChannelRefused, ProtocolBroken
from tests.eventually import eventually_here
from tests.store.memory_channels import KIND, MemoryListener, memory_is_reached

__all__ = ["memory_is_reached", "nothing_is_left"]
MIB = 1 << 20


@pytest.mark.parametrize("sealed", [False, True])
def test_messages_come_once_in_order_and_are_counted_by_op(sealed: bool) -> None:
    rows, q, partial = 3, 9 * 64 * 4, (9 * 64 + 9) * 4
    with pair(KIND, sealed=sealed) as (one, two):
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


def test_a_message_without_payload_and_the_longest_one() -> None:
    with pair(KIND, message_bytes_max=3 * MIB) as (one, two):
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


def test_a_window_is_all_that_is_sent_ahead() -> None:
    with pair(KIND, window=4) as (one, two):
        shorten(one, 0.3)
        for _ in range(4):
            one.send(QUERY)
        with pytest.raises(ChannelLost, match="attention-0: has not taken 4 messages"):
            one.send(QUERY)
        with pytest.raises(ChannelLost, match="attention-0: has not taken 4 messages"):
            one.send(QUERY)
        assert two.receive(fresh).op is Op.QUERY


def test_who_only_receives_gives_credit_all_the_same() -> None:
    with pair(KIND, window=4) as (one, two):
        sending = in_thread(lambda: [one.send(MessageHeader(Op.APPEND, step=step)) for step in range(100)])
        assert [two.receive(fresh).step for _ in range(100)] == list(range(100))
        sending()
        assert two.sent.messages(Op.CREDIT) <= 50
        assert two.sent.payload_bytes(Op.CREDIT) == 0


def test_where_both_have_sent_all_they_may_an_error_says_to_receive() -> None:
    with pair(KIND, window=4) as (one, two):
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


def test_a_message_that_came_while_sending_is_received_and_refused_as_any_other() -> None:
    with pair(KIND) as (one, two):
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


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_no_message_breaks_the_channel_and_says_why(reason: str, sealed: bool) -> None:
    with pair(KIND, sealed=sealed) as (one, two):
        raw = Raw(one)
        raw.send(BROKEN[reason](raw))
        with pytest.raises(ProtocolBroken, match=f"decode-0: {reason}"):
            receive_all(two)
        with pytest.raises(ChannelLost, match=f"attention-0: gave the channel up: {reason}"):
            one.receive(fresh)


@pytest.mark.parametrize("sealed", [False, True])
def test_more_than_the_window_breaks_the_channel_and_is_not_stored(sealed: bool) -> None:
    with pair(KIND, window=4, sealed=sealed) as (one, two):
        raw = Raw(one)
        for _ in range(6):
            raw.send(raw.header())
        with pytest.raises(ProtocolBroken, match="window: more than 4 messages at once"):
            for_ever_send(two)  # it stores what comes while it has no room


def test_who_receives_may_refuse_and_the_other_end_hears_why() -> None:
    with pair(KIND) as (one, two):

        def refuse(header: MessageHeader) -> memoryview:
            raise MessageRefused(f"rows: {header.rows}, and there is room for 4")

        one.send(MessageHeader(Op.QUERY, Dtype.F32, rows=99), memory(99))
        with pytest.raises(ProtocolBroken, match="QUERY: rows: 99, and there is room for 4"):
            two.receive(refuse)
        with pytest.raises(
            ChannelLost, match="gave the channel up: QUERY: rows: 99, and there is room for 4"
        ):
            one.receive(fresh)


def test_a_fault_of_the_receiver_ends_the_channel() -> None:
    """Who asked again would get half of a message."""
    with pair(KIND) as (one, two):
        one.send(QUERY, memory(10))
        with pytest.raises(ZeroDivisionError):
            two.receive(lambda header: memory(1 // 0))
        with pytest.raises(ChannelLost, match="interrupted"):
            two.receive(fresh)


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
def test_a_peer_of_another_model_or_build_is_refused_by_the_name_of_the_field(field: str) -> None:
    settings = options(KIND)
    with MemoryListener(hello("attention-0"), settings) as listener:
        other = hello("decode-0", **{field: OTHER[field]})
        with pytest.raises(
            ChannelRefused, match=f"^{field}: {OTHER[field]!r} at 'decode-0', .* at 'attention-0'$"
        ):
            connect(listener.addresses, other, settings, peer="attention-0")
        eventually_here(lambda: bool(listener.counters), "it is counted")
        assert dict(listener.counters) == {f"refused_{field}": 1}
        assert listener.accept() is None


def test_every_field_of_a_hello_is_compared_or_an_ends_own() -> None:
    assert {*OTHER, "worker_id", "window", "message_bytes_max"} == set(hello("a").__struct_fields__)


def test_heads_that_cannot_be_split_so_are_refused() -> None:
    for changes, reason in (
        ({"head_shares": 2}, "head_shares: 2 do not divide 3 KV heads"),
        ({"heads": 10}, "kv_heads: 3 do not divide 10 heads"),
    ):
        with pytest.raises(ChannelRefused, match=reason):
            MemoryListener(hello("attention-0", **changes), options(KIND))
        with pytest.raises(ChannelRefused, match=reason):
            connect(["unix:x/y"], hello("decode-0", **changes), options(KIND), peer="a")


def test_another_worker_than_was_called_is_refused() -> None:
    settings = options(KIND)
    with (
        MemoryListener(hello("attention-1"), settings) as listener,
        pytest.raises(ChannelRefused, match=r"worker_id: 'attention-1' at .*, not 'attention-0'"),
    ):
        connect(listener.addresses, hello("decode-0"), settings, peer="attention-0")
