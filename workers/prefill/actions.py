"""Actions of a prefill worker, by `PrefillState.on`. Imperative; the docstring names the events that end each.

An action without such a name is done when it is begun, and its failure changes nothing for the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from halfmoon.schemas.decisions import LayerStage
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.similar import kept_tokens
from halfmoon.workers.machines import Announce, AnswerResend, Deliver, Report, TakeTokens


class BeginSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The request is traced under `traceparent`; its span of this order began with its arrival."""

    order_id: str
    request_id: str
    prompt_tokens: int
    traceparent: str
    #: Monotonic.
    arrived_ns: int


class ReserveSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Lease the prompt's blocks in the own node's pool, reserve slots for the rest.

    SlotsReserved or ReserveSlotsFailed.
    """

    order_id: str
    block_keys: bytes
    blocks: int
    tenant: str
    #: Packed: the store publishes them to routers, where its options ask for that.
    token_ids: bytes


class PauseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Ends in PauseEnded after `pause_ns`: a store that had no room, or did not answer, is asked again."""

    order_id: str
    pause_ns: int = SECOND_NS // 10


class StartFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Into the own node's pool: LayersFetched again and again, then BlocksFetched or FetchFailed.

    When the source fails, `replicas` are tried.
    """

    order_id: str
    source_node_id: str
    first_block: int
    blocks: int
    replicas: list[str]


class ReserveReference(msgspec.Struct, frozen=True, kw_only=True):
    """Lease what the own node's pool holds of a similar prompt, reserve slots for the rest, under a hold of its own
    that ends with the order. ReferenceReserved or ReferenceLost.
    """

    order_id: str
    block_keys: bytes
    tenant: str


class FetchReference(msgspec.Struct, frozen=True, kw_only=True):
    """As StartFetch, for blocks of the reference, of which `first_block` counts: ReferenceLayers again and again, then
    ReferenceFetched or ReferenceLost.
    """

    order_id: str
    source_node_id: str
    first_block: int
    blocks: int
    replicas: list[str]


class StartPush(msgspec.Struct, frozen=True, kw_only=True):
    """Room for the prompt's blocks at the decode node: PushOpened or OpenPushFailed."""

    order_id: str
    request_id: str
    target_node_id: str
    decode_worker_id: str
    prompt_tokens: int


class ReferenceSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Where a similar prompt lies in the pool: it stands in for tokens from `first_token` on. Layers up to
    `fetched_layer` are readable; LoadReference tells of the others.

    `slots[i]` has block `blocks[i]` of the prompt that it was computed in.
    """

    slots: list[int]
    blocks: list[int]
    first_token: int
    fetched_layer: int
    resemblance: int
    #: Of the tokens from `first_token` on, each layer keeps so many percent; 0: all.
    retain_percent: int = 0

    def kept(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt of so many each layer keeps the KV of."""
        return self.first_token + kept_tokens(prompt_tokens - self.first_token, self.retain_percent)


class ComputePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Compute `chunks` in order: PromptComputed, LoadFailed or, after StopComputing, ComputingStopped.

    On the way PrefixLayerLoaded for each layer of the cached blocks, LayerStored for each layer of a chunk and
    ChunkStored at its end.
    """

    order_id: str
    token_ids: Sequence[int]
    #: Tokens of each chunk; together they end with the prompt's last.
    chunks: list[range]
    #: Blocks before the first chunk: they are loaded from the pool's slots.
    prefix_blocks: int
    #: Layers of the prefix up to this one are readable in the pool; LoadLayers announces the others.
    fetched_layer: int
    #: By block, slots of the pool; those of `present` hold their bytes and must not be written.
    slots: list[int]
    present: list[int]
    #: Workers and their layers, in order, the last ones here; []: all layers are computed here. With stages StageLost
    #: is one more end.
    stages: list[LayerStage] = []
    #: How many of the most likely tokens are wanted with each of the prompt's; -1: not even that one's.
    prompt_logprobs: int = -1
    #: Names a prompt of one block of which further answers are wanted: it may be kept, or have been. b"": it is not.
    kept_key: bytes = b""
    #: Then one chunk begins at its first token.
    reference: ReferenceSlots | None = None


class ComputeStage(msgspec.Struct, frozen=True, kw_only=True):
    """Compute `layers` layers, from `first_layer` on, of the prompt that `prefill_worker_id` has: StageEnded."""

    order_id: str
    prefill_worker_id: str
    prompt_tokens: int
    first_layer: int
    layers: int


class DropStage(msgspec.Struct, frozen=True, kw_only=True):
    """Compute nothing more of the part of another worker's prompt, and let its messages go."""

    order_id: str


class LoadLayers(msgspec.Struct, frozen=True, kw_only=True):
    """The computation under way may load layers up to and including `layer` of the prefix."""

    order_id: str
    layer: int


class FailLoads(msgspec.Struct, frozen=True, kw_only=True):
    """The computation under way must not wait for further layers of the prefix: it ends in LoadFailed."""

    order_id: str
    reason: str


class LoadReference(msgspec.Struct, frozen=True, kw_only=True):
    """The computation under way may read layers up to and including `layer` of the reference."""

    order_id: str
    layer: int


class FailReference(msgspec.Struct, frozen=True, kw_only=True):
    """The computation under way must not wait for the reference: it computes what it has not."""

    order_id: str
    reason: str


class StopComputing(msgspec.Struct, frozen=True, kw_only=True):
    """The computation under way stops before its next layer: ComputingStopped, unless it is over."""

    order_id: str


class SendLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Layers `layer .. layer + layers - 1` of these blocks are readable here: send them to the decode node."""

    order_id: str
    layer: int
    first_block: int
    blocks: int
    layers: int = 1


class CommitPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """These blocks are whole: others may read them. A failure only means that they are not shared."""

    order_id: str
    first_block: int
    blocks: int


class DrawFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """From the logits of the computation that just ended: FirstTokenDrawn."""

    order_id: str
    sampling: Sampling
    token_ids: Sequence[int]


class SendResult(msgspec.Struct, frozen=True, kw_only=True):
    """To the decode worker."""

    decode_worker_id: str
    result: PrefillResult


class EndPush(msgspec.Struct, frozen=True, kw_only=True):
    """Wait until everything pushed is readable at the decode node: PushClosed or PushFailed."""

    order_id: str


class EndOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Give back the order's slots in the stores, withdraw its open questions, end its span.

    The last action of every order, answered or cancelled. Calls that are still under way end in nothing.
    """

    order_id: str
    #: When the order came, monotonic.
    arrived_ns: int
    cancelled: bool = False
    error: str = ""
    #: None: it failed or was cancelled.
    result: PrefillResult | None = None
    cached_local_tokens: int = 0
    cached_fetched_tokens: int = 0


Action = (
    TakeTokens
    | BeginSpan
    | ReserveSlots
    | PauseOrder
    | StartFetch
    | ReserveReference
    | FetchReference
    | StartPush
    | ComputePrompt
    | ComputeStage
    | DropStage
    | LoadLayers
    | FailLoads
    | LoadReference
    | FailReference
    | StopComputing
    | SendLayer
    | CommitPrompt
    | DrawFirstToken
    | SendResult
    | EndPush
    | Report
    | Deliver
    | AnswerResend
    | EndOrder
    | Announce
)


class Actions(Protocol):
    """Where a job's actions go, in their order; a machine that has others too has them in the same list."""

    def append(self, action: Action, /) -> None:
        """At the end."""
