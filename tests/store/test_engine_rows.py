"""Rows of several engines in one agent: each takes as many of its blocks as it fills, and comes back whole or not."""

from __future__ import annotations

import numpy as np
import pytest
from store_harness import Cluster, open_client, tell

from halfmoon.schemas.policy import Layout
from halfmoon.store.adapters import row_client
from halfmoon.store.adapters.row_client import RowClient
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.errors import AgentUnreachable, BlockMissing, WrongSize

BLOCK = 4096
#: Of two engines: whole blocks, and one that leaves an eighth of its last block.
ROWS = (3 * BLOCK, 5 * BLOCK + 7 * 512)
KEYS = [key_of(f"row {i}") for i in range(5)]


def drawn(size: int, count: int = len(KEYS), seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8))


def empty(size: int, count: int = len(KEYS)) -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


async def store(here: Cluster, *, block_bytes: int = BLOCK, layers: int = 1) -> StoreClient:
    await here.agent("n1", layout=Layout.opaque(block_bytes, layers), slots=64, data_port=-1)
    return await open_client(here, "n1")


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return [row.tobytes() for row in one] == [row.tobytes() for row in other]


# A connector's agent, whose blocks have layers, holds rows as well.
@pytest.mark.pure
@pytest.mark.parametrize(("block_bytes", "layers"), [(BLOCK, 1), (2 * BLOCK, 2)])
def test_engines_with_rows_of_two_lengths_share_an_agent(
    nats_url: str, block_bytes: int, layers: int
) -> None:
    lengths = (4 * BLOCK, 6 * BLOCK + 3 * 1024)

    async def story(here: Cluster) -> None:
        client = await store(here, block_bytes=block_bytes, layers=layers)
        engines = [(RowClient(client, size), drawn(size, seed=size)) for size in lengths]
        for number, (rows, given) in enumerate(engines):
            keys = [key_of(f"engine {number} {key.hex()}") for key in KEYS]
            assert await rows.batch_exists(keys) == [False] * 5
            assert await rows.batch_put(dict(zip(keys[:4], given, strict=False))) == [None] * 4
            assert await rows.batch_exists(keys) == [True] * 4 + [False]
        blocks = [-(-size // block_bytes) for size in lengths]
        assert here.agents["n1"].context.guard.counts().committed == 4 * sum(blocks)
        for number, (rows, given) in enumerate(engines):
            keys = [key_of(f"engine {number} {key.hex()}") for key in KEYS]
            into = empty(len(given[0]))
            *there, last = await rows.batch_get_into(keys, into, verify=True)
            assert (there, type(last)) == ([None] * 4, BlockMissing)
            assert same(into[:4], given[:4])
            assert not into[4].any()

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize("size", ROWS)
def test_a_row_of_which_a_block_is_gone_is_missing_until_it_is_stored_again(nats_url: str, size: int) -> None:
    async def story(here: Cluster) -> None:
        client = await store(here)
        rows, given = RowClient(client, size), drawn(size)
        await rows.batch_put(dict(zip(KEYS, given, strict=True)))
        for part in (0, -1):
            of_row = rows._block_keys([KEYS[2]])
            assert await client.batch_remove([of_row[part]]) == [True]
            assert await rows.batch_exists(KEYS) == [True, True, False, True, True]
            into = empty(size)
            answers = await rows.batch_get_into(KEYS, into)
            assert [type(answer) for answer in answers] == [type(None), type(None), BlockMissing] + [
                type(None)
            ] * 2
            assert same(into[3:], given[3:])
            before = here.agents["n1"].context.guard.counts().committed
            assert await rows.batch_put({KEYS[2]: given[2]}) == [None]
            # The blocks that had stayed are not stored a second time.
            assert here.agents["n1"].context.guard.counts().committed == before + 1
        into = empty(size)
        assert await rows.batch_get_into(KEYS, into) == [None] * 5
        assert same(into, given)

    tell(nats_url, story)


@pytest.mark.pure
def test_many_rows_go_in_exchanges_of_few_keys(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_client, "KEYS_MAX", 7)

    async def story(here: Cluster) -> None:
        client = await store(here)
        asked: list[int] = []
        probe = client.batch_exists
        monkeypatch.setattr(client, "batch_exists", lambda keys: asked.append(len(keys)) or probe(keys))
        rows, given = RowClient(client, ROWS[0]), drawn(ROWS[0])
        assert await rows.batch_put(dict(zip(KEYS, given, strict=True))) == [None] * 5
        assert await rows.batch_exists(KEYS) == [True] * 5
        assert asked == [6, 6, 3]
        into = empty(ROWS[0])
        assert await rows.batch_get_into(KEYS, into) == [None] * 5
        assert same(into, given)

    tell(nats_url, story)


@pytest.mark.pure
def test_nodes_whose_blocks_have_other_lengths_give_each_other_no_part_of_a_row(nats_url: str) -> None:
    size = 8 * BLOCK

    async def story(here: Cluster) -> None:
        for node, block_bytes in (("n1", BLOCK), ("n2", 2 * BLOCK), ("n3", size), ("n4", BLOCK)):
            await here.agent(node, layout=Layout.opaque(block_bytes))
        near = await open_client(here, "n1")
        given = drawn(size, 1)
        assert await RowClient(near, size).batch_put({KEYS[0]: given[0]}) == [None]
        for node, found in (("n2", False), ("n3", False), ("n4", True)):
            rows, into = RowClient(await open_client(here, node, peers=("n1",)), size), empty(size, 1)
            assert await rows.batch_exists(KEYS[:1]) == [found]
            (answer,) = await rows.batch_get_into(KEYS[:1], into)
            assert (answer is None, same(into, given)) == (found, found)

    tell(nats_url, story)


@pytest.mark.pure
def test_a_store_that_does_not_answer_is_no_miss(nats_url: str) -> None:
    async def story(here: Cluster) -> None:
        client = await store(here)
        rows = RowClient(client, ROWS[0])
        await here.agents["n1"].stop()
        (answer,) = await rows.batch_get_into(KEYS[:1], empty(ROWS[0], 1))
        assert isinstance(answer, AgentUnreachable)

    tell(nats_url, story)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("block_bytes", "row_bytes", "fits"),
    [
        (4096, 4096, True),
        (4096, 64 * 4096, True),
        (4096, 65 * 4096, False),  # too many blocks
        (5 * 4096, 4 * 4096, True),
        (5 * 4096, 4 * 4096 - 1, False),  # more than a fifth would be wasted
        (8192, 3 * 4096, False),
        (8192, 9 * 4096, True),
    ],
)
def test_blocks_that_are_too_small_or_waste_too_much_are_refused(
    block_bytes: int, row_bytes: int, fits: bool
) -> None:
    class Blocks:
        pass

    client = Blocks()
    client.block_bytes = block_bytes  # type: ignore[attr-defined]
    if fits:
        RowClient(client, row_bytes)  # type: ignore[arg-type]
        return
    with pytest.raises(WrongSize, match=f"blocks of {block_bytes} bytes, this engine's have {row_bytes}"):
        RowClient(client, row_bytes)  # type: ignore[arg-type]
