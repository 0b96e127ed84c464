"""The codec over every message class of `halfmoon.schemas`: what goes through, what is refused, and in which
words.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as shape

from halfmoon.schemas.codec import MessageInvalid, decode, digest, encode
from halfmoon.schemas.contract.asyncapi import message_classes
from halfmoon.schemas.decisions import DECISION_TYPES, Decision, Ordered, Prediction, StartPrefill
from halfmoon.schemas.events import (
    EVENT_TYPES,
    BlocksStored,
    Event,
    FrontendLeft,
    PrefillFinished,
    RequestArrived,
    StoreSuspected,
    TimerFired,
)
from halfmoon.schemas.kv import KV_TYPES, KvMessage, TransferOpened
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import Delivery, TakeReply, TokensSampled
from halfmoon.schemas.types import KEY_BYTES, BlockKeys, Message
from tests.lengths import examples

MESSAGES: list[type[Message]] = [kind for kind in message_classes() if issubclass(kind, Message)]
BAD_IDS = ["", "a" * 81, "a.b", "a b", "*", ">", "a\n", "\n", "a\r\nPUB x 0", "é", "a/b", "a\0", "$SYS"]
every_message = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)


def finished(**changes: Any) -> dict[str, Any]:
    """A PrefillFinished as JSON, with other values."""
    fields = {
        "order_id": "o",
        "request_id": "r",
        "worker_id": "w",
        "queue_ns": 1,
        "transfer_ns": 2,
        "compute_ns": 3,
    }
    return {"type": "PrefillFinished", **fields, **changes}


def refusal(fields: Any, kind: Any = PrefillFinished) -> str:
    try:  # tens of thousands of times, and `pytest.raises` takes longer than to decode
        decode(json.dumps(fields).encode(), kind)
    except MessageInvalid as refused:
        return str(refused)
    pytest.fail(f"{kind} takes {fields}")


# --- strategies, built from the classes: a new field is tested without a line here --------------------------

BLOCK_KEYS_MAX = shape.type_info(BlockKeys).type.max_length
#: What orjson writes.
UNBOUNDED = (-(2**63), 2**64 - 1)


@functools.cache
def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any valid `kind`; fields that have a default are sometimes left out."""
    described = shape.type_info(kind)
    return _struct(described)


@functools.cache
def drawn(kind: type[Message]) -> list[Message]:
    """Valid `kind`, the same each time. What is the same for any message asks these: to begin to draw takes longer
    than to draw.
    """
    kept: list[Message] = []

    @given(message=messages(kind))
    @settings(max_examples=max(4, examples(25)), suppress_health_check=list(HealthCheck))
    def keep(message: Message) -> None:
        kept.append(message)

    keep()
    return kept


def as_json(kind: type[Message]) -> list[dict[str, Any]]:
    return [json.loads(encode(message)) for message in drawn(kind)]


def _struct(described: shape.StructType) -> st.SearchStrategy[Any]:
    required = {field.name: values(field.type) for field in described.fields if field.required}
    optional = {field.name: values(field.type) for field in described.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda fields: described.cls(**fields))


@functools.cache
def _texts(pattern: str) -> st.SearchStrategy[str]:
    # One of each: a pattern takes longer to become a strategy than a message to be drawn.
    return st.from_regex(pattern)


def values(kind: shape.Type) -> st.SearchStrategy[Any]:
    """Any valid value of a field."""
    match kind:
        case shape.Metadata():
            return values(kind.type)
        case shape.StructType():
            return _struct(kind)
        case shape.UnionType():
            return st.one_of([values(one) for one in kind.types])
        case shape.IntType():
            low = UNBOUNDED[0] if kind.ge is None else kind.ge
            return st.integers(low, UNBOUNDED[1] if kind.le is None else kind.le)
        case shape.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False, allow_infinity=False)
        case shape.StrType(pattern=pattern) if pattern is not None:
            return _texts(pattern)
        case shape.StrType():
            return st.text(
                st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=kind.max_length or 40
            )
        case shape.BytesType(max_length=maximum) if maximum == BLOCK_KEYS_MAX:
            return st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=4).map(b"".join)
        case shape.BytesType():
            return st.binary(max_size=64)
        case shape.ListType():
            return st.lists(values(kind.item_type), max_size=4)
        case shape.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case shape.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=4)
        case shape.LiteralType():
            return st.sampled_from(kind.values)
        case shape.BoolType():
            return st.booleans()
        case shape.NoneType():
            return st.none()
        case _:
            raise AssertionError(f"no strategy for {kind}")


@functools.cache
def plain_fields(kind: type[Message]) -> list[tuple[str, shape.Type]]:
    """Each field's JSON name and type, without the annotations around it."""
    described = shape.type_info(kind)
    return [
        (field.encode_name, field.type.type if isinstance(field.type, shape.Metadata) else field.type)
        for field in described.fields
    ]


# --- what goes through --------------------------------------------------------------------------------------


@pytest.mark.hypothesis
@every_message
def test_every_message_survives_the_way_there(kind: type[Message]) -> None:
    for message in drawn(kind):
        payload = encode(message)
        assert decode(payload, kind) == message
        assert encode(decode(payload, kind)) == payload
        assert json.loads(payload)["type"] == kind.__name__


def test_every_member_of_a_union_is_found_by_its_type() -> None:
    for union, kinds in ((Event, EVENT_TYPES), (Decision, DECISION_TYPES), (KvMessage, KV_TYPES)):
        assert set(kinds) == set(get_args(union))
        assert len({kind.__name__ for kind in kinds}) == len(kinds)
    event = FrontendLeft(frontend_id="f")
    assert decode(encode(event), Event) == event


def test_the_bytes_of_a_message_are_pinned() -> None:
    order = StartPrefill(
        order_id="o", request_id="r", frontend_id="f", worker_id="w", decode_worker_id="d", decode_node_id="n",
        prompt_tokens=7, predicted=Prediction(ttft_ns=5),
    )  # fmt: skip
    assert encode(Ordered(cause_seq=3, position=1, decision=order)) == (
        b'{"type":"Ordered","cause_seq":3,"position":1,"decision":{"type":"StartPrefill","order_id":"o","request_id":"r",'
        b'"frontend_id":"f","worker_id":"w","decode_worker_id":"d","decode_node_id":"n","prompt_tokens":7,'
        b'"predicted":{"ttft_ns":5}}}'
    )
    assert encode(BlocksStored(node_id="n", incarnation="i", block_keys=bytes(range(16)))) == (
        b'{"type":"BlocksStored","node_id":"n","incarnation":"i","block_keys":"AAECAwQFBgcICQoLDA0ODw=="}'
    )


def test_equal_messages_give_equal_bytes_however_their_mappings_were_filled() -> None:
    one = TakeReply(sampling=Sampling(logit_bias={7: 1.0, 50: -1.0, 6: 2.0}))
    other = TakeReply(sampling=Sampling(logit_bias={6: 2.0, 50: -1.0, 7: 1.0}))
    assert one == other
    assert encode(one) == encode(other)
    assert decode(encode(one), TakeReply) == one


@every_message
def test_unknown_fields_are_ignored(kind: type[Message]) -> None:
    for message in drawn(kind):
        newer = {**json.loads(encode(message)), "a_field_of_tomorrow": {"with": ["things", 1.5, None]}}
        assert decode(json.dumps(newer).encode(), kind) == message


def test_a_digest_is_32_hex_digits_and_pinned() -> None:
    assert digest(b"") == "cae66941d9efbd404e4d88758ea67670"
    assert digest(b"halfmoon") != digest(b"halfmoon ")


# --- what is refused, with the field named ------------------------------------------------------------------

WRONG: list[Any] = [None, True, 1, 1.5, "\u0000", [], {}, ["x"], {"x": 1}]


def fits(value: Any, kind: shape.Type) -> bool:
    """Whether the JSON `value` is of the right sort for `kind` (the limits within a sort are tested below)."""
    match kind:
        case shape.Metadata():
            return fits(value, kind.type)
        case shape.UnionType():
            return any(fits(value, one) for one in kind.types)
        case shape.IntType():
            return type(value) is int
        case shape.FloatType():
            return type(value) in (int, float)
        case shape.StrType() | shape.BytesType():
            return isinstance(value, str)
        case shape.LiteralType():
            return value in kind.values
        case shape.ListType() | shape.TupleType():
            return isinstance(value, list)
        case shape.BoolType():
            return isinstance(value, bool)
        case shape.NoneType():
            return value is None
        case _:
            return isinstance(value, dict)


@every_message
def test_a_wrong_type_is_refused_with_the_field_named(kind: type[Message]) -> None:
    for good in as_json(kind):
        for name, described in plain_fields(kind):
            for value in WRONG:
                if not fits(value, described):
                    assert f"`$.{name}" in refusal({**good, name: value}, kind)


@every_message
def test_a_missing_field_is_refused_and_named(kind: type[Message]) -> None:
    for good in as_json(kind):
        for field in msgspec.structs.fields(kind):
            if field.required:
                fields = {name: value for name, value in good.items() if name != field.encode_name}
                assert f"`{field.encode_name}`" in refusal(fields, kind)


@every_message
def test_bad_ids_are_refused_with_the_field_named(kind: type[Message]) -> None:
    for good in as_json(kind):
        for name, described in plain_fields(kind):
            if isinstance(described, shape.StrType) and described.pattern is not None:
                # A tenant's mark may be empty; all else that is no id is no mark either.
                for bad in BAD_IDS if "?$" not in described.pattern else [bad for bad in BAD_IDS if bad]:
                    assert f"`$.{name}`" in refusal({**good, name: bad}, kind)


@every_message
def test_integers_out_of_range_are_refused_with_the_field_named(kind: type[Message]) -> None:
    for good in as_json(kind):
        for name, described in plain_fields(kind):
            if isinstance(described, shape.IntType):
                if described.ge is not None:
                    assert f"`$.{name}`" in refusal({**good, name: described.ge - 1}, kind)
                if described.le is not None:
                    for bad in (described.le + 1, 2**63, 2**64, 10**30):
                        assert f"`$.{name}`" in refusal({**good, name: bad}, kind)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_finite_number_is_refused(token: str) -> None:
    for payload, kind in (
        (json.dumps(finished(queue_ns="X")).replace('"X"', token), PrefillFinished),
        (f'{{"type":"TakeReply","sampling":{{"temperature":{token}}}}}', TakeReply),
    ):
        with pytest.raises(MessageInvalid):
            decode(payload.encode(), kind)


def test_floats_in_the_place_of_integers_are_refused() -> None:
    for bad in (1.0, 1e3, -0.0):
        assert "`$.queue_ns`" in refusal(finished(queue_ns=bad))


def test_a_message_of_another_class_is_refused_by_its_type() -> None:
    assert "PrefillFinished" in refusal(finished(), TakeReply)
    assert "`$.type`" in refusal(finished(type="PrefillStarted"))
    assert "`$.type`" in refusal(finished(type="TakeReply"), Event)
    assert "`type`" in refusal({}, Event)


def test_block_keys_that_are_no_whole_keys_are_refused() -> None:
    arrived = {
        "type": "RequestArrived", "request_id": "r", "frontend_id": "f", "prompt_tokens": 1, "max_tokens": 1,
    }  # fmt: skip
    assert "block_keys: 3 bytes" in refusal({**arrived, "block_keys": "YWJj"}, RequestArrived)
    assert "`$.block_keys`" in refusal({**arrived, "block_keys": "not base64!"}, RequestArrived)
    assert "block_keys: 3 bytes" in refusal({"type": "TakeReply", "block_keys": "YWJj"}, TakeReply)
    for kind in ("StoreInventory", "BlocksStored", "BlocksEvicted"):
        fields = {
            "type": kind,
            "node_id": "n",
            "incarnation": "i",
            "part": 0,
            "parts": 1,
            "block_keys": "YWJj",
        }
        assert "block_keys: 3 bytes" in refusal(fields, Event)
    with pytest.raises(ValueError, match="17 bytes"):
        BlocksStored(node_id="n", incarnation="i", block_keys=b"x" * 17)


def test_a_negative_slot_is_refused() -> None:
    fields = {"type": "TransferOpened", "order_id": "o", "request_id": "r", "slots": [3, -1]}
    assert "`$.slots[1]`" in refusal(fields, TransferOpened)


def test_texts_have_a_limit() -> None:
    fields = {"type": "StoreSuspected", "node_id": "n", "reporter_id": "w"}
    decode(json.dumps({**fields, "reason": "é" * 512}).encode(), StoreSuspected)
    assert "`$.reason`" in refusal({**fields, "reason": "é" * 513}, StoreSuspected)


# --- bytes from anywhere ------------------------------------------------------------------------------------

HOSTILE = {
    "empty": b"",
    "one space": b" ",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "cut short": b'{"type":"TimerFired","key":"k',
    "two values": b'{"type":"TimerFired","key":"k","at_ns":1} {}',
    "invalid UTF-8 in a field": b'{"type":"TimerFired","key":"\xff\xfe","at_ns":1}',
    "invalid UTF-8 in a name": b'{"type":"TimerFired","\xff":1',
    "half a surrogate pair": b'{"type":"TimerFired","key":"\\ud800","at_ns":1}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"type":"TimerFired","key":"k","at_ns":1}'.encode("utf-16"),
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep lists, closed": b"[" * 200_000 + b"]" * 200_000,
    "deep unknown field": b'{"type":"TimerFired","key":"k","at_ns":1,"x":' + b"[" * 200_000,
    "deep known field": b'{"type":"TimerFired","key":' + b'{"a":' * 200_000,
    "deep before the type": b'{"x":' + b"[" * 200_000,
    "a number of 100,000 digits": b'{"type":"TimerFired","key":"k","at_ns":' + b"9" * 100_000 + b"}",
    "an exponent of 100,000 digits": b'{"type":"TimerFired","key":"k","at_ns":1e' + b"9" * 100_000 + b"}",
    "16 MiB of one byte": b"x" * (16 << 20),
    "16 MiB of spaces": b" " * (16 << 20),
    "a type of 16 MiB": b'{"type":"' + b"x" * (16 << 20) + b'"}',
    "a binary protocol": bytes(range(256)),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("kind", [TimerFired, Event, Ordered], ids=["a class", "a union", "a nested union"])
def test_hostile_bytes_raise_nothing_but_message_invalid(kind: Any, payload: bytes) -> None:
    with pytest.raises(MessageInvalid) as caught:
        decode(payload, kind)
    assert len(str(caught.value)) < 17 << 20


@given(payload=st.binary(max_size=200) | st.text().map(str.encode))
@settings(max_examples=examples(300))
def test_random_bytes_raise_nothing_but_message_invalid(payload: bytes) -> None:
    for kind in (Event, Ordered, KvMessage, TakeReply):
        with pytest.raises(MessageInvalid):
            decode(payload, kind)


@given(data=st.data(), kind=st.sampled_from(MESSAGES))
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
def test_a_damaged_message_is_refused_or_is_another_message(data: st.DataObject, kind: type[Message]) -> None:
    payload = bytearray(encode(data.draw(messages(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = decode(bytes(payload), kind)
    except MessageInvalid:
        return
    assert decode(encode(other), kind) == other


# --- what the encoder refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_say_is_refused_where_it_is_written(number: float) -> None:
    delivery = Delivery(
        request_id="r", order_id="o", index=0,
        tokens=[SampledToken(token_id=1), SampledToken(token_id=2, top_logprobs=[(3, -1.0), (4, number)])],
    )  # fmt: skip
    path = r"`\$\.deliveries\[0\]\.tokens\[1\]\.top_logprobs\[1\]\[1\]`"
    with pytest.raises(MessageInvalid, match=rf"^TokensSampled: .*{path}"):
        encode(TokensSampled(worker_id="w", deliveries=[delivery]))
    with pytest.raises(MessageInvalid, match=r"`\$\.sampling\.logit_bias\.7`"):
        encode(TakeReply(sampling=Sampling(logit_bias={7: number})))


def test_the_word_null_in_a_text_is_no_null() -> None:
    event = FrontendLeft(frontend_id="f", reason="null")
    assert decode(encode(event), FrontendLeft) == event


def test_integers_over_64_bits_and_half_surrogates_are_refused_where_they_are_written() -> None:
    with pytest.raises(MessageInvalid, match="TakeReply"):
        encode(TakeReply(sampling=Sampling(seed=2**64)))
    with pytest.raises(MessageInvalid, match="FrontendLeft"):
        encode(FrontendLeft(frontend_id="f", reason="\ud800"))
