"""The context that simulated workers share: time, network, nodes, the log, and the outcome of each request.

The world makes one and fills it; workers know nothing else of the world.
"""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.network import Network
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.schemas.decisions import StartDecode, StartMixed
from halfmoon.schemas.events import Event, RequestFinished


class SimulationContext:
    """`say` appends an event to the log, `ended` notes the end of a request, `keys` gives its block keys."""

    def __init__(
        self,
        profile: Profile,
        clock: Clock,
        network: Network,
        outcomes: dict[str, Outcome],
        *,
        block_tokens: int,
        segment_tokens: int,
        say: Callable[[Event], None],
        ended: Callable[[str, str], None],
        keys: Callable[[str], list[bytes]],
    ) -> None:
        self.profile = profile
        self.clock = clock
        self.network = network
        self.block_tokens = block_tokens
        #: What is lent is whole segments; 0: nobody lends.
        self.segment_tokens, self.segment_blocks = segment_tokens, segment_tokens // block_tokens
        self.block_bytes = profile.layout(block_tokens).block_bytes
        self.say = say
        self.ended = ended
        self.keys = keys
        #: By request and by node id.
        self.outcomes = outcomes
        self.nodes: dict[str, Node] = {}
        self.failed_fetches = self.fetched_bytes = self.pushed_bytes = 0

    def finish(
        self, order: StartDecode | StartMixed, *, completion_tokens: int, tbt_ns: int, decode_ns: int
    ) -> None:
        """All tokens of the order's answer are drawn: the log is told, and the request has ended."""
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
