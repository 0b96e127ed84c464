"""Actions of a prefill worker: what `PrefillState.on` orders. Imperative; the docstring names the events that end it.

An action without such a name is done when it is begun, and its failure changes nothing for the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.schemas.events import PrefillFailed, PrefillFinished
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeTokens:
    """Ends in TokensTaken."""

    order_id: str
    request_id: str
    frontend_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSpan:
    """The request is traced under `traceparent`; its span of this order began with its arrival."""

    order_id: str
    request_id: str
    prompt_tokens: int
    traceparent: str
    #: Monotonic.
    arrived_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPut:
    """Lease what the own node's pool holds of the prompt, reserve slots for the rest: PutOpened or OpenPutFailed."""

    order_id: str
    block_keys: bytes
    blocks: int
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOrder:
    """Ends in PauseEnded after `pause_ns`."""

    order_id: str
    pause_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBlocks:
    """Into the own node's pool: LayersFetched again and again, then BlocksFetched or FetchFailed.

    When the source fails, `replicas` are tried.
    """

    order_id: str
    source_node_id: str
    first_block: int
    blocks: int
    replicas: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPush:
    """Room for the prompt's blocks at the decode node: PushOpened or OpenPushFailed."""

    order_id: str
    request_id: str
    target_node_id: str
    decode_worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePrompt:
    """Compute `chunks` in order: PromptComputed, LoadFailed or, after StopComputing, ComputingStopped.

    On the way PrefixLayerLoaded for each layer of the cached blocks, LayerStored for each layer of a chunk and
    ChunkStored at its end.
    """

    order_id: str
    token_ids: list[int]
    #: Tokens of each chunk; together they end with the prompt's last.
    chunks: list[range]
    #: Blocks before the first chunk: they are loaded from the pool's slots.
    prefix_blocks: int
    #: Layers of the prefix up to this one are readable in the pool; LoadLayers tells of the others.
    fetched_layer: int
    #: By block, slots of the pool; those of `present` hold their bytes and must not be written.
    slots: list[int]
    present: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLayers:
    """The computation under way may load layers up to and including `layer` of the prefix."""

    order_id: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailLoads:
    """The computation under way must not wait for further layers of the prefix: it ends in LoadFailed."""

    order_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopComputing:
    """The computation under way stops before its next layer: ComputingStopped, unless it is over."""

    order_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLayer:
    """Layer `layer` of these blocks is readable here: send it to the decode node."""

    order_id: str
    layer: int
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBlocks:
    """These blocks are whole: others may read them. A failure only means that they are not shared."""

    order_id: str
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawFirstToken:
    """From the logits of the computation that just ended: FirstTokenDrawn."""

    order_id: str
    sampling: Sampling
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """To the decode worker."""

    decode_worker_id: str
    result: PrefillResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePush:
    """Wait until everything pushed is readable at the decode node: PushClosed or PushFailed."""

    order_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """To the log: the one answer to an order."""

    event: PrefillFinished | PrefillFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """Give back what the order holds in the stores, take back what is still asked for it, end its span.

    The last action of every order, answered or cancelled. What it still has under way ends in nothing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Join the cluster again."""


Action = (
    TakeTokens
    | BeginSpan
    | OpenPut
    | PauseOrder
    | FetchBlocks
    | OpenPush
    | ComputePrompt
    | LoadLayers
    | FailLoads
    | StopComputing
    | PushLayer
    | CommitBlocks
    | DrawFirstToken
    | SendResult
    | ClosePush
    | Report
    | EndOrder
    | Announce
)
