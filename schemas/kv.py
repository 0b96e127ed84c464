"""KV progress: messages to a decode or prefill worker about a running transfer.

KV stream, short retention, ≤ 4 KiB each (but for the `TransferOpened` of a long prompt, and a `PrefillResult` with
log probabilities of one, or with an engine's blocks).

Subject: `halfmoon.kv.<worker that waits>.<type>.<author>`. Store agents send all but `PrefillResult` and `KvPromised`,
because they know first when a write has become readable: `author` is their node, or the prefill worker.
"""

from __future__ import annotations

from typing import Annotated, get_args

from msgspec import Meta

from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.schemas.types import Blocks, Bytes, Count, Id, LayersOfRun, Message, Ns, Part, Text, Tokens

#: An engine names each of its blocks: those of a prompt of half a million tokens, by 16.
ENGINE_PARAMS_MAX = 256 << 10
#: Fields of an engine's `kv_transfer_params`, where its connector is ours: the name under which a prompt's KV is asked
#: for, and the connector that has it.
KV_ORDER, KV_SOURCE = "halfmoon_order", "halfmoon_worker"


class TransferOpened(Message, frozen=True):
    """The decode node reserved `slots[i]` of its pool, in its epoch `epochs[i]`, for prompt block i. Those in `present`
    hold their bytes.
    """

    order_id: Id
    request_id: Id
    slots: list[Blocks]
    epochs: list[int]
    present: list[Blocks] = []


class KvReady(Message, frozen=True):
    """Layers `layer .. layer + layers - 1` of blocks `first_block .. first_block + blocks - 1` are readable in the
    decode node's pool. `moved_bytes`: of all of them.
    """

    order_id: Id
    request_id: Id
    layer: Count
    first_block: Blocks
    blocks: Blocks
    moved_bytes: Bytes = 0
    #: More than one only for workers that say that they understand it (`Attach.hears_runs`).
    layers: LayersOfRun = 1


class KvLoaded(Message, frozen=True):
    """To a prefill worker: layers up to and including `layer` of a fetch are readable in its own node's pool."""

    order_id: Id
    layer: Count
    first_block: Blocks
    blocks: Blocks


class TransferFailed(Message, frozen=True):
    """No more KV of this order will come."""

    order_id: Id
    request_id: Id
    reason: Text


class EngineKv(Part, frozen=True):
    """The KV of a prompt lies in an engine of another's; a decode engine of its kind gets it there by itself."""

    #: What the prefill engine says of the place (vLLM's `kv_transfer_params`), or what tells an SGLang of it, JSON;
    #: "": it says nothing. Then the decode engine finds the KV in a store that both have, or computes it.
    params: Annotated[str, Meta(max_length=ENGINE_PARAMS_MAX)] = ""
    #: Tokens that it is of: the prompt, and what the client had of the answer.
    tokens: Tokens = 0


class KvPromised(Message, frozen=True):
    """From the adapter of a prefill engine that computes the prompt now: the decode engine may be asked already, and
    its KV comes meanwhile.
    """

    order_id: Id
    request_id: Id
    engine_kv: EngineKv


class WantKv(Message, frozen=True):
    """An engine's connector asks the one that computes a prompt to push its KV, as it comes, into this node's pool."""

    order_id: Id
    #: Who asks, and hears of the KV.
    worker_id: Id
    node_id: Id
    tokens: Tokens
    #: Equal for engines whose KV of equal tokens is laid out alike.
    layout: Id


class PrefillResult(Message, frozen=True):
    """From the prefill worker: the first token, drawn from the last prompt token's logits, and how prefill went.

    Sent as soon as it is known; KvReady messages of the last layers may still be under way.
    """

    order_id: Id
    request_id: Id
    first: SampledToken
    queue_ns: Ns
    transfer_ns: Ns
    compute_ns: Ns
    cached_tokens: Tokens
    #: Wall clock of the prefill worker when compute ended.
    finished_at_ns: Ns
    #: KV of a similar prompt stood in for some of it: it is shared with nobody. None: all is the prompt's own.
    similar: SimilarReuse | None = None
    #: From an adapter. None: the KV comes through the pool of the decode worker's node.
    engine_kv: EngineKv | None = None


KvMessage = TransferOpened | KvReady | KvLoaded | TransferFailed | PrefillResult | KvPromised
KV_TYPES: tuple[type[Message], ...] = get_args(KvMessage)
