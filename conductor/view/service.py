"""Serves the cluster's page: the answers that a frontend gets while the page is open somewhere.

The last minutes are always kept; requests are followed, and the newest events held, only for `LEASE_S` after the last
question. Each question is answered out of the state as it is, bounded in size whatever the cluster's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

from halfmoon.bus.connection import Bus
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.prices import rows_of, step_price
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.conductor.core.state.records import WorkerRecord
from halfmoon.conductor.core.step_output import explain_none
from halfmoon.conductor.replay.text import message
from halfmoon.conductor.view.log_lookup import LogLookup, story
from halfmoon.conductor.view.recent_window import RecentWindow
from halfmoon.conductor.view.request_tracker import RequestTracker
from halfmoon.conductor.view.status import node_statuses, request_counts, ssd_counts
from halfmoon.schemas import subjects
from halfmoon.schemas.decisions import Decision
from halfmoon.schemas.events import Stamped
from halfmoon.schemas.view import (
    ClusterView,
    Explained,
    ExplainRequest,
    TierUse,
    Told,
    ViewRequest,
    WorkerLoad,
)

log = logging.getLogger(__name__)

LEASE_S = 5.0
NODES_MAX = 200
LINKS_MAX = 60
#: Most events that are held, that are in one answer, and that one kind may have while others want room.
HELD_MAX = 400
TOLD_MAX = 40
KIND_MAX = 4
WORDS_MAX = 240
#: Blocks on SSD are counted node by node, for which all of them are looked at: this many in a second, on the average.
SSD_BLOCKS_S = 20_000
SSD_S_MIN = 5.0


class ViewService:
    """`before` and `after` each step of `core`; `serve` answers."""

    def __init__(self, bus: Bus, core: Core, *, conductor_id: str) -> None:
        self._bus = bus
        self._core = core
        self._conductor_id = conductor_id
        self.caught_up = False
        self._recent = RecentWindow(core)
        self._log_lookup = LogLookup(bus)
        self._looked_at_s = 0.0
        self._tracker: RequestTracker | None = None
        self._held: deque[Stamped] = deque(maxlen=HELD_MAX)
        self._ssd: list[TierUse] = []
        self._ssd_due_s = 0.0

    async def serve(self) -> None:
        await self._bus.serve(subjects.view(subjects.CONDUCTORS), ViewRequest, self.view)
        await self._bus.serve(subjects.explain(self._conductor_id), ExplainRequest, self.explain)

    def before(self, stamped: Stamped) -> None:
        try:
            self._before(stamped)
        except Exception:  # `_start_again` logs it
            self._start_again()

    def after(self, stamped: Stamped, decisions: Iterable[Decision]) -> None:
        try:
            self._after(stamped, decisions)
        except Exception:  # `_start_again` logs it
            self._start_again()

    def _start_again(self) -> None:
        """A fault of the view must not stop a conductor."""
        log.exception("the page's view of event %d failed: it starts again", self._core.seq)
        self._recent = RecentWindow(self._core)
        self._look_away()

    def _before(self, stamped: Stamped) -> None:
        self._recent.before(stamped)
        if self._tracker is not None:
            self._tracker.before(stamped)

    def _after(self, stamped: Stamped, decisions: Iterable[Decision]) -> None:
        self._recent.after(stamped, decisions)
        if self._tracker is not None:
            self._tracker.after(stamped, decisions)
            self._held.append(stamped)
            if time.monotonic() - self._looked_at_s > LEASE_S:
                self._look_away()

    def _look_away(self) -> None:
        self._tracker = None
        self._held.clear()
        self._core.explain_requests = explain_none

    # --- answers --------------------------------------------------------------------------------------------

    def view(self, asked: ViewRequest) -> ClusterView:
        """The answer to a frontend; in full only from the conductor that it names."""
        core = self._core
        state = core.state
        if asked.conductor_id != self._conductor_id:
            return ClusterView(conductor_id=self._conductor_id, seq=core.seq, caught_up=self.caught_up)
        self._looked_at_s = time.monotonic()
        if self._tracker is None:
            self._tracker = RequestTracker(core)
        nodes = node_statuses(state)
        events, left_out = self._events(asked.after_seq)
        ttft, tbt = self._recent.spreads()
        return ClusterView(
            conductor_id=self._conductor_id,
            seq=core.seq,
            at_ns=state.server_ns,
            caught_up=self.caught_up,
            full=True,
            policy=state.policy.name,
            admission=state.policy.admission,
            ttft_slo_ns=state.policy.ttft_slo_ns,
            tbt_slo_ns=state.policy.tbt_slo_ns,
            block_bytes=next((worker.block_bytes for worker in state.workers.values()), 0),
            nodes=nodes[:NODES_MAX],
            nodes_left_out=max(0, len(nodes) - NODES_MAX),
            loads=[_load(worker, state) for worker in list(state.workers.values())[:NODES_MAX]],
            tiers=self._tiers(),
            links=self._recent.links()[:LINKS_MAX],
            stages=self._tracker.stages(),
            requests=self._tracker.requests(),
            counts=request_counts(state),
            recent=self._recent.recent(),
            ttft=ttft,
            tbt=tbt,
            series=self._recent.series(),
            refused=list(self._recent.refused),
            happened=list(self._recent.happened),
            events=events,
            events_left_out=left_out,
        )

    async def explain(self, asked: ExplainRequest) -> Explained:
        """A request's history, from memory when it is followed, else out of the log. Raises PeerError."""
        if self._tracker is not None:
            history = self._tracker.histories.of.get(asked.request_id)
            if history is not None and history.why:
                return story(history, self._core.state)
        return await self._log_lookup.look_up(asked.request_id)

    def _events(self, after_seq: int) -> tuple[list[Told], int]:
        """Events after `after_seq`, the newest of each kind, so that no rare one is lost; and how many are left out."""
        news = [stamped for stamped in self._held if stamped.seq > after_seq]
        room: Counter[type] = Counter()
        first: list[Stamped] = []
        more: list[Stamped] = []
        for stamped in reversed(news):
            kind = type(stamped.event)
            room[kind] += 1
            (first if room[kind] <= KIND_MAX else more).append(stamped)
        chosen = sorted((first + more)[:TOLD_MAX], key=lambda stamped: stamped.seq)
        passed = self._core.seq - after_seq - len(chosen) if after_seq else 0
        return [_told(stamped) for stamped in chosen], max(0, passed)

    def _tiers(self) -> list[TierUse]:
        state = self._core.state
        now_s = time.monotonic()
        if now_s >= self._ssd_due_s:
            ssd = ssd_counts(state)
            self._ssd_due_s = now_s + max(SSD_S_MIN, sum(ssd.values()) / SSD_BLOCKS_S)
            self._ssd = [TierUse(node_id=node, tier="ssd", used=blocks) for node, blocks in ssd.items()]
        dram = [
            TierUse(node_id=node_id, tier="dram", used=store.slots_used, total=store.slots)
            for node_id, store in sorted(state.stores.items())
        ]
        return [*dram[:NODES_MAX], *self._ssd[:NODES_MAX]]


def _load(worker: WorkerRecord, state: State) -> WorkerLoad:
    """The predicted first token, or time between tokens, at the worker's present load, against the cluster's SLO."""
    predicted_ns, slo_ns = 0, state.policy.tbt_slo_ns
    if worker.prompts is not None:
        predicted_ns, slo_ns = queue_ns(worker, state.at_ns), state.policy.ttft_slo_ns
    elif sequences := len(worker.orders):
        step = step_price(state, worker, sequences, worker.context_tokens, rows_of(state, worker))
        predicted_ns = step.ns
    return WorkerLoad(worker_id=worker.worker_id, load=1_000 * predicted_ns // max(1, slo_ns))


def _told(stamped: Stamped) -> Told:
    event = stamped.event
    kind = type(event).__name__
    return Told(
        seq=stamped.seq,
        at_ns=stamped.at_ns,
        kind=kind,
        words=message(event)[len(kind) + 1 :][:WORDS_MAX],
        request_id=str(getattr(event, "request_id", "")),
    )
