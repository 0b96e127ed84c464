"""The whole KVCache elsewhere: the same bits as if it were here, by request and by heads, and bytes as counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_harness import BLOCK, LAYERS, PROMPTS, SEGMENT, WAIT_S, Place, any_model
from reference import prefill

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, MessageHeader, Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.errors import LenderLost, PartRefused, RowRefusal
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.held_caches import HeldCaches
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.remote_cache import RemoteCache, head_shares
from halfmoon.workers.attention.server import STATES, WHOLE
from halfmoon.workers.attention.tensors import DTYPES, bytes_of
from halfmoon.workers.decode.actions import PushTail
from halfmoon.workers.decode.borrower import Borrower
from halfmoon.workers.decode.group_choice import GroupChoice
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.transformer import Layer
from tests.eventually import eventually_here
from tests.lengths import sizes
from tests.store.channel_harness import addresses, hello, options, shorten
from tests.store.memory_channels import channel_kind

__all__ = ["any_model"]

#: Whole and broken segments and blocks, less than one, none; some reach a bound of either within STEPS.
LENGTHS, STEPS = (200, 30, 126, 20, 0), 6
MEMBERS = range(len(LENGTHS))


@dataclass
class Local:
    """What one worker with a cache computes, which is compared with: of each member and step, its token and logits."""

    engine: Engine
    tables: list[list[int]]
    tokens: list[list[int]] = field(default_factory=list)
    digests: list[list[str]] = field(default_factory=list)


@pytest.fixture(scope="module", name="local")
def any_local(model: LoadedModel) -> Local:
    engine = Engine(model, num_blocks=64, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT)
    tables = [engine.allocator.allocate(-(-(length + STEPS) // BLOCK)) for length in LENGTHS]
    one = Local(engine, tables)
    first = [
        engine.argmax(prefill(engine, PROMPTS[0][i : i + length], table))[0] if length else 7
        for i, (length, table) in enumerate(zip(LENGTHS, tables, strict=True))
    ]
    one.tokens.append(first)
    for number in range(STEPS):
        rows = engine.decode(one.tokens[-1], [length + number for length in LENGTHS], tables)
        one.tokens.append(engine.argmax(rows))
        one.digests.append([engine.logits_digest(row) for row in rows])
    flat = [digest for digests in one.digests for digest in digests]
    assert len(set(flat)) == len(flat)
    return one


@pytest.fixture(scope="module", name="away")
def any_away(local: Local, model: LoadedModel) -> Engine:
    """It has no cache to speak of."""
    return Engine(
        model, num_blocks=16, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT, query_first=True
    )


def whole(name: str, heads: range, hold: int) -> KvPart:
    return KvPart(worker_id=name, first_kv_head=heads.start, kv_heads=len(heads), hold=hold)


class Group:
    """Channels and the cache of one group of rows."""

    def __init__(self, places: Sequence[Place], engine: Engine) -> None:
        self.channels = {place.name: place.connect() for place in places}
        self.cache = RemoteCache(self.channels, engine.config, engine.dtype, SEGMENT)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


class Model:
    """A model worker, and the attention workers that have the members' KV: `by_heads`, or by request."""

    def __init__(
        self, local: Local, away: Engine, count: int, *, by_heads: bool, groups: int = 1, kind: str = "unix"
    ) -> None:
        self.local, self.away, self.by_heads, self.n = local, away, by_heads, groups
        shares = count if by_heads else 1
        self.places = [
            Place(away, f"attention-{i}", kind, head_shares=shares, blocks=len(LENGTHS) * 14)
            for i in range(count)
        ]
        heads = head_shares(away.config.kv_heads, shares)
        self.kv_heads = {place.name: heads[i if by_heads else 0] for i, place in enumerate(self.places)}
        self.groups = [Group(self.places, away) for _ in range(groups)]
        #: Of each member: the steps that it has taken.
        self.taken = [0 for _ in MEMBERS]

    def at(self, member: int) -> list[Place]:
        """Where its KV is."""
        return self.places if self.by_heads else [self.places[member % len(self.places)]]

    def hand_over(self, member: int) -> None:
        """Its prompt, in one push; the hold has blocks in no row."""
        length = LENGTHS[member]
        for place in self.at(member):
            blocks = list(range(member, place.cache.num_blocks, len(LENGTHS)))
            hold = HeldSegments(blocks[::-1], 0, expected=length)
            place.server.holds[member] = hold
            if length:
                with place.connect() as channel:
                    heads = self.kv_heads[place.name]
                    cache, table = self.local.engine.cache, self.local.tables[member]
                    push_tokens(
                        channel, member, cache, table, 0, length, kv_heads=slice(heads.start, heads.stop)
                    )
            assert hold.complete

    def begin(self, members: Sequence[int]) -> None:
        cuts = self.away.groups_of(len(members), self.n)
        for group, rows in zip(self.groups, cuts, strict=False):
            lengths = [LENGTHS[member] + self.taken[member] for member in members[rows]]
            held = [
                [whole(place.name, self.kv_heads[place.name], member) for place in self.at(member)]
                for member in members[rows]
            ]
            group.cache.begin(held, lengths)

    def step(self, members: Sequence[int], number: int) -> None:
        """One token of each: the same bits as there."""
        tokens = [self.local.tokens[self.taken[member]][member] for member in members]
        positions = [LENGTHS[member] + self.taken[member] for member in members]
        caches = [group.cache for group in self.groups][: len(self.away.groups_of(len(members), self.n))]
        for cache in caches:
            cache.step = number
        rows = self.away.decode(tokens, positions, [[]] * len(members), caches, groups=self.n)
        for member, row in zip(members, rows, strict=True):
            assert self.away.logits_digest(row) == self.local.digests[self.taken[member]][member], member
            self.taken[member] += 1

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for place in self.places:
            place.close()


Made = Callable[..., Model]


@pytest.fixture(name="made")
def any_made(request: pytest.FixtureRequest, local: Local, away: Engine) -> Iterator[Made]:
    kind = channel_kind(request.node)
    with contextlib.ExitStack() as stack:

        def make(count: int, *, by_heads: bool = False, groups: int = 1) -> Model:
            one = Model(local, away, count, by_heads=by_heads, groups=groups, kind=kind)
            stack.callback(one.close)
            for member in MEMBERS:
                one.hand_over(member)
            return one

        yield make


@pytest.mark.parametrize("groups", sizes(2, 1))
@pytest.mark.parametrize(("by_heads", "count"), [(False, 1), (False, 2), (True, 3)])
def test_the_same_bits_while_members_come_and_go(made: Made, by_heads: bool, count: int, groups: int) -> None:
    model = made(count, by_heads=by_heads, groups=groups)
    batches = {0: [0, 1], 1: [0, 1, 2, 3, 4], 3: [4, 2, 0], 5: [3, 0]}
    members: list[int] = []
    for number in range(STEPS):
        if number in batches:
            members = batches[number]
            model.begin(members)
        model.step(members, number)
    assert model.taken == [6, 3, 4, 3, 4]
    for member in MEMBERS:
        for place in model.at(member):
            assert place.server.holds[member].tokens == LENGTHS[member] + model.taken[member]


@pytest.mark.pure
def test_n_groups_have_the_bits_of_one(made: Made) -> None:
    model = made(1, groups=3)
    model.begin(MEMBERS)
    for number in range(2):
        model.step(MEMBERS, number)


@pytest.mark.pure
@pytest.mark.parametrize(("by_heads", "count"), [(False, 2), (True, 3)])
def test_bytes_are_those_of_the_formula(made: Made, by_heads: bool, count: int) -> None:
    """A step's payload is (2 + 2/G) e d B L, whatever the split; each layer has three messages at each place."""
    model = made(count, by_heads=by_heads)
    model.begin(MEMBERS)
    config, size = model.away.config, model.away.dtype.itemsize
    for number in range(2):
        model.step(MEMBERS, number)
    channels = model.groups[0].channels.values()
    total = messages = headers = 0
    for channel in channels:
        for counts, op in (
            (channel.sent, Op.QUERY),
            (channel.sent, Op.KEY_VALUE),
            (channel.received, Op.OUT),
        ):
            total += counts.payload_bytes(op)
            messages += counts.messages(op)
            headers += counts.header_bytes(op)
        others = {*channel.sent.by_op(), *channel.received.by_op()} - {"QUERY", "KEY_VALUE", "OUT"}
        assert others <= {"HELLO", "SLOTS", "CREDIT"}
    group, hidden = config.heads // config.kv_heads, config.heads * config.head_dim
    assert total * group == 2 * (2 * group + 2) * size * hidden * len(MEMBERS) * LAYERS
    assert messages == 2 * 3 * LAYERS * count
    assert headers == messages * HEADER_BYTES
    assert HEADER_BYTES <= 64


@pytest.mark.pure
def test_attention_to_the_past_begins_before_the_new_keys_are_there(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's end computes no key before the place has begun, which it could not do the other way round."""
    model = made(1)
    server = model.places[0].server
    project = Layer.key_value
    asked = 0

    def late(self: Layer, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal asked
        asked += 1
        eventually_here(lambda: server.counts.queries >= asked, "the place has begun", every_s=0.001)
        return project(self, *inputs)

    monkeypatch.setattr(Layer, "key_value", late)
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)
    assert server.counts.queries == server.counts.early == asked == LAYERS


@pytest.mark.pure
def test_what_is_begun_goes_out_before_another_query_is_taken(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one group waits for attention of the other, and two groups gain little over one."""
    model = made(1, groups=2)
    ask, merge = HeldCaches.ask, HeldCaches.merge
    taken: list[tuple[str, HeldCaches]] = []
    all_sent = threading.Event()

    def noted_ask(self: HeldCaches, header: MessageHeader) -> None:
        taken.append(("ask", self))
        all_sent.wait(WAIT_S)
        ask(self, header)

    def noted_merge(self: HeldCaches, header: MessageHeader) -> RowRefusal | None:
        taken.append(("merge", self))
        return merge(self, header)

    monkeypatch.setattr(HeldCaches, "ask", noted_ask)
    monkeypatch.setattr(HeldCaches, "merge", noted_merge)
    model.begin(MEMBERS)
    config = model.away.config
    q = torch.ones(len(MEMBERS), config.heads, config.head_dim, dtype=model.away.dtype)
    cuts = model.away.groups_of(len(MEMBERS), 2)
    both = list(zip(model.groups, cuts, strict=True))
    for layer, asked in enumerate((both, both[::-1])):
        taken.clear()
        all_sent.clear()
        for group, rows in asked:
            group.cache.ask(layer, q[rows])
        for group, rows in asked[::-1]:  # the other's query is older than these keys
            group.cache.tell(q[rows, : config.kv_heads], q[rows, : config.kv_heads])
        all_sent.set()
        for group, rows in asked:
            group.cache.collect(torch.empty_like(q[rows]))
        assert [what for what, _ in taken] == ["ask", "merge", "ask", "merge"], layer
        assert taken[0][1] is taken[1][1] is not taken[2][1]


@pytest.mark.pure
def test_a_step_that_failed_is_taken_again_with_those_who_are_left(made: Made) -> None:
    model = made(2, groups=2)
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)
    model.places[1].close()
    with pytest.raises(ChannelLost, match="attention-1"):
        model.step(MEMBERS, 1)
    with pytest.raises(AssertionError, match="begin again"):
        model.groups[0].cache.ask(0, torch.empty(2, 9, 64))
    left = [member for member in MEMBERS if model.at(member) == [model.places[0]]]
    model.begin(left)
    for number in range(1, 3):
        model.step(left, number)


@pytest.mark.pure
def test_another_model_worker_goes_on_where_one_was_lost_in_mid_step(made: Made) -> None:
    """Nothing is computed again but the token whose step was not finished."""
    model = made(1, by_heads=False)
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)
    cache = model.groups[0].cache
    config = model.away.config
    q = torch.ones(len(MEMBERS), config.heads, config.head_dim, dtype=model.away.dtype)
    cache.step = 1
    cache.ask(0, q)
    cache.tell(q[:, : config.kv_heads], q[:, : config.kv_heads])
    model.groups[0].close()
    model.groups[0] = Group(model.places, model.away)
    model.begin(MEMBERS)
    for number in range(1, 3):
        model.step(MEMBERS, number)


@pytest.mark.pure
def test_an_older_list_does_not_write_to_what_a_newer_one_has(made: Made) -> None:
    model = made(1, groups=1)
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)
    newer = Group(model.places, model.away)
    tokens = LENGTHS[0] + 1
    newer.cache.begin([[whole("attention-0", range(3), 0)]], [tokens])
    newer.cache.ask(0, torch.zeros(1, 9, 64, dtype=model.away.dtype))
    with pytest.raises(PartRefused, match="attention-0: slots: hold 0 is on a newer list"):
        model.step(MEMBERS, 1)
    newer.close()


REFUSED = [
    ([(77, 5)], "slots 2: hold 77 is not here", 77),
    ([(-5, 5)], "slots 2: hold -5 is not here", 0),
    ([(0, 201)], "slots 2: hold 0 has 200 tokens, and 201 were meant", 0),
    ([(0, 199)], "slots 2: hold 0 has 200 tokens, and 199 were meant", 0),
    ([(0, 200), (0, 200)], "slots 2: 2 rows, where each has a hold of its own", 0),
    ([(8, 3)], "slots 2: hold 8 has 3 of 4 tokens", 8),
    ([(9, BLOCK)], "slots: hold 9 is full: 16 tokens", 9),
]


class WaitClock:
    """In place of `time` where answers are waited for; moves when the slow place is at work."""

    now_ns = looks = 0

    def monotonic_ns(self) -> int:
        self.looks += 1
        return self.now_ns


@pytest.mark.pure
def test_the_wait_for_a_slow_place_is_measured(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(2)
    merge, slow, clock = HeldCaches.merge, model.places[1].cache, WaitClock()
    layers = 0

    def slowly(self: HeldCaches, header: MessageHeader) -> RowRefusal | None:
        nonlocal layers
        if self._cache is slow:
            # Before and after the other's answer, and before this one's.
            eventually_here(lambda: clock.looks == 4 * layers + 3, "it is waited for", every_s=0.001)
            clock.now_ns += 50_000_000
            layers += 1
        return merge(self, header)

    model.begin(MEMBERS)
    monkeypatch.setattr("halfmoon.workers.attention.remote_places.time", clock)
    monkeypatch.setattr(HeldCaches, "merge", slowly)
    model.step(MEMBERS, 0)
    # The other answers meanwhile, whenever it is asked for.
    assert model.groups[0].cache.waits_ns == {"attention-0": 0, "attention-1": LAYERS * 50_000_000}


def test_who_says_nothing_is_lost_after_the_bound_of_its_channel(
    away: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the connection, and takes no message."""
    settings = options("unix", timeout_s=WAIT_S)

    def impatient(*args: Any, **named: Any) -> WorkerChannel:
        channel = connect(*args, **named)
        shorten(channel, 0.2)
        return channel

    monkeypatch.setattr("halfmoon.workers.attention.worker_channels.connect", impatient)
    listener = ChannelListener(hello("attention-0"), settings)
    choice = GroupChoice(1, CostProfile(), hello("decode-0"))
    borrower = Borrower(away, hello("decode-0"), settings, choice)
    borrower.addresses["attention-0"] = addresses(listener, "unix")
    part = whole("attention-0", range(3), 5)
    row = SimpleNamespace(order_id="o", parts=[part], output=[7], length=20, table=[])
    with pytest.raises(LenderLost, match="nothing came for 200 ms") as lost:
        borrower.decode([row])  # type: ignore[list-item]
    assert (lost.value.worker_id, lost.value.hold) == ("attention-0", 0)
    listener.close()
    borrower.close()


@pytest.mark.pure
def test_lists_are_refused_by_field_and_the_channel_goes_on(made: Made) -> None:
    model = made(1)
    holds, cache = model.places[0].server.holds, model.groups[0].cache
    holds[8] = HeldSegments([1], 3, expected=4)
    holds[9] = HeldSegments([2], BLOCK)
    config = model.away.config
    for held, reason, named in REFUSED:
        cache._number = 1
        cache.begin(
            [[whole("attention-0", range(3), hold)] for hold, _ in held], [tokens for _, tokens in held]
        )
        q = torch.zeros(len(held), config.heads, config.head_dim, dtype=model.away.dtype)
        # Two layers: the answer to the second says the same.
        for layer in range(2):
            cache.ask(layer, q)
            cache.tell(q[:, : config.kv_heads], q[:, : config.kv_heads])
            with pytest.raises(PartRefused) as refused:
                cache.collect(q)
            assert str(refused.value) == f"attention-0: {reason}"
            assert refused.value.hold == named
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)


@pytest.mark.pure
def test_a_hold_that_fills_up_says_so_and_one_with_more_blocks_goes_on(made: Made) -> None:
    model = made(1)
    hold = model.places[0].server.holds[1]
    more, hold.blocks = hold.blocks[2:], hold.blocks[:2]  # room for 32, and 30 are here
    model.begin([1, 3])
    model.step([1, 3], 0)
    model.step([1, 3], 1)
    with pytest.raises(PartRefused, match="slots: hold 1 is full: 32 tokens"):
        model.step([1, 3], 2)
    hold.blocks += more
    model.begin([1, 3])
    model.step([1, 3], 2)


@pytest.mark.pure
def test_a_hold_that_was_dropped_is_refused(made: Made) -> None:
    model = made(1)
    model.begin(MEMBERS)
    model.step(MEMBERS, 0)
    model.places[0].server.drop(3)
    with pytest.raises(PartRefused, match="attention-0: hold 3 was dropped") as refused:
        model.step(MEMBERS, 1)
    assert refused.value.hold == 3


@pytest.mark.pure
def test_questions_out_of_order_are_refused(made: Made) -> None:
    model = made(1)
    model.begin([0])
    cache, config = model.groups[0].cache, model.away.config
    q = torch.zeros(1, config.heads, config.head_dim, dtype=model.away.dtype)
    k = q[:, : config.kv_heads]
    cache._layer = 0
    cache.tell(k, k)
    with pytest.raises(PartRefused, match="layer: k and v of step 0, layer 0 came without their query"):
        cache.collect(q)
    cache.ask(1, q)
    cache.tell(k, k)
    with pytest.raises(PartRefused, match="layer: 1, where 0 was due"):
        cache.collect(q)


@pytest.mark.pure
def test_keys_for_who_holds_segments_end_the_channel(made: Made) -> None:
    model = made(1)
    with model.places[0].connect() as channel:
        slots = torch.tensor([[0, 0]], dtype=torch.int32)
        channel.send(MessageHeader(Op.SLOTS, rows=1, slots=1), bytes_of(slots))
        channel.send(MessageHeader(Op.KEY_VALUE, rows=1, slots=1))
        with pytest.raises(ChannelLost, match="op: KEY_VALUE is not for who holds segments"):
            channel.receive(lambda header: memoryview(bytearray(header.payload_bytes)))


@pytest.mark.pure
def test_a_channel_has_a_list_of_each_kind_and_of_each_the_newest(made: Made) -> None:
    model = made(1)
    config, dtype = model.away.config, model.away.dtype
    query = torch.ones(1, config.heads, config.head_dim, dtype=dtype)
    new = torch.ones(2, 1, config.kv_heads, config.head_dim, dtype=dtype)
    with model.places[0].connect() as channel:

        def say(kind: int, number: int, pair: list[int]) -> None:
            header = MessageHeader(Op.SLOTS, parts=kind, rows=1, slots=number)
            channel.send(header, bytes_of(torch.tensor([pair], dtype=torch.int32)))

        def ask(op: Op, number: int, rows: torch.Tensor) -> None:
            channel.send(MessageHeader(op, DTYPES[dtype], rows=1, slots=number), bytes_of(rows))

        def heard() -> tuple[Op, int]:
            found = channel.receive(lambda header: memoryview(bytearray(header.payload_bytes)))
            return found.op, found.slots

        say(WHOLE, 1, [0, LENGTHS[0]])
        say(STATES, 2, [0, 1])
        ask(Op.QUERY, 1, query)
        ask(Op.QUERY, 2, query)
        ask(Op.KEY_VALUE, 1, new)
        assert [heard(), heard()] == [(Op.PARTIAL, 2), (Op.OUT, 1)]
        say(WHOLE, 3, [2, LENGTHS[2]])
        ask(Op.QUERY, 2, query)
        assert heard() == (Op.PARTIAL, 2)
        ask(Op.QUERY, 1, query)
        with pytest.raises(ChannelLost, match="slots: 1 is not the newest list, 3"):
            heard()


@pytest.mark.pure
def test_ends_of_prompts_go_over_one_channel_until_the_place_starts_again(made: Made, local: Local) -> None:
    model, settings = made(1), options("unix", timeout_s=WAIT_S)
    (place,) = model.places
    borrower = Borrower(
        local.engine, hello("decode-0"), settings, GroupChoice(1, CostProfile(), hello("decode-0"))
    )
    borrower.addresses[place.name] = addresses(place.listener, place.kind)
    kv_heads = model.away.config.kv_heads

    def push(holder: Place, hold: int) -> None:
        holder.server.holds[hold] = HeldSegments([hold], 0)
        borrower.push(PushTail("o", local.tables[0][0], 0, 3, (whole(holder.name, range(kv_heads), hold),)))
        assert holder.server.holds.pop(hold).tokens == 3

    push(place, 50)
    (first,) = borrower._pushes.open.values()
    push(place, 51)
    assert list(borrower._pushes.open.values()) == [first]
    with pytest.raises(LenderLost, match="hold 52 is not here"):
        borrower.push(PushTail("o", local.tables[0][0], 0, 3, (whole(place.name, range(kv_heads), 52),)))
    assert list(borrower._pushes.open.values()) == [first]
    place.close()
    again = Place(model.away, place.name, place.kind)
    model.places.append(again)
    borrower.addresses[place.name] = addresses(again.listener, again.kind)
    push(again, 1)
    assert list(borrower._pushes.open.values()) != [first]
    borrower._pushes.close()


@pytest.mark.pure
def test_heads_that_do_not_divide_and_rows_without_a_place(made: Made) -> None:
    assert head_shares(6, 3) == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(ValueError, match="places: 3 KV heads do not divide by 2"):
        head_shares(3, 2)
    cache = made(1).groups[0].cache
    for held, heads, reason in (
        ([[0]], range(2), "rows: KV head 2 of row 0 is at 0 places"),
        ([[], [0]], range(3), "rows: KV head 0 of row 0 is at 0 places"),
        ([[0, 0]], range(3), "rows: KV head 0 of row 0 is at 2 places"),
    ):
        with pytest.raises(ValueError, match=reason):
            cache.begin(
                [[whole("attention-0", heads, hold) for hold in holds] for holds in held], [200] * len(held)
            )


@pytest.mark.pure
def test_the_query_alone_has_the_bits_that_it_has_with_keys_and_values(local: Local, away: Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    for rows in (1, 16):
        x = torch.randn(rows, away.config.hidden, generator=generator).to(away.dtype)
        positions = torch.arange(rows) * 91
        cos, sin = away.transformer.rotary.rows(positions % away.transformer.rotary.positions)
        for ours, theirs in zip(away.transformer.layers, local.engine.transformer.layers, strict=True):
            q, normed = ours.query(x, cos, sin)
            together = theirs.project(x, cos, sin)
            for one, two in zip((q, *ours.key_value(normed, cos, sin)), together, strict=True):
                assert torch.equal(one, two)
            for one, two in zip(ours.project(x, cos, sin), together, strict=True):
                assert torch.equal(one, two)
