"""Events of a prefill worker, for `PrefillState.on`. Past tense; each carries its own time.

`at_ns` is the worker's monotonic clock. Every action that can end in more than one way has one event for each of
them; `halfmoon.workers.prefill.actions` names them.
"""

from __future__ import annotations

from halfmoon.schemas.decisions import StartPrefill, StartStage
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.workers.machines import (
    AnnounceRequested,
    OrderCancelled,
    OrderEvent,
    ResendRequested,
    TokensTaken,
    WorkerEvent,
    WorkerStopped,
)

# --- from the conductor -------------------------------------------------------------------------------------


class PrefillOrdered(WorkerEvent, frozen=True, kw_only=True):
    """A StartPrefill came; the same one may come again."""

    order: StartPrefill


class StageOrdered(WorkerEvent, frozen=True, kw_only=True):
    """A StartStage came; the same one may come again."""

    order: StartStage


# --- preparing ----------------------------------------------------------------------------------------------


class SlotsReserved(OrderEvent, frozen=True, kw_only=True):
    """`slots[i]` of the own node's pool is prompt block i; those in `present` hold their bytes already."""

    slots: list[int]
    present: list[int]


class ReserveSlotsFailed(OrderEvent, frozen=True, kw_only=True):
    """The own node's store did not give slots. `full`: it has no room at the moment."""

    reason: str
    full: bool


class PauseEnded(OrderEvent, frozen=True, kw_only=True):
    """The time of a PauseOrder is over."""


class LayersFetched(OrderEvent, frozen=True, kw_only=True):
    """Layers up to and including `layer` of the fetch are readable in the own node's pool; may be repeated."""

    layer: int


class BlocksFetched(OrderEvent, frozen=True, kw_only=True):
    """All layers of the fetch are readable and committed; they came from `source_node_id`."""

    source_node_id: str
    moved_bytes: int
    elapsed_ns: int


class FetchFailed(OrderEvent, frozen=True, kw_only=True):
    """Neither the source nor a replica gave the blocks. `corrupted`: layers that were announced may be wrong."""

    reason: str
    corrupted: bool = False


class ReferenceReserved(OrderEvent, frozen=True, kw_only=True):
    """`slots[i]` of the own node's pool is block i of the reference; those in `present` hold their bytes already."""

    slots: list[int]
    present: list[int]


class ReferenceLayers(OrderEvent, frozen=True, kw_only=True):
    """Layers up to and including `layer` of the reference are readable in the own node's pool; may be said again."""

    layer: int


class ReferenceFetched(OrderEvent, frozen=True, kw_only=True):
    """All layers of what was asked for of the reference are readable."""


class ReferenceLost(OrderEvent, frozen=True, kw_only=True):
    """The own node has no room for the reference, or nobody gave its blocks."""

    reason: str


# --- computing ----------------------------------------------------------------------------------------------


class PushOpened(OrderEvent, frozen=True, kw_only=True):
    """The decode node reserved slots for the prompt."""


class OpenPushFailed(OrderEvent, frozen=True, kw_only=True):
    """The decode node's store did not give slots. `full`: it has no room at the moment."""

    reason: str
    full: bool


class PrefixLayerLoaded(OrderEvent, frozen=True, kw_only=True):
    """Layer `layer` of all cached blocks is in the engine's cache."""

    layer: int


class LayerStored(OrderEvent, frozen=True, kw_only=True):
    """Layer `layer` of blocks `first_block .. first_block + blocks - 1` was computed and is in the pool's slots."""

    layer: int
    first_block: int
    blocks: int


class ChunkStored(OrderEvent, frozen=True, kw_only=True):
    """All layers of blocks `first_block .. first_block + blocks - 1` are in the pool's slots."""

    first_block: int
    blocks: int


class PromptComputed(OrderEvent, frozen=True, kw_only=True):
    """The logits of the last prompt token are there. `finished_at_ns`: wall clock. `stage_wait_ns`: the part of the
    time that was waited for the stage before.
    """

    finished_at_ns: int
    stage_wait_ns: int = 0
    #: Nothing was computed: another choice's prefill had made the same.
    kept: bool = False
    #: A reference stood in for some of it.
    similar: SimilarReuse | None = None


class LoadFailed(OrderEvent, frozen=True, kw_only=True):
    """Computing ended early: cached layers that it waited for will not come."""

    reason: str


class ComputingStopped(OrderEvent, frozen=True, kw_only=True):
    """Computing ended early, as StopComputing demanded."""


class StageLost(OrderEvent, frozen=True, kw_only=True):
    """Computing ended early: `stage_id`, which has some of the layers, is gone or does not do its part."""

    stage_id: str
    reason: str


class StageEnded(OrderEvent, frozen=True, kw_only=True):
    """The part of another worker's prompt is over. `reason`: why before its last chunk; "": it is not."""

    elapsed_ns: int
    compute_ns: int
    reason: str = ""


class FirstTokenDrawn(OrderEvent, frozen=True, kw_only=True):
    """The first token of the answer."""

    first: SampledToken


class PushClosed(OrderEvent, frozen=True, kw_only=True):
    """Everything pushed is readable at the decode node."""

    moved_bytes: int
    elapsed_ns: int


class PushFailed(OrderEvent, frozen=True, kw_only=True):
    """Not everything pushed has come."""

    reason: str


#: Events before a prompt is computed, of any worker that prefills.
Preparing = (
    TokensTaken
    | SlotsReserved
    | ReserveSlotsFailed
    | PauseEnded
    | LayersFetched
    | BlocksFetched
    | FetchFailed
)
#: And of a similar prompt's KV.
OfReference = ReferenceReserved | ReferenceLayers | ReferenceFetched | ReferenceLost
StepOfOrder = (
    Preparing
    | OfReference
    | PushOpened
    | OpenPushFailed
    | PrefixLayerLoaded
    | LayerStored
    | ChunkStored
    | PromptComputed
    | LoadFailed
    | ComputingStopped
    | StageLost
    | StageEnded
    | FirstTokenDrawn
    | PushClosed
    | PushFailed
)
Event = (
    PrefillOrdered
    | StageOrdered
    | OrderCancelled
    | AnnounceRequested
    | WorkerStopped
    | ResendRequested
    | StepOfOrder
)
