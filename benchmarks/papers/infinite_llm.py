"""Instances that lend KVCache and attention to each other while they decode: the system `infinite-llm`.

A model of its own, without the conductor, and with prefill removed: requests are dealt to the instances in turn, as a
balancer that knows nothing would, and wait there for room, first come, first served. A step takes `T(batch, context)`
of the profile: what depends on the batch, and attention to the context that lies here, that of others included. A part
elsewhere is attended to there, behind the part here; where it takes longer, with a round trip for each layer, the step
waits for it. Room is booked for all that a request will grow to.

An instance that has no room for the first that waits asks those for whose room nobody waits, emptiest first, where all
together then make more tokens a second. Either the new request borrows (its prefill brings the KV there), or one that
runs gives a part away, which moves while it decodes, so many tokens a step. A request that no cache holds alone borrows
whatever it costs the others, or it would wait for ever. The live planner
(`conductor/core/moves.py`) decides from the conductor's state, in whole segments, and cannot be asked without that
state; this one is kept small and weighs the same sum of rates.

Source: Infinite-LLM (arXiv 2401.02669 v2), sections 5.2 to 5.4, for the model of time, the greedy plan and its limits.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from benchmarks.papers.report import DecodeReport
from benchmarks.papers.saturation import Saturation, figures_of
from halfmoon.conductor.simulation.batch import Steps, tbt_ns
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import Profile
from halfmoon.conductor.simulation.report import Objectives, RunSetting, Traffic, summarise
from halfmoon.conductor.simulation.trace import Arrival, faster
from halfmoon.schemas.numbers import SECOND_NS

#: Tokens that a step may move for nothing, and what as many more cost of its speed (measured in the paper).
FREE_MOVE_TOKENS, MORE_MOVED_COST = 16, 0.086
#: Between two instances, a layer's query there and its state back: as between Lamina's pools.
ROUND_TRIP_NS = 33_000
#: The end of a prompt stays where its answer grows.
TAIL_TOKENS = 16
#: Sizes that the planner weighs against each other, from the least that makes room to the most that there is.
SIZES = 8


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """How instances lend."""

    #: New requests may borrow. Without this and moves nobody lends: the baseline.
    placed: bool = True
    #: Of a running request, moved in one step, at most.
    move_tokens: int = FREE_MOVE_TOKENS
    #: Percent of a cache that is never lent.
    reserve_percent: int = 5
    #: Clients of each instance, who send their next request once the last is answered; 0: at the trace's times.
    clients: int = 0


NOBODY_LENDS = Lending(placed=False, move_tokens=0)


class LentSequence(msgspec.Struct, gc=False):
    """One request in hand; `away` has its tokens elsewhere, by the instance that holds them."""

    name: str
    prompt_tokens: int
    output_tokens: int
    joined: int = 0
    away: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def here_tokens(self) -> int:
        """Room that it takes where it is decoded."""
        return self.tokens - sum(self.away.values())


class PartMove(msgspec.Struct):
    """Tokens of a running sequence on their way to a lender, where their room is booked."""

    name: str
    lender: int
    tokens: int
    left: int


class Instance:
    """One instance: its batch, its room, and what it holds for others."""

    def __init__(self, place: int, profile: Profile, kv_tokens: int) -> None:
        self.place, self.cost, self.layers = place, profile.cost, profile.layers
        self.batch_max = profile.batch_max
        self.kv_tokens = self.free_tokens = kv_tokens
        self.steps = Steps(profile.cost)
        #: Dealt to it: those whose clients have not sent them yet, and those that wait for room.
        self.unsent: deque[LentSequence] = deque()
        self.waiting: deque[LentSequence] = deque()
        self.batch: dict[str, LentSequence] = {}
        self.move: PartMove | None = None
        #: Tokens that it attends to, by the instance whose they are; and its own that others attend to.
        self.lent: dict[int, int] = {}
        self.away_tokens = 0
        self.since_ns = 0
        self.stepping = False
        #: Changes of room in the cluster when the first that waits was last refused a loan, or a move.
        self.refused_at = self.not_moved_at = -1

    @property
    def local_tokens(self) -> int:
        """Context that is attended to here."""
        return self.steps.context_tokens - self.away_tokens + sum(self.lent.values())

    def rate(self, joining: int = 0, tokens: int = 0, most_away: int = 0) -> float:
        """Tokens a second with so many more sequences and tokens attended to here, and `most_away` at one lender."""
        sequences, local = self.steps.sequences + joining, self.local_tokens + tokens
        return (
            sequences * SECOND_NS / (self.steps.step_ns(sequences, local) + self.waited_ns(local, most_away))
        )

    def attention_ns(self, tokens: int) -> float:
        return self.cost.decode_per_context_token_ps * tokens / 1e3

    def waited_ns(self, local_tokens: int, most_away: int) -> float:
        """Time that a step waits for the lender that attends to the most, behind its own attention."""
        if not most_away:
            return 0.0
        there = self.attention_ns(most_away) + self.layers * ROUND_TRIP_NS
        return max(0.0, there - self.attention_ns(local_tokens))

    def step_ns(self, instances: Sequence[Instance], moved: int) -> float:
        """One step, in which `moved` tokens are on their way."""
        most = max(one.lent.get(self.place, 0) for one in instances)
        own = self.steps.step_ns(self.steps.sequences, self.local_tokens)
        own += self.waited_ns(self.local_tokens, most)
        over = max(0, moved - FREE_MOVE_TOKENS)
        return own / (1 - min(0.9, MORE_MOVED_COST * over / FREE_MOVE_TOKENS))

    def hold(self, owner: int, tokens: int) -> None:
        """For another instance, from now on; a negative number: no longer."""
        self.free_tokens -= tokens
        self.lent[owner] = self.lent.get(owner, 0) + tokens
        if not self.lent[owner]:
            del self.lent[owner]
        assert self.free_tokens >= 0, (self.place, self.free_tokens)
        assert all(held > 0 for held in self.lent.values()), self.lent

    def join(self, sequence: LentSequence) -> None:
        sequence.joined = self.steps.made
        self.free_tokens -= sequence.here_tokens
        self.away_tokens += sum(sequence.away.values())
        self.batch[sequence.name] = sequence
        self.steps.join(sequence.name, sequence.prompt_tokens, sequence.output_tokens)
        assert self.free_tokens >= 0, (self.place, self.free_tokens)

    def leave(self, sequence: LentSequence) -> None:
        del self.batch[sequence.name]
        self.free_tokens += sequence.here_tokens
        self.away_tokens -= sum(sequence.away.values())
        self.steps.leave(sequence.name, sequence.tokens)


class Planner:
    """Who lends how much to whom: greedy, emptiest lender first, within the paper's limits."""

    def __init__(self, instances: Sequence[Instance], lending: Lending) -> None:
        self.instances, self.lending = instances, lending

    def loans(self, owner: Instance, first: LentSequence) -> dict[int, int]:
        """Tokens of the first that waits, by lender, so that it and those behind it find room; none: none gains."""
        if not self.lending.placed:
            return {}
        # What no cache of its own will ever hold must borrow, whatever it costs and whoever waits.
        must = first.tokens > owner.kv_tokens
        best, most = dict[int, int](), float("-inf") if must else 0.0
        for size in _sizes(first.tokens - owner.free_tokens, first.prompt_tokens - TAIL_TOKENS):
            joining, context = _joining(owner, size)
            loans, gain = self._spread(owner, size, joining, context - size, of_all=must)
            if loans and gain > most:
                best, most = loans, gain
        return best

    def move(self, owner: Instance) -> PartMove | None:
        """A part of the longest running sequence that makes room for those that wait; None where none gains."""
        if not (self.lending.move_tokens and owner.waiting and owner.batch):
            return None
        longest = max(owner.batch.values(), key=lambda one: (one.here_tokens, one.name))
        best, most = None, 0.0
        movable = longest.prompt_tokens - TAIL_TOKENS - sum(longest.away.values())
        for size in _sizes(owner.waiting[0].tokens - owner.free_tokens, movable):
            joining, context = _joining(owner, size)
            loans, gain = self._spread(owner, size, joining, context - size)
            if len(loans) == 1 and gain > most:
                (lender,) = loans
                best, most = PartMove(longest.name, lender, size, size), gain
        return best

    def _spread(
        self, owner: Instance, tokens: int, joining: int, context_tokens: int, *, of_all: bool = False
    ) -> tuple[dict[int, int], float]:
        """Lenders of so many tokens, and what all gain in tokens a second when so many join; none: no room."""
        gain, most = 0.0, 0
        found: dict[int, int] = {}
        for lender in self._lenders(owner, of_all):
            reserve = lender.kv_tokens * self.lending.reserve_percent // 100
            part = min(tokens, lender.free_tokens - reserve)
            if part > 0:
                found[lender.place] = part
                gain += lender.rate(0, part) - lender.rate()
                most = max(most, part + lender.lent.get(owner.place, 0))
                tokens -= part
        gain += owner.rate(joining, context_tokens, most) - owner.rate()
        return (found, gain) if tokens <= 0 else ({}, 0.0)

    def _lenders(self, owner: Instance, of_all: bool) -> list[Instance]:
        """Those whose room nobody of their own waits for, or all, emptiest first. Two do not lend to each other."""
        others = [
            one
            for one in self.instances
            if one is not owner and (of_all or not one.waiting) and one.place not in owner.lent
        ]
        return sorted(others, key=lambda one: (-one.free_tokens, one.place))


def _sizes(least: int, most: int) -> list[int]:
    """Up to SIZES numbers from `least` to `most`."""
    if not 0 < least <= most:
        return []
    return sorted({least + (most - least) * part // (SIZES - 1) for part in range(SIZES)})


def _joining(owner: Instance, tokens: int) -> tuple[int, int]:
    """How many of those that wait would join if so many tokens more were free, and their context."""
    free, joining, context = owner.free_tokens + tokens, 0, 0
    for sequence in owner.waiting:
        if sequence.tokens > free or len(owner.batch) + joining >= owner.batch_max:
            break
        free -= sequence.tokens
        joining += 1
        context += sequence.prompt_tokens
    return joining, context


class LendingRun:
    """One simulation of instances; `run` makes it."""

    def __init__(
        self, arrivals: Sequence[Arrival], instances: int, kv_tokens: int, profile: Profile, lending: Lending
    ) -> None:
        self.arrivals, self.lending = arrivals, lending
        self.instances = [Instance(place, profile, kv_tokens) for place in range(instances)]
        self.planner = Planner(self.instances, lending)
        self.outcomes: dict[str, Outcome] = {}
        #: (when its step ends, instance).
        self.ends: list[tuple[int, int]] = []
        self.now_ns = self.steps = self.ended = 0
        self.borrowed_tokens = self.moved_tokens = 0
        #: How often room has changed. A plan is not made again before it has: contexts that grow gain nothing new.
        self.changes = 0
        self.whole, self.full = Saturation(), Saturation()
        self.digest = blake2b(digest_size=16)
        most = instances if lending.placed else 1
        #: The longest request that could ever run, in an empty cluster.
        self.tokens_max = kv_tokens + (most - 1) * (kv_tokens - kv_tokens * lending.reserve_percent // 100)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        told = 0
        while self.ends or len(self.outcomes) < len(self.arrivals):
            next_ns = (
                self.arrivals[len(self.outcomes)].at_ns if len(self.outcomes) < len(self.arrivals) else -1
            )
            if self.ends and (next_ns < 0 or self.ends[0][0] < next_ns):
                self.now_ns, place = heapq.heappop(self.ends)
                self._stepped(self.instances[place])
            else:
                self.now_ns = next_ns
                self._arrive()
            self._begin_steps()
            if progress is not None and self.ended - told >= 100:
                told = self.ended
                progress(told)

    def _arrive(self) -> None:
        arrival = self.arrivals[len(self.outcomes)]
        place = len(self.outcomes) % len(self.instances)
        name = f"r{len(self.outcomes)}"
        outcome = self.outcomes[name] = Outcome(
            arrived_ns=arrival.at_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            decode_id=f"instance-{place}",
        )
        tokens = arrival.prompt_tokens + arrival.output_tokens
        kv_tokens = self.instances[place].kv_tokens
        # The answer grows where it is decoded.
        if tokens > self.tokens_max or (
            tokens > kv_tokens and arrival.output_tokens + TAIL_TOKENS > kv_tokens
        ):
            outcome.end, outcome.ended_ns = "too_long", self.now_ns
            return
        instance = self.instances[place]
        instance.unsent.append(LentSequence(name, arrival.prompt_tokens, arrival.output_tokens))
        self._send(instance)

    def _send(self, instance: Instance) -> None:
        """Whatever clients send now."""
        clients = self.lending.clients
        while instance.unsent and (not clients or len(instance.waiting) + len(instance.batch) < clients):
            sequence = instance.unsent.popleft()
            self.outcomes[sequence.name].arrived_ns = self.now_ns
            self.changes += 1
            instance.waiting.append(sequence)

    def _begin_steps(self) -> None:
        for instance in self.instances:
            if instance.stepping:
                continue
            self._join(instance)
            if not instance.batch:
                continue
            move = self._move_of(instance)
            moved = min(self.lending.move_tokens, move.left) if move is not None else 0
            took = instance.step_ns(self.instances, moved)
            instance.stepping, instance.since_ns = True, self.now_ns
            heapq.heappush(self.ends, (self.now_ns + max(1, round(took)), instance.place))

    def _move_of(self, instance: Instance) -> PartMove | None:
        """The move that is under way, or one that begins now."""
        if instance.move is None and instance.waiting and instance.not_moved_at != self.changes:
            instance.move = self.planner.move(instance)
            if instance.move is not None:
                self.instances[instance.move.lender].hold(instance.place, instance.move.tokens)
                self.changes += 1
            instance.not_moved_at = self.changes
        return instance.move

    def _join(self, instance: Instance) -> None:
        while instance.waiting and len(instance.batch) < instance.batch_max:
            first = instance.waiting[0]
            if first.tokens > instance.free_tokens:
                if instance.refused_at == self.changes:
                    return
                loans = self.planner.loans(instance, first)
                if not loans:
                    instance.refused_at = self.changes
                    return
                for place, tokens in loans.items():
                    self.instances[place].hold(instance.place, tokens)
                    self.borrowed_tokens += tokens
                first.away = loans
            instance.waiting.popleft()
            instance.join(first)
            self.changes += 1
            self.outcomes[first.name].queue_ns = self.now_ns - self.outcomes[first.name].arrived_ns
            self.digest.update(f"{first.name}:{instance.place}:{first.away}\n".encode())

    def _stepped(self, instance: Instance) -> None:
        instance.stepping = False
        sequences, length = instance.steps.sequences, self.now_ns - instance.since_ns
        self.steps += 1
        self.whole.step(sequences, instance.since_ns, self.now_ns)
        if self._steady():
            self.full.step(sequences, instance.since_ns, self.now_ns)
        made = instance.steps.made
        over = instance.steps.single(length)
        for sequence in instance.batch.values():
            if sequence.joined == made:
                self.outcomes[sequence.name].first_token_ns = self.now_ns
        self._move_on(instance)
        for name in over:
            self._end(instance, instance.batch[name])
        self._send(instance)

    def _steady(self) -> bool:
        """Each client has sent a second request and has more to send, or the trace goes on."""
        if self.lending.clients:
            begun = self.ended >= self.lending.clients * len(self.instances)
            return begun and all(one.unsent for one in self.instances)
        return self.now_ns <= self.arrivals[-1].at_ns

    def _move_on(self, instance: Instance) -> None:
        """Some tokens more of a move are there; with the last of them the room here is free."""
        move = instance.move
        if move is None:
            return
        move.left -= min(self.lending.move_tokens, move.left)
        if not move.left:
            instance.move = None
            sequence = instance.batch[move.name]
            sequence.away = {
                **sequence.away,
                move.lender: sequence.away.get(move.lender, 0) + move.tokens,
            }
            instance.away_tokens += move.tokens
            instance.free_tokens += move.tokens
            self.moved_tokens += move.tokens
            self.changes += 1

    def _end(self, instance: Instance, sequence: LentSequence) -> None:
        outcome = self.outcomes[sequence.name]
        outcome.tbt_ns = tbt_ns(instance.steps.intervals(sequence.joined))
        outcome.end, outcome.ended_ns = "finished", self.now_ns
        if instance.move is not None and instance.move.name == sequence.name:
            self.instances[instance.move.lender].hold(instance.place, -instance.move.tokens)
            instance.move = None
        for place, tokens in sequence.away.items():
            self.instances[place].hold(instance.place, -tokens)
        instance.leave(sequence)
        self.changes += 1
        self.ended += 1


def simulate_infinite_llm(
    arrivals: Sequence[Arrival],
    instances: int,
    kv_tokens: int,
    profile: Profile,
    *,
    lending: Lending,
    slo: Objectives,
    speed: float = 1.0,
    progress: Callable[[int], None] | None = None,
    outcomes: dict[str, Outcome] | None = None,
) -> DecodeReport:
    """As `simulate`, of decode alone on `instances` with room for `kv_tokens` each."""
    began = time.perf_counter()
    run = LendingRun(faster(arrivals, speed), instances, kv_tokens, profile, lending)
    if outcomes is not None:
        run.outcomes = outcomes
    complete = True
    try:
        run.run(progress)
    except KeyboardInterrupt:
        complete = False
    lends = lending.placed or lending.move_tokens
    report = DecodeReport(
        setting=RunSetting(
            system="infinite-llm",
            policy="greedy lending" if lends else "nobody lends",
            admission="none",
            profile=profile.name,
            prefill=0,
            decode=instances,
            speed=speed,
            seed=0,
        ),
        complete=complete,
        slo=slo,
        traffic=Traffic(bytes_moved=run.moved_tokens * profile.token_bytes),
        events=run.steps,
        digest=run.digest.hexdigest(),
        pools=figures_of(run.full, run.whole, instances * kv_tokens),
    )
    summarise(report, run.outcomes, run.now_ns)
    report.wall_s = round(time.perf_counter() - began, 3)
    return report
