"""Events of a prefill worker: what `PrefillState.on` hears. Past tense; each carries its own time.

`at_ns` is the worker's monotonic clock. Every action that can end in more than one way has one event for each of
them; `halfmoon.workers.prefill.actions` names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import TakeReply


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that happened to the worker at `at_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEvent(WorkerEvent):
    """Something that happened to one order."""

    order_id: str


# --- from the conductor -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReceived(WorkerEvent):
    """A StartPrefill came; the same one may come again."""

    order: StartPrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCancelled(OrderEvent):
    """A CancelOrder came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRequested(WorkerEvent):
    """An AnnounceYourself came: the conductors do not know this worker, nor any of its orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(WorkerEvent):
    """The process ends."""


# --- preparing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensTaken(OrderEvent):
    """The frontend's answer to TakeTokens; None: it does not answer."""

    reply: TakeReply | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOpened(OrderEvent):
    """`slots[i]` of the own node's pool is prompt block i; those in `present` hold their bytes already."""

    slots: list[int]
    present: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPutFailed(OrderEvent):
    """The own node's store did not give slots. `full`: it has no room at the moment."""

    reason: str
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseEnded(OrderEvent):
    """The time of a PauseOrder is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersFetched(OrderEvent):
    """Layers up to and including `layer` of the fetch are readable in the own node's pool; may be said again."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFetched(OrderEvent):
    """All layers of the fetch are readable and committed; they came from `source_node_id`."""

    source_node_id: str
    moved_bytes: int
    elapsed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed(OrderEvent):
    """Neither the source nor a replica gave the blocks."""

    reason: str


# --- computing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOpened(OrderEvent):
    """The decode node reserved slots for the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPushFailed(OrderEvent):
    """The decode node's store did not give slots. `full`: it has no room at the moment."""

    reason: str
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLayerLoaded(OrderEvent):
    """Layer `layer` of all cached blocks is in the engine's cache."""

    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStored(OrderEvent):
    """Layer `layer` of blocks `first_block .. first_block + blocks - 1` was computed and is in the pool's slots."""

    layer: int
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStored(OrderEvent):
    """All layers of blocks `first_block .. first_block + blocks - 1` are in the pool's slots."""

    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptComputed(OrderEvent):
    """The logits of the last prompt token are there. `finished_at_ns`: wall clock."""

    finished_at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed(OrderEvent):
    """Computing ended early: cached layers that it waited for will not come."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputingStopped(OrderEvent):
    """Computing ended early, as StopComputing demanded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenDrawn(OrderEvent):
    """The first token of the answer."""

    first: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class PushClosed(OrderEvent):
    """Everything pushed is readable at the decode node."""

    moved_bytes: int
    elapsed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed(OrderEvent):
    """Not everything pushed has come."""

    reason: str


StepOfOrder = (
    TokensTaken
    | PutOpened
    | OpenPutFailed
    | PauseEnded
    | LayersFetched
    | BlocksFetched
    | FetchFailed
    | PushOpened
    | OpenPushFailed
    | PrefixLayerLoaded
    | LayerStored
    | ChunkStored
    | PromptComputed
    | LoadFailed
    | ComputingStopped
    | FirstTokenDrawn
    | PushClosed
    | PushFailed
)
Event = OrderReceived | OrderCancelled | AnnounceRequested | WorkerStopped | StepOfOrder
