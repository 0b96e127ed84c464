"""Holders that answer late for a while, in some worlds that lend or have attention workers, and what must follow.

A decode worker that has waited long enough for one says so. Whoever was said to be slow is marked until it is well
again, not before; nothing moves there, and no new part goes there while others have room. The bookkeeping here is
from what is said in the log alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.state.slow_places import slow_mark
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Decision, MoveKv, StartDecode
from halfmoon.schemas.events import Stamped, WorkerHeartbeat
from halfmoon.schemas.lending import KvPart
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.step_times import EXPECTED_NS_MIN, WINDOW
from tests.chaos.texts import BLOCK_TOKENS
from tests.conductor.conductor_scripts import MS, S

if TYPE_CHECKING:
    from tests.chaos.holders import Holder
    from tests.chaos.world import World

SLOW = 0.4
PERCENT = 1_000
#: Beside the rest of a step, what is measured of the parts of one is nothing.
MEASURED = {"attention_token_ps": 1, "attention_row_ns": 1, "channel_trip_ns": 1}
Steps = dict[str, deque[int]]


class SlowHolders:
    """See the module. `on`: they are drawn in this world."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.net = world, world.net
        self.draw = random.Random(f"slow {seed}")
        can = world.lending or world.attention > 0
        self.on = can and world.wishes.drawn("slow holders", self.draw.random() < SLOW)
        #: Then half of them are slow again and again, there are four, with much to place, and they are seldom killed.
        self.wished = world.wishes.drawn("slow holders", False)
        #: Until when each is slow, and how many times what is expected it takes.
        self._slow: dict[str, tuple[int, int]] = {}
        #: By life of an owner: what its newest steps waited for each place, and whom it asked since its last heartbeat.
        self._steps: dict[tuple[str, int], Steps] = {}
        self._asked: dict[tuple[str, int], dict[str, bool]] = {}
        #: By life of a place: who says that it is slow, and when it said so last.
        self._marks: dict[tuple[str, str], dict[str, int]] = {}

    def measured(self, profile: CostProfile) -> CostProfile:
        return msgspec.structs.replace(profile, **MEASURED) if self.on else profile

    def policy(self) -> dict[str, int]:
        if not self.on:
            return {}
        slow_place_ns = self.draw.choice([3 * S, 30 * S])
        return {"slow_place_percent": PERCENT, "slow_place_ns": 30 * S if self.wished else slow_place_ns}

    def prompt_tokens(self, tokens: int) -> int:
        """Where KV moves some requests outgrow one cache, so that lenders are known before anything has moved."""
        lends = self.world.moving or (self.wished and self.world.lending)
        if not (self.on and lends) or self.draw.random() < (0.4 if self.wished else 0.7):
            return tokens
        return (self.world.decode_kv_blocks + self.draw.choice([2, 6])) * BLOCK_TOKENS

    # --- being slow -------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """One of the holders is slow from now on, for a while."""
        net, draw = self.net, self.draw
        if not net.faults:
            return
        role = "attention" if self.world.attention else "decode"
        places = sorted(one.process_id for one in net.processes.values() if one.role == role)
        if places:
            struck = draw.choice(places)
            slow = net.now_ns + draw.randrange(3 * S, 10 * S), draw.choice([7, 15, 50])
            for place in places[: len(places) // 2] if self.wished else [struck]:
                self._slow[place] = slow
            net.counts["slow for a while"] += 1
        net.later(draw.randrange(2 * S), self.strike)

    def waits(self, batch: Sequence[DecodeSequence]) -> dict[str, int]:
        """How long a step of the batch waits for each that holds something of it."""
        if not self.on:
            return {}
        places = dict.fromkeys(part.worker_id for sequence in batch for part in sequence.parts)
        return {place: self._wait_ns(place) for place in places}

    def _wait_ns(self, place: str) -> int:
        until_ns, times = self._slow.get(place, (0, 0))
        if not self.net.faults or self.net.now_ns >= until_ns:
            return self.draw.randrange(1 * MS)
        return times * EXPECTED_NS_MIN + self.draw.randrange(1 * MS)

    # --- saying so --------------------------------------------------------------------------------------------

    def step_ended(self, owner: Holder, waits: dict[str, int]) -> None:
        """The owner is about to hear of a step that waited so."""
        if not self.on:
            return
        life = owner.process_id, owner.life
        known = self._steps.get(life, {})
        self._steps[life] = {place: known.get(place, deque(maxlen=WINDOW)) for place in waits}
        for place, waited_ns in waits.items():
            self._steps[life][place].append(waited_ns)
            self._asked.setdefault(life, {})[place] = True

    def told(self, owner: Holder, heartbeat: WorkerHeartbeat) -> None:
        """Whoever made all of so many steps wait too long is named."""
        life = owner.process_id, owner.life
        limit_ns = EXPECTED_NS_MIN * PERCENT // 100
        named = [
            seen.worker_id for seen in heartbeat.places if seen.waited_ns * 100 >= seen.expected_ns * PERCENT
        ]
        for place in self._asked.pop(life, {}):
            steps = self._steps[life].get(place, deque())
            if len(steps) == WINDOW and min(steps) >= limit_ns:
                assert place in named, (
                    "I92 slow, and nobody says so",
                    owner.process_id,
                    place,
                    heartbeat.places,
                )

    # --- what follows -----------------------------------------------------------------------------------------

    def check(self, state: State, stamped: Stamped, decisions: Sequence[Decision]) -> None:
        """After a step of a core."""
        if not self.on:
            return
        event = stamped.event
        if isinstance(event, WorkerHeartbeat) and event.places:
            owner = state.workers.get(event.worker_id)
            if owner is not None and owner.incarnation == event.incarnation:
                self._check_marks(state, event)
        for decision in decisions:
            if isinstance(decision, MoveKv):
                lender = state.workers[decision.lender_id]
                assert slow_mark(state, lender) is None, ("I93 moves to a slow one", decision)
            elif isinstance(decision, StartDecode) and not decision.resumes:
                self._check_placed(state, decision)

    def _check_marks(self, state: State, event: WorkerHeartbeat) -> None:
        for seen in event.places:
            place = state.workers.get(seen.worker_id)
            if place is None or place.holds is None:  # it is gone, or has taken another role
                continue
            known = self._marks.setdefault((place.worker_id, place.incarnation), {})
            for owner_id, seen_ns in list(known.items()):
                if owner_id not in state.workers or state.at_ns - seen_ns >= state.policy.slow_place_ns:
                    del known[owner_id]
            times = seen.waited_ns * 100 / seen.expected_ns
            marked = event.worker_id in known and times >= PERCENT // 2
            self.net.counts["slow ones well again"] += event.worker_id in known and not marked
            if times >= PERCENT or marked:
                self.net.counts["slow ones marked"] += event.worker_id not in known
                known[event.worker_id] = state.at_ns
                assert event.worker_id in place.holds.slow_by, ("I92 slow and not marked", seen, place)
            else:
                known.pop(event.worker_id, None)
                assert event.worker_id not in place.holds.slow_by, ("I92 well and still marked", seen, place)

    def _check_placed(self, state: State, order: StartDecode) -> None:
        """A slow one is taken only where the others have no room, even now that the order's own is booked."""
        owner = state.workers[order.worker_id]
        if order.cache:
            chosen = [state.workers[place.worker_id] for place in order.cache]
            blocks = owner.layout.blocks(order.prompt_tokens + order.max_tokens)
            ranges: dict[int, int] = {}
            for one in _quick(state, "attention"):
                first = one.holds.first_kv_head
                ranges[first] = max(ranges.get(first, 0), _free_blocks(one))
            room = len(ranges) == self.world.head_ranges and min(ranges.values()) >= blocks
        else:
            chosen = [state.workers[loan.worker_id] for loan in order.loans]
            others = [one for one in _quick(state, "decode") if one is not owner and one.lends]
            room = _segments_free(others) >= sum(map(_segments, order.loans))
        slow = [one.worker_id for one in chosen if slow_mark(state, one) is not None]
        assert not (slow and room), ("I93 placed at a slow one", order, slow)
        self.net.counts["I93 placed at a slow one"] += bool(slow)


def _quick(state: State, role: str) -> list[WorkerRecord]:
    return [
        one
        for one in state.workers.values()
        if one.role == role and slow_mark(state, one) is None and state.takes_orders(one)
    ]


def _segments(loan: KvPart) -> int:
    return loan.segments


def _segments_free(lenders: Sequence[WorkerRecord]) -> int:
    return sum(
        max(0, _free_blocks(one)) // (one.layout.segment_tokens // one.block_tokens) for one in lenders
    )


def _free_blocks(worker: WorkerRecord) -> int:
    return worker.kv_blocks - worker.reserved_blocks
