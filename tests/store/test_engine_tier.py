"""`StoreTier`: an engine's rows go to real store agents and come back; a store that is away costs hits alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from store_harness import PATIENT, Cluster, cluster, until

from halfmoon.schemas.policy import Layout
from halfmoon.store.adapters import pace as paces
from halfmoon.store.adapters.pace import AGAIN_S, Pace
from halfmoon.store.adapters.tier import Finished, StoreTier, TierOptions
from halfmoon.store.adapters.verdicts import Verdicts
from tests.eventually import BOUND_S, eventually

ROW = 2 * 4096
ROWS = 8
KEYS = [f"block {i}".encode() for i in range(ROWS)]


@asynccontextmanager
async def tier(
    here: Cluster, node_id: str, rows: np.ndarray, *, namespace: bytes = b"engine", **options: Any
) -> AsyncIterator[StoreTier]:
    """A tier of an engine whose memory is `rows`; its `start` and `close` wait, so they run beside the agents."""
    given = {"nats": here.url, "node": node_id, **PATIENT, **options}
    made = StoreTier(rows, TierOptions.of(given), namespace=namespace)
    try:
        await asyncio.to_thread(made.start)
        yield made
    finally:
        await asyncio.to_thread(made.close)


def memory(fill: Callable[[int], int] = lambda row: 0) -> np.ndarray:
    view = memoryview(bytearray(ROWS * ROW)).cast("b", (ROWS, ROW))
    rows = np.asarray(view).view(np.uint8)
    for row in range(ROWS):
        rows[row] = fill(row)
    return rows


async def agent(here: Cluster, node_id: str, **changes: Any) -> Any:
    return await here.agent(node_id, layout=Layout.opaque(ROW), data_port=-1, **changes)


async def found(made: StoreTier, keys: list[bytes], request_id: str = "r") -> list[bool]:
    """As a scheduler asks: every key in each step, until all are known."""
    answers: list[bool | None] = []

    def known() -> bool:
        answers[:] = [made.lookup(key, request_id) for key in keys]
        made.flush()
        return None not in answers

    await until(known)
    return [answer is True for answer in answers]


async def moved(
    made: StoreTier, keys: list[bytes], rows: list[int], *, load: bool, job_id: int = 1
) -> Finished:
    made.submit(job_id, keys, rows, load=load)
    ended: list[Finished] = []
    await until(lambda: bool(ended.extend(made.finished()) or ended))
    (job,) = ended
    return job


def test_what_one_engine_stored_another_loads_and_other_weights_and_tenants_do_not_see(nats_url: str) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            await agent(here, "n1")
            first, second = memory(lambda row: 10 + row), memory()
            async with tier(here, "n1", first) as cold, tier(here, "n1", second) as warm:
                assert await found(cold, KEYS) == [False] * ROWS
                stored = await moved(cold, KEYS[:6], [5, 4, 3, 2, 1, 0], load=False)
                assert (stored.load, stored.moved) == (False, tuple(KEYS[:6]))
                # Stored just now, it is no miss.
                assert await found(cold, KEYS) == [True] * 6 + [False] * 2
                assert await found(warm, KEYS) == [True] * 6 + [False] * 2
                # One of the three is not there: the other two arrive, in the rows that were named.
                loaded = await moved(warm, [KEYS[0], KEYS[7], KEYS[5]], [7, 6, 2], load=True)
                assert loaded.moved == (KEYS[0], KEYS[5])
                assert [int(second[row, 0]) for row in range(ROWS)] == [0, 0, 10, 0, 0, 0, 0, 15]
                assert (second[7] == first[5]).all()
                assert warm.counts() == {"blocks_loaded": 2, "blocks_missing": 1}
            for other in ({"tenant": "acme"}, {"namespace": b"other weights"}):
                async with tier(here, "n1", memory(), **other) as stranger:
                    assert await found(stranger, KEYS) == [False] * ROWS

    asyncio.run(story())


def test_a_load_that_failed_is_a_miss_until_its_requests_have_ended(nats_url: str) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            store = await agent(here, "n1")
            async with tier(here, "n1", memory()) as made:
                await moved(made, KEYS[:1], [0], load=False)
                assert await found(made, KEYS[:1]) == [True]
                # It is evicted between the lookup and the load.
                assert store.context.guard.counts().committed == 1
                client = made._link._client
                assert client is not None
                assert await asyncio.wrap_future(
                    asyncio.run_coroutine_threadsafe(
                        client._client.batch_remove([made._keys.of(KEYS[0])]), made._link.loop
                    )  # type: ignore[arg-type]
                )
                assert (await moved(made, KEYS[:1], [0], load=True, job_id=2)).moved == ()
                assert made.lookup(KEYS[0], "r") is False
                await moved(made, KEYS[:1], [0], load=False, job_id=3)
                assert made.lookup(KEYS[0], "r") is True
                made.forget("r")
                assert len(made._verdicts) == 0

    asyncio.run(story())


def test_a_store_that_dies_is_a_miss_and_is_found_again(nats_url: str) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            store = await agent(here, "n1")
            rows = memory(lambda row: 1 + row)
            async with tier(here, "n1", rows) as made:
                await moved(made, KEYS[:2], [0, 1], load=False)
                await store.stop()
                rows[:] = 0
                assert await found(made, KEYS[:2], "while it is away") == [False, False]
                assert (await moved(made, KEYS[:2], [0, 1], load=True)).moved == ()
                assert (await moved(made, KEYS[:2], [0, 1], load=False)).moved == ()
                assert made.counts()["store_away"] >= 1
                await agent(here, "n1")
                rows[:] = 7

                async def stored() -> bool:
                    return (await moved(made, KEYS[:1], [0], load=False)).moved == (KEYS[0],)

                await eventually(stored, "the tier uses the new agent")
                rows[:] = 0
                assert await found(made, KEYS[:1], "afterwards") == [True]
                assert (await moved(made, KEYS[:1], [3], load=True)).moved == (KEYS[0],)
                assert set(rows[3]) == {7}

    asyncio.run(story())


def test_an_engine_starts_without_a_store_and_not_with_one_of_other_blocks(
    nats_url: str,
) -> None:
    async def story() -> None:
        async with cluster(nats_url) as here:
            async with tier(here, "nobody", memory(), connect_s=0.1) as made:
                assert await found(made, KEYS) == [False] * ROWS
                made.submit(1, KEYS, list(range(ROWS)), load=True)
                made.submit(2, KEYS, list(range(ROWS)), load=False)
                await asyncio.to_thread(made.drain)
                assert sorted((job.job_id, job.moved) for job in made.finished()) == [(1, ()), (2, ())]
            # The thread has ended: nothing hangs, nothing raises.
            made.submit(3, KEYS, list(range(ROWS)), load=True)
            made.drain()
            assert [job.job_id for job in made.finished()] == [3]
            assert not [one for one in threading.enumerate() if one.name.startswith("halfmoon-link")]

            # A store of blocks that do not suit ends the start.
            await here.agent("n1", layout=Layout.opaque(3 * 4096), data_port=-1)
            with pytest.raises(ValueError, match=f"node: the store agent of n1 holds .* --block-bytes {ROW}"):
                async with tier(here, "n1", memory()):
                    pass

    asyncio.run(story())


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "missing required field `node`"),
        ({"node": "a.b"}, r"\$\.node"),
        ({"node": "a", "nodes": "b"}, "unknown field `nodes`"),
        ({"node": "a", "peers": "b"}, r"\$\.peers"),
        ({"node": "a", "peers": ["n1", "*x"]}, r"\$\.peers\[1\]"),
        ({"node": "a", "lookup_s": 0}, r"lookup_s: 0\S* is not in 0\.\.600"),
        ({"node": "a", "block_compute_s": -1}, r"block_compute_s: -1\S* is not in 0\.\.600"),
    ],
)
def test_options_that_are_wrong_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"configuration of the halfmoon tier: .*{told}"):
        TierOptions.of(given)


@pytest.mark.pure
def test_peers_are_nodes_or_whichever_has_the_blocks() -> None:
    assert TierOptions.of({"node": "a", "peers": ["*", "n-1"]}).peers == ("*", "n-1")


@pytest.mark.pure
def test_a_verdict_comes_in_time_and_late_answers_change_nothing() -> None:
    verdicts = Verdicts(patience_ns=100)
    assert [verdicts.ask(b"a", "r1", 0), verdicts.ask(b"a", "r2", 50)] == [None, None]
    assert (verdicts.take_unsent(), verdicts.take_unsent()) == ([b"a"], [])  # asked once for both
    assert verdicts.ask(b"a", "r1", 101) is False
    verdicts.answered([b"a"], [True])
    assert (verdicts.ask(b"a", "r1", 102), verdicts.late) == (False, 1)
    verdicts.forget("r1")
    assert verdicts.ask(b"a", "r2", 103) is False
    verdicts.forget("r2")
    verdicts.answered([b"a"], [True])
    assert (len(verdicts), verdicts.ask(b"a", "r3", 104)) == (0, None)


@pytest.mark.pure
def test_a_store_that_is_slower_than_computing_has_nothing_until_one_load_is_in_time() -> None:
    pace = Pace(block_compute_s=0.1)
    assert pace.may_ask("first", 0.0)
    pace.began(1, 10, 0.0)
    assert not pace.slow(1.0)
    assert pace.slow(1.1)  # late, and still under way
    pace.ended(1, 10, 3.0)
    assert pace.may_ask("first", 3.0)  # what it was told holds
    assert not pace.may_ask("second", 3.0)
    assert pace.may_ask("third", AGAIN_S)  # one tries it
    assert not pace.may_ask("fourth", AGAIN_S)
    pace.began(2, 4, AGAIN_S)
    pace.ended(2, 0, AGAIN_S + 0.3)  # nothing came: not in time, however soon that was
    assert pace.slow(AGAIN_S + 0.3)
    pace.began(3, 4, AGAIN_S)
    pace.ended(3, 4, AGAIN_S + 0.39)
    assert not pace.slow(AGAIN_S + 0.5)
    assert not pace.may_ask("second", AGAIN_S + 0.5)
    pace.forget("second")
    assert pace.may_ask("second", AGAIN_S + 0.5)
    assert pace.sent_away == 2
    for request_id in ("first", "second", "third", "fourth"):
        pace.forget(request_id)
    assert len(pace) == 0
    for block_compute_s in (0.0, 1.0):
        other = Pace(block_compute_s=block_compute_s)
        other.began(1, 10, 0.0)
        other.ended(1, 10, 3.0)
        assert not other.slow(3.0)


def test_a_request_is_told_that_a_slow_store_has_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paces, "AGAIN_S", 10 * BOUND_S)

    async def story() -> None:
        async with cluster(nats_url) as here:
            await agent(here, "n1")
            # No store brings a block within a nanosecond, and each brings one within ten minutes.
            for block_compute_s, third in ((1e-9, [False] * 2), (600.0, [True] * 2)):
                async with tier(here, "n1", memory(), block_compute_s=block_compute_s) as made:
                    await moved(made, KEYS[:2], [0, 1], load=False)
                    assert await found(made, KEYS[:2], "first") == [True] * 2
                    assert (await moved(made, KEYS[:2], [0, 1], load=True)).moved == tuple(KEYS[:2])
                    assert await found(made, KEYS[:2], "first") == [True] * 2
                    assert await found(made, KEYS[:2], "third") == third
                    assert made.counts()["requests_slow"] == third.count(False) // 2

    asyncio.run(story())
