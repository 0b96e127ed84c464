"""The context that simulated workers share: time, network, nodes, the log, and the outcome of each request.

The world makes one and fills it; workers know nothing else of the world.
"""

from __future__ import annotations

from typing import Protocol

from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.network import Network
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.schemas.decisions import StartDecode, StartMixed, StartPrefill
from halfmoon.schemas.events import Event, RequestFinished
from halfmoon.schemas.policy import Policy


class Surroundings(Protocol):
    """The world as its workers see it."""

    def say(self, event: Event) -> None:
        """Appends an event to the log."""

    def ended(self, request_id: str, end: str) -> None:
        """Notes the end of a request."""

    def keys(self, request_id: str) -> list[bytes]:
        """Block keys of a request."""


class SimulationContext:
    """See the module. `say`, `ended` and `keys` are the world's."""

    def __init__(
        self,
        profile: Profile,
        clock: Clock,
        network: Network,
        outcomes: dict[str, Outcome],
        world: Surroundings,
        *,
        block_tokens: int,
        policy: Policy,
    ) -> None:
        self.profile = profile
        self.clock = clock
        self.network = network
        self.block_tokens = block_tokens
        #: Whether prompts wait for blocks that one before them computes: at prefill workers, at mixed ones.
        self.coming_blocks = policy.coming_blocks
        self.coming_at_mixed = policy.coming_blocks and policy.coming_at_mixed
        self.block_bytes = profile.layout(block_tokens).block_bytes
        self.say, self.ended, self.keys = world.say, world.ended, world.keys
        #: By request and by node id.
        self.outcomes = outcomes
        self.nodes: dict[str, Node] = {}
        self.failed_fetches = self.fetched_bytes = self.pushed_bytes = 0

    def finish(
        self,
        order: StartDecode | StartMixed | StartPrefill,
        *,
        completion_tokens: int,
        tbt_ns: int,
        decode_ns: int,
    ) -> None:
        """The answer to `order` is whole."""
        outcome = self.outcomes[order.request_id]
        outcome.tbt_ns = tbt_ns
        self.say(
            RequestFinished(
                order_id=order.order_id,
                request_id=order.request_id,
                worker_id=order.worker_id,
                finish_reason="length",
                completion_tokens=completion_tokens,
                ttft_ns=outcome.ttft_ns,
                tbt_ns=tbt_ns,
                decode_ns=decode_ns,
            )
        )
        self.ended(order.request_id, "finished")
