"""Lines of requests that wait for room, in some worlds that lend or have attention workers, and what must hold of them.

Who borrows is served in turn; the first waits only while there is no room for it; and room that is kept for it goes to
nobody who is not expected to be gone before. What is compared is the state before and after each step.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from halfmoon.conductor.core.line import MAY_MAKE_ROOM
from halfmoon.conductor.core.placement.candidates import decode_candidates
from halfmoon.conductor.core.placement.prefix_match import match_prefix
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import answer_class, expected_tokens
from halfmoon.conductor.core.state.records import Order
from halfmoon.schemas.decisions import Decision, StartDecode
from halfmoon.schemas.events import Stamped
from tests.conductor.conductor_scripts import S

if TYPE_CHECKING:
    from tests.chaos.world import World


class RoomLines:
    """See the module."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.net = world, world.net
        self.draw = random.Random(f"rooms {seed}")
        self.on = (world.lending or world.attention > 0) and self.draw.random() < 0.6
        #: As they were after the step before: the line, and since when room is kept for whom.
        self._line: list[str] = []
        self._claim: tuple[str, int] | None = None

    def policy(self) -> dict[str, int]:
        return {"room_wait_ns_max": self.draw.choice([1 * S, 5 * S, 60 * S])} if self.on else {}

    def check(self, state: State, stamped: Stamped, decisions: list[Decision]) -> None:
        """After one step. Raises AssertionError."""
        if not self.on:
            return
        self._check_turns(state, decisions)
        if decisions or type(stamped.event) in MAY_MAKE_ROOM:
            self._check_first(state)
        claim = state.claim
        first = next(iter(state.line), "")
        assert claim is None or claim.request_id == first, ("kept for another than the first", claim, first)
        if claim is not None and self._claim == (claim.request_id, claim.since_ns):
            new = [one for one in state.orders.values() if one.placed_seq == stamped.seq]
            for order in new:
                self._check_kept(state, order)
        self.net.counts["waited for room"] += sum(one not in self._line for one in state.line)
        self._line = list(state.line)
        self._claim = None if claim is None else (claim.request_id, claim.since_ns)

    def _check_turns(self, state: State, decisions: list[Decision]) -> None:
        for order in decisions:
            if isinstance(order, StartDecode) and order.request_id in self._line:
                self.net.counts["room after waiting"] += 1
            if not isinstance(order, StartDecode) or order.placement > 1 or not (order.loans or order.cache):
                continue
            turn = self._line.index(order.request_id) if order.request_id in self._line else len(self._line)
            passed = [one for one in self._line[:turn] if one in state.line]
            assert not passed, ("out of its turn", order, passed)

    def _check_first(self, state: State) -> None:
        if not state.line:
            return
        request = state.requests[next(iter(state.line))]
        event, claim = request.event, state.claim
        answer = expected_tokens(state.answers.get(answer_class(event.max_tokens)), event.max_tokens)
        state.claim = None
        try:
            match = match_prefix(state, event, state.at_ns)
            found = decode_candidates(state, event, match, answer, avoid=request.avoid)
        finally:
            state.claim = claim
        ready = bool(state.loads.prefill.workers)
        assert not ready or not any(one.room and not one.full for one in found), (
            "waits beside room",
            request,
            found,
        )

    def _check_kept(self, state: State, order: Order) -> None:
        """It leaves what is kept for the first, or is expected to end before that one can begin."""
        request, claim = state.requests[order.request_id], state.claim
        assert claim is not None
        # What was accepted before goes wherever it can; where load is predicted, that is compared at another time.
        if request.placements > 1 or order.mixed or state.policy.admission not in ("none", "late"):
            return
        kept = claim.blocks.get(order.decode_id, 0)
        worker = state.workers[order.decode_id]
        fits = not kept or worker.reserved_blocks + kept <= worker.kv_blocks
        ends_ns = order.prefill_end_ns + order.decode_ns
        assert fits or ends_ns <= claim.at_ns, ("takes room that is kept", order, claim)
