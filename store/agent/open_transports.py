"""An agent's RDMA transport, or why it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfmoon.schemas.store import QueuePair
from halfmoon.store.errors import TransferError
from halfmoon.store.transports.rdma.device import RdmaAbsent
from halfmoon.store.transports.rdma.transport import RdmaTransport

if TYPE_CHECKING:
    from halfmoon.store.agent.agent import StoreAgent


def open_rdma(agent: StoreAgent) -> RdmaTransport | None:
    """None where it is absent, with the reason in `agent.absent`. Raises TransferError when RDMA is forced."""

    async def exchange(node_id: str, offer: QueuePair) -> QueuePair:
        return await agent.peers.ask(node_id, "pair", offer, QueuePair)

    if agent.config.transport not in ("auto", "rdma"):
        agent.absent["rdma"] = f"transport is {agent.config.transport}"
        return None
    try:
        return RdmaTransport(
            agent.view,
            agent.guard,
            agent.config,
            agent.executor,
            incarnation=agent.incarnation,
            counters=agent.counters,
            exchange=exchange,
        )
    except RdmaAbsent as problem:
        agent.absent["rdma"] = str(problem)
        if agent.config.transport == "rdma":
            raise TransferError(f"RDMA is not to be had: {problem}") from None
        return None
