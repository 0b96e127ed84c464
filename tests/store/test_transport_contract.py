"""The contract of a transport, for each one of the agent's list (`open_transports.OPENERS`), TCP also with TLS."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from store_harness import layout
from transport_harness import KINDS, Side, call, noise

from halfmoon.schemas.events import Endpoint
from halfmoon.schemas.policy import Layout
from halfmoon.store.agent.open_transports import OPENERS
from halfmoon.store.errors import BytesCorrupted, HolderUnreachable, TransferError, TransferTimeout
from halfmoon.store.transports.base import Slice
from tests.eventually import BOUND_S, eventually

pytestmark = pytest.mark.parametrize("kind", KINDS)
Story = Callable[[Side, Side], Awaitable[None]]


def tell(kind: str, story: Story, *, shape: Layout | None = None, slots: int = 16) -> None:
    async def run() -> None:
        one, two = Side(kind, "one", shape=shape, slots=slots), Side(kind, "two", shape=shape, slots=slots)
        one.meet(two)
        try:
            await story(one, two)
        finally:
            await one.close()
            await two.close()

    asyncio.run(run())


def test_it_describes_itself(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        name = "tcp" if kind == "tls" else kind
        assert one.transport.kind.name == name
        assert {at.transport for at in one.transport.endpoints} == {name}
        mine = tuple(two.transport.endpoints)
        others = tuple(Endpoint(transport=other, address="of others") for other in OPENERS if other != name)
        for endpoints, usable in ((mine, mine), ((*others, *mine), mine), (others, ())):
            peer = dataclasses.replace(two.peer, endpoints=endpoints)
            assert one.transport.usable_endpoints(peer) == list(usable)

    tell(kind, story)


def test_read_brings_exactly_the_layers_asked_for(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1, 2, 3), one.reserved(3)
        before = one.view.blocks.copy()
        items = [Slice(mine[i], theirs[i], 1, 2) for i in range(3)]
        await one.transport.read(two.peer, items, call())
        for i in range(3):
            assert np.array_equal(one.view.blocks[mine[i], 1:3], two.view.blocks[theirs[i], 1:3])
            before[mine[i], 1:3] = one.view.blocks[mine[i], 1:3]
        assert np.array_equal(one.view.blocks, before)

    tell(kind, story)


def test_write_is_readable_at_the_peer_when_it_returns(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs = two.reserved(4)
        one.view.blocks[:] = noise(one.view.blocks.shape, 3)
        before = two.view.blocks.copy()
        for layer in (0, 3):
            await one.transport.write(two.peer, [Slice(i, theirs[i], layer, 1) for i in range(4)], call())
            for i in range(4):
                assert np.array_equal(two.view.blocks[theirs[i], layer], one.view.blocks[i, layer])
                before[theirs[i], layer] = one.view.blocks[i, layer]
        assert np.array_equal(two.view.blocks, before)

    tell(kind, story)


@pytest.mark.parametrize("layers", [1, 4])
def test_a_block_that_is_filled_in_part_is_moved_in_part(kind: str, layers: int) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, half = two.reserved(2), one.view.geometry.layer_block_bytes // 2
        fill = half // 4 + 1
        one.view.blocks[:] = noise(one.view.blocks.shape, 5)
        two.view.blocks[:] = noise(two.view.blocks.shape, 6)
        before = two.view.blocks.copy()
        items = [Slice(0, theirs[0], 0, 4), Slice(1, theirs[1], 0, layers, fill)]
        await one.transport.write(two.peer, items, call())
        before[theirs[0]] = one.view.blocks[0]
        for start in (0, half):  # its keys, and its values
            some = slice(start, start + fill)
            before[theirs[1], :layers, some] = one.view.blocks[1, :layers, some]
        assert np.array_equal(two.view.blocks, before)
        name = one.transport.kind.name
        if name != "shm":  # the receiver sees nothing of it
            moved = 4 * 2 * half + layers * 2 * fill
            assert two.counters[f"{name}_written_bytes"] == moved
        for wrong in (half + 1, -1):
            with pytest.raises(TransferError):
                await one.transport.write(two.peer, [Slice(1, theirs[1], 0, 1, wrong)], call())
        assert np.array_equal(two.view.blocks, before)

    tell(kind, story)


@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (30, 64), (2, 16384)])
def test_shapes_from_tiny_to_larger_than_a_frame(kind: str, layers: int, tokens: int) -> None:
    shape = layout(layers=layers, block_tokens=tokens, kv_heads=1, head_dim=64)

    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1, 2), one.reserved(2)
        items = [Slice(mine[i], theirs[i], 0, layers) for i in range(2)]
        await one.transport.read(two.peer, items, call())
        assert all(np.array_equal(one.view.blocks[mine[i]], two.view.blocks[theirs[i]]) for i in range(2))
        back = two.reserved(2)
        await one.transport.write(two.peer, [Slice(mine[i], back[i], 0, layers) for i in range(2)], call())
        assert all(np.array_equal(one.view.blocks[mine[i]], two.view.blocks[back[i]]) for i in range(2))

    tell(kind, story, shape=shape, slots=4)


def test_many_moves_at_once_do_not_mix(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(*range(8)), one.reserved(8)
        reads = [
            one.transport.read(two.peer, [Slice(mine[i], theirs[i], layer, 1)], call())
            for i in range(8)
            for layer in range(4)
        ]
        await asyncio.gather(*reads)
        assert all(np.array_equal(one.view.blocks[mine[i]], two.view.blocks[theirs[i]]) for i in range(8))

    tell(kind, story)


def test_a_passed_deadline_moves_nothing(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs = two.reserved(1)
        one.view.blocks[0] = 7
        with pytest.raises(TransferTimeout):
            await one.transport.write(two.peer, [Slice(0, theirs[0], 0, 4)], call(seconds=-1))
        assert not two.view.blocks[theirs[0]].any()

    tell(kind, story)


def test_slices_outside_of_a_pool_are_refused_here(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        for item in (
            Slice(99, 0, 0, 1),
            Slice(0, 99, 0, 1),
            Slice(0, 0, 3, 2),
            Slice(0, 0, -1, 1),
            Slice(0, 0, 0, 0),
        ):
            with pytest.raises(TransferError):
                await one.transport.read(two.peer, [item], call())

    tell(kind, story)


def test_bytes_that_are_not_what_was_committed_are_found(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1), one.reserved(1)
        two.view.blocks[theirs[0], 2, 100] ^= 1
        with pytest.raises(BytesCorrupted):
            await one.transport.read(two.peer, [Slice(mine[0], theirs[0], 0, 4)], call(verify=True))
        two.view.blocks[theirs[0], 2, 100] ^= 1
        await one.transport.read(two.peer, [Slice(mine[0], theirs[0], 0, 4)], call(verify=True))

    tell(kind, story)


def test_a_link_that_ended_is_replaced_and_a_peer_that_is_gone_is_unreachable_however_much_time_there_is(
    kind: str,
) -> None:
    async def story(one: Side, two: Side) -> None:
        theirs, mine = two.stored(1), one.reserved(1)
        items = [Slice(mine[0], theirs[0], 0, 4)]
        peer = two.peer
        for _ in range(2):
            for _ in range(3):
                await one.transport.read(peer, items, call())
            # An idle link that ends meanwhile costs no move.
            await two.end_links()
        await one.transport.read(peer, items, call())
        await two.close()
        for _ in range(2):
            with pytest.raises(HolderUnreachable):
                async with asyncio.timeout(BOUND_S):
                    await one.transport.read(peer, items, call(seconds=100 * BOUND_S))
            one.transport.forget("two")

    tell(kind, story)


def test_a_cancelled_read_touches_nothing_afterwards(kind: str) -> None:
    shape = layout(layers=8, block_tokens=1024, kv_heads=2, head_dim=64)

    async def story(one: Side, two: Side) -> None:
        theirs, (other, *mine) = two.stored(*range(8)), one.reserved(9)
        items = [Slice(mine[i], theirs[i], layer, 1) for layer in range(8) for i in range(8)]
        await one.transport.read(two.peer, items[:1], call())
        for begun in (0, 1, 8, 32):
            one.view.blocks[mine] = 0
            reading = asyncio.create_task(one.transport.read(two.peer, items, call()))
            await asyncio.sleep(0)

            def moves(begun: int = begun, reading: asyncio.Task[None] = reading) -> bool:
                return reading.done() or int(one.view.blocks[mine, :, :64].any(axis=2).sum()) >= begun

            await eventually(moves, f"{begun} of 64 pieces are here", every_s=0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            one.view.blocks[mine] = 0
            # What comes after it on the same connection is here, and no thread of either end moves anything.
            await one.transport.read(two.peer, [Slice(other, theirs[0], 0, 1)], call())
            for side in (one, two):
                await side.idle()
            assert not one.view.blocks[mine].any()
        await one.transport.read(two.peer, items, call())
        assert np.array_equal(one.view.blocks[mine], two.view.blocks[theirs])

    tell(kind, story, shape=shape, slots=9)


def test_after_close_a_call_fails_with_words(kind: str) -> None:
    async def story(one: Side, two: Side) -> None:
        await one.transport.close()
        await one.transport.close()
        with pytest.raises(TransferError, match="closed"):
            await one.transport.read(two.peer, [Slice(0, 0, 0, 1)], call())

    tell(kind, story)
