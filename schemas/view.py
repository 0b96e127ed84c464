"""A conductor's view of the cluster: the content of its page, the grounds of one request's placement, and which nodes
have blocks.

Core NATS, never stored, and only while somebody looks or asks. No text and no tokens of any prompt: lengths, times and
names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from halfmoon.schemas.events import Tier
from halfmoon.schemas.status import NodeStatus, RequestCounts
from halfmoon.schemas.types import BlockKeys, Blocks, Bytes, Count, Id, Message, Ns, Part, Seq, Text, Tokens

Stage = Literal["waiting", "queued", "transfer", "prefill", "handover", "decode"]
Ending = Literal["open", "finished", "rejected", "failed", "cancelled"]
#: Activity in a stretch of a request's life, from, to: ns of the log.
Stretch = tuple[Literal[Stage, "lost"], Ns, Ns]
#: A row of a table, its cells as text: of the candidate that `won`, of what `then` happened to it, or of another.
Row = tuple[Literal["", "won", "then"], list[str]]


class ViewRequest(Message, frozen=True):
    """To all conductors: how is the cluster? `conductor_id` answers in full, the others that they are there."""

    conductor_id: str = ""
    #: The asker knows events up to this one.
    after_seq: Seq = 0


class TierUse(Part, frozen=True):
    """Blocks that a node holds; `total` 0: not known."""

    node_id: Id
    tier: Tier
    used: Blocks
    total: Blocks = 0


class WorkerLoad(Part, frozen=True):
    """A worker's prediction, in thousandths of the SLO: first token (prefill), time between tokens (decode)."""

    worker_id: Id
    load: Count


class LinkUse(Part, frozen=True):
    """KVCache that went from node to node: in the last 60 s, and a second in the last 10."""

    source: Id
    destination: Id
    moved_bytes: Bytes
    bytes_s: Bytes


class RequestView(Part, frozen=True, kw_only=True):
    """A request that is followed. Times are ns of the log; those that have not come are 0."""

    request_id: Id
    stage: Stage | Literal["ended"]
    ending: Ending = "open"
    arrived_ns: Ns
    end_ns: Ns = 0
    prompt_tokens: Tokens
    max_tokens: Tokens
    prefill_id: str = ""
    decode_id: str = ""
    cached_tokens: Tokens = 0
    #: KV of a similar prompt stood in for so many.
    similar_tokens: Tokens = 0
    placements: Count = 0
    ttft_ns: Ns = 0
    tbt_ns: Ns = 0
    ttft_slo_ns: Ns = 0
    tbt_slo_ns: Ns = 0
    reason: str = ""
    stretches: list[Stretch] = []


class Refused(Part, frozen=True):
    """A request that was rejected, or failed."""

    request_id: Id
    at_ns: Ns
    reason: str
    message: Text
    ttft_ns: Ns = 0
    tbt_ns: Ns = 0


class Told(Part, frozen=True):
    """An event in words. `request_id`: of the request that it is about."""

    seq: Seq
    at_ns: Ns
    kind: str
    words: str
    request_id: str = ""


class Spread(Part, frozen=True):
    """Requests that finished in the last 60 s: the number that met the SLO, and the times of a sample, in us."""

    finished: Count = 0
    met: Count = 0
    p50_us: Count = 0
    p90_us: Count = 0
    p99_us: Count = 0


class Series(Part, frozen=True):
    """A value for each second of the last two minutes, oldest first; times in us, 0 where no request finished."""

    last_s: Count = 0
    arrived: list[int] = []
    finished: list[int] = []
    rejected: list[int] = []
    failed: list[int] = []
    ttft_p50_us: list[int] = []
    ttft_p99_us: list[int] = []
    tbt_p50_us: list[int] = []
    tbt_p99_us: list[int] = []


class ConductorView(Message, frozen=True):
    """A conductor that has read the log up to event `seq`, and the policy that it decides by.

    A ClusterView begins with it, and ends with it where `full` is False.
    """

    conductor_id: Id
    seq: Seq
    at_ns: Ns = 0
    caught_up: bool = False
    full: bool = False
    policy: str = ""
    admission: str = ""
    ttft_slo_ns: Ns = 0
    tbt_slo_ns: Ns = 0
    block_bytes: Bytes = 0


class ClusterView(ConductorView, frozen=True):
    """A conductor's knowledge after event `seq`. `full` False: only that it is there."""

    #: Workers, store agents, frontends; `nodes_left_out` are there too.
    nodes: list[NodeStatus] = []
    nodes_left_out: Count = 0
    loads: list[WorkerLoad] = []
    tiers: list[TierUse] = []
    links: list[LinkUse] = []
    #: Requests in each stage, all of them; and some of them one by one.
    stages: dict[str, int] = msgspec.field(default_factory=dict)
    requests: list[RequestView] = []
    counts: RequestCounts = RequestCounts()
    #: The same of the last 60 s, and TTFT and TBT in them.
    recent: RequestCounts = RequestCounts()
    ttft: Spread = Spread()
    tbt: Spread = Spread()
    series: Series = Series()
    refused: list[Refused] = []
    #: Events of processes, newest last.
    happened: list[Told] = []
    events: list[Told] = []
    #: Events after `after_seq` that are not among `events`.
    events_left_out: Count = 0


class ExplainRequest(Message, frozen=True):
    """To a conductor: explain the placement of this request, and its later history."""

    request_id: Id


class Grounds(Part, frozen=True):
    """One decision on a request, in words: every candidate, and below the chosen ones their later history."""

    head: str
    verdict: str
    refused: bool
    prefill: list[Row]
    decode: list[Row]
    more: list[str]


class Explained(Message, frozen=True):
    """The whole story of a request, in the words of `halfmoon replay --explain`."""

    request: RequestView
    #: Event of its arrival, and the newest one that the story knows.
    seq: Seq
    until_seq: Seq
    text: str
    prefill_heads: list[str]
    decode_heads: list[str]
    grounds: list[Grounds]


class LocateBlocks(Message, frozen=True):
    """To the conductors, of which one answers: which nodes, none of `besides`, have these blocks?"""

    block_keys: BlockKeys
    besides: list[Id] = []


class BlocksLocated(Message, frozen=True):
    """Nodes that hold these blocks between them, as far as any node does, those with most of them first, and a few
    replicas behind them. By the log: what a node has since stored or evicted, it says itself.
    """

    nodes: list[Id] = []
