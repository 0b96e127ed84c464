"""Prompts for which KV of a similar one stands in, in some worlds: a mark of its own, which nobody else may ever find.

What the reference's slots hold is looked at when it is read, as far as they are still the order's by then.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.decisions import Decision, StartPrefill
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import split_keys
from halfmoon.schemas.similar import SAMPLES, NamedDocument, SimilarReuse
from halfmoon.schemas.store import reference_hold
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.store.errors import StoreError
from halfmoon.store.pool.slots import Owner
from halfmoon.workers.prefill import actions as prefill_actions
from halfmoon.workers.prefill import events as prefill_events
from tests.chaos.stores import Fetching
from tests.chaos.texts import BLOCK_TOKENS, LAYERS
from tests.conductor.conductor_scripts import keys

if TYPE_CHECKING:
    from tests.chaos.prefill_workers import Computation, PrefillWorker
    from tests.chaos.world import World

#: Of the worlds in which it can be.
SIMILAR = 0.5
TENANTS = ("acme", "other")
#: Chains of block keys of the second tenant begin here.
APART = 1_000
#: Before the mark of a block that was not computed.
STOOD_IN = b"stood in for "
#: And of one that has tokens of all over the prompt, since others were left out.
KEPT = b"some of "


def own_mark(mark: bytes) -> bytes:
    """The mark as if it had been computed."""
    return mark.removeprefix(STOOD_IN)


def whole_mark(mark: bytes) -> bytes:
    """The mark as if no token had been left out."""
    return mark.removeprefix(KEPT)


class SimilarPrompts:
    """See the module. `on`: they are drawn in this world."""

    def __init__(self, world: World, seed: int) -> None:
        self.draw = random.Random(f"similar {seed}")
        self.documents = random.Random(f"documents {seed}")
        can = world.layout.numerics == "fast" and not (world.null or world.mixed or world.stages.on)
        self.on = can and world.wishes.drawn("similar", self.draw.random() < SIMILAR)

    def policy(self) -> dict[str, int]:
        return {"similar_tokens_min": self.draw.choice([20, 60])} if self.on else {}

    def prompt_tokens(self, tokens: int) -> int:
        return self.draw.choice([60, 95, 150, 300]) if self.on and self.draw.random() < 0.6 else tokens

    def retain_percent(self, number: int) -> int:
        """Of the prompts of some requests each layer keeps the KV of so much."""
        return (0, 30, 60)[number % 3] if self.on else 0

    def told(self, arrived: RequestArrived) -> RequestArrived:
        """The request as one of two tenants', whose chains differ. All prompts of a family have one sketch, whosever
        they are, and some have none.
        """
        if not self.on:
            return arrived
        tenant, family = self.draw.choice(TENANTS), self.draw.choice([0, 1, 1, 2])
        block_keys = arrived.block_keys
        if block_keys:
            chain = int.from_bytes(block_keys[:8], "big") + APART * TENANTS.index(tenant)
            block_keys = keys(len(block_keys) // KEY_BYTES, chain)
        sketch = bytes([family]) * (4 * SAMPLES) if family else b""
        return msgspec.structs.replace(
            arrived,
            tenant=tenant,
            sketch=sketch,
            block_keys=block_keys,
            documents=self._documents(family, arrived.prompt_tokens),
        )

    def _documents(self, family: int, tokens: int) -> list[NamedDocument]:
        """The two halves of some prompts, from their second block on. Those of a family have one name, whosever they
        are.
        """
        if self.documents.random() < 0.5:
            return []
        half = (tokens - BLOCK_TOKENS) // 2
        return [
            NamedDocument(
                name=bytes([family, place]) * 8, first_token=BLOCK_TOKENS + place * half, tokens=half
            )
            for place in range(2 if half > 0 else 0)
        ]

    def check(self, state: State, decisions: Sequence[Decision]) -> None:
        """After a step of a core: what stands in is a prompt of the same tenant."""
        for order in decisions:
            if not isinstance(order, StartPrefill) or order.reference is None:
                continue
            tenant = state.requests[order.request_id].event.tenant
            for part in order.reference.parts:
                whose = TENANTS[int.from_bytes(part.block_keys[:8], "big") // APART]
                assert whose == tenant, ("I117 a prompt of another tenant", order, tenant)
            every = [key for part in order.reference.parts for key in split_keys(part.block_keys)]
            assert len(every) == len(dict.fromkeys(every)), ("I122 a block twice", order)


def reserve_reference(worker: PrefillWorker, action: prefill_actions.ReserveReference) -> None:
    order_id, hold_id = action.order_id, reference_hold(action.order_id)
    worker.referring[order_id] = split_keys(action.block_keys)
    named, owner = worker.referring[order_id], Owner(hold_id, worker.process_id)

    def work() -> None:
        hold = worker.store.open_put(owner, named, len(named), [])
        slots, present = list(hold.slots), list(hold.present)
        worker.later(worker.net.lag_ns(), lambda: answered(slots, present))

    def answered(slots: list[int], present: list[int]) -> None:
        if order_id in worker.open_orders():
            worker.kept[hold_id] = True
        kind = prefill_events.ReferenceReserved
        worker.hear(kind, order_id=order_id, slots=slots, present=present)

    worker.ask(work, lambda problem: lost(worker, order_id, str(problem)))


def lost(worker: PrefillWorker, order_id: str, reason: str) -> None:
    worker.net.counts["references lost"] += 1
    worker.hear(prefill_events.ReferenceLost, order_id=order_id, reason=reason)


def fetch_reference(worker: PrefillWorker, action: prefill_actions.FetchReference) -> None:
    order_id, owner = action.order_id, Owner(reference_hold(action.order_id), worker.process_id)
    nodes = dict.fromkeys([action.source_node_id, *action.replicas])
    holders = [worker.world.store(node) for node in nodes]

    def failed(problem: str) -> None:
        lost(worker, order_id, problem)

    def answered(_: str, problem: str) -> None:
        if problem:
            failed(problem)
        else:
            worker.hear(prefill_events.ReferenceFetched, order_id=order_id)

    def work() -> None:
        answer = worker.watched(answered, failed)
        Fetching(worker.store, owner, action.first_block, action.blocks, holders, answer)

    worker.ask(work, lambda problem: failed(str(problem)))


class StandIn:
    """The end of a prompt, from chunk `number` on, layer by layer as the reference comes. Where it does not come, that
    is computed as any other.
    """

    def __init__(
        self, computation: Computation, reference: prefill_actions.ReferenceSlots, number: int
    ) -> None:
        self.computation, self.reference, self.number = computation, reference, number
        self.worker = computation.worker
        self.layer = reference.fetched_layer
        self.failure = ""
        #: What was read was not what the reference's keys say.
        self.strange = False
        self.kept = reference.kept(len(computation.action.token_ids))

    def steer(self, action: prefill_actions.LoadReference | prefill_actions.FailReference) -> None:
        if isinstance(action, prefill_actions.LoadReference):
            self.layer = max(self.layer, action.layer)
        else:
            self.failure = action.reason

    def step(self, layer: int) -> None:
        computation = self.computation
        first = self.reference.first_token // BLOCK_TOKENS
        end = -(-self.kept // BLOCK_TOKENS)
        if computation.stopped:
            computation.tell(prefill_events.ComputingStopped)
        elif self.failure:
            self.worker.net.counts["references lost while computing"] += 1
            computation.compute_chunk(self.number, whole=True)
        elif layer == LAYERS:
            computation.tell(prefill_events.ChunkStored, first_block=first, blocks=end - first)
            self._over()
        elif layer > self.layer:
            self.worker.later(computation.pace_ns, lambda: self.step(layer))
        else:
            assert computation.memory is not None
            named = self.worker.referring[computation.order_id]
            for slot, key in zip(self.reference.slots, named, strict=True):
                self.strange |= computation.memory[slot][layer] != key
            for block in range(first, end):
                kept = KEPT if self.reference.retain_percent else b""
                computation.store(block, layer, STOOD_IN + kept + computation.text.mark(block))
            computation.tell(prefill_events.LayerStored, layer=layer, first_block=first, blocks=end - first)
            self.worker.later(computation.pace_ns, lambda: self.step(layer + 1))

    def _over(self) -> None:
        """The shell asks whether the slots that were read are still the order's."""
        worker, order_id = self.worker, self.computation.order_id
        owner, kind = Owner(reference_hold(order_id), worker.process_id), prefill_events.PromptComputed
        retained = self.kept if self.reference.retain_percent else 0
        reuse = SimilarReuse(tokens=1, computed_tokens=1, resemblance=100, retained_tokens=retained)

        def work() -> None:
            worker.store.guard.hold(owner)
            assert not self.strange, ("I96 read other bytes", order_id)
            worker.net.counts["similar prompts stood in"] += 1
            worker.net.counts["prompts with tokens left out"] += retained > 0
            worker.net.counts["documents stood in"] += self.reference.blocks[0] > 0
            now_ns = worker.net.now_ns
            worker.soon(worker.net.lag_ns(), kind, order_id=order_id, finished_at_ns=now_ns, similar=reuse)

        def failed(problem: StoreError) -> None:
            worker.hear(prefill_events.LoadFailed, order_id=order_id, reason=str(problem))

        worker.ask(work, failed)
