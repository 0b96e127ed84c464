"""Between frontend and workers, beside the log: token ids and sampled tokens. Core NATS, never stored.

`halfmoon.give.<worker_id>.<frontend_id>` (publish): a frontend, which hears where its requests are placed, gives their
tokens. `halfmoon.take.<frontend_id>.<worker_id>` (request/reply): a worker that was given none asks for them.
`halfmoon.tokens.<frontend_id>.<worker_id>` (publish): a decode worker delivers, one message a step for all of the
frontend's sequences. `halfmoon.resend.<worker_id>.<frontend_id>` (request/reply): the frontend missed some.

Of requests that a gateway takes to an engine: `halfmoon.forward.<frontend_id>.<worker_id>` (publish): an adapter names
its engine. `halfmoon.relay.<worker_id>.<frontend_id>` (publish): the frontend passes on what the gateway hears of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from halfmoon.schemas.kv import ENGINE_PARAMS_MAX
from halfmoon.schemas.roles import WorkerRole
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.schemas.types import (
    BLOCKS_MAX,
    PACKED_TOKENS_MAX,
    REQUEST_AROUND_BYTES,
    TEXT_MAX,
    BlockKeys,
    Count,
    Id,
    Message,
    Ns,
    PackedTokens,
    Part,
    Text,
    Tokens,
    check_whole_keys,
)


class TakeRequest(Message, frozen=True):
    """A worker asks for the tokens of a request that it was ordered to work on."""

    request_id: Id
    order_id: Id
    worker_id: Id
    role: WorkerRole


#: The code of a ProcessError: the frontend has not heard yet of the placement that the worker asks for.
ORDER_UNKNOWN = "order_unknown"


class TakeReply(Message, frozen=True):
    """`gone`: the frontend no longer wants it (finished, cancelled, or a newer order has it)."""

    gone: bool = False
    token_ids: PackedTokens = b""
    block_keys: BlockKeys = b""
    #: Tokens that the client has already; the decode worker replays them (exact numerics) and sends those that follow.
    output_ids: PackedTokens = b""
    sampling: Sampling = Sampling()
    max_tokens: Tokens = 0
    #: Key before the first block, so that generated blocks can be named.
    root_key: bytes = b""
    #: Whose quota of the stores the blocks count in.
    tenant: Text = ""
    #: W3C, of the request's span; "": not traced.
    traceparent: Text = ""
    #: Answers to this prompt that the client wants in all, each a request of its own; 0 or 1: this one.
    choices: Count = 0
    #: Of which the root and the block keys are: the order's.
    weight_version: Text = ""
    #: A gateway asks the engine, in its client's own words, once it knows which (`EngineNamed`).
    forwarded: bool = False
    #: Of the prompt behind a similar one's KV, each layer keeps the KV of so many percent; 0: of all.
    retain_percent: Annotated[int, Meta(ge=0, le=99)] = 0

    def __post_init__(self) -> None:
        check_whole_keys(self.block_keys)


class TokensGiven(Message, frozen=True):
    """The tokens that the worker of an order would have asked for."""

    frontend_id: Id
    order_id: Id
    taken: TakeReply


class DecodeGiven(Message, frozen=True):
    """`TokensGiven` for a decode worker that can do without the prompt's tokens: it has their KV. One that needs them
    asks, and so does one that does not know this message.
    """

    frontend_id: Id
    order_id: Id
    taken: TakeReply


class EngineNamed(Message, frozen=True):
    """From an adapter to a frontend: the engine that a forwarded request is for.

    `endpoint`: address and port, for the gateway. `fields`: JSON, set in the request's body; `headers`: in its
    head.
    """

    worker_id: Id
    request_id: Id
    order_id: Id
    endpoint: Text
    #: With the place of the prompt's KV, where another engine has it.
    fields: Annotated[str, Meta(max_length=ENGINE_PARAMS_MAX + TEXT_MAX)]
    headers: dict[str, str] = {}


class AnswerRelayed(Message, frozen=True):
    """From a frontend to an adapter: what the engine has answered through the gateway, as it came.

    `number`: 0, and one more with each part. `streamed`: server-sent events, or else one JSON object. `ended` False
    until its last byte.
    """

    frontend_id: Id
    order_id: Id
    number: Count
    status: Count = 200
    streamed: bool = False
    body: bytes = b""
    ended: bool = False


class Timing(Part, frozen=True):
    """How a request went, in ns; sent with its first tokens."""

    queue_ns: Ns = 0
    transfer_ns: Ns = 0
    prefill_ns: Ns = 0
    decode_wait_ns: Ns = 0
    cached_tokens: Tokens = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    similar: SimilarReuse | None = None


class Delivery(Part, frozen=True):
    """Tokens of one request from `index` on (0: the first output token). `finish_reason` with the last ones."""

    request_id: Id
    order_id: Id
    index: Count
    tokens: list[SampledToken]
    finish_reason: Literal["", "stop", "length", "abort"] = ""
    timing: Timing | None = None


class TokensSampled(Message, frozen=True):
    """From a decode worker to a frontend."""

    worker_id: Id
    deliveries: list[Delivery]


class ResendRequest(Message, frozen=True):
    """From a frontend to a decode worker: send the tokens of this request from `index` on."""

    frontend_id: Id
    request_id: Id
    order_id: Id
    index: Count


class ResendReply(Message, frozen=True):
    """`known` False: the worker has no such order (any more). `more`: the rest is to be asked for, from there on."""

    known: bool
    delivery: Delivery | None = None
    more: bool = False


#: Base64 of one token id; slot, checksum and key of one block, as the longest of the store's messages has them.
_TOKEN_BYTES, _BLOCK_BYTES = 16 / 3, 36


def carried_tokens(payload_bytes_max: int, block_tokens: int) -> int:
    """The most tokens, prompt and answer together, whose every message fits in `payload_bytes_max` and its own fields.

    The longest are `TokensGiven`, which has all tokens and block keys, and, where blocks are short, the store's lists.
    """
    token_bytes = _TOKEN_BYTES + _BLOCK_BYTES / block_tokens
    fitting = int((payload_bytes_max - REQUEST_AROUND_BYTES) / token_bytes)
    return max(0, min(fitting, BLOCKS_MAX * block_tokens, PACKED_TOKENS_MAX))


class ProcessError(Message, frozen=True):
    """An internal service could not obey a request. `code` is for programs, `message` for people."""

    code: str
    message: Text
