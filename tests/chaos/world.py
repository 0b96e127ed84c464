"""A whole cluster of make-believe, drawn from one seed: any number of conductors over one log, a network that
delays, loses and repeats, processes that die, pause and come back.

Time is the world's own. What is real: the core (each conductor has one), the machines of prefill, decode, mixed and
attention workers, the pools of block slots with their guards, the messages and their identities. What is played:
nats-server (`network`), the shells of conductors (`conductors`) and workers (`workers`, `prefill_workers`,
`decode_workers`, `mixed_workers`, `attention_workers`; what some share is in `holders` and `remote_caches`), store
agents (`stores`), frontends and clients (`frontends`), the model (`texts`), and what goes wrong (`faults`).

`run` plays a phase with faults and one without. Safety is checked all along: every conductor decides the same on the
same event and has the same state; invariants of core, machines and pools hold; a full queue takes nothing new; every
slot and block holds what its owner believes; an order is answered once, a cancelled one never; a client gets every
token of its text once, and is told one end. Liveness at the end: every request that a living frontend accepted has
ended, and nothing is held any more.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any, get_args

import msgspec

from halfmoon.conductor.core.invariants import check_ledger
from halfmoon.schemas.codec import digest as digest_of
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import ClusterConfigured, RequestArrived, Stamped, StateDigested
from halfmoon.schemas.policy import AdmissionName, CopiesPrice, Policy, PolicyName
from tests.chaos.attention_workers import AttentionWorker
from tests.chaos.conductors import Conductor, published
from tests.chaos.decode_workers import DecodeWorker
from tests.chaos.faults import Faults
from tests.chaos.frontends import Frontend
from tests.chaos.holders import Holder
from tests.chaos.mixed_workers import MixedWorker
from tests.chaos.network import Network
from tests.chaos.order_checks import check_orders
from tests.chaos.planner_deaths import PlannerDeaths
from tests.chaos.prefill_workers import PrefillWorker
from tests.chaos.similar import SimilarPrompts
from tests.chaos.slow_holders import SlowHolders
from tests.chaos.stages import StageGroups
from tests.chaos.stores import StoreAgent
from tests.chaos.texts import BLOCK_TOKENS, LAYERS, LAYOUT, Text
from tests.chaos.wishes import Feature, Wishes
from tests.chaos.workers import Worker
from tests.conductor.conductor_scripts import MS, PROFILE, S, keys, nothing_reserved

CALM_S_MAX = 180
#: How many of the worlds in which it can be lend, and their segments of two blocks.
LENDING = 0.4
SEGMENT_TOKENS = 2 * BLOCK_TOKENS
#: And how many of the rest of them have attention workers.
ATTENTION = 0.4
#: And how many of those by requests also split by sequence.
SPLITS = 0.6
#: In how many of those without them prefill and decode workers change roles, of those that lend, and that move KV.
ELASTIC, ELASTIC_LENDING, ELASTIC_MOVING = 0.4, 0.2, 0.1
#: And how many of those without any of it have mixed workers.
MIXED = 0.4
#: And in how many placements are paused.
PAUSES = 0.2
#: 1 ms a token: fetching a block is mostly cheaper than computing it.
SLOW_PREFILL = msgspec.structs.replace(PROFILE, prefill_per_token_ps=1_000_000_000)


class World:
    """Call `run`; AssertionError says what is wrong.

    `conductors`: how many, 0 for a number that is drawn. `lossy` False: every message arrives and no link is cut.
    `wants`: what this world has, whatever the seed draws.
    """

    def __init__(
        self, seed: int, *, conductors: int = 0, lossy: bool = True, wants: Collection[Feature] = ()
    ) -> None:
        self.wishes = wishes = Wishes(wants)
        self.net = Network(random.Random(seed))
        #: In one world of four the server's clock is set; drawn apart, so that the other worlds stay as they were.
        self.clock_draw = random.Random(f"clock {seed}")
        self.clock_steps = wishes.drawn("clock steps", self.clock_draw.random() < 0.25)
        self.draw = draw = self.net.draw
        #: For what was added later: a seed's other draws stay what they were.
        self.draw_late = random.Random(-seed - 1)
        self.idle_served = random.Random(f"idle {seed}").random() < 0.5
        self.correction_window = random.Random(f"correction {seed}").choice([0, 0, 3, 15])
        self.coming_blocks = random.Random(f"coming {seed}").random() < 0.5
        self.coming_at_mixed = random.Random(f"coming at mixed {seed}").random() < 0.5
        self.one_token_prefills = random.Random(f"one token {seed}").random() < 0.7
        self.passing_durations = random.Random(f"passing {seed}").choice([0, 1, 8])
        self.copies_price = random.Random(f"copies {seed}").choice(get_args(CopiesPrice))
        if not lossy:
            self.net.loss = 0.0
        # The configuration, drawn too.
        self.arrival_ns = draw.choice([100 * MS, 300 * MS, 800 * MS])
        #: So many prompts that they wait for each other.
        self.crowds = wishes.drawn("crowds", random.Random(f"crowds {seed}").random() < 0.05)
        if self.crowds:
            self.arrival_ns = 20 * MS
        self.kv_blocks = draw.choice([40, 60, 150])
        self.batch_max = draw.choice([2, 16])
        self.slots = draw.choice([45, 200])
        self.chains = draw.choice([2, 8])
        self.prepared_max = draw.choice([1, 3])
        self.chunk_tokens = draw.choice([20, 100])
        self.stream_layers = draw.random() < 0.8
        #: Engines that compute nothing, and need no stores.
        self.null = wishes.drawn("null", draw.random() < 0.1)
        exact = wishes.drawn("exact", draw.choice(["exact", "fast"]) == "exact")
        layers, numerics = 0 if self.null else LAYERS, "exact" if exact else "fast"
        self.layout = msgspec.structs.replace(LAYOUT, layers=layers, numerics=numerics)
        # Prompts may be longer than the caches of prefill workers; drawn apart, as the clock.
        cache_draw = random.Random(f"cache {seed}")
        self.prefill_kv_blocks = self.kv_blocks
        if wishes.drawn("outgrown caches", cache_draw.random() < 0.3) and exact and not self.null:
            each = cache_draw.choice([1, 2, 3])
            self.prefill_kv_blocks = each * cache_draw.choice([1, 2, 4]) + cache_draw.randrange(each)
            self.layout = msgspec.structs.replace(self.layout, segment_tokens=each * BLOCK_TOKENS)
        #: Decode workers whose caches are smaller than some prompts, and who lend to each other; drawn apart as well.
        lending_draw = random.Random(f"lending {seed}")
        can_lend = exact and not self.null
        self.lending = can_lend and wishes.drawn("lending", lending_draw.random() < LENDING)
        #: KV moves between them while they decode: in most of these worlds, whose requests fit one cache.
        self.moves_draw = random.Random(f"moves {seed}")
        moves_drawn = self.moves_draw.random()
        self.moving = self.lending and wishes.drawn("moves", moves_drawn < 0.6)
        self.decode_kv_blocks = self.kv_blocks
        if self.lending:
            self.decode_kv_blocks = lending_draw.choice([8, 12, 20])
            if self.moving:
                if moves_drawn < 0.5:
                    self.decode_kv_blocks = 30
                self.batch_max = self.moves_draw.choice([self.batch_max, 16])
            if not self.layout.segment_tokens:
                self.layout = msgspec.structs.replace(self.layout, segment_tokens=SEGMENT_TOKENS)
        self.answer_draw = random.Random(f"answers {seed}")
        self.giver_draw = random.Random(f"giver {seed}")
        self.iteration_ns = random.Random(f"iteration {seed}").choice([0, 5 * MS, 50 * MS])
        self.overload_shared = random.Random(f"overload {seed}").random() < 0.5
        self.attention_draw = random.Random(f"attention {seed}")
        self._add_attention(self.attention_draw)
        self._add_splits(random.Random(f"splits {seed}"))
        #: Workers that may take each other's role, and are told to at any time.
        self.role_draw = random.Random(f"roles {seed}")
        share = ELASTIC_MOVING if self.moving else ELASTIC_LENDING if self.lending else ELASTIC
        self.elastic = not self.attention and wishes.drawn("roles", self.role_draw.random() < share)
        self.mixed_draw = random.Random(f"mixed {seed}")
        self.mixed_by_policy = random.Random(f"mixed by policy {seed}").random() < 0.7
        self._add_mixed(self.mixed_draw)
        #: Placements are paused now and then, and go on with other weights.
        self.pause_draw = random.Random(f"pauses {seed}")
        self.pauses = wishes.drawn("pauses", self.pause_draw.random() < PAUSES)
        self.stages = StageGroups(self, seed)
        if self.stages.on:
            self.arrival_ns = 1 * S  # a group is of idle ones
        self.similar = SimilarPrompts(self, seed)
        self.slow_holders = SlowHolders(self, seed)
        self.planner_deaths = PlannerDeaths(self, seed)
        self.profile = self.slow_holders.measured(CostProfile() if draw.random() < 0.2 else SLOW_PREFILL)
        self.policy = self.any_policy()
        self.faults = Faults(self, cuts=lossy)
        if self.slow_holders.wished:
            self.faults.pause_s = 6.0
        conductors = conductors or draw.randrange(1, 5)
        self.conductors = [Conductor(self, f"c{number}") for number in range(conductors)]
        self.frontends: list[Frontend] = []
        self.texts: dict[str, Text] = {}
        self._add_processes()
        # What must agree, and what happened.
        self.decisions: dict[int, list[Decision]] = {}
        self.digests: dict[int, str] = {}
        self.snapshots: list[bytes] = []
        self.ends: dict[str, str] = {}

    def _add_attention(self, draw: random.Random) -> None:
        """In some of the other worlds decode workers keep no KV; it lies at so many attention workers (0: at none)."""
        self.attention = self.attention_kv_blocks = 0
        #: KV heads of the model, of which each attention worker has one where there are two.
        self.head_ranges = 1
        if self.null or self.lending or self.layout.numerics != "exact":
            return
        if not self.wishes.drawn("attention", draw.random() < ATTENTION):
            return
        self.head_ranges = draw.choice([1, 2])
        if self.wishes.drawn("splits", False):
            self.head_ranges = 1
        self.attention = self.head_ranges * draw.choice([1, 2])
        self.attention_kv_blocks = draw.choice([30, 60, 300])
        self.decode_kv_blocks = draw.choice([1, 3])
        segment_tokens = self.layout.segment_tokens or SEGMENT_TOKENS
        self.layout = msgspec.structs.replace(
            self.layout, kv_heads=self.head_ranges, segment_tokens=segment_tokens
        )

    def _add_splits(self, draw: random.Random) -> None:
        """Some attention workers that have all heads take parts of sequences; none has room for all of most."""
        can = self.attention > 0 and self.head_ranges == 1
        self.splits = can and self.wishes.drawn("splits", draw.random() < SPLITS)
        if self.splits:
            self.attention, self.attention_kv_blocks = draw.choice([2, 3]), draw.choice([8, 12, 20])

    def _add_mixed(self, draw: random.Random) -> None:
        """In some of those without any of this there are so many mixed workers, beside the others or alone."""
        self.mixed, self.mixed_alone = 0, False
        drawn, count, alone = draw.random(), draw.choice([1, 2, 3]), draw.random() < 0.3
        self.token_budget, self.mixed_kv_blocks = draw.choice([5, 13, 40]), draw.choice([12, 20, 60])
        others = self.lending or self.attention or self.elastic
        if not others and self.wishes.drawn("mixed", drawn < MIXED):
            self.mixed, self.mixed_alone = count, alone

    def kv_heads_of(self, worker_id: str) -> tuple[int, int]:
        """The first KV head of an attention worker's cache, and how many it has."""
        return int(worker_id[1:]) % self.head_ranges, self.layout.kv_heads // self.head_ranges

    def _add_processes(self) -> None:
        draw, processes = self.draw, self.net.processes
        kinds: tuple[type[PrefillWorker] | type[DecodeWorker], ...] = (PrefillWorker, DecodeWorker)
        for kind in kinds:
            count = draw.randrange(1, 4)
            if self.mixed_alone:
                count = 0
            if (self.lending or self.attention) and kind is DecodeWorker:
                count += 1
            if self.elastic:
                count = max(2, count)
            if self.slow_holders.wished and kind is DecodeWorker:
                count = 4
            if self.stages.on and kind is PrefillWorker:
                count += 2
            for number in range(count):
                self._add_worker(kind, number)
        for number in range(self.attention):
            self._add_worker(AttentionWorker, number)
        for number in range(self.mixed):
            self._add_worker(MixedWorker, number)
        for number in range(draw.randrange(1, 3)):
            frontend = Frontend(self, f"f{number}")
            processes[frontend.process_id] = frontend
            self.frontends.append(frontend)

    def _add_worker(
        self, kind: type[PrefillWorker] | type[DecodeWorker] | type[AttentionWorker], number: int
    ) -> None:
        worker_id = f"{kind.role[0]}{number}"
        store = StoreAgent(self, f"n-{worker_id}")
        self.net.processes[store.process_id] = store
        self.net.processes[worker_id] = worker = kind(self, worker_id, store)
        if self.elastic and not isinstance(worker, AttentionWorker):
            other = (DecodeWorker if kind is PrefillWorker else PrefillWorker)(self, worker_id, store)
            worker.other, other.other, other.home = other, worker, worker

    def any_policy(self) -> Policy:
        draw = self.draw
        added: dict[str, Any] = {}
        if self.moving:
            added = {
                "admission": self.moves_draw.choice(["none", "none", "predicted", "late"]),
                "move_period_ns": self.wishes.some(
                    "moves", self.moves_draw.choice([0, 200 * MS, 1 * S]), 200 * MS
                ),
                "move_from_percent": self.moves_draw.choice([60, 90]),
                "move_to_percent": self.moves_draw.choice([70, 100]),
                "move_reserve_percent": self.moves_draw.choice([0, 10]),
                "move_step_tokens": self.moves_draw.choice([5, BLOCK_TOKENS, 100]),
            }
            # Drawn apart: some moves are given up before their owner answers, and it does later.
            added["move_answer_ns"] = self.answer_draw.choice([0, 200 * MS, 2 * S])
        added |= self.slow_holders.policy() | self.stages.policy() | self.similar.policy()
        if self.attention:
            added["admission"] = self.attention_draw.choice(["none", "none", "predicted"])
        if self.mixed:
            added["admission"] = self.mixed_draw.choice(["none", "none", "predicted", "late"])
            added["mixed_choice"] = self.mixed_draw.choice(["predicted", "predicted", "preferred"])
            added["mixed_by_policy"] = self.mixed_by_policy
        if self.elastic:
            roles = self.role_draw
            added |= {
                "elastic": roles.choice(["off", "advise", "on", "on"]),
                "elastic_window_ns": roles.choice([2 * S, 15 * S]),
                "elastic_hold_ns": roles.choice([0, 2 * S]),
                "elastic_pause_ns": roles.choice([0, 1 * S]),
                "elastic_from_percent": roles.choice([0, 60]),
                "elastic_changes_max": roles.choice([1, 3]),
                "elastic_giver_percent_max": self.giver_draw.choice([0, 85]),
            }
        policy = Policy(
            name=draw.choice(get_args(PolicyName)),
            admission=draw.choice(get_args(AdmissionName)),
            seed=draw.randrange(100),
            ttft_slo_ns=draw.choice([1 * S, 30 * S]),
            tbt_slo_ns=draw.choice([20 * MS, 1 * S, 1 * S]),
            queued_max_per_worker=draw.choice([2, 12]),
            placements_max=draw.choice([1, 3, 5, 5]),
            link_bytes_s=draw.choice([20_000_000, 2_000_000_000]),
            lost_after_ns=draw.choice([2 * S, 4 * S]),
            clock_step_ns_max=60 * S,
            arrival_wait_ns_max=self.draw_late.choice([0, 1 * S, 10 * S]),
            pools_bound=self.draw_late.random() < 0.5,
            sources_named=True,
            idle_served=self.idle_served,
            overload_shared=self.overload_shared,
            correction_window=self.correction_window,
            copies_price=self.copies_price,
            coming_blocks=self.coming_blocks,
            coming_at_mixed=self.coming_at_mixed,
            passing_durations=self.passing_durations,
            one_token_prefills=self.one_token_prefills,
        )
        if self.crowds:
            added |= {"name": "halfmoon", "admission": "none", "passing_durations": 8}
            added["queued_max_per_worker"] = 12
        return msgspec.structs.replace(policy, **added)

    @property
    def log(self) -> list[Stamped]:
        return self.net.log

    @property
    def accepted(self) -> int:
        return len(self.texts)

    # --- who is who -----------------------------------------------------------------------------------------

    def worker(self, worker_id: str) -> Worker:
        found = self.net.processes[worker_id]
        assert isinstance(found, Worker), worker_id
        return found

    def decode_worker(self, worker_id: str) -> DecodeWorker:
        """In its life as a decode worker; it may be over."""
        found = self.worker(worker_id)
        if found.role != "decode" and found.other is not None:
            found = found.other
        assert isinstance(found, DecodeWorker), worker_id
        return found

    def decoder(self, worker_id: str) -> PrefillWorker | DecodeWorker:
        """Who delivers tokens, in the life that it has now."""
        found = self.worker(worker_id)
        assert isinstance(found, PrefillWorker | DecodeWorker), worker_id
        return found

    def attention_worker(self, worker_id: str) -> AttentionWorker:
        found = self.net.processes[worker_id]
        assert isinstance(found, AttentionWorker), worker_id
        return found

    def holder(self, worker_id: str) -> Holder:
        found = self.net.processes[worker_id]
        return found if isinstance(found, Holder) else self.decode_worker(worker_id)

    def store(self, node_id: str) -> StoreAgent:
        found = self.net.processes[node_id]
        assert isinstance(found, StoreAgent), node_id
        return found

    def frontend(self, frontend_id: str) -> Frontend:
        found = self.net.processes[frontend_id]
        assert isinstance(found, Frontend), frontend_id
        return found

    def text(self, request_id: str) -> Text:
        return self.texts[request_id]

    # --- what must agree ------------------------------------------------------------------------------------

    def decided(self, conductor: Conductor, stamped: Stamped, decisions: list[Decision]) -> None:
        known = self.decisions.setdefault(stamped.seq, decisions)
        assert known == decisions, ("I83 decided differently", conductor.name, stamped, known, decisions)
        if known is not decisions:
            return
        if self.lending or self.attention:
            check_ledger(conductor.core.state)
            self.slow_holders.check(conductor.core.state, stamped, decisions)
        self.stages.check(conductor.core.state, decisions)
        self.similar.check(conductor.core.state, decisions)
        self.net.counts["prompts passed"] += sum(bool(getattr(one, "before", "")) for one in decisions)
        self.net.counts["decisions"] += len(decisions)
        check_orders(conductor.core.state, stamped, decisions)

    def digested(self, conductor: Conductor) -> None:
        seq, snapshot = conductor.core.seq, conductor.core.snapshot()
        digest = digest_of(snapshot)
        assert self.digests.setdefault(seq, digest) == digest, ("I84 another state", conductor.name, seq)
        event = StateDigested(
            conductor_id=conductor.name, incarnation="i", code_version="t", at_seq=seq, digest=digest
        )
        if conductor.position >= conductor.goal:
            self.net.append(event, f"digest-{conductor.name}-{seq}")
        conductor.keep_snapshot(snapshot)

    def ended(self, request_id: str, how: str) -> None:
        """A client was told the end of its request."""
        assert request_id not in self.ends, ("I86 a second end", request_id, self.ends[request_id], how)
        self.ends[request_id] = how
        self.net.counts[f"end: {how}"] += 1

    # --- clients --------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        draw = self.draw
        if not self.net.faults:
            return
        alive = [frontend for frontend in self.frontends if frontend.alive]
        if alive:
            frontend = draw.choice(alive)
            number = self.accepted + 1
            tokens = draw.choice([draw.randrange(1, 300), 100, 2_500 if draw.random() < 0.05 else 1])
            max_tokens, end_at = draw.choice([1, 5, 30]), 0
            if self.moving and self.policy.move_period_ns and self.moves_draw.random() < 0.8:
                # What moves fits one cache, and decodes for a while.
                tokens = self.moves_draw.choice([10, 10, 30, 6 * self.decode_kv_blocks])
                max_tokens, end_at = 30, self.moves_draw.randrange(10, 30)
            if self.attention and self.attention_draw.random() < 0.6:
                tokens = self.attention_draw.choice([5, 20, 33, 150])
                max_tokens, end_at = 30, self.attention_draw.randrange(10, 30)
            if self.mixed and self.mixed_draw.random() < 0.6:
                # Answers outgrow small caches, whose requests give way to each other.
                tokens = self.mixed_draw.choice([5, 20, 33, 60])
                max_tokens, end_at = 40, self.mixed_draw.randrange(10, 40)
            if self.slow_holders.wished:
                max_tokens, end_at = 40, 15
            tokens = self.stages.prompt_tokens(self.slow_holders.prompt_tokens(tokens))
            tokens = self.similar.prompt_tokens(tokens)
            arrived = RequestArrived(
                request_id=f"r{number}",
                frontend_id=frontend.process_id,
                prompt_tokens=tokens,
                max_tokens=max_tokens,
                block_keys=keys(tokens // BLOCK_TOKENS, draw.randrange(1, self.chains + 1)),
                ttft_slo_ns=draw.choice([0, 0, 500 * MS]),
                priority=draw.choice([0, 0, -1_000, 1_000]),
            )
            arrived = self.similar.told(arrived)
            self.texts[arrived.request_id] = text = Text(arrived, number, draw.randrange(25) + end_at)
            frontend.accept(text)
            if draw.random() < 0.1:
                frontend.later(draw.randrange(3 * S), lambda: frontend.cancel(arrived.request_id))
        self.net.later(draw.randrange(self.arrival_ns), self.arrive)

    # --- a run ----------------------------------------------------------------------------------------------

    def run(self, chaos_s: int = 12) -> None:
        """Faults for a while, then none until everything has ended."""
        self.storm(chaos_s)
        self.calm()

    def storm(self, chaos_s: int) -> None:
        """Requests arrive, and things go wrong."""
        net = self.net
        net.append(ClusterConfigured(code_version="t", log_version=2, policy=self.policy), "begin")
        for conductor in self.conductors:
            conductor.start()
        for process in net.processes.values():
            net.later(
                self.draw.randrange(S), lambda process=process: None if process.alive else process.start()
            )
        net.later(0, self.arrive)
        net.later(self.draw.randrange(2 * S), self.faults.strike)
        if self.attention:
            net.later(self.attention_draw.randrange(3 * S), self.faults.strike_attention)
        if self.slow_holders.on:
            net.later(self.slow_holders.draw.randrange(2 * S), self.slow_holders.strike)
        if self.elastic:
            net.later(self.role_draw.randrange(2 * S), self.faults.change_role)
        if self.pauses:
            net.later(self.pause_draw.randrange(4 * S), self.faults.pause)
        if self.clock_steps:
            net.later(self.clock_draw.randrange(4 * S), self.faults.step_clock)
        self.pass_time(chaos_s)

    def calm(self) -> None:
        """Everything must come to its end."""
        self.calm_down()
        for _ in range(CALM_S_MAX):
            self.pass_time(1)
            # Not at the same place between two heartbeats each time.
            self.net.advance(self.net.now_ns + 37 * MS)
            if self.at_rest() == "":
                break
        assert self.at_rest() == "", f"I87 {self.at_rest()}"
        self.alike()

    def pass_time(self, seconds: int) -> None:
        self.net.advance(self.net.now_ns + seconds * S)

    def calm_down(self) -> None:
        """No more faults; everybody is back."""
        net = self.net
        net.faults = False
        for process in net.processes.values():
            if not process.alive:
                process.start()
        for conductor in self.conductors:
            if not conductor.alive:
                conductor.start()

    def at_rest(self) -> str:
        """What is still under way; "" when every request has ended and nothing is held."""
        if not self.net.server_up:
            return "the server is away"
        for process in self.net.processes.values():
            if under_way := process.under_way():
                return under_way
        state = self.conductors[0].core.state
        if state.requests or state.orders or state.parked or state.leaving:
            return f"known to {self.conductors[0].name}: {sorted(state.requests)} {sorted(state.orders)}"
        behind = [conductor.name for conductor in self.conductors if conductor.position < len(self.log)]
        return f"behind: {behind}" if behind else ""

    def alike(self) -> None:
        """All conductors have read the same, and hold the same."""
        while any(conductor.position < len(self.log) for conductor in self.conductors):
            for conductor in self.conductors:
                conductor.paused_until_ns = 0
                conductor.read()
        digests = {conductor.core.digest() for conductor in self.conductors}
        assert len(digests) == 1, ("I84 another state at the end", digests)
        decided = published(self.decisions, range(1, self.log[-1].seq + 1))
        self.pass_time(1)
        unheard = [identity for identity in decided if identity not in self.net.stored_ns]
        assert not unheard, ("I85 decided, and never published", unheard)
        assert len(self.ends) == self.accepted, ("I86 requests without an end", len(self.ends), self.accepted)
        for worker in self.conductors[0].core.state.workers.values():
            assert nothing_reserved(worker), ("I88 still reserved", worker)
        for process in self.net.processes.values():
            if isinstance(process, StoreAgent):
                process.pool.check()
