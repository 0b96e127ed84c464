"""The KVCache elsewhere at 1 to 4 places, by request, by heads and by sequence: the same bits, and bytes as counted.

Invariant I108 of `docs/invariants.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from attention_harness import BLOCK, EACH, LAYERS, PROMPTS, SEGMENT, WAIT_S, Place
from reference import prefill

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import MessageHeader, Op
from halfmoon.workers.attention.errors import LenderLost
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.decode.borrower import Borrower
from halfmoon.workers.decode.group_choice import GroupChoice
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from tests.store.channel_harness import addresses, hello, options
from tests.store.memory_channels import channel_kind

#: Whole and broken segments; one and two of them with nothing behind; less than one.
LENGTHS, STEPS = (200, 64, 130, 32, 20), 4
MEMBERS = range(len(LENGTHS))
HEADS = {"heads": 8, "kv_heads": 4}


@pytest.fixture(scope="module", params=["f32", pytest.param("bf16", marks=pytest.mark.slow)], name="model")
def four_kv_heads(request: pytest.FixtureRequest) -> LoadedModel:
    """Eight of the nine heads, and a fourth KV head of the third's weights and others'."""
    found: LoadedModel = request.getfixturevalue(f"model_{request.param}")
    config = replace(found.config, layers=LAYERS, **HEADS)
    dim, weights = config.head_dim, dict(found.weights)
    for layer in range(LAYERS):
        wide, out = weights[f"layers.{layer}.qkv"], weights[f"layers.{layer}.out"]
        q, k, v = wide.split([9 * dim, 3 * dim, 3 * dim])
        again = [torch.cat([each, each[:dim].flip(0)]) for each in (k, v)]
        weights[f"layers.{layer}.qkv"] = torch.cat([q[: 8 * dim], *again])
        weights[f"layers.{layer}.out"] = out[:, : 8 * dim].contiguous()
    return replace(found, config=config, weights=weights)


@dataclass
class Member:
    """What of a decode worker's sequence the borrower looks at."""

    parts: list[KvPart]
    prompt_tokens: int
    output: list[int]
    table: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_tokens + len(self.output) - 1


class Local:
    """What one worker with a cache computes: of each member and step, its token and logits."""

    def __init__(self, model: LoadedModel) -> None:
        self.engine = Engine(model, num_blocks=64, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT)
        self.tables = [self.engine.allocator.allocate(-(-(length + STEPS) // BLOCK)) for length in LENGTHS]
        self.tokens = [
            [self.engine.argmax(prefill(self.engine, PROMPTS[0][i : i + length], table))[0]]
            for i, (length, table) in enumerate(zip(LENGTHS, self.tables, strict=True))
        ]
        self.digests: list[list[str]] = [[] for _ in LENGTHS]
        for number in range(STEPS):
            at = [length + number for length in LENGTHS]
            rows = self.engine.decode([each[-1] for each in self.tokens], at, self.tables)
            for member, (row, token) in enumerate(zip(rows, self.engine.argmax(rows), strict=True)):
                self.tokens[member].append(token)
                self.digests[member].append(self.engine.logits_digest(row))


@pytest.fixture(scope="module", name="local")
def any_local(model: LoadedModel) -> Local:
    return Local(model)


class Spread:
    """A decode worker without KV, and attention workers that have the members' KV in one of three ways."""

    def __init__(
        self, local: Local, model: LoadedModel, split: str, count: int, groups: int, kind: str
    ) -> None:
        self.local, self.split, settings = local, split, options("unix", timeout_s=WAIT_S)
        self.away = Engine(
            model, num_blocks=1, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT, query_first=True
        )
        shares = count if split == "heads" else 1
        self.places = [
            Place(self.away, f"attention-{i}", kind, head_shares=shares, blocks=80, **HEADS)
            for i in range(count)
        ]
        ours = hello("decode-0", **HEADS)
        choice = GroupChoice(groups, CostProfile(), ours)
        self.borrower = Borrower(self.away, ours, settings, choice)
        for place in self.places:
            self.borrower.addresses[place.name] = addresses(place.listener, kind)
        self.members = [self.member(number) for number in MEMBERS]

    def given(self, number: int) -> list[KvPart]:
        """Where a member's KV is to be."""
        length, count, heads = LENGTHS[number], len(self.places), HEADS["kv_heads"]
        turned = [self.places[(number + i) % count].name for i in range(count)]
        if self.split == "heads":
            each = heads // count
            return [
                KvPart(worker_id=place.name, first_kv_head=i * each, kv_heads=each)
                for i, place in enumerate(self.places)
            ]
        # At the last place what is behind the whole segments, which may be nothing, and a share of these.
        ends = (
            [length // SEGMENT * (i + 1) // count for i in range(count - 1)]
            if self.split == "sequence"
            else []
        )
        firsts = dict.fromkeys([0, *ends])
        found = [
            KvPart(worker_id=name, first_kv_head=0, kv_heads=heads, first_segment=first, segments=end - first)
            for name, first, end in zip(turned, firsts, [*list(firsts)[1:], 0], strict=False)
            if end
        ]
        last = turned[len(found)]
        end = list(firsts)[-1]
        return [*found, KvPart(worker_id=last, first_kv_head=0, kv_heads=heads, first_segment=end)]

    def member(self, number: int) -> Member:
        """Its prompt is pushed to where it is to be."""
        length, parts = LENGTHS[number], []
        for given in self.given(number):
            part = msgspec.structs.replace(given, hold=number + 1)
            first, tokens = part.first_segment * EACH, part.size(length, SEGMENT)
            place = next(one for one in self.places if one.name == given.worker_id)
            blocks = list(range(number, place.cache.num_blocks, len(LENGTHS)))[::-1]
            hold = HeldSegments(blocks, 0, expected=tokens)
            place.server.holds[part.hold] = hold
            if tokens:
                named = part.heads(HEADS["kv_heads"])
                heads = slice(named.start, named.stop)
                table = self.local.tables[number][first:]
                with place.connect() as channel:
                    push_tokens(
                        channel,
                        part.hold,
                        self.local.engine.cache,
                        table,
                        0,
                        tokens,
                        kv_heads=heads,
                    )
            assert hold.complete
            parts.append(part)
        return Member(parts, length, [self.local.tokens[number][0]])

    def step(self, numbers: Sequence[int]) -> None:
        """One token of each: the same bits as there."""
        batch: list[Any] = [self.members[number] for number in numbers]
        rows = self.borrower.decode(batch)
        for number, row in zip(numbers, rows, strict=True):
            taken = len(self.members[number].output)
            assert self.away.logits_digest(row) == self.local.digests[number][taken - 1], (number, taken)
            self.members[number].output.append(self.local.tokens[number][taken])

    def channels(self) -> list[WorkerChannel]:
        (group,) = self.borrower._groups
        return list(group.channels.open.values())

    def close(self) -> None:
        self.borrower.close()
        for place in self.places:
            place.close()


Made = Callable[..., Spread]


@pytest.fixture(name="made")
def any_made(request: pytest.FixtureRequest, local: Local, model: LoadedModel) -> Iterator[Made]:
    kind = channel_kind(request.node)
    with contextlib.ExitStack() as stack:

        def make(split: str, count: int, groups: int = 1) -> Spread:
            one = Spread(local, model, split, count, groups, kind)
            stack.callback(one.close)
            return one

        yield make


SPLITS = [
    pytest.param(split, count, marks=[] if (split, count) == ("sequence", 3) else pytest.mark.slow)
    for split in ("request", "heads", "sequence")
    for count in (1, 2, 3, 4)
    if split != "heads" or HEADS["kv_heads"] % count == 0
]


@pytest.mark.parametrize(("split", "count"), SPLITS)
def test_the_same_bits_at_so_many_places_while_members_come_and_go(
    made: Made, split: str, count: int
) -> None:
    spread = made(split, count, groups=2)
    used = {part.worker_id for member in spread.members for part in member.parts}
    assert len(used) == count
    if split == "sequence":
        assert max(len(member.parts) for member in spread.members) == count
    for numbers in ([0, 1], MEMBERS, MEMBERS, [4, 2, 0]):
        spread.step(numbers)
    assert [len(member.output) - 1 for member in spread.members] == [4, 3, 3, 2, 3]


@pytest.mark.pure
def test_a_planted_difference_in_a_part_is_seen(made: Made) -> None:
    spread = made("sequence", 3)
    spread.step([0])
    place = spread.places[0]
    block, held = place.server.holds[1].blocks[0], np.zeros(place.cache.layer_block_bytes, np.uint8)
    place.cache.read_block(0, block, held)
    held[3] ^= 0x40
    place.cache.write_block(0, block, held)
    with pytest.raises(AssertionError):
        spread.step([0])


@pytest.mark.pure
def test_bytes_by_sequence_are_those_of_the_formula(made: Made) -> None:
    """Up: a query to each place of a row, k and v to one. Down: a state of each segment, or one row of a whole."""
    spread = made("sequence", 3)
    spread.step(MEMBERS)
    config, size = spread.away.config, spread.away.dtype.itemsize
    query, state = config.heads * config.head_dim * size, config.heads * (config.head_dim * size + 4)
    token = 2 * config.kv_heads * config.head_dim * size
    up = down = 0
    for member, length in zip(spread.members, LENGTHS, strict=True):
        up += len(member.parts) * query + token
        down += -(-length // SEGMENT) * state if len(member.parts) > 1 else query
    channels = spread.channels()
    sent = sum(one.sent.payload_bytes(op) for one in channels for op in (Op.QUERY, Op.KEY_VALUE))
    heard = sum(one.received.payload_bytes(op) for one in channels for op in (Op.OUT, Op.PARTIAL))
    assert (sent, heard) == (LAYERS * up, LAYERS * down)
    others = {op for one in channels for op in (*one.sent.by_op(), *one.received.by_op())}
    assert others <= {"QUERY", "KEY_VALUE", "OUT", "PARTIAL", "HELLO", "SLOTS", "CREDIT"}


@pytest.mark.pure
def test_a_lost_place_fails_the_step_and_the_others_go_on_from_where_they_were(made: Made) -> None:
    spread = made("sequence", 3)
    spread.step(MEMBERS)
    spread.places[1].close()
    with pytest.raises(LenderLost) as lost:
        spread.step(MEMBERS)
    assert lost.value.worker_id == "attention-1"
    left = [
        number
        for number in MEMBERS
        if all(part.worker_id != "attention-1" for part in spread.members[number].parts)
    ]
    assert left
    spread.step(left)
    spread.step(left)


@pytest.mark.pure
def test_a_part_that_was_dropped_is_refused_and_the_channels_go_on(made: Made) -> None:
    spread = made("sequence", 2)
    spread.step(MEMBERS)
    first, last = spread.members[0].parts
    for part in (last, first):
        place = next(one for one in spread.places if one.name == part.worker_id)
        hold = place.server.holds[part.hold]
        place.server.drop(part.hold)
        with pytest.raises(LenderLost, match=r"hold 1 (was dropped|is not here)"):
            spread.step(MEMBERS)
        place.server.holds[part.hold] = hold
    spread.step(MEMBERS)
    assert len(spread.channels()) == 2


@pytest.mark.pure
def test_states_that_are_more_than_the_other_end_takes_are_refused(made: Made) -> None:
    place = made("request", 1).places[0]
    place.server.holds[9] = HeldSegments(list(range(80)), 1)
    with place.connect(message_bytes_max=4096) as channel:
        pairs = torch.tensor([[9, 1]], dtype=torch.int32)
        channel.send(MessageHeader(Op.SLOTS, parts=2, rows=1, slots=1), bytes_of(pairs))
        query = torch.zeros(1, 8, 64, dtype=place.cache.dtype)
        new = torch.zeros(2, 1, 4, 64, dtype=place.cache.dtype)
        header = MessageHeader(Op.QUERY, DTYPES[place.cache.dtype], rows=1, slots=1)
        channel.send(header, bytes_of(query))
        channel.send(header._replace(op=Op.KEY_VALUE), bytes_of(new))
        reason = bytearray()

        def into(header: MessageHeader) -> memoryview:
            reason.extend(bytes(header.payload_bytes))
            return memoryview(reason)

        assert channel.receive(into).op is Op.REFUSED
        assert b"bytes, and 4096 are taken" in reason
