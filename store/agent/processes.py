"""The users of this node's pool: its workers' processes and the other agents' incarnations.

A new process under a known name means that the earlier one is dead: it will neither read nor write any more, so
that whatever it held is free at once and need not wait for its lease to end.
"""

from __future__ import annotations

from halfmoon.store.agent.context import AgentContext
from halfmoon.store.agent.release import release
from halfmoon.store.errors import NotAttached
from halfmoon.store.pool.guard import peer_writer


class KnownProcesses:
    """The last process seen of each worker, and the last incarnation of each other agent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        #: Workers that have this incarnation's memory mapped; nothing is opened for others.
        self._attached: set[str] = set()
        #: Workers that understand `KvReady.layers`.
        self.hear_runs: set[str] = set()
        self._workers: dict[str, str] = {}
        self._agents: dict[str, str] = {}

    async def worker_seen(self, worker_id: str, process: str) -> None:
        """A worker of that name is there: holds of an earlier process of the same name end."""
        known = self._workers.get(worker_id)
        self._workers[worker_id] = process
        if known is not None and known != process:
            self._attached.discard(worker_id)
            for owner in self._context.guard.party(worker_id):
                await release(self._context, owner)

    async def agent_seen(self, node_id: str, incarnation: str) -> None:
        """Another agent is there: reservations of an earlier one of its node will not be written any more."""
        known = self._agents.get(node_id)
        self._agents[node_id] = incarnation
        if known is not None and known != incarnation:
            self._context.peers.forget(node_id)
            writer = peer_writer(node_id)
            for owner in self._context.guard.party(writer):
                self._context.guard.release(owner, writers=[writer])

    def attach(self, worker_id: str, *, hears_runs: bool) -> None:
        """The worker has mapped the memory of this incarnation."""
        self._attached.add(worker_id)
        if hears_runs:
            self.hear_runs.add(worker_id)
        else:
            self.hear_runs.discard(worker_id)

    def require_attached(self, worker_id: str) -> None:
        """Raises NotAttached: the worker would write to, or read, the memory of an agent that is gone."""
        if worker_id not in self._attached:
            node_id = self._context.config.node_id
            raise NotAttached(f"worker {worker_id} has not mapped node {node_id}'s memory yet")
