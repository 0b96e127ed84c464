"""The agent's list of transports: all that the schema names, opened or absent with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import pytest
from transport_harness import Side

from halfmoon.schemas.events import TransportName
from halfmoon.store.agent.open_transports import OPENERS, OpenTransports
from halfmoon.store.errors import TransferError


def tell(story: Callable[[Side, OpenTransports], Awaitable[None]], **changes: Any) -> None:
    async def run() -> None:
        side, opened = Side("shm", "one", **changes), OpenTransports()
        try:
            await story(side, opened)
        finally:
            await opened.close()
            await side.close()

    asyncio.run(run())


def test_every_transport_that_the_schema_names_is_open_or_absent_with_a_reason() -> None:
    async def story(side: Side, opened: OpenTransports) -> None:
        await opened.open(side.site)
        names = {at.transport for at in opened.endpoints}
        assert names.isdisjoint(opened.absent)
        assert names | set(opened.absent) == set(OPENERS) == set(get_args(TransportName))
        assert all(opened.absent.values())
        assert {"shm", "tcp"} <= names

    tell(story)


def test_each_has_a_rank_of_its_own_by_which_the_engine_takes_it() -> None:
    async def story(side: Side, opened: OpenTransports) -> None:
        await opened.open(side.site)
        ranks = [transport.kind.rank for transport in opened._open.values()]
        assert len(set(ranks)) == len(ranks)
        paths = opened.engine_for(side.own_peer(opened.endpoints)).paths(side.own_peer(opened.endpoints))
        assert [path.kind for path in paths][:2] == ["shm", "tcp"]

    tell(story)


def test_one_that_is_forced_alone_is_called_over_and_the_others_still_serve() -> None:
    async def story(side: Side, opened: OpenTransports) -> None:
        await opened.open(side.site)
        assert {at.transport for at in opened.endpoints} == {"shm", "tcp"}
        peer = side.own_peer(opened.endpoints)
        assert {path.kind for path in opened.engine_for(peer).paths(peer)} == {"tcp"}
        assert opened.absent == {"rdma": "transport is tcp"}

    tell(story, transport="tcp")


def test_one_that_is_forced_and_absent_is_an_error_and_one_that_is_not_forced_is_not() -> None:
    async def story(side: Side, opened: OpenTransports) -> None:
        await opened.open(side.site)
        assert opened.absent == {"tcp": "there is no data port", "rdma": "rdma is off"}

    tell(story, data_port=-1)

    async def forced(side: Side, opened: OpenTransports) -> None:
        with pytest.raises(TransferError, match="RDMA is not to be had: no RDMA device"):
            await opened.open(side.site)

    tell(forced, transport="rdma", rdma="none0")
