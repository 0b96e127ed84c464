"""Segments of a live sequence at other workers: the same bits as if all of them were here, and bytes as counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from reference import prefill

from halfmoon.store.channels.header import HEADER_BYTES, Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.remote_segments import HeldPart, PartRefused, RemoteSegments
from halfmoon.workers.attention.server import HeldSegments, SegmentServer
from halfmoon.workers.model.attention import SdpaAttention
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.files import LoadedModel
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.segments import AWAY
from tests.store.channel_harness import addresses, hello, options

BLOCK, SEGMENT, LAYERS, STEPS = 16, 32, 3, 6
EACH = SEGMENT // BLOCK
#: Threads of several products may keep each other from the processors for seconds.
WAIT_S = 60.0
LENGTHS = (200, 33, 130, 20)
PROMPTS = [
    [(i * i * 31 + 17 * i + 900 * seed) % 40000 + 20 for i in range(n)] for seed, n in enumerate(LENGTHS)
]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(f"model_{request.param}")
    return replace(found, config=replace(found.config, layers=LAYERS))


@pytest.fixture
def engine(model: LoadedModel) -> Engine:
    return Engine(model, num_blocks=64, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT)


class Place:
    """A worker that holds segments for others: a cache, and a thread that serves."""

    def __init__(self, engine: Engine, name: str, kind: str) -> None:
        config = engine.config
        self.cache = PagedCache(config, 24, BLOCK, engine.dtype)
        self.cache.k.fill_(float("nan"))  # what was never brought there would be seen
        self.cache.v.fill_(float("nan"))
        attention = SdpaAttention(BLOCK, torch.device("cpu"))
        self.server = SegmentServer(attention, self.cache, segment_tokens=SEGMENT, heads=config.heads)
        self.listener = ChannelListener(hello(name), options(kind, timeout_s=WAIT_S))
        self.kind, self.name = kind, name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self.listener, self._over.is_set))
        self._thread.start()
        self._next_hold = 0

    def take(self, engine: Engine, table: list[int], first: int, segments: int) -> int:
        """Moves whole segments of a sequence here, as raw bytes; nothing of them stays. Returns the hold."""
        used = sum(len(hold.blocks) for hold in self.server.holds.values())
        blocks = list(range(23 - used, 23 - used - segments * EACH, -1))  # in reverse: they lie in no row
        buffer = torch.empty(engine.cache.layer_block_bytes, dtype=torch.uint8)
        for i, block in enumerate(blocks):
            place = first * EACH + i
            for layer in range(LAYERS):
                engine.cache.read_block(layer, table[place], buffer)
                self.cache.write_block(layer, block, buffer)
            engine.cache.k[:, table[place]] = float("nan")
            engine.cache.v[:, table[place]] = float("nan")
            table[place] = AWAY
        self._next_hold += 1
        self.server.holds[self._next_hold] = HeldSegments(blocks, segments * SEGMENT)
        return self._next_hold

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.listener.close()


class Borrower:
    """An engine whose sequences are partly elsewhere."""

    def __init__(self, engine: Engine, places: list[Place]) -> None:
        self.engine, self.places = engine, {place.name: place for place in places}
        self.channels = {
            place.name: connect(
                addresses(place.listener, place.kind),
                hello("decode-0"),
                options(place.kind, timeout_s=WAIT_S),
                peer=place.name,
            )
            for place in places
        }
        config = engine.config
        self.remote = RemoteSegments(
            self.channels, heads=config.heads, head_dim=config.head_dim, dtype=engine.dtype
        )
        self.parts: dict[str, list[HeldPart]] = {name: [] for name in self.places}

    def lend(self, name: str, row: int, tables: list[list[int]], first: int, segments: int) -> None:
        hold = self.places[name].take(self.engine, tables[row], first, segments)
        self.parts[name].append(HeldPart(row, first, segments, hold))
        self.remote.begin(self.parts)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


@pytest.fixture(params=["unix", "tls"])
def borrower(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Borrower]:
    with contextlib.ExitStack() as stack:
        places = [Place(engine, f"attention-{i}", request.param) for i in range(3)]
        for place in places:
            stack.callback(place.close)
        one = Borrower(engine, places)
        stack.callback(one.close)
        yield one


def start(engine: Engine) -> tuple[list[list[int]], list[int]]:
    """Tables of the prompts, and the first token of each."""
    tables = [engine.allocator.allocate(-(-(len(prompt) + STEPS) // BLOCK)) for prompt in PROMPTS]
    logits = [prefill(engine, prompt, table) for prompt, table in zip(PROMPTS, tables, strict=True)]
    return tables, [engine.argmax(row)[0] for row in logits]


def step(
    engine: Engine, tables: list[list[int]], tokens: list[int], number: int, remote: RemoteSegments | None
) -> tuple[list[str], list[int]]:
    if remote is not None:
        remote.step = number
    rows = engine.decode(
        tokens, [length + number for length in LENGTHS], tables, [] if remote is None else [remote]
    )
    return [engine.logits_digest(row) for row in rows], engine.argmax(rows)


def test_the_same_bits_while_parts_leave_in_mid_answer(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    expected = []
    for number in range(STEPS):
        digests, tokens = step(engine, tables, tokens, number, None)
        expected.append(digests)
    flat = [digest for digests in expected for digest in digests]
    assert len(set(flat)) == len(flat)

    for table in tables:
        engine.allocator.free(table)
    tables, tokens = start(engine)
    borrower.remote.begin(borrower.parts)
    moves = {
        1: [("attention-0", 0, 1, 2)],
        2: [("attention-1", 0, 4, 1), ("attention-1", 2, 0, 3)],
        3: [("attention-2", 0, 0, 1), ("attention-2", 1, 0, 1)],
        5: [("attention-0", 0, 3, 1)],
    }
    for number in range(STEPS):
        for name, row, first, segments in moves.get(number, ()):
            borrower.lend(name, row, tables, first, segments)
        digests, tokens = step(engine, tables, tokens, number, borrower.remote)
        assert digests == expected[number], number


def test_bytes_are_those_of_the_formula(engine: Engine, borrower: Borrower) -> None:
    """Up: a query of each row. Down: of each segment its result and one number a head."""
    tables, tokens = start(engine)
    borrower.lend("attention-0", 0, tables, 0, 3)
    borrower.lend("attention-0", 2, tables, 1, 2)
    borrower.lend("attention-1", 0, tables, 3, 1)
    before = {name: channel.sent.payload_bytes(Op.QUERY) for name, channel in borrower.channels.items()}
    assert not any(before.values())
    for number in range(2):
        _, tokens = step(engine, tables, tokens, number, borrower.remote)
    config, size = engine.config, engine.dtype.itemsize
    row = config.heads * config.head_dim * size
    for name, rows, segments in (("attention-0", 2, 5), ("attention-1", 1, 1), ("attention-2", 0, 0)):
        channel = borrower.channels[name]
        messages = 2 * LAYERS * (rows > 0)
        assert channel.sent.payload_bytes(Op.QUERY) == 2 * LAYERS * rows * row
        assert channel.received.payload_bytes(Op.PARTIAL) == 2 * LAYERS * segments * (row + 4 * config.heads)
        assert channel.sent.messages(Op.QUERY) == channel.received.messages(Op.PARTIAL) == messages
        assert channel.sent.header_bytes(Op.QUERY) == messages * HEADER_BYTES


def chunks(engine: Engine, table: list[int], start: int, tokens: int, borrower: Borrower | None) -> list[str]:
    """Digests of the logits after each chunk of the first prompt from `start` on."""
    digests = []
    for at in range(start, tokens, BLOCK):
        rows = min(BLOCK, tokens - at)
        if borrower is not None:
            borrower.remote.begin(borrower.parts, chunk_rows=rows)
            borrower.remote.step = at
        logits = engine.prefill_chunk(
            PROMPTS[0][at : at + rows],
            at,
            table,
            want_logits=True,
            elsewhere=None if borrower is None else borrower.remote,
        )
        assert logits is not None
        digests.append(engine.logits_digest(logits))
    return digests


def test_a_prompt_goes_on_whose_first_segments_are_elsewhere(engine: Engine, borrower: Borrower) -> None:
    """The same bits, in whole chunks and for a last token alone; bytes by the formula."""
    table = engine.allocator.allocate(13)
    start, tokens = 5 * SEGMENT, 5 * SEGMENT + BLOCK + 1
    prefill(engine, PROMPTS[0][:start], table)
    expected = chunks(engine, table, start, tokens, None)
    tables = [table]
    for name, first, segments in (("attention-0", 0, 2), ("attention-1", 2, 1), ("attention-0", 4, 1)):
        borrower.lend(name, 0, tables, first, segments)
    assert chunks(engine, table, start, tokens, borrower) == expected
    row = engine.config.heads * engine.config.head_dim * engine.dtype.itemsize
    for name, segments in (("attention-0", 3), ("attention-1", 1), ("attention-2", 0)):
        channel = borrower.channels[name]
        rows = LAYERS * (BLOCK + 1)
        assert channel.sent.payload_bytes(Op.QUERY) == rows * row * (segments > 0)
        partial = rows * segments * (row + 4 * engine.config.heads)
        assert channel.received.payload_bytes(Op.PARTIAL) == partial


def test_a_chunk_whose_states_are_more_than_a_message_is_refused(engine: Engine, borrower: Borrower) -> None:
    table = engine.allocator.allocate(13)
    prefill(engine, PROMPTS[0][: 5 * SEGMENT], table)
    borrower.lend("attention-1", 0, [table], 0, 1)
    place = borrower.places["attention-1"]
    place.server.holds[1] = HeldSegments(place.server.holds[1].blocks, 10**6 * SEGMENT)
    with pytest.raises(
        PartRefused, match=r"attention-1: slots 2: states of [0-9]+ bytes, and 16777216 are taken"
    ):
        chunks(engine, table, 5 * SEGMENT, 6 * SEGMENT, borrower)


def test_a_part_that_is_not_there_is_named(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    borrower.remote.begin({"attention-1": [HeldPart(0, 0, 1, 77)]})
    with pytest.raises(PartRefused, match="attention-1: slots 2: hold 77 is not here"):
        step(engine, tables, tokens, 0, borrower.remote)
    # Nothing is lost but the step: what is right is answered as ever.
    borrower.remote.begin(borrower.parts)
    step(engine, tables, tokens, 0, borrower.remote)


def test_a_part_that_was_dropped_is_refused_though_it_was_listed(engine: Engine, borrower: Borrower) -> None:
    """Its blocks may have others' KV by then."""
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    _, tokens = step(engine, tables, tokens, 0, borrower.remote)
    ((hold, held),) = borrower.places["attention-1"].server.holds.items()
    del borrower.places["attention-1"].server.holds[hold]
    with pytest.raises(PartRefused, match=f"attention-1: hold {hold} was dropped"):
        step(engine, tables, tokens, 1, borrower.remote)
    # Held again under the number, by whatever chance: it is not what was listed.
    borrower.places["attention-1"].server.holds[hold] = HeldSegments(held.blocks, held.tokens)
    with pytest.raises(PartRefused, match="was dropped"):
        step(engine, tables, tokens, 1, borrower.remote)


def test_a_place_that_dies_is_lost_by_name(engine: Engine, borrower: Borrower) -> None:
    tables, tokens = start(engine)
    borrower.lend("attention-1", 0, tables, 0, 1)
    _, tokens = step(engine, tables, tokens, 0, borrower.remote)
    borrower.places["attention-1"].close()
    with pytest.raises(ChannelLost, match="attention-1"):
        step(engine, tables, tokens, 1, borrower.remote)
