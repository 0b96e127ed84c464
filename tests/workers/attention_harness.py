"""Workers that hold segments of others' sequences, in threads with real channels, and an engine that asks them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import prefill

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.opening import connect
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.remote_segments import RemoteSegments
from halfmoon.workers.attention.server import SegmentServer
from halfmoon.workers.model.attention.kernel import SdpaAttention
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.segments import AWAY
from tests.lengths import sizes
from tests.store.channel_harness import addresses, hello, options
from tests.store.memory_channels import channel_kind, listening

BLOCK, SEGMENT, LAYERS, STEPS = 16, 32, 3, 6
EACH = SEGMENT // BLOCK
#: Threads of several products may keep each other from the processors for seconds.
WAIT_S = 60.0
LENGTHS = (200, 33, 130, 20)
PROMPTS = [
    [(i * i * 31 + 17 * i + 900 * seed) % 40000 + 20 for i in range(n)] for seed, n in enumerate(LENGTHS)
]


@pytest.fixture(scope="module", params=["f32", pytest.param("bf16", marks=pytest.mark.slow)], name="model")
def any_model(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(f"model_{request.param}")
    return replace(found, config=replace(found.config, layers=LAYERS))


@pytest.fixture(name="engine")
def any_engine(model: LoadedModel) -> Engine:
    return Engine(model, num_blocks=64, block_tokens=BLOCK, exact=True, segment_tokens=SEGMENT)


def part(name: str, first: int, segments: int, hold: int) -> KvPart:
    return KvPart(worker_id=name, first_segment=first, segments=segments, hold=hold)


class Place:
    """A worker that holds segments for others: a cache, and a thread that serves."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        kind: str,
        *,
        head_shares: int = 1,
        blocks: int = 24,
        **heads: int,
    ) -> None:
        """`heads`: of a model that has others than SmolLM2."""
        whole = engine.config
        self._said: dict[str, Any] = {"head_shares": head_shares, **heads}
        config = replace(whole, heads=whole.heads // head_shares, kv_heads=whole.kv_heads // head_shares)
        self.cache = PagedCache(config, blocks, BLOCK, engine.dtype)
        self.cache.k.fill_(float("nan"))  # what was never brought there would be seen
        self.cache.v.fill_(float("nan"))
        attention = SdpaAttention(BLOCK, torch.device("cpu"))
        self.server = SegmentServer(attention, self.cache, segment_tokens=SEGMENT, heads=config.heads)
        self.listener = listening(hello(name, **self._said), options(kind, timeout_s=WAIT_S), kind)
        self.kind, self.name = kind, name
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self.server.run, args=(self.listener, self._over.is_set), daemon=True
        )
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

    def connect(self, **said: Any) -> WorkerChannel:
        settings, mine = options(self.kind, timeout_s=WAIT_S), hello("decode-0", **self._said, **said)
        return connect(addresses(self.listener, self.kind), mine, settings, peer=self.name)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.listener.close()


class Borrower:
    """An engine whose sequences are partly elsewhere."""

    def __init__(self, engine: Engine, places: list[Place]) -> None:
        self.engine, self.places = engine, {place.name: place for place in places}
        self.channels = {place.name: place.connect() for place in places}
        self.remote = RemoteSegments(self.channels, engine.config, engine.dtype)
        #: Of each row.
        self.parts: list[list[KvPart]] = [[] for _ in PROMPTS]

    def lend(self, name: str, row: int, tables: list[list[int]], first: int, segments: int) -> None:
        hold = self.places[name].take(self.engine, tables[row], first, segments)
        self.parts[row].append(part(name, first, segments, hold))
        self.remote.begin(self.parts)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


@pytest.fixture(name="borrower")
def any_borrower(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Borrower]:
    with contextlib.ExitStack() as stack:
        kind = channel_kind(request.node, getattr(request, "param", "unix"))
        places = [Place(engine, f"attention-{i}", kind) for i in range(3)]
        for place in places:
            stack.callback(place.close)
        one = Borrower(engine, places)
        stack.callback(one.close)
        yield one


#: Of a test that has them over sockets.
over_each_kind = pytest.mark.parametrize("borrower", sizes("unix", "tls"), indirect=True)


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
