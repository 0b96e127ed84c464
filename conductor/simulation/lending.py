"""Loans between simulated decode workers: the room that one holds for others, a move under way, and what steps wait.

Source: Infinite-LLM (arXiv 2401.02669 v2), section 5, for what a move costs the steps in which it is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.schemas.decisions import Loan, MoveKv
from halfmoon.schemas.policy import Layout

#: Tokens that a step may move for nothing, and what as many more cost of its speed (measured in the paper).
FREE_MOVE_TOKENS, MORE_MOVED_COST = 16, 0.086
#: Between two instances, a layer's query there and its state back: as between Lamina's pools.
ROUND_TRIP_NS = 33_000
#: A loan is of whole segments, each of at least so many tokens, as live (`workers/model/segments.py`).
SEGMENT_TOKENS = 1_024
#: Of a head's log-sum-exp.
LSE_BYTES = 4


def with_segments(layout: Layout) -> Layout:
    """Segments of at least `SEGMENT_TOKENS`, in whole blocks."""
    each = -(-SEGMENT_TOKENS // layout.block_tokens) * layout.block_tokens
    return msgspec.structs.replace(layout, segment_tokens=each)


def with_parts(profile: Profile) -> Profile:
    """The profile with prices of attention elsewhere; where none were measured, by its other numbers.

    Queries of a token have as many bytes as its residual, which holds for the models of the shipped profiles.
    """
    cost = profile.cost
    if cost.channel_trip_ns and cost.attention_token_ps:
        return profile
    cost = msgspec.structs.replace(
        cost,
        attention_token_ps=cost.decode_per_context_token_ps,
        channel_trip_ns=ROUND_TRIP_NS,
        channel_byte_ps=10**12 // profile.link_bytes_s,
        query_row_bytes=profile.activation_bytes,
    )
    return msgspec.structs.replace(profile, cost=cost)


class HeldRoom:
    """Blocks that a worker holds for others' sequences, by order, and there by plan ("": lent with the order)."""

    def __init__(self) -> None:
        self.orders: dict[str, dict[str, int]] = {}

    def hold(self, order_id: str, plan_id: str, blocks: int) -> None:
        plans = self.orders.setdefault(order_id, {})
        plans[plan_id] = plans.get(plan_id, 0) + blocks

    def holds(self, order_id: str, plan_id: str) -> bool:
        return plan_id in self.orders.get(order_id, ())

    def drop_order(self, order_id: str) -> int:
        """The blocks that are free by it."""
        return sum(self.orders.pop(order_id, {}).values())

    def drop_plan(self, order_id: str, plan_id: str) -> int:
        """The blocks that are free by it."""
        blocks = self.orders.get(order_id, {}).pop(plan_id, 0)
        if order_id in self.orders and not self.orders[order_id]:
            del self.orders[order_id]
        return blocks


class MoveUnderWay:
    """Segments of a running sequence that go to a lender, some tokens with each step from the next one on."""

    def __init__(self, order: MoveKv, tokens: int) -> None:
        self.order = order
        self._steps = -(-tokens // order.tokens_per_step)
        #: Steps that the worker had made when the first of them began; -1: it has not.
        self._began = -1

    def begin(self, made: int) -> None:
        if self._began < 0:
            self._began = made

    def steps_left(self, made: int) -> int:
        return self._steps - (made - self._began if self._began >= 0 else 0)

    @property
    def slower(self) -> float:
        """Times that a step takes longer in which it is made: measured in the paper."""
        over = max(0, self.order.tokens_per_step - FREE_MOVE_TOKENS)
        return 1 / (1 - min(0.9, MORE_MOVED_COST * over / FREE_MOVE_TOKENS))


def longest_wait_ns(profile: Profile, tokens_each: int, sequences: Iterable[list[Loan]]) -> float:
    """The time of the slowest lender for its part of a step, as the borrower sees it; `tokens_each` a segment."""
    asked: dict[str, tuple[int, int]] = {}
    for loans in sequences:
        for loan in loans:
            rows, segments = asked.get(loan.worker_id, (0, 0))
            asked[loan.worker_id] = rows + 1, segments + loan.segments
    cost, query = profile.cost, profile.cost.query_row_bytes
    head_bytes = profile.token_bytes // (2 * profile.layers * profile.kv_heads)
    state = query + query // head_bytes * LSE_BYTES
    return max(
        (
            cost.channel_ns(profile.layers, profile.layers * (rows * query + segments * state))
            + cost.attention_ns(1, rows, segments * tokens_each)
            for rows, segments in asked.values()
        ),
        default=0.0,
    )
