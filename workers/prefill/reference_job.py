"""The reference of an order: KV of a similar prompt, or of documents, on its way into the node's pool. Pure; part of a
`Job`.

::

    reserving ─ fetching ─ held        a failure of any: lost, and the prompt is computed whole

It is of help and never needed: nothing waits for it before the turn begins, and what goes wrong costs computing. Layers
are read while others are computed, except where documents come from several other nodes: these are asked one after the
other, and layers from the last one say nothing of the others.
"""

from __future__ import annotations

from itertools import groupby
from typing import assert_never

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.similar import Reference, ReferencePart
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.prefill import actions
from halfmoon.workers.prefill.actions import Actions, ReferenceSlots
from halfmoon.workers.prefill.events import (
    OfReference,
    ReferenceFetched,
    ReferenceLayers,
    ReferenceLost,
    ReferenceReserved,
)
from halfmoon.workers.prefill.stages import JobRules


class ReferenceJob:
    """`layers`: of the model."""

    def __init__(self, order_id: str, reference: Reference, layers: int) -> None:
        self._order_id, self._layers = order_id, layers
        # What one node has is one fetch.
        self._parts = sorted(reference.parts, key=lambda part: part.node_id)
        self._resemblance = reference.resemblance
        self._slots: list[int] = []
        #: To be asked for one after the other, the first one under way.
        self._fetches: list[actions.FetchReference] = []
        self._streamed = False
        #: Layers up to this one are readable.
        self._layer = -1
        self._lost = False

    def reserve(self, tenant: str, out: Actions) -> None:
        """Slots for it, after those of the prompt itself."""
        block_keys = b"".join(part.block_keys for part in self._parts)
        out.append(actions.ReserveReference(order_id=self._order_id, block_keys=block_keys, tenant=tenant))

    def step(self, event: OfReference, out: Actions, *, computing: bool) -> None:
        """`computing`: whoever computes is told too."""
        if self._lost:
            return
        match event:
            case ReferenceReserved():
                self._reserved(event, out)
            case ReferenceLayers():
                if self._streamed:
                    self._readable(event.layer, out, computing=computing)
            case ReferenceFetched():
                self._fetched(out, computing=computing)
            case ReferenceLost():
                self._lost = True
                if computing:
                    out.append(actions.FailReference(order_id=self._order_id, reason=event.reason))
            case _:
                assert_never(event)

    @property
    def here(self) -> bool:
        """It has slots, and is not lost."""
        return bool(self._slots) and not self._lost

    def slots(self, first_token: int, retain_percent: int) -> ReferenceSlots | None:
        """As a computation that begins now is told; None: there is nothing to wait for."""
        if not self.here:
            self._lost = True  # what comes of it later comes too late
            return None
        return ReferenceSlots(
            slots=self._slots,
            blocks=[block for part in self._parts for block in _blocks(part)],
            first_token=first_token,
            fetched_layer=self._layer,
            resemblance=self._resemblance,
            retain_percent=retain_percent,
        )

    def _reserved(self, event: ReferenceReserved, out: Actions) -> None:
        self._slots = event.slots
        present, at = set(event.present), 0
        for node_id, some in groupby(self._parts, key=lambda part: part.node_id):
            parts = list(some)
            end = at + sum(len(_blocks(part)) for part in parts)
            first = next((block for block in range(at, end) if block not in present), end)
            at = end
            if first < end:
                self._fetches.append(
                    actions.FetchReference(
                        order_id=self._order_id,
                        source_node_id=node_id,
                        first_block=first,
                        blocks=end - first,
                        replicas=[
                            node for node in parts[0].replicas if all(node in part.replicas for part in parts)
                        ],
                    )
                )
        self._streamed = len(self._fetches) == 1
        if self._fetches:
            out.append(self._fetches[0])
        else:
            self._layer = self._layers - 1

    def _fetched(self, out: Actions, *, computing: bool) -> None:
        if not self._fetches:
            return
        del self._fetches[0]
        if self._fetches:
            out.append(self._fetches[0])
        else:
            self._readable(self._layers - 1, out, computing=computing)

    def _readable(self, layer: int, out: Actions, *, computing: bool) -> None:
        if layer > self._layer:
            self._layer = layer
            if computing:
                out.append(actions.LoadReference(order_id=self._order_id, layer=layer))


def _blocks(part: ReferencePart) -> range:
    """Their places in the prompt that they were computed in."""
    return range(part.first_block, part.first_block + len(part.block_keys) // KEY_BYTES)


def reference_of(order: StartPrefill, rules: JobRules) -> ReferenceJob | None:
    """That of an order which has one, where there is a pool for it."""
    if order.reference is None or not rules.has_store:
        return None
    return ReferenceJob(order.order_id, order.reference, rules.layout.layers)
