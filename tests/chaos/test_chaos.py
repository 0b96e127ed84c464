"""Some worlds of chaos; `make chaos` plays thousands. That the checks of a world can fail is shown here too: faults
are planted in the core, in the pools and in the machines of workers, and each is found in worlds made for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon.conductor.core import (
    booking,
    choice,
    loans,
    machine,
    membership,
    moves,
    order_events,
    orders,
    reconcile,
    resume,
    roles,
    weights,
)
from halfmoon.conductor.core.placement import parts
from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.sampling import SampledToken
from halfmoon.store.kv_arrival import KvArrival
from halfmoon.store.pool.pool import Pool
from halfmoon.workers.attention.actions import AnswerHold
from halfmoon.workers.attention.holds import Holds
from halfmoon.workers.decode.lenders import Lenders
from halfmoon.workers.decode.moves import Moves
from halfmoon.workers.decode.orders import Orders
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import Report
from halfmoon.workers.prefill.actions import EndOrder
from halfmoon.workers.prefill.cache_window import CacheWindow
from halfmoon.workers.prefill.job import Job
from halfmoon.workers.prefill.stages import PrefillStage
from halfmoon.workers.prefill.state import PrefillState
from tests.chaos.conductors import Conductor
from tests.chaos.searching import fails
from tests.chaos.stores import StoreAgent
from tests.chaos.wishes import Feature
from tests.chaos.world import World
from tests.lengths import seeds


@pytest.mark.parametrize("seed", seeds(2, of=8, first=100))
def test_a_world_of_chaos_keeps_its_promises(seed: int) -> None:
    world = World(seed)
    world.run()
    assert len(world.log) > 100
    assert world.accepted == len(world.ends) > 5


def test_a_seed_plays_the_same_again() -> None:
    worlds = [World(7), World(7)]
    for world in worlds:
        world.run()
    assert worlds[0].log == worlds[1].log
    assert worlds[0].net.stream == worlds[1].net.stream


def test_the_command_names_what_it_played() -> None:
    program = Path(__file__).parent / "run.py"
    done = subprocess.run(
        [sys.executable, program, "--seed", "100"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 seeds, ")
    assert "none fails" in done.stdout


@pytest.mark.slow
def test_a_run_is_kept_and_the_next_one_goes_on_from_its_end(tmp_path: Path) -> None:
    program, out = Path(__file__).parent / "run.py", tmp_path / "chaos.json"
    kept = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, program, "--seeds", "1", "--processes", "1", "--out", out],
            capture_output=True,
            check=True,
        )
        kept.append(json.loads(out.read_text()))
    assert [(run["first"], run["seeds"], run["failures_by_cause"]) for run in kept] == [
        (0, 1, {}),
        (0, 2, {}),
    ]
    assert kept[1]["events"] > kept[0]["events"] > 0
    kept[1]["beside"]["python"] = "other"
    out.write_text(json.dumps(kept[1]))
    refused = subprocess.run(
        [sys.executable, program, "--seeds", "1", "--out", out], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "is of other code" in refused.stderr


# --- in the core and in the pools ---------------------------------------------------------------------------


def test_a_conductor_that_decides_by_something_else_than_the_log_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Conductor.start

    def ill(self: Conductor) -> None:
        whole(self)
        self.core.state.policy = self.world.any_policy()

    monkeypatch.setattr(Conductor, "start", ill)
    fails("I83 |I84 ")


@pytest.mark.slow
def test_lost_kv_that_nobody_misses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_is_overdue", lambda *_: False)
    fails("I87 (orders at d|open at f)", "planner deaths")


def test_a_core_that_believes_the_servers_clock_when_it_is_set_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "log_time_ns", lambda state, stamped_ns: stamped_ns)
    fails("I87 (orders|open|held) at", "clock steps")


def test_a_core_that_places_in_a_pause_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "choose_again", choice.place_again)
    fails("I119 ", "pauses")


def test_a_core_that_keeps_the_keys_of_other_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "of_these_weights", lambda state, event: event)
    fails("I120 ", "pauses")


def test_a_request_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.orders.place

    def forgets(state: Any, request: Any, lost: str, out: Any) -> None:
        if request.placements == 1:
            machine.orders.end(state, request)
        else:
            whole(state, request, lost, out)

    monkeypatch.setattr(machine.orders, "place", forgets)
    monkeypatch.setattr(reconcile, "place", forgets)
    fails("I87 open at f")


def test_a_block_that_is_leased_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "_take_free", lambda self: self._free[-1])
    fails("I45 ")


def test_a_lease_that_is_never_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "sweep", lambda self, now_ns: [])
    monkeypatch.setattr(StoreAgent, "release", lambda self, owner: None)
    fails("I87 (held at n-|orders at|open at)")


def test_a_full_queue_that_takes_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = machine.orders.cost_request
    monkeypatch.setattr(
        machine.orders, "cost_request", lambda state, *args, **more: cost(Roomy(state), *args, **more)
    )
    fails("I90 ")


def test_room_at_a_lender_that_is_promised_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_blocks", lambda worker: worker.kv_blocks)
    fails("I34 ", "lending")


def test_a_loan_that_outlives_its_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking, "end_loans", lambda *_: None)
    fails("I32 ", "lending")


def test_a_move_that_is_booked_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = moves.book_move

    def twice(state: Any, order: Any, move: Any) -> None:
        whole(state, order, move)
        state.workers[move.loan.worker_id].reserved_blocks += 1

    monkeypatch.setattr(moves, "book_move", twice)
    fails("I18 ", "moves")


@pytest.mark.slow
def test_a_refused_move_that_stays_booked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(state: Any, order: Any) -> None:
        order.decode.move = None

    monkeypatch.setattr(loans, "end_move", forgets)
    monkeypatch.setattr(membership, "end_move", forgets)
    fails("I33 ", "moves")


def test_an_owner_whose_room_does_not_grow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = order_events.kv_moved

    def keeps(state: Any, order: Any, event: Any) -> bool:
        before = state.workers[order.decode_id].reserved_blocks
        found = whole(state, order, event)
        state.workers[order.decode_id].reserved_blocks = before
        return found

    monkeypatch.setattr(order_events, "kv_moved", keeps)
    fails("I18 ", "moves")


@pytest.mark.slow
def test_room_at_an_attention_worker_that_is_booked_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_blocks", lambda worker: worker.kv_blocks)
    fails("I34 ", "splits")


@pytest.mark.slow
def test_a_cache_that_stays_booked_for_the_order_that_was_resumed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = resume._hand_over

    def keeps(state: Any, order: Any, holders: list[Any], *more: Any) -> None:
        before = [holder.lent[order.order_id] for holder in holders]
        whole(state, order, holders, *more)
        for holder, blocks in zip(holders, before, strict=True):
            holder.holds.orders[order.order_id] = blocks

    monkeypatch.setattr(resume, "_hand_over", keeps)
    fails("I32 ", "attention")


@pytest.mark.slow
def test_a_request_that_a_change_of_role_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = membership._orphans

    def forgets(state: Any, worker_id: str) -> list[str]:
        worker = state.workers.get(worker_id)
        return [] if worker is not None and worker.change.becomes else whole(state, worker_id)

    monkeypatch.setattr(membership, "_orphans", forgets)
    fails("I4 |I87 (open at f|orders at d)", "roles")


def test_a_worker_that_counts_in_its_old_role_too_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = State.members_changed

    def keeps(self: State) -> None:
        if not any(worker.change.becomes for worker in self.workers.values()):
            whole(self)

    monkeypatch.setattr(State, "members_changed", keeps)
    fails("I91 placed", "roles")


def test_a_role_that_loses_its_last_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "others_stay", lambda *_: True)
    fails("I91 the last of its role", "roles")


class Roomy:
    """A state as seen by somebody who does not count the queue."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.policy = msgspec.structs.replace(state.policy, queued_max_per_worker=1_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


# --- in the machines of workers -----------------------------------------------------------------------------


def twice(whole: Callable[..., None]) -> Callable[..., None]:
    """`whole`, and what it reported once more."""

    def again(self: Any, *args: Any) -> None:
        reports = args[-1] if isinstance(self, Job) else self.out
        before = len(reports)
        whole(self, *args)
        reports += [action for action in reports[before:] if type(action).__name__ == "Report"]

    return again


def kv_told_again_counts_twice(self: KvArrival, layer: int, block: int) -> bool:
    return layer < self._layers and block < len(self.slots)


def blocks_are_freed_in_the_step(self: Orders, sequence: DecodeSequence) -> bool:
    return sequence.kv.copying > 0


def a_cancelled_decode_goes_on(self: Orders, order_id: str) -> None:
    """Does not hear of it."""


def the_clients_tokens_are_forgotten(self: DecodeSequence, *args: Any) -> None:
    whole_take(self, *args)
    self.output, self.tokens = [], []
    self.replay = self.replay[1:]


def replayed_tokens_are_not_fed_again(self: DecodeSequence, *args: Any) -> None:
    whole_take(self, *args)
    self.output = list(self.replay[:-1])
    self.tokens = [SampledToken(token_id=token) for token in self.output]


def a_delivery_begins_one_too_early(self: DecodeSequence, first: int, worker_id: str) -> Any:
    delivery = whole_delivery(self, first, worker_id)
    return msgspec.structs.replace(delivery, index=max(0, first - 1))


def the_lease_is_kept(self: Orders, sequence: DecodeSequence, after_ns: int = 0) -> None:
    sequence.released = True


def a_cancelled_prefill_goes_on(self: Job, out: list[Any]) -> None:
    """Does not hear of it."""


def the_result_goes_before_the_token_is_drawn(self: Job, event: Any, out: list[Any]) -> None:
    whole_computed(self, event, out)
    if self.stage is PrefillStage.DRAWING:
        self._first_token_drawn(SampledToken(token_id=0), out)


def an_answer_is_reported_behind_its_prefill(self: Job, first: SampledToken, out: list[Any]) -> None:
    own: list[Any] = []
    whole_drawn(self, first, own)
    reports = [action for action in own if isinstance(action, Report)]
    out += [action for action in own if action not in reports] + reports[::-1]


def the_last_layer_is_not_pushed(self: Job, event: Any, out: list[Any]) -> None:
    if event.layer + 1 < self.rules.layout.layers:
        whole_stored(self, event, out)


def layers_are_loaded_before_they_are_fetched(self: Job, out: list[Any]) -> None:
    self.fetched_layer = self.rules.layout.layers - 1
    whole_compute(self, out)


def a_failed_fetch_is_not_heard_of(self: Job, reason: str, out: list[Any]) -> None:
    """Waits on."""


def a_store_is_not_asked_again(self: Job, out: list[Any]) -> None:
    """The pause has no end."""


def the_turn_is_not_given_back(self: PrefillState, job: Job) -> None:
    if job.stage is PrefillStage.ENDED:
        del self.jobs[job.order_id]
        if job in self.queue:
            self.queue.remove(job)


def leases_outlive_the_order(self: Job, error: str, out: list[Any]) -> None:
    whole_end(self, error, out)
    out[:] = [action for action in out if not isinstance(action, EndOrder)]


def a_lender_forgets_to_drop(self: Holds, order_id: str, out: list[Any]) -> bool:
    return False


def a_part_counts_as_held_before_it_is(
    self: Lenders, sequence: DecodeSequence, part: Any, after_ns: int, out: list[Any]
) -> None:
    whole_ask(self, sequence, part, after_ns, out)
    sequence.parts[sequence.parts.index(part)] = msgspec.structs.replace(part, hold=1)


def kv_counts_as_moved_before_it_is_there(
    self: Moves, moved_bytes: int, problem: str, out: list[Any]
) -> bool:
    move = self.push.move if self.push else None
    freed = whole_pushed(self, moved_bytes, problem, out)
    if move is not None:
        move.tokens = move.blocks * self.layout.block_tokens
    return freed


def blocks_that_are_being_sent_are_given_away(self: Moves, sequence: DecodeSequence) -> list[int]:
    return sequence.own_blocks


def a_resume_loses_a_token(self: DecodeSequence, *args: Any) -> None:
    if len(self.replay) > 2:
        del self.replay[-2]
    whole_go_on(self, *args)


def whatever_is_as_long_is_adopted(self: Holds, ask_id: int, request: Any) -> AnswerHold:
    """Another order's too."""
    for hold in self.open.values():
        if hold.request.tokens == request.tokens and not hold.loading:
            hold.request = request
            return AnswerHold(ask_id, hold.number)
    return AnswerHold(ask_id, refused="adopts")


def overwritten_blocks_count_as_cached(
    self: CacheWindow, cache: list[int], block: int, blocks: int = 1
) -> list[int]:
    return [cache[i % len(cache)] for i in range(block + blocks)]


whole_ask, whole_pushed = Lenders._ask, Moves.pushed
whole_go_on = DecodeSequence.go_on
whole_take, whole_delivery = DecodeSequence.take, DecodeSequence.delivery
whole_computed, whole_stored, whole_drawn = (
    Job._prompt_computed,
    Job._layer_stored,
    Job._first_token_drawn,
)
whole_compute, whole_end = Job._compute, Job._end
PLANTED: list[tuple[Any, str, Callable[..., Any], tuple[Feature, ...], str]] = [
    (KvArrival, "_is_fresh", kv_told_again_counts_twice, (), "I63 "),
    (
        Orders,
        "_is_busy",
        blocks_are_freed_in_the_step,
        ("stages",),
        "I59 |I102 ",
    ),
    (Orders, "finish", twice(Orders.finish), (), "I89 "),
    (Orders, "cancel", a_cancelled_decode_goes_on, (), "I89 |I87 orders at d"),
    (Orders, "_release", the_lease_is_kept, (), "I87 held at n-d"),
    (
        DecodeSequence,
        "take",
        the_clients_tokens_are_forgotten,
        ("splits",),
        "I97 ",
    ),
    (DecodeSequence, "take", replayed_tokens_are_not_fed_again, ("attention",), "I64 output before"),
    (DecodeSequence, "delivery", a_delivery_begins_one_too_early, (), "I97 another token"),
    (Holds, "drop", a_lender_forgets_to_drop, ("moves",), "I87 blocks used at d"),
    (Holds, "drop", a_lender_forgets_to_drop, ("attention",), "I87 orders at a"),
    (
        Holds,
        "_adopt",
        whatever_is_as_long_is_adopted,
        ("splits",),
        "I101 |I96 ",
    ),
    (
        DecodeSequence,
        "go_on",
        a_resume_loses_a_token,
        ("attention", "slow holders"),
        "I97 decodes",
    ),
    (Lenders, "_ask", a_part_counts_as_held_before_it_is, ("lending",), "I100 "),
    (
        Moves,
        "pushed",
        kv_counts_as_moved_before_it_is_there,
        ("moves",),
        "I100 |I96 lends",
    ),
    (
        Moves,
        "unread",
        blocks_that_are_being_sent_are_given_away,
        ("moves", "slow holders", "roles"),
        "I59 |not used",
    ),
    (Job, "cancel", a_cancelled_prefill_goes_on, (), "I89 |I87 orders at p"),
    (
        Job,
        "_prompt_computed",
        the_result_goes_before_the_token_is_drawn,
        (),
        "I97 |I103 ",
    ),
    (Job, "_first_token_drawn", an_answer_is_reported_behind_its_prefill, (), "I125 not answered"),
    (Job, "_push_closed", twice(Job._push_closed), (), "I89 "),
    (Job, "_layer_stored", the_last_layer_is_not_pushed, (), "I99 committed"),
    (Job, "_compute", layers_are_loaded_before_they_are_fetched, (), "I96 loaded"),
    (Job, "_fetch_failed", a_failed_fetch_is_not_heard_of, (), "I87 (orders at|held at n-)[pm]"),
    (Job, "_pause_ended", a_store_is_not_asked_again, ("stages",), "I87 (orders at|held at n-)[pm]"),
    (Job, "_end", leases_outlive_the_order, (), "I87 held at n-[pm]"),
    (
        CacheWindow,
        "table",
        overwritten_blocks_count_as_cached,
        ("outgrown caches",),
        "I96 attends",
    ),
    (
        PrefillState,
        "_settle",
        the_turn_is_not_given_back,
        (),
        "I69 ",
    ),
]


#: By method and wishes. Dozens of worlds are played before each, or long ones.
FOUND_LATE = {
    ("_compute", ()),
    ("_fetch_failed", ()),
    ("_end", ()),
    ("_pause_ended", ("stages",)),
    ("_adopt", ("splits",)),
    ("drop", ("attention",)),
    ("go_on", ("attention", "slow holders")),
    ("unread", ("moves", "slow holders", "roles")),
}


@pytest.mark.parametrize(
    ("owner", "method", "fault", "wants", "match"),
    [
        pytest.param(*planted, marks=[pytest.mark.slow] if planted[1:4:2] in FOUND_LATE else [])
        for planted in PLANTED
    ],
    ids=["-".join([f"{p[0].__name__}.{p[1]}", *p[3]]) for p in PLANTED],
)
def test_a_fault_planted_in_a_workers_machine_is_found(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    fault: Any,
    wants: tuple[Feature, ...],
    match: str,
) -> None:
    if fault is the_lease_is_kept:
        monkeypatch.setattr(Pool, "sweep", lambda self, now_ns: [])  # else it ends by itself
    monkeypatch.setattr(owner, method, fault)
    fails(match, *wants)
