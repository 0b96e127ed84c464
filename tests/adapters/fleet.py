"""A cluster over engines, fake or real: requests to it, and what its log was told."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nats

from halfmoon.conductor.core.machine import Core
from halfmoon.schemas.events import (
    BlocksStored,
    DecodeStarted,
    Event,
    PrefillFinished,
    RequestArrived,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.types import KEY_BYTES
from tests.cluster.harness import Cluster
from tests.eventually import BOUND_S, eventually, within

OTHER = {"vllm-0": "vllm-1", "vllm-1": "vllm-0"}


class AdaptedFleet:
    """`cluster` over engines whose workers have these `names`; `nc` is a client's connection."""

    def __init__(self, cluster: Cluster, names: Iterable[str], nc: nats.NATS) -> None:
        self.cluster, self.names, self.nc = cluster, list(names), nc

    async def ask(
        self, ids: list[int], tokens: int = 4, *, bound_s: float = BOUND_S, **fields: Any
    ) -> dict[str, Any]:
        return await self.cluster.generate(
            self.nc, bound_s, prompt=ids, max_tokens=tokens, temperature=0, **fields
        )

    async def cold(self, ids: list[int], tokens: int = 4, *, blocks: int, **fields: Any) -> dict[str, Any]:
        """Ask for what no engine has. Returns when the log was told of so many blocks of the prompt at its worker.

        Blocks of requests before it may be told of meanwhile, and do not count.
        """
        after = await self.last_seq()
        said = await self.ask(ids, tokens, **fields)
        assert said["usage"]["cached_tokens"] == 0
        at = said["decode_worker"]
        (arrived,) = [
            one.event
            for one in await self.cluster.events(after)
            if isinstance(one.event, RequestArrived) and one.event.request_id == said["id"]
        ]
        keys = set(split_keys(arrived.block_keys)[:blocks])
        assert len(keys) == blocks, "the prompt has fewer"

        async def all_told() -> bool:
            stored = await self.told(after, BlocksStored, at)
            return keys <= {key for one in stored for key in split_keys(one.block_keys)}

        await eventually(all_told, f"{blocks} blocks of the prompt at {at} are told of", every_s=0.05)
        return said

    async def last_seq(self) -> int:
        return (await self.cluster.events())[-1].seq

    async def told(self, after: int, kind: type[Event], at: str) -> list[Any]:
        """Messages of a kind in the log since then, of the worker or of its node, which has its name."""
        events = [one.event for one in await self.cluster.events(after)]
        return [
            one
            for one in events
            if isinstance(one, kind) and at in (getattr(one, "worker_id", ""), getattr(one, "node_id", ""))
        ]

    async def stored(self, after: int, at: str, blocks: int) -> None:
        """Returns when the log was told of so many blocks of a node. Requests that follow are placed by them."""

        async def enough() -> bool:
            return await self.blocks_told(after, at) >= blocks

        await eventually(enough, f"{blocks} blocks of {at} are told of", every_s=0.05)

    async def blocks_told(self, after: int, at: str) -> int:
        stored = await self.told(after, BlocksStored, at)
        return sum(len(one.block_keys) for one in stored) // KEY_BYTES

    async def known(self, blocks: int, at: str) -> None:
        """Returns when the conductors know so many blocks of a node: by the log, since a heartbeat may be of before."""

        async def so_many() -> bool:
            core = Core()
            for one in await self.cluster.events():
                core.step(one)
            return core.state.index.counts().get(at) == blocks

        await eventually(so_many, f"{at} has {blocks} blocks", every_s=0.2)

    async def joined(self, after: int, at: str) -> None:
        await eventually(functools.partial(self.told, after, WorkerJoined, at), f"{at} is back", every_s=0.1)

    async def gone(self, after: int, at: str) -> None:
        await eventually(functools.partial(self.told, after, WorkerLeft, at), f"{at} has left", every_s=0.1)

    async def operated(self, *words: str, status: int = 0) -> str:
        """The output of a command."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "halfmoon.cli.main", *words, "--cluster", self.cluster.name),
            env=self.cluster.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await within(process.communicate(), f"{words} ends")
        assert process.returncode == status, (words, said)
        return said.decode()

    async def paused(self) -> None:
        """Returns when nothing is placed any more."""

        async def by_conductor() -> bool:
            return (await self.cluster.all_conductors(1))[0].paused

        await eventually(by_conductor, "placements are paused", every_s=0.05)

    async def drawing(self, after: int) -> str:
        """The worker that has begun an answer since, and sent its first token."""

        async def begun() -> str:
            for at in self.names:
                prefills = await self.told(after, PrefillFinished, at)
                if any(one.decodes for one in prefills) or await self.told(after, DecodeStarted, at):
                    return at
            return ""

        return await eventually(begun, "an answer has begun", every_s=0.05)


def explained(log: Path, request_id: str) -> str:
    """`halfmoon replay --explain`."""
    words = ["replay", str(log), "--explain", request_id]
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.main", *words], capture_output=True, text=True, check=True
    ).stdout
