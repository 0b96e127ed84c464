"""Membership: processes join, send heartbeats, drain, leave and are lost.

Each process has one timer, `lost:<role>:<id>:<incarnation>`. When it fires, a process that was heard of since is given
another; one that was not is lost. While the log itself was silent (the bus was down) no process could be heard, so
every process's last heartbeat counts as later by the length of the silence.
"""

from __future__ import annotations

from typing import assert_never, cast

from halfmoon.conductor.core.loans import end_move
from halfmoon.conductor.core.orders import arm, cancel, place_parked
from halfmoon.conductor.core.reconcile import lose_orders
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.cost import decode_fit, prefill_fit
from halfmoon.conductor.core.state.records import (
    BatchDuty,
    FrontendRecord,
    HoldDuty,
    Learning,
    PromptDuty,
    RoleChange,
    StoreRecord,
    WorkerRecord,
    WorkerReport,
)
from halfmoon.conductor.core.step_output import StepOutput
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import AnnounceYourself, FailRequest
from halfmoon.schemas.events import (
    BlocksEvicted,
    BlocksStored,
    FrontendHeartbeat,
    FrontendJoined,
    StoreHeartbeat,
    StoreInventory,
    StoreJoined,
    StoreSuspected,
    TierLost,
    WorkerDraining,
    WorkerHeartbeat,
    WorkerJoined,
)
from halfmoon.schemas.roles import ROLES, MemberRole

# --- workers ------------------------------------------------------------------------------------------------


def worker_joined(state: State, event: WorkerJoined, out: StepOutput) -> None:
    known = state.workers.get(event.worker_id)
    state.asked_ns.pop(f"worker:{event.worker_id}", None)
    worker = _worker(event, state.at_ns)
    if known is not None:
        if _is_same(known, worker):
            _carry_over(known, worker)
            state.workers[event.worker_id] = worker
            state.members_changed()
            if known.report.asked:
                dropped = f"worker {event.worker_id} dropped its orders"
                lose_orders(state, event.worker_id, _orphans(state, event.worker_id), dropped, out, told=True)
            place_parked(state, out)
            return
        _forget_timer(state, known.role, event.worker_id, known.incarnation)
    orphans = _orphans(state, event.worker_id)
    state.workers[event.worker_id] = worker
    state.workers = dict(sorted(state.workers.items()))
    state.members_changed()
    _arm_loss(state, event.role, event.worker_id, event.incarnation, state.at_ns, out)
    lose_orders(state, event.worker_id, orphans, _was_lost(event.worker_id), out)
    place_parked(state, out)


def _worker(event: WorkerJoined, now_ns: int) -> WorkerRecord:
    layout, profile = event.layout, event.profile
    prompts, batch, holds = _duties(event)
    return WorkerRecord(
        worker_id=event.worker_id,
        role=event.role,
        node_id=event.node_id,
        incarnation=event.incarnation,
        layout=layout,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        kv_blocks=event.kv_blocks,
        context_tokens_max=event.context_tokens_max,
        batch_max=event.batch_max,
        last_seen_ns=now_ns,
        cost=profile,
        learning=Learning(profile=profile, enabled=layout.block_bytes > 0 or profile != CostProfile()),
        report=WorkerReport(exact_numerics=event.exact_numerics),
        change=RoleChange(may_become=event.may_become),
        prompts=prompts,
        batch=batch,
        holds=holds,
    )


def _duties(event: WorkerJoined) -> tuple[PromptDuty | None, BatchDuty | None, HoldDuty | None]:
    prompts, batch, holds = None, None, None
    duties = ROLES[event.role].duties
    if "prompts" in duties:
        prompts = PromptDuty(
            fit=prefill_fit(event.profile),
            tokens_max=event.prompt_tokens_max,
            stage_addresses=event.stage_addresses,
            activation_bytes=event.activation_bytes,
            answers=event.answers,
        )
    if "batch" in duties:
        batch = BatchDuty(
            fit=decode_fit(event.profile),
            token_budget=event.token_budget,
            iteration_ns=event.iteration_ns,
            cache_elsewhere=event.cache_elsewhere,
            groups=event.decode_groups,
        )
    if "holds" in duties or event.lends:
        holds = HoldDuty(segments=event.lends, first_kv_head=event.first_kv_head, kv_heads=event.kv_heads)
    return prompts, batch, holds


def _is_same(known: WorkerRecord, worker: WorkerRecord) -> bool:
    """True for the same process, on the same node and with the same duties."""
    return (
        (known.incarnation, known.role, known.node_id) == (worker.incarnation, worker.role, worker.node_id)
        # A role has its duties, but for holding, which an option brings.
        and (known.holds is None) == (worker.holds is None)
    )


def _carry_over(known: WorkerRecord, worker: WorkerRecord) -> None:
    """The same process joins once more: its orders go on, and learned costs stay unless it measured them anew."""
    worker.draining, worker.change.becomes = known.draining, known.change.becomes
    worker.reserved_blocks = known.reserved_blocks
    learned = known.learning.profile == worker.learning.profile
    if learned:
        worker.cost, worker.learning.fitted = known.cost, known.learning.fitted
    if known.prompts is not None and worker.prompts is not None:
        _carry_prompts(known.prompts, worker.prompts, learned)
    if known.batch is not None and worker.batch is not None:
        _carry_batch(known.batch, worker.batch, learned)
    if known.holds is not None and worker.holds is not None:
        worker.holds.orders, worker.holds.slow_by = known.holds.orders, known.holds.slow_by


def _carry_prompts(known: PromptDuty, duty: PromptDuty, learned: bool) -> None:
    duty.orders, duty.reserved_ns, duty.head_since_ns = known.orders, known.reserved_ns, known.head_since_ns
    duty.pending_blocks, duty.prompt_blocks = known.pending_blocks, known.prompt_blocks
    if learned:
        duty.fit, duty.seen, duty.permille = known.fit, known.seen, known.permille
        duty.neighbours, duty.head_neighbours = known.neighbours, known.head_neighbours


def _carry_batch(known: BatchDuty, duty: BatchDuty, learned: bool) -> None:
    duty.orders, duty.context_tokens = known.orders, known.context_tokens
    if learned:
        duty.fit, duty.elsewhere_permille = known.fit, known.elsewhere_permille
        duty.steps_seen, duty.step_permille = known.steps_seen, known.step_permille
        duty.answers_seen = known.answers_seen


def worker_heartbeat(state: State, event: WorkerHeartbeat, out: StepOutput) -> WorkerRecord | None:
    """The worker, if its incarnation is the known one."""
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.incarnation != event.incarnation:
        # The heartbeat has no role; the process recognizes itself by target_id.
        role = worker.role if worker is not None else "prefill"
        if _ask(state, "worker", role, event.worker_id, out) and worker is not None:
            worker.report.asked = True
        return None
    worker.last_seen_ns = state.at_ns
    report = worker.report
    report.queued, report.running, report.kv_blocks_used = event.queued, event.running, event.kv_blocks_used
    if worker.batch is not None:
        worker.batch.groups_seen = event.groups
    return worker


def worker_draining(state: State, event: WorkerDraining, out: StepOutput) -> None:
    worker = state.workers.get(event.worker_id)
    if worker is not None and worker.incarnation == event.incarnation:
        # A worker that changes its role keeps draining whatever its heartbeat reports, or the change would never end.
        worker.draining = event.draining or worker.change.becomes != ""
        state.members_changed()
        place_parked(state, out)


def worker_left(state: State, worker_id: str, incarnation: str, out: StepOutput) -> None:
    worker = state.workers.get(worker_id)
    if worker is None or incarnation not in ("", worker.incarnation):
        return
    orphans = _orphans(state, worker_id)
    del state.workers[worker_id]
    state.members_changed()
    _forget_timer(state, worker.role, worker_id, worker.incarnation)
    lose_orders(state, worker_id, orphans, _was_lost(worker_id), out)


def _orphans(state: State, worker_id: str) -> list[str]:
    """Orders that need the worker; a move to it is over, and its order goes on."""
    worker = state.workers.get(worker_id)
    if worker is None:
        return []
    for order in state.orders.values():
        if order.decode.move is not None and order.decode.move.loan.worker_id == worker_id:
            end_move(state, order)
    return [*worker.orders, *worker.lent]


def _was_lost(worker_id: str) -> str:
    return f"worker {worker_id} was lost"


# --- store agents -------------------------------------------------------------------------------------------


def store_joined(state: State, event: StoreJoined, out: StepOutput) -> None:
    known = state.stores.get(event.node_id)
    state.asked_ns.pop(f"store:{event.node_id}", None)
    if known is not None and known.incarnation != event.incarnation:
        _forget_timer(state, "store", event.node_id, known.incarnation)
    state.index.join(event.node_id)
    state.members_changed()
    state.stores[event.node_id] = StoreRecord(
        node_id=event.node_id,
        incarnation=event.incarnation,
        host=event.host,
        slots=event.slots,
        last_seen_ns=state.at_ns,
    )
    _arm_loss(state, "store", event.node_id, event.incarnation, state.at_ns, out)
    place_parked(state, out)


def store_heartbeat(state: State, event: StoreHeartbeat, out: StepOutput) -> None:
    store = _known_store(state, event.node_id, event.incarnation)
    if store is None:
        _ask(state, "store", "store", event.node_id, out)
        return
    store.last_seen_ns = state.at_ns
    store.slots_used = event.slots_used


def _known_store(state: State, node_id: str, incarnation: str) -> StoreRecord | None:
    store = state.stores.get(node_id)
    return store if store is not None and store.incarnation == incarnation else None


def blocks_reported(state: State, event: BlocksStored | BlocksEvicted | TierLost | StoreInventory) -> None:
    """The blocks of a node, from the store agent that is known there."""
    store = _known_store(state, event.node_id, event.incarnation)
    if store is None:
        return
    match event:
        case BlocksStored():
            state.index.add(event.node_id, event.block_keys, event.tier)
        case BlocksEvicted():
            state.index.discard(event.node_id, event.block_keys, event.tier)
            if state.policy.copies_price == "displaced":
                state.displaced.evict(state.index, event.block_keys, state.loads.pool_blocks)
        case TierLost():
            state.index.forget_tier(event.node_id, event.tier)
        case StoreInventory():
            # What it had when it started; each part counts once.
            if event.part not in store.parts_seen:
                store.parts_seen[event.part] = True
                state.index.add(event.node_id, event.block_keys, event.tier)
        case _:
            assert_never(event)


def store_suspected(state: State, event: StoreSuspected) -> None:
    store = state.stores.get(event.node_id)
    if store is not None:
        store.suspected_until_ns = state.at_ns + state.policy.suspected_ns
        state.members_changed()


def store_left(state: State, node_id: str, incarnation: str) -> None:
    store = state.stores.get(node_id)
    if store is None or incarnation not in ("", store.incarnation):
        return
    del state.stores[node_id]
    state.members_changed()
    state.index.leave(node_id)
    state.links.pop(node_id, None)
    state.ssd_links.pop(node_id, None)
    _forget_timer(state, "store", node_id, store.incarnation)


# --- frontends ----------------------------------------------------------------------------------------------


def frontend_joined(state: State, event: FrontendJoined, out: StepOutput) -> None:
    known = state.frontends.get(event.frontend_id)
    state.asked_ns.pop(f"frontend:{event.frontend_id}", None)
    if known is not None and known.incarnation != event.incarnation:
        _forget_timer(state, "frontend", event.frontend_id, known.incarnation)
        _cancel_all(state, event.frontend_id, out)
    state.frontends[event.frontend_id] = FrontendRecord(
        frontend_id=event.frontend_id, incarnation=event.incarnation, last_seen_ns=state.at_ns
    )
    _arm_loss(state, "frontend", event.frontend_id, event.incarnation, state.at_ns, out)


def frontend_heartbeat(state: State, event: FrontendHeartbeat, out: StepOutput) -> None:
    frontend = state.frontends.get(event.frontend_id)
    if frontend is None or frontend.incarnation != event.incarnation:
        _ask(state, "frontend", "frontend", event.frontend_id, out)
        return
    frontend.last_seen_ns = state.at_ns
    frontend.open_requests = event.open_requests
    for request_id in event.silent:
        if request_id in state.finished:  # it was refused, or failed, and the word of it was lost
            message = "it was answered with an error, and the answer was lost"
            out.append(FailRequest(request_id=request_id, frontend_id=event.frontend_id, message=message))


def frontend_left(state: State, frontend_id: str, incarnation: str, out: StepOutput) -> None:
    frontend = state.frontends.get(frontend_id)
    if frontend is None or incarnation not in ("", frontend.incarnation):
        return
    del state.frontends[frontend_id]
    _forget_timer(state, "frontend", frontend_id, frontend.incarnation)
    _cancel_all(state, frontend_id, out)


def _cancel_all(state: State, frontend_id: str, out: StepOutput) -> None:
    """Cancel every request of a frontend: nobody reads its answer.

    The ids are not kept, since a frontend that was lost by mistake sends its requests again.
    """
    mine = [request for request in state.requests.values() if request.event.frontend_id == frontend_id]
    for request in mine:
        cancel(state, request, out)
        del state.finished[request.event.request_id]


# --- signs of life ------------------------------------------------------------------------------------------


def bridge_silence(state: State, at_ns: int) -> None:
    """Count the silence of the log before an event at `at_ns` as heartbeats. Call it before each event is applied."""
    gap_ns = at_ns - state.at_ns
    if gap_ns <= 2 * state.policy.heartbeat_ns or state.seq == 0:
        return
    if state.timers_in_row > len(state.workers) + len(state.stores) + len(state.frontends):
        # The log goes on, with nothing but timers: the members themselves are silent.
        return
    for members in state.members.values():
        for member in members.values():
            member.last_seen_ns += gap_ns


def loss_timer_fired(state: State, key: str, at_ns: int, out: StepOutput) -> None:
    """The timer `key` of a process, set for `at_ns`, is due."""
    _, role, process_id, incarnation = key.split(":")
    member = state.members[ROLES[cast("MemberRole", role)].member].get(process_id)
    if member is None or member.incarnation != incarnation:
        return
    if state.at_ns - member.last_seen_ns < state.policy.lost_after_ns:
        # Later than before in any case: a timer's name and time are its identity in the log.
        due_ns = max(member.last_seen_ns + state.policy.lost_after_ns, at_ns + 1)
        arm(state, key, due_ns, out)
        return
    match member:
        case StoreRecord():
            store_left(state, process_id, incarnation)
        case FrontendRecord():
            frontend_left(state, process_id, incarnation, out)
        case WorkerRecord():
            worker_left(state, process_id, incarnation, out)
        case _:
            assert_never(member)


def _arm_loss(
    state: State, role: str, process_id: str, incarnation: str, last_seen_ns: int, out: StepOutput
) -> None:
    key = f"lost:{role}:{process_id}:{incarnation}"
    arm(state, key, last_seen_ns + state.policy.lost_after_ns, out)


def _forget_timer(state: State, role: str, process_id: str, incarnation: str) -> None:
    state.timers.pop(f"lost:{role}:{process_id}:{incarnation}", None)


def _ask(
    state: State,
    kind: str,
    role: MemberRole,
    process_id: str,
    out: StepOutput,
) -> bool:
    """Ask a process to announce itself: once, until it joins or two heartbeats have passed. True when asked now."""
    pause_ns = 2 * state.policy.heartbeat_ns
    state.asked_ns = {key: ns for key, ns in state.asked_ns.items() if ns + pause_ns > state.at_ns}
    if f"{kind}:{process_id}" in state.asked_ns:
        return False
    state.asked_ns[f"{kind}:{process_id}"] = state.at_ns
    out.append(AnnounceYourself(role=role, target_id=process_id))
    return True
