"""Which endpoint messages are refused, with a reason and a name to count them under; what a mailbox is
refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.store import QueuePair, RemoteMemory
from halfmoon.store.transports.base import Run, Slice
from halfmoon.store.transports.rdma import wire

SECRET = "the tests' secret"


def pair(keeper_number: int = 1, *, secret: str = SECRET, **changes: Any) -> QueuePair:
    """From node one to node two, unless told otherwise."""
    memory = RemoteMemory(address=str(2**63 + 4096), size=4096, rkey=7)
    fields: dict[str, Any] = {
        "node_id": "one",
        "incarnation": "one-1",
        "to_node_id": "two",
        "to_incarnation": "two-1",
        "number": keeper_number,
        "answer": False,
        "qpn": 17,
        "psn": 1,
        "gid": "::ffff:10.77.0.1",
        "lid": 0,
        "ethernet": True,
        "mtu": 4096,
        "region": memory,
        "mailbox": memory,
    }
    return wire.sign(QueuePair(**{**fields, **changes}), secret)


def keeper(node_id: str = "two", incarnation: str = "two-1") -> wire.OfferVerifier:
    return wire.OfferVerifier(node_id, incarnation, SECRET)


def refusal(of: wire.OfferVerifier, message: QueuePair) -> str:
    with pytest.raises(wire.OfferRefused) as problem:
        of.admit(message)
    return problem.value.name


def test_a_genuine_offer_is_taken_once_and_survives_the_bus() -> None:
    door = keeper()
    raw = encode(pair())
    door.admit(decode(raw, QueuePair))
    assert refusal(door, decode(raw, QueuePair)) == "replayed"
    door.admit(pair(2))
    door.admit(pair(5))
    assert refusal(door, pair(4)) == "replayed"


def test_numbers_count_for_each_incarnation_of_each_node() -> None:
    door = keeper()
    door.admit(pair(3))
    door.admit(pair(1, incarnation="one-2"))
    door.admit(pair(1, node_id="three"))
    assert refusal(door, pair(3)) == "replayed"
    assert refusal(door, pair(1, incarnation="one-2")) == "replayed"


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": "three"},
        {"incarnation": "one-2"},
        {"number": 9},
        {"qpn": 18},
        {"psn": 2},
        {"gid": "::ffff:10.77.0.9"},
        {"answer": True},
        {"still": [1]},
        {"region": RemoteMemory(address="1", size=1, rkey=1)},
        {"mailbox": RemoteMemory(address="1", size=1, rkey=1)},
        {"to_incarnation": "two-2"},
        {"proof": ""},
        {"proof": "é"},
    ],
)
def test_any_field_changed_by_another_hand_is_found(change: dict[str, Any]) -> None:
    door = keeper()
    assert refusal(door, msgspec.structs.replace(pair(), **change)) == "proof"
    door.admit(pair())  # and what was refused has used up no number


def test_another_cluster_another_node_another_life() -> None:
    door = keeper()
    assert refusal(door, pair(secret="another")) == "proof"
    assert refusal(door, pair(to_node_id="three")) == "foreign"
    assert refusal(door, pair(to_incarnation="two-0")) == "foreign"
    assert refusal(door, pair(answer=True)) == "foreign"


def test_only_the_answer_to_this_very_offer_counts() -> None:
    one = wire.OfferVerifier("one", "one-1", SECRET)
    offer = pair(one.number())
    back = {
        "node_id": "two",
        "incarnation": "two-1",
        "to_node_id": "one",
        "to_incarnation": "one-1",
        "answer": True,
    }
    one.check_answer(pair(1, **back), offer)
    wrong: list[tuple[str, QueuePair]] = [
        ("replayed", pair(2, **back)),
        ("replayed", pair(1, **{**back, "answer": False})),
        ("foreign", pair(1, **{**back, "incarnation": "two-2"})),
        ("foreign", pair(1, **{**back, "node_id": "three"})),
        ("foreign", pair(1, **{**back, "to_incarnation": "one-0"})),
        ("proof", pair(1, **back, secret="another")),
    ]
    for name, answer in wrong:
        with pytest.raises(wire.OfferRefused) as problem:
            one.check_answer(answer, offer)
        assert problem.value.name == name


def test_a_number_is_given_once() -> None:
    door = keeper()
    assert [door.number() for _ in range(3)] == [1, 2, 3]


def test_malformed_messages_do_not_decode() -> None:
    good = encode(pair())
    for bad in (
        good.replace(b'"address":"9', b'"address":"x'),
        good.replace(b'"number":1', b'"number":-1'),
        good[:-9],
    ):
        with pytest.raises(MessageInvalid):
            decode(bad, QueuePair)


@pytest.mark.parametrize("layer_bytes", [256, 8192, 1 << 20, 8 << 20])
def test_messages_hold_every_layer_once_within_their_limits(layer_bytes: int) -> None:
    items = [Slice(i, 100 + i, i % 3, 40) for i in range(50)] + [Slice(60, 70, 0, 2000)]
    found: set[tuple[int, int, int]] = set()
    for message in wire.messages(items, layer_bytes):
        layers = sum(item.layers for item in message)
        assert 0 < len(message) <= wire.RUNS_PER_MESSAGE
        assert layers <= wire.LAYERS_PER_MESSAGE
        assert layers == 1 or layers * layer_bytes <= wire.MESSAGE_BYTES
        each = {
            (item.local_slot, item.remote_slot, layer)
            for item in message
            for layer in range(item.first_layer, item.first_layer + item.layers)
        }
        assert len(each) == layers
        assert not found & each
        found |= each
    assert len(found) == 50 * 40 + 2000


def test_messages_of_parts_have_work_requests_for_all_of_their_layers() -> None:
    """Of a block that is filled in part each layer is two writes, and a queue pair holds a bounded number."""
    items = [Slice(i, 100 + i, 0, 40, 16 * (i % 2)) for i in range(50)] + [Slice(60, 70, 0, 2000, 16)]
    found: list[tuple[int, int, int]] = []
    for message in wire.messages(items, 8192):
        assert sum(item.layers if item.fill else 1 for item in message) <= wire.RUNS_PER_MESSAGE
        assert all(
            item.fill == (16 if item.local_slot == 60 else 16 * (item.local_slot % 2)) for item in message
        )
        for item in message:
            layers = range(item.first_layer, item.first_layer + item.layers)
            found += [(item.local_slot, item.remote_slot, layer) for layer in layers]
    assert len(found) == len(set(found)) == 50 * 40 + 2000


def test_the_largest_message_fits_into_a_mailbox() -> None:
    from halfmoon.store.transports.rdma.connection import CELL_BYTES

    most = wire.LAYERS_PER_MESSAGE // wire.RUNS_PER_MESSAGE
    arrived = wire.Arrived(
        order_id="o" * 80,
        party="p" * 85,
        runs=[Run(2**31 - 1, 10_000, most, 2**31 - 1)] * wire.RUNS_PER_MESSAGE,
        sums=[2**64 - 1] * wire.LAYERS_PER_MESSAGE,
    )
    raw = wire.pack(arrived)
    assert len(raw) <= CELL_BYTES
    assert wire.arrived_decoder.decode(raw) == arrived
