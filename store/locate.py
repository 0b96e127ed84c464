"""Finds the holders of blocks, for programs without a conductor's orders: by asking the agents, of which the conductors
know which have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from nats.errors import Error as NatsError

from halfmoon.bus import errors as bus_errors
from halfmoon.bus.connection import Bus
from halfmoon.schemas import store as messages
from halfmoon.schemas import subjects
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.schemas.view import BlocksLocated, LocateBlocks

#: Of a conductor, which has the answer in memory.
LOCATE_S = 1.0
PROBE_S = 2.0
#: Once every block has a holder, the other agents have this long to name themselves as replicas.
LATE_S = 0.02


async def located(bus: Bus, block_keys: bytes, besides: Collection[str]) -> list[str] | None:
    """Nodes, none of `besides`, that are worth asking for these blocks; None: no conductor answers."""
    request = LocateBlocks(block_keys=block_keys, besides=sorted(besides))
    try:
        answer = await bus.request(subjects.locate(), request, BlocksLocated, timeout_s=LOCATE_S)
    except (bus_errors.BusError, NatsError):
        return None
    return answer.nodes


async def find_holders(
    bus: Bus, node_ids: Sequence[str], block_keys: bytes, tenant: str = "", *, mark: str = ""
) -> tuple[dict[int, list[str]], list[str]]:
    """Which nodes have the key of that index, those that have it in memory first; and which did not answer."""
    request = messages.ProbeBlocks(block_keys=block_keys, tenant=tenant, mark=mark)

    async def ask(node_id: str) -> messages.Probed | None:
        try:
            return await bus.request(
                subjects.store(node_id, "probe"), request, messages.Probed, timeout_s=PROBE_S
            )
        except (bus_errors.BusError, NatsError):
            return None

    asking = {node_id: asyncio.create_task(ask(node_id)) for node_id in node_ids}
    waiting = set(asking.values())
    try:
        while waiting:
            patience_s = LATE_S if _all_held(asking, len(block_keys) // KEY_BYTES) else None
            done, waiting = await asyncio.wait(
                waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
    finally:
        for task in waiting:
            task.cancel()
    answers = {node_id: task.result() for node_id, task in asking.items() if task not in waiting}
    blocks = len(block_keys) // KEY_BYTES
    holders: dict[int, list[str]] = {}
    for tier in ("dram", "ssd"):
        for node_id, answer in answers.items():
            for i in getattr(answer, tier) if answer is not None else []:
                if i < blocks and node_id not in holders.setdefault(i, []):
                    holders[i].append(node_id)
    return holders, [node_id for node_id in node_ids if answers.get(node_id) is None]


def _all_held(asking: Mapping[str, asyncio.Task[messages.Probed | None]], blocks: int) -> bool:
    """True: the nodes that have answered hold all blocks between them."""
    answers = [task.result() for task in asking.values() if task.done()]
    found = {i for answer in answers if answer is not None for i in (*answer.dram, *answer.ssd)}
    return found >= set(range(blocks))
