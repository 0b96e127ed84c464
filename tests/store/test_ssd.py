"""The SSD tier: what DRAM gives up comes back as it was, and a disk that fails is a miss and an event."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_harness import Cluster, layout, tell, until

from halfmoon.schemas.events import BlocksEvicted, BlocksStored, StoreInventory, TierLost
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.kv import KvLoaded
from halfmoon.store.agent import tier_load
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.errors import BlockMissing, WrongTenant
from halfmoon.store.tiers.ssd import SsdTier
from halfmoon.store.tiers.ssd_file import ENTRY_BYTES, PAGE_BYTES, Entry, NoRoomForTier, SsdFile, TierError
from tests.eventually import BOUND_S

BLOCK = 4 * 8192
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.store.tiers.ssd.IDLE_S", 0.002)


def value(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


KEYS = [key_of(str(number)) for number in range(200)]


async def start(
    here: Cluster, path: Path, node_id: str = "n1", **changes: Any
) -> tuple[StoreAgent, StoreClient]:
    fields: dict[str, Any] = {
        "slots": 8,
        "eviction": "lru",
        "ssd": str(path),
        "ssd_bytes": 64 * BLOCK + MIB,
        "ssd_ahead_percent": 100,
    }
    agent = await here.agent(node_id, **{**fields, **changes})
    client = await StoreClient.connect(here.url, node_id=node_id)
    here.stack.push_async_callback(client.close)
    return agent, client


async def told(agent: StoreAgent) -> None:
    """All that has happened to it is in the log."""
    agent.context.announcer.flush()
    assert await agent.context.bus.flush(BOUND_S)


def tier(agent: StoreAgent) -> SsdTier:
    assert isinstance(agent.context.tier, SsdTier)
    return agent.context.tier


async def put_through(agent: StoreAgent, client: StoreClient, numbers: range) -> None:
    """One after another, as fast as the disk keeps up."""
    for number in numbers:
        await client.put(KEYS[number], value(number))
        await until(lambda n=number: tier(agent).find(KEYS[n]) is not None)


async def is_right(client: StoreClient, number: int) -> bool:
    into = bytearray(BLOCK)
    await client.get_into(KEYS[number], into, verify=True)
    return into == value(number).tobytes()


@pytest.mark.pure
def test_what_dram_gives_up_comes_back_as_it_was(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        await put_through(agent, client, range(40))
        assert agent.context.counters["ssd_unsaved"] == 0
        assert await client.batch_exists(KEYS[:41]) == [True] * 40 + [False]
        for number in range(40):
            assert await is_right(client, number)
            agent.context.guard.check()
            tier(agent).check()
        assert agent.context.counters["ssd_read_bytes"] >= 32 * BLOCK
        assert await client.batch_remove([KEYS[3], KEYS[39]]) == [True, True]
        with pytest.raises(BlockMissing):
            await is_right(client, 3)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize(("block_tokens", "direct"), [(16, True), (17, True), (16, False), (17, False)])
def test_records_of_any_size_with_and_without_the_page_cache(
    tmp_path: Path, block_tokens: int, direct: bool
) -> None:
    """Blocks that are no whole pages go through a buffer; whole records and single layers alike."""
    shape = layout(block_tokens=block_tokens)
    file, entries = SsdFile.open(tmp_path / "tier", shape, 10 * MIB)
    assert (entries, file.direct) == ({}, True)
    file.direct = direct
    if not direct:
        fcntl.fcntl(file._fd, fcntl.F_SETFL, fcntl.fcntl(file._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (4, shape.layers, shape.layer_block_bytes), np.uint8)
    file.write(3, [blocks[0], blocks[1]])
    file.write(7, [blocks[2]])
    into = np.zeros_like(blocks)
    file.read(3, 0, [into[0], into[1]])
    for layer in range(shape.layers):
        file.read(7, layer, [into[2, layer : layer + 1]])
    file.read(4, 1, [into[3, 1:3]])
    assert np.array_equal(into[:3], blocks[:3])
    assert np.array_equal(into[3, 1:3], blocks[1, 1:3])
    file.close()


def test_a_reader_on_another_node_gets_it_and_the_log_knows_the_tiers(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        await here.agent("n2", transport="tcp")
        await put_through(agent, client, range(20))
        other = await StoreClient.connect(here.url, node_id="n2", peers=["n1"])
        here.stack.push_async_callback(other.close)
        for number in (0, 7, 19):
            assert await is_right(other, number)
        agent.context.announcer.announce()
        await told(agent)
        events = await here.log()
        stored = [e for e in events if isinstance(e, BlocksStored) and e.node_id == "n1" and e.tier == "ssd"]
        assert {key for e in stored for key in split_keys(e.block_keys)} == set(KEYS[:20])
        parts = [e for e in events if isinstance(e, StoreInventory) and e.node_id == "n1"][-2:]
        assert [(e.tier, e.part, e.parts) for e in parts] == [("dram", 0, 2), ("ssd", 1, 2)]
        assert set(split_keys(parts[1].block_keys)) == set(KEYS[:20])

    tell(nats_url, story)


@pytest.mark.pure
def test_a_worker_loads_from_its_own_node_layer_by_layer(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the conductor orders it: a fetch whose source is the node itself. Each group has one layer here."""
    monkeypatch.setattr(tier_load, "GROUP_BYTES", 1)

    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        await put_through(agent, client, range(30))
        worker = await here.client("n1", "w1")
        keys = b"".join([KEYS[0], KEYS[1], KEYS[29], KEYS[2], KEYS[150]])
        opened = await worker.open_put("o1", keys, blocks=6)
        assert opened.present == [2]
        with pytest.raises(BlockMissing) as caught:
            await worker.fetch("o1", "n1", first_block=1, blocks=4)
        assert caught.value.held == 3  # one of them is in the pool
        fetched = await worker.fetch("o1", "n1", first_block=0, blocks=4)
        assert (fetched.bytes, fetched.blocks) == (3 * BLOCK, 4)
        for index, number in ((0, 0), (1, 1), (2, 29), (3, 2)):
            assert worker.view.blocks[opened.slots[index]].tobytes() == value(number).tobytes()
        each = [KvLoaded(order_id="o1", layer=layer, first_block=0, blocks=4) for layer in range(4)]
        await until(lambda: here.heard["w1"][-4:] == each)
        await worker.release("o1")
        counts = agent.context.guard.counts()
        assert (counts.committed, counts.holds, counts.condemned) == (8 - counts.free, 0, 0)
        tier(agent).check()
        assert agent.context.guard._pool.slots[agent.context.guard.find(KEYS[1]) or 0].hits == 1

    tell(nats_url, story)


@pytest.mark.pure
def test_a_restart_finds_what_was_saved_and_saves_what_was_idle(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier", ssd_ahead_percent=0)
        assert await client.batch_put({KEYS[n]: value(n) for n in range(8)}) == [None] * 8
        assert len(tier(agent)) == 0
        await client.close()
        await agent.stop()
        agent, client = await start(here, tmp_path / "tier")
        assert sorted(tier(agent).keys()) == sorted(KEYS[:8])
        for number in range(8):
            assert await is_right(client, number)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.slow
def test_only_blocks_that_were_hit_often_enough_are_saved(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier", ssd_hits=2)
        await client.batch_put({KEYS[n]: value(n) for n in range(8)})
        for number in (1, 4):
            for _ in range(2):
                assert await is_right(client, number)
        await is_right(client, 5)
        await until(lambda: len(tier(agent)) == 2)
        await client.batch_put({KEYS[n]: value(n) for n in range(8, 16)})
        assert sorted(tier(agent).keys()) == sorted([KEYS[1], KEYS[4]])
        assert await client.batch_exists(KEYS[:8]) == [n in (1, 4) for n in range(8)]
        assert agent.context.counters["ssd_unsaved"] == 6

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.slow
def test_a_small_file_gives_up_the_oldest_and_says_so(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier", slots=4, ssd_bytes=3 * PAGE_BYTES + 10 * BLOCK)
        await put_through(agent, client, range(40))
        assert len(tier(agent)) == 10
        tier(agent).check()
        await told(agent)
        held: set[bytes] = set()
        for event in await here.log():
            if isinstance(event, BlocksStored) and event.tier == "ssd":
                held |= set(split_keys(event.block_keys))
            elif isinstance(event, BlocksEvicted) and event.tier == "ssd":
                held -= set(split_keys(event.block_keys))
        assert held == set(tier(agent).keys())

    tell(nats_url, story)


@pytest.mark.pure
def test_bytes_that_changed_on_the_disk_are_a_miss_and_are_forgotten(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        path = tmp_path / "tier"
        agent, client = await start(here, path)
        await put_through(agent, client, range(30))
        where = {key: tier(agent).lend([key])[0].record for key in KEYS[:3]}
        await client.close()
        await agent.stop()
        with path.open("r+b") as file:
            file.seek(2 * PAGE_BYTES + where[KEYS[1]] * BLOCK + 9000)  # behind head and a table of one page
            file.write(b"\xff" * 512)
            file.seek(PAGE_BYTES + where[KEYS[2]] * ENTRY_BYTES + 20)
            file.write(b"\xff")  # an entry that was torn
        agent, client = await start(here, path)
        assert await is_right(client, 0)
        for number in (1, 2):
            with pytest.raises(BlockMissing):
                await is_right(client, number)
        assert agent.context.counters["ssd_corrupted"] == 1
        assert tier(agent).find(KEYS[1]) is None
        tier(agent).check()

    tell(nats_url, story)


@pytest.mark.pure
def test_another_tenant_is_refused_what_comes_from_the_disk(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        mine = await StoreClient.connect(here.url, node_id="n1", tenant="acme")
        here.stack.push_async_callback(mine.close)
        await mine.put(KEYS[0], value(0))
        await put_through(agent, client, range(1, 20))
        assert agent.context.guard.find(KEYS[0]) is None
        with pytest.raises(BlockMissing):
            await client.get_into(KEYS[0], bytearray(BLOCK))
        assert not await client.remove(KEYS[0])
        assert await is_right(mine, 0)
        with pytest.raises(WrongTenant):
            await client.get_into(KEYS[0], bytearray(BLOCK))

    tell(nats_url, story)


@contextlib.contextmanager
def disk(agent: StoreAgent, stand_in: str) -> Any:
    """Every read and write of the file meets what `stand_in` gives: /proc/self/mem an I/O error, /dev/full no
    room.
    """
    file = tier(agent)._file
    assert file is not None
    kept, bad = os.dup(file._fd), os.open(stand_in, os.O_RDWR)
    os.dup2(bad, file._fd)
    try:
        yield
    finally:
        os.dup2(kept, file._fd)
        os.close(kept)
        os.close(bad)


@pytest.mark.pure
def test_a_disk_that_cannot_be_read_is_a_miss_and_the_rest_goes_on(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look would see another file, and give up this one with all its blocks.
    monkeypatch.setattr("halfmoon.store.tiers.ssd.LOOK_S", math.inf)

    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        await put_through(agent, client, range(30))
        with disk(agent, "/proc/self/mem"):
            with pytest.raises(BlockMissing):
                await is_right(client, 0)
            assert agent.context.counters["ssd_read_errors"] == 1
            assert tier(agent).find(KEYS[0]) is None
        assert await is_right(client, 1)
        assert await is_right(client, 29)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize(
    "what",
    ["full", "vanished", *(pytest.param(at, marks=pytest.mark.slow) for at in ("broken", "replaced", "cut"))],
)
def test_a_disk_that_fails_becomes_an_event_and_the_node_goes_on(
    nats_url: str, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Opened again, it would be lost a second time.
    monkeypatch.setattr("halfmoon.store.tiers.ssd.REOPEN_S", 600.0)
    # The writes are to find it, before a look sees the stand-in as another file.
    if what in ("full", "broken"):
        monkeypatch.setattr("halfmoon.store.tiers.ssd.LOOK_S", math.inf)

    async def story(here: Cluster) -> None:
        path = tmp_path / "tier"
        agent, client = await start(here, path)
        await put_through(agent, client, range(20))
        with contextlib.ExitStack() as stack:
            match what:
                case "full":
                    stack.enter_context(disk(agent, "/dev/full"))
                case "broken":
                    stack.enter_context(disk(agent, "/proc/self/mem"))
                case "vanished":
                    path.unlink()
                case "replaced":
                    path.rename(tmp_path / "elsewhere")
                    path.write_bytes(b"")
                case _:
                    os.truncate(path, 3 * BLOCK)
            for number in range(20, 60):  # puts do not notice
                await client.put(KEYS[number], value(number))
            await until(lambda: not tier(agent).open)
        assert await is_right(client, 59)
        with pytest.raises(BlockMissing):
            await is_right(client, 0)
        await told(agent)
        lost = [event for event in await here.log() if isinstance(event, TierLost)]
        assert len(lost) == 1
        words = {
            "full": "No space",
            "broken": "error",
            "vanished": "No such file",
            "replaced": "another",
            "cut": "cut to",
        }
        assert words[what] in lost[0].reason
        tier(agent)._reopen_s = 0.01
        agent.context.guard.check()

    tell(nats_url, story)


@pytest.mark.pure
def test_a_lost_file_is_opened_anew(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.store.tiers.ssd.REOPEN_S", 0.05)

    async def story(here: Cluster) -> None:
        path = tmp_path / "tier"
        agent, client = await start(here, path)
        await put_through(agent, client, range(20))
        path.unlink()
        await until(lambda: agent.context.counters["ssd_lost"] == 1)
        await until(lambda: tier(agent).open)
        await put_through(agent, client, range(20, 40))
        assert await is_right(client, 20)
        tier(agent).check()

    tell(nats_url, story)


@pytest.mark.pure
def test_a_disk_that_was_full_is_tried_soon_however_long_it_was(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.store.tiers.ssd.REOPEN_S", 0.05)

    async def story(here: Cluster) -> None:
        opened = SsdFile.open
        tries: list[Path] = []

        def full(path: Path, *rest: Any) -> Any:
            tries.append(path)
            raise NoRoomForTier(f"{path}: no room for 64 MiB (No space left on device)")

        monkeypatch.setattr(SsdFile, "open", full)
        agent, client = await start(here, tmp_path / "tier")
        await until(lambda: len(tries) > 8)
        await told(agent)
        lost = [event for event in await here.log() if isinstance(event, TierLost)]
        assert len(lost) == 1, "said once, however often it is tried"
        assert tier(agent)._reopen_s == 0.05
        monkeypatch.setattr(SsdFile, "open", opened)
        await until(lambda: tier(agent).open)
        await put_through(agent, client, range(20))
        assert await is_right(client, 0)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.slow
def test_no_room_for_the_file_is_said_and_the_node_serves_without(nats_url: str, tmp_path: Path) -> None:
    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier", ssd_bytes=1 << 50)
        assert not tier(agent).open
        await client.put(KEYS[0], value(0))
        assert await is_right(client, 0)

    tell(nats_url, story)


@pytest.mark.pure
def test_a_file_in_use_and_a_file_of_another_layout(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    file, _ = SsdFile.open(path, layout(), 10 * MIB)
    file.set_entry(3, Entry(KEYS[0], 7, hits=2, tenant=b"t" * 16))
    file.write_table()
    with pytest.raises(TierError, match="alive"):
        SsdFile.open(path, layout(), 10 * MIB)
    file.close()
    file, entries = SsdFile.open(path, layout(), 10 * MIB)
    assert entries == {3: Entry(KEYS[0], 7, hits=2, tenant=b"t" * 16)}
    file.close()
    file, entries = SsdFile.open(path, layout(kv_heads=1), 10 * MIB)
    assert entries == {}
    file.close()
    with pytest.raises(TierError, match="No such file"):
        SsdFile.open(tmp_path / "no" / "tier", layout(), 10 * MIB)


@pytest.mark.pure
def test_a_slow_disk_never_slows_a_put(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes hang until the end; every put is served meanwhile, and what could not be saved is counted."""
    go_on = threading.Event()
    write = SsdFile.write

    def hang(self: SsdFile, record: int, source: Any) -> None:
        go_on.wait(BOUND_S)
        write(self, record, source)

    monkeypatch.setattr(SsdFile, "write", hang)

    async def story(here: Cluster) -> None:
        agent, client = await start(here, tmp_path / "tier")
        try:
            for number in range(100):
                await client.put(KEYS[number], value(number))
            assert agent.context.counters["ssd_unsaved"] == 92
            assert len(tier(agent)) == 0
            assert await is_right(client, 99)
        finally:
            go_on.set()
        # What was being copied is another block's by now: it is thrown away.
        await until(lambda: agent.context.counters["ssd_write_outrun"] > 0)
        for number in range(100):
            with contextlib.suppress(BlockMissing):
                assert await is_right(client, number)

    tell(nats_url, story)
