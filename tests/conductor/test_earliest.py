"""The short ways to the earliest first token and to the shortest step find what looking at every worker
finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import msgspec
import pytest
from conductor_scripts import MS, PROFILE, Script, arrived, keys, prefill, stored
from random_clusters import Cluster

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.best_first import earliest_first_token
from halfmoon.conductor.core.placement.candidates import candidates
from halfmoon.conductor.core.placement.decode_candidates import decode_candidates, shortest_step
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN,
    EARLIEST_TOKEN_WITH_COPIES,
    POLICIES,
    choose_decode,
    choose_prefill,
)
from halfmoon.conductor.core.placement.prefix_match import FetchSource, PrefixMatch, match_prefix
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import LINK_STALE_NS, Link, answer_class, expected_tokens
from halfmoon.conductor.core.state.records import DecodeHalf, Order, PrefillHalf
from halfmoon.schemas.decisions import Prediction
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.types import KEY_BYTES
from tests.lengths import sizes


def short_clusters() -> Iterator[Cluster]:
    """Random clusters whose policy has short ways, whatever policies there are."""
    drawn = (Cluster(7_000 + seed, checked=False) for seed in range(1_000))
    short = (EARLIEST_TOKEN, EARLIEST_TOKEN_WITH_COPIES)
    return (one for one in drawn if POLICIES[one.world.policy.name].prefill in short)


def compared(cluster: Cluster) -> tuple[int, int]:
    """How often the short way was taken in a random cluster's log: to a prefill worker, to a decode worker."""
    cluster.run(chaos_s=30, calm_s=0)
    core, prefills, decodes = Core(), 0, 0
    for stamped in cluster.log:
        state, event = core.state, stamped.event
        if isinstance(event, RequestArrived):
            now_ns = max(state.at_ns, stamped.at_ns)
            prefills += short_prefill(state, event, now_ns)
            decodes += short_decode(state, event, now_ns)
        core.step(stamped)
    return prefills, decodes


def short_prefill(state: State, event: RequestArrived, now_ns: int) -> bool:
    matched = match_prefix(state, event, now_ns)
    every = candidates(state, event, matched, now_ns)
    best = earliest_first_token(state, event, matched, now_ns)
    if best is None:
        return False
    assert best == choose_prefill(state, [c for c in every if not c.full], "")
    assert len(state.loads.prefill.rows) == len(every)
    return len(every) > 1


def short_decode(state: State, event: RequestArrived, now_ns: int) -> bool:
    matched = match_prefix(state, event, now_ns)
    tokens = expected_tokens(state.answers.get(answer_class(event.max_tokens)), event.max_tokens)
    every = decode_candidates(state, event, matched, tokens)
    short = shortest_step(state, event, matched, tokens)
    if short is None:
        return False
    assert short.best == choose_decode(state, [c for c in every if c.room and not c.full], "")
    assert short.tbt_ns_max >= max(c.tbt_ns for c in every)
    return len(every) > 1


@pytest.mark.parametrize("count", sizes(3, 20))
def test_the_short_ways_end_where_the_policy_would_among_all(count: int) -> None:
    """As many clusters as it takes to see so many; one that has few is as good as another."""
    prefills = decodes = 0
    for cluster in islice(short_clusters(), 4 * count):
        ways = compared(cluster)
        prefills, decodes = prefills + ways[0], decodes + ways[1]
        if prefills > 25 * count and decodes > 5 * count:
            return
    raise AssertionError((prefills, decodes))


@pytest.mark.parametrize("count", sizes(2, 5))
def test_rows_are_as_if_made_anew_after_every_event(count: int) -> None:
    coming = 0
    for seed in range(count):
        cluster = Cluster(8_000 + seed, checked=False)
        cluster.run(chaos_s=20, calm_s=0)
        core = Core()
        for stamped in cluster.log:
            assert core.state.loads is not None  # made, so that it must be kept true
            core.step(stamped)
            state = core.state
            if state.policy.coming_blocks:
                coming += comings_agree(state)
            anew = msgspec.structs.replace(state).loads
            assert state.loads.suspected_until_ns == anew.suspected_until_ns
            for name in ("prefill", "decode", "mixed"):
                have, want = getattr(state.loads, name), getattr(anew, name)
                assert have.workers == want.workers
                assert have.rows == want.rows
                assert have.by_load == want.by_load
                assert have.prompts == want.prompts
                for worker in have.workers:
                    costs = [msgspec.structs.astuple(cost) for cost in (have.least, worker.cost, have.most)]
                    assert all(least <= cost <= most for least, cost, most in zip(*costs, strict=True))
                assert (have.tokens_max, have.block_tokens, have.on_node) == (
                    want.tokens_max,
                    want.block_tokens,
                    want.on_node,
                )
    assert coming > 0


def comings_agree(state: State) -> int:
    """How many requests find coming blocks; the same as in a state made of the records alone."""
    kept, anew = state.coming, msgspec.structs.replace(state).coming
    found = [request.event.block_keys for request in state.requests.values()]
    assert [kept.match(each) for each in found] == [anew.match(each) for each in found]
    return sum(1 for each in found if kept.match(each))


def order_at(worker_id: str) -> Order:
    return Order(
        order_id=f"at {worker_id}",
        request_id="x",
        prefill_id=worker_id,
        prefill_node_id=f"n-{worker_id}",
        decode_id="d0",
        decode_node_id="n-d0",
        placed_ns=0,
        placed_seq=0,
        predicted=Prediction(),
        prefill=PrefillHalf(end_ns=0, reserved_ns=0, pending_blocks=0, prompt_blocks=0),
        decode=DecodeHalf(lasts_ns=0, reserved_blocks=0, context_tokens=0),
    )


def wide_pool(draw: random.Random) -> Script:
    """Ten to forty prefill workers with what makes them differ, though many are alike."""
    script = Script(
        coming_blocks=True,
        link_bytes_s=10 ** draw.randrange(7, 11),
        link_latency_ns=draw.choice([0, 500_000]),
        copies_price=draw.choice(["reuse", "displaced"]),
    )
    count = draw.randrange(10, 41)
    costs = [PROFILE, msgspec.structs.replace(PROFILE, prefill_per_token_ps=100_000_001)]
    for number in range(count):
        script(prefill(number, profile=draw.choice(costs)))
    holders, sending = draw.choice([2, 8, count]), draw.choice([0.3, 1.0])
    for number in range(holders):
        script(stored(f"p{number}", keys(draw.choice([1, 9, 20]))))
    state = script.core.state
    state.counters.prompt_tokens, state.counters.cached_local_tokens = 1_000, draw.choice([0, 300])
    state.displaced.evicted, state.displaced.missed = 10, draw.choice([0, 3, 10])
    for worker in state.workers.values():
        if draw.random() < (0.9 if int(worker.worker_id[1:]) < holders else 0.2):
            worker.prompts.orders["x"] = worker.prompts.reserved_ns = draw.choice(
                [1_000, 5 * MS, 100 * MS, 500 * MS]
            )
            worker.prompts.head_since_ns = script.now_ns
        state.links[worker.node_id] = {
            f"n-p{draw.randrange(count)}": Link(
                bytes_s=10 ** draw.randrange(6, 12),
                measured_ns=draw.choice([script.now_ns, script.now_ns - LINK_STALE_NS - 1]),
            )
            for _ in range(draw.randrange(4))
        }
        if draw.random() < sending:
            ends = (script.now_ns + draw.choice([-1, 1]) for _ in range(draw.randrange(1, 3)))
            state.leaving[worker.node_id] = {str(place): end_ns for place, end_ns in enumerate(ends)}
    state.members_changed()
    for worker in state.workers.values():
        if worker.orders and draw.random() < 0.3:
            state.coming.add(order_at(worker.worker_id), keys(draw.choice([1, 10, 20])))
    return script


@pytest.mark.parametrize("seed", range(3))
def test_in_a_wide_pool_no_holder_and_no_idle_worker_is_passed_over_that_would_be_taken(seed: int) -> None:
    draw, fetched, coming = random.Random(seed), 0, 0
    for _ in range(40):
        script = wide_pool(draw)
        state, request = (
            script.core.state,
            arrived(tokens=draw.choice([100, 500, 950, 2_001]), block_keys=keys(20)),
        )
        matched = match_prefix(state, request, script.now_ns)
        best = earliest_first_token(state, request, matched, script.now_ns)
        every = candidates(state, request, EverySource.of(state, request, script.now_ns), script.now_ns)
        assert candidates(state, request, matched, script.now_ns) == every
        assert best == choose_prefill(state, every, "")
        fetched += bool(best and best.fetches)
        coming += bool(best and best.coming_blocks)
    assert fetched > 0
    assert coming > 0


def test_a_long_queue_is_looked_at_where_more_is_coming_than_anybody_holds() -> None:
    script = Script(prefill(0), prefill(1), prefill(2), coming_blocks=True, link_bytes_s=100_000)
    script(stored("p0", keys(10)))
    state, request = script.core.state, arrived(tokens=2_001, block_keys=keys(20))
    for name, queue_ns in (("p0", 500 * MS), ("p1", 120 * MS)):
        prompts = state.workers[name].prompts
        prompts.orders["x"] = prompts.reserved_ns = queue_ns
        prompts.head_since_ns = script.now_ns
    state.members_changed()
    state.coming.add(order_at("p1"), keys(20))
    # p2 could take 110 ms, were the ten blocks there at once; over its link it computes all, in 210 ms.
    matched = match_prefix(state, request, script.now_ns)
    best = earliest_first_token(state, request, matched, script.now_ns)
    assert best == choose_prefill(state, candidates(state, request, matched, script.now_ns), "")
    assert best is not None
    assert best.worker_id == "p1"


class EverySource(PrefixMatch):
    """Looks at every holder."""

    @classmethod
    def of(cls, state: State, request: RequestArrived, now_ns: int) -> EverySource:
        runs = state.index.runs(request.block_keys, len(request.block_keys) // KEY_BYTES)
        return cls(state, runs, runs, now_ns, state.coming.match(request.block_keys))

    def undominated_sources(self, measured: object, more_than: int) -> Iterator[FetchSource]:
        return self.sources(more_than)
