"""Timeline of a run: lanes, bars, marks and curves, made in one replay; `page` and `perfetto` draw it.

Times are ns since the first event. A worker reports the times of an order's waiting and computing, the log has the time
of its delivery: so the wait starts with the order, computing follows it, and the rest is the delivery of the last
layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.replay.histories import PlacementAttempt, RequestHistories, RequestHistory
from halfmoon.conductor.replay.logfile import DecisionLine, EventLine
from halfmoon.conductor.replay.text import message
from halfmoon.conductor.replay.verify import Replay
from halfmoon.schemas.events import (
    ClusterConfigured,
    Event,
    FrontendJoined,
    FrontendLeft,
    PolicyChanged,
    RoleWanted,
    StoreJoined,
    StoreLeft,
    StoreSuspected,
    TierLost,
    TimerFired,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.roles import ROLES, WORKER_ROLES, MemberRole, WorkerRole
from halfmoon.schemas.weights import PlacementsPaused, WeightsChanged

#: Points of a curve: at most, and after every other one was dropped.
SAMPLES_MAX = 1_600


class Bar(msgspec.Struct):
    """One order on one worker; ends of its parts in order of time. Prefill: wait, compute, delivery. Decode:
    wait for KV, decode."""

    request: int
    order_id: str
    lane: str
    row: int
    parts: list[int]
    #: Loading from other nodes, or from disk: from, to.
    transfer: tuple[int, int] | None = None
    #: Ends of chunks; when KV of a layer became readable.
    chunks: list[int] = []
    marks: list[int] = []
    lost: str = ""


class Happening(msgspec.Struct):
    """Something that came to a process, or to the whole cluster (`lane` "")."""

    at_ns: int
    kind: str
    lane: str
    text: str


class Sample(msgspec.Struct):
    """Load and cache at one time."""

    at_ns: int
    #: Predicted queue of each prefill worker; sequences and share of KV (in thousandths) of each decode worker. Mixed
    #: ones have all.
    queue_ns: dict[str, int]
    sequences: dict[str, int]
    kv_share: dict[str, int]
    requests: int
    index_blocks: int
    #: Since the log began.
    prompt_tokens: int
    cached_tokens: int


class Timeline(msgspec.Struct, kw_only=True):
    """All that is drawn."""

    start_ns: int
    end_ns: int
    events: int
    decisions: int
    policy: Policy
    model: str
    #: Workers by id: role; prefill before decode.
    lanes: dict[str, WorkerRole]
    rows: dict[str, int]
    histories: list[RequestHistory]
    prefill: list[Bar]
    decode: list[Bar]
    happenings: list[Happening]
    samples: list[Sample]


def timeline(replay: Replay) -> Timeline:
    """Replays the log of `replay` (with `explain_all`, placements are explained)."""
    found = RequestHistories()
    happenings: list[Happening] = []
    samples: list[Sample] = []
    roles: dict[str, WorkerRole] = {}
    start_ns = end_ns = step_ns = 0
    events = decisions_seen = 0
    policy, model = Policy(), ""
    for line, decisions in replay:
        core = replay.core
        found.see(line, decisions, core)
        decisions_seen += isinstance(line, DecisionLine)
        if not isinstance(line, EventLine):
            continue
        events += 1
        start_ns = start_ns or line.at_ns
        end_ns = max(end_ns, line.at_ns)
        event = line.event
        if isinstance(event, WorkerJoined):
            roles[event.worker_id], model = event.role, event.layout.model
        elif isinstance(event, ClusterConfigured):
            policy = event.policy
        happenings += happened(event, line.at_ns - start_ns, roles, core)
        if not samples or line.at_ns - start_ns >= samples[-1].at_ns + step_ns:
            samples.append(_sample(core, line.at_ns - start_ns))
            if len(samples) > SAMPLES_MAX:
                samples = samples[::2]
                step_ns = max(1, 2 * step_ns, (line.at_ns - start_ns) // SAMPLES_MAX)
    for worker in replay.core.state.workers.values():
        roles.setdefault(worker.worker_id, worker.role)
    histories = list(found.of.values())
    prefill, decode = _bars(histories, start_ns, end_ns)
    # A worker may have left, or have died before a log that begins late; a damaged log may name one that never was.
    for name in [bar.lane for bar in prefill] + [name for sample in samples for name in sample.queue_ns]:
        roles.setdefault(name, "prefill")
    for name in [bar.lane for bar in decode] + [name for sample in samples for name in sample.sequences]:
        roles.setdefault(name, "decode")
    lanes = dict(sorted(roles.items(), key=lambda lane: (WORKER_ROLES.index(lane[1]), _natural(lane[0]))))
    rows = _stack([*prefill, *decode])  # together: a mixed worker has both roles, another may have had both
    return Timeline(
        start_ns=start_ns,
        end_ns=end_ns,
        events=events,
        decisions=decisions_seen,
        policy=policy,
        model=model,
        lanes=lanes,
        rows={lane: rows.get(lane, 1) for lane in lanes},
        histories=histories,
        prefill=prefill,
        decode=decode,
        happenings=happenings,
        samples=samples,
    )


def _natural(name: str) -> tuple[str, int]:
    """`decode-10` after `decode-9`."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


def happened(event: Event, at_ns: int, roles: Mapping[str, str], core: Core) -> list[Happening]:
    """The happenings in an event that `core` has just stepped over. `roles`: of the workers that have a lane."""
    match event:
        case WorkerJoined(worker_id=lane):
            return [Happening(at_ns, "joined", lane, f"{event.role} worker {lane} joined")]
        case WorkerLeft(worker_id=lane):
            return [
                Happening(at_ns, "lost", lane, f"worker {lane} left: {event.reason or 'no reason was given'}")
            ]
        case WorkerDraining(worker_id=lane):
            return [
                Happening(
                    at_ns, "draining", lane, f"worker {lane} {'drains' if event.draining else 'is back'}"
                )
            ]
        case StoreJoined(node_id=node):
            return [Happening(at_ns, "joined", _at_node(node, core), f"store agent {node} joined")]
        case StoreLeft(node_id=node):
            return [
                Happening(at_ns, "lost", _at_node(node, core), f"store agent {node} left: {event.reason}")
            ]
        case StoreSuspected(node_id=node):
            return [
                Happening(at_ns, "suspected", _at_node(node, core), f"store agent {node}: {event.reason}")
            ]
        case TierLost(node_id=node):
            why = f"store agent {node}: its {event.tier} tier is out of use: {event.reason}"
            return [Happening(at_ns, "lost", _at_node(node, core), why)]
        case FrontendJoined():
            return [Happening(at_ns, "joined", "", f"frontend {event.frontend_id} joined")]
        case FrontendLeft():
            return [Happening(at_ns, "lost", "", f"frontend {event.frontend_id} left: {event.reason}")]
        case RoleWanted(target_id=lane):
            taken = lane in core.state.workers and core.state.workers[lane].change.becomes == event.role
            how = (
                "finishes what it has, and becomes" if taken else "may not, or is needed too much, to become"
            )
            return [Happening(at_ns, "role", lane, f"worker {lane} {how} a {event.role} worker")]
        case PolicyChanged():
            return [Happening(at_ns, "policy", "", f"policy: {message(event.policy)}")]
        case PlacementsPaused():
            text = "placements paused" + (", orders taken back" if event.abort else "")
            return [Happening(at_ns, "policy", "", text if event.paused else "placements go on")]
        case WeightsChanged():
            return [Happening(at_ns, "policy", "", f"weights: version {event.weight_version!r}")]
        case TimerFired() if core.role_notes:
            return [
                Happening(
                    at_ns,
                    "role",
                    why.worker_id,
                    f"worker {why.worker_id} {'is advised to become' if why.advised else 'becomes'} a {why.becomes} "
                    f"worker: {why.reason}",
                )
                for why in core.role_notes
            ]
        case TimerFired() if event.key.startswith("lost:") and event.key.count(":") == 3:
            _, role, name, _ = event.key.split(":")
            state = core.state
            # A worker may have the name of its node, whose store agent may live on.
            membership = ROLES[cast("MemberRole", role)].member if role in ROLES else "worker"
            if event.key in state.timers or name in state.members[membership]:
                return []  # it lives: the timer was set anew, or it is of an earlier incarnation
            lane = name if name in roles else _at_node(name, core) if role == "store" else ""
            return [Happening(at_ns, "lost", lane, f"{role} {name} was not heard of any more")]
        case _:
            return []


def _at_node(node_id: str, core: Core) -> str:
    return next((w.worker_id for w in core.state.workers.values() if w.node_id == node_id), "")


def _sample(core: Core, at_ns: int) -> Sample:
    state = core.state
    prefills = [worker for worker in state.workers.values() if worker.prompts is not None]
    decodes = [worker for worker in state.workers.values() if worker.batch is not None]
    counters = state.counters
    return Sample(
        at_ns=at_ns,
        queue_ns={worker.worker_id: queue_ns(worker, state.at_ns) for worker in prefills},
        sequences={worker.worker_id: len(worker.orders) for worker in decodes},
        kv_share={w.worker_id: 1_000 * w.reserved_blocks // max(1, w.kv_blocks) for w in decodes},
        requests=len(state.requests),
        index_blocks=state.index.blocks,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_local_tokens + counters.cached_fetched_tokens,
    )


def _bars(histories: list[RequestHistory], start_ns: int, end_ns: int) -> tuple[list[Bar], list[Bar]]:
    prefill, decode = [], []
    for number, history in enumerate(histories):
        for attempt in history.attempts:
            prefill.append(prefill_bar(number, attempt, start_ns, end_ns))
            bar = decode_bar(number, attempt, start_ns, end_ns)
            if bar is not None:
                decode.append(bar)
    return prefill, decode


def prefill_bar(number: int, attempt: PlacementAttempt, start_ns: int, log_end_ns: int) -> Bar:
    """The prefill half of an order, from `start_ns` on; a half that has not ended goes on to `log_end_ns`."""
    begin = attempt.at_ns - start_ns
    bar = Bar(number, attempt.order.order_id, attempt.order.worker_id, 0, [begin], lost=attempt.lost)
    then = attempt.prefilled
    if then is None:  # lost, open, or done before the log begins
        bar.parts.append((attempt.prefill_end_ns or attempt.end_ns or log_end_ns) - start_ns)
        return bar
    end = attempt.prefill_end_ns - start_ns
    computed = max(begin, min(end, begin + then.queue_ns + then.compute_ns))
    computes = max(begin, computed - then.compute_ns)
    bar.parts += [computes, computed, end]
    if then.transfer_ns:
        bar.transfer = (max(begin, computes - then.transfer_ns), max(begin + then.transfer_ns, computes))
    loaded = [mark.at_ns - start_ns for mark in attempt.marks if mark.loaded]
    if loaded:
        bar.transfer, bar.marks = (min(begin, loaded[0]), loaded[-1]), loaded
    ends: dict[int, int] = {}
    for mark in attempt.marks:
        if not mark.loaded:
            ends[mark.first_block] = mark.at_ns - start_ns
    bar.chunks = list(ends.values())[:-1]
    bar.lost = ""  # the other half was
    return bar


def decode_bar(number: int, attempt: PlacementAttempt, start_ns: int, log_end_ns: int) -> Bar | None:
    """As `prefill_bar`; None when it has not come to that."""
    ready = [mark.at_ns - start_ns for mark in attempt.marks if not mark.loaded]
    begin = (
        min([attempt.prefill_end_ns - start_ns, *ready[:1]]) if attempt.prefill_end_ns else (ready or [0])[0]
    )
    if not begin:
        return None  # it never came to that
    end = (attempt.end_ns or log_end_ns) - start_ns
    started = attempt.decode_start_ns - start_ns if attempt.decode_start_ns else end
    if attempt.finished is not None and not attempt.decode_start_ns:
        started = max(begin, end - attempt.finished.decode_ns)
    bar = Bar(number, attempt.order.order_id, attempt.order.decode_worker_id, 0, [begin, max(begin, started)])
    bar.parts.append(max(bar.parts[-1], end))
    bar.marks, bar.lost = ready, attempt.lost
    return bar


def _stack(bars: Iterable[Bar]) -> dict[str, int]:
    """Gives every bar a row in which it meets no other; how many rows each lane has."""
    free: dict[str, list[int]] = {}
    running: dict[str, list[tuple[int, int]]] = {}
    rows: dict[str, int] = {}
    for bar in sorted(bars, key=lambda bar: bar.parts[0]):
        ends, lane_free = running.setdefault(bar.lane, []), free.setdefault(bar.lane, [])
        while ends and ends[0][0] <= bar.parts[0]:
            heapq.heappush(lane_free, heapq.heappop(ends)[1])
        if lane_free:
            bar.row = heapq.heappop(lane_free)
        else:
            bar.row = rows.get(bar.lane, 0)
            rows[bar.lane] = bar.row + 1
        heapq.heappush(ends, (bar.parts[-1], bar.row))
    return rows
