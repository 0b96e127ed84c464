"""Candidates, and the measures by which policies compare them.

A measure is a number of a candidate with its name in words: the least wins. Policies choose by measures and replay
explains a choice by the very same ones, so an explanation names the numbers that were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec

from halfmoon.schemas.decisions import Fetch, LayerStage
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.similar import Reference


class CandidateWorker(msgspec.Struct, kw_only=True):
    """A worker that could take a half of a request."""

    worker_id: str
    node_id: str
    #: Out of the choice, because its queue or its batch is as long as it may be.
    full: bool = False


class Candidate(CandidateWorker, kw_only=True):
    """A prefill worker, and the prompt's times there, from now on."""

    queue_ns: int
    transfer_ns: int = 0
    prefill_ns: int
    ttft_ns: int
    #: Tokens (whole blocks) that need not be computed, and how many of those blocks are on the node already.
    cached_tokens: int
    cached_blocks: int
    local_blocks: int
    fetches: list[Fetch] = []
    fetch_sharing: int = 1
    #: Some of the blocks come from an SSD.
    from_ssd: bool = False
    #: Orders accepted before, blocks waiting to be computed, blocks of prompts in hand.
    orders: int
    pending_blocks: int
    prompt_blocks: int
    #: Blocks of this prompt that must be computed.
    uncached_blocks: int
    #: Of `local_blocks`: not there yet, but of a prompt that this worker has accepted before.
    coming_blocks: int = 0
    #: Price of one more copy of blocks that are elsewhere: the time to compute the displaced blocks, as far as these
    #: are reused. 0 under policies that do not price copies.
    copies_ns: int = 0
    #: Workers and their layers, this one's last ([]: it computes all), in chunks of `chunk_tokens`; and the prompt's
    #: time on one worker, on two, and so on, as far as there were idle ones ([]: no group was considered).
    stages: list[LayerStage] = []
    chunk_tokens: int = 0
    group_ns: list[int] = []
    #: A similar prompt whose KV stands in; None: all is computed.
    reference: Reference | None = None


class DecodeCandidate(CandidateWorker, kw_only=True):
    """A decode worker with all that it has accepted, this request included."""

    tbt_ns: int
    #: KV blocks that the request needs, and that are reserved before it; whether they fit.
    blocks: int
    reserved_blocks: int
    room: bool
    prefix_blocks: int
    sequences: int
    #: Parts with the prompt's first segments, where the worker's own cache is too small; `blocks` are the others.
    loans: list[KvPart] = []
    #: Parts of its KV where the worker keeps none, and the blocks of each (of parts by sequence: all together).
    cache: list[KvPart] = []
    cache_blocks: int = 0
    #: Part of `tbt_ns` that waits for attention elsewhere; number of groups in which the batch takes turns (0: none).
    waits_ns: int = 0
    groups: int = 0

    @property
    def needs_others(self) -> bool:
        """Others hold some of its KV."""
        return bool(self.loans or self.cache)


#: Where no token is to be decoded.
NOBODY = DecodeCandidate(
    worker_id="", node_id="", tbt_ns=0, blocks=0, reserved_blocks=0, room=True, prefix_blocks=0, sequences=0
)


class MixedCandidate(msgspec.Struct, kw_only=True):
    """One mixed worker, costed for the prompt and for the answer."""

    prefill: Candidate
    decode: DecodeCandidate
    #: How long the worker's other requests wait while it computes this prompt, all together.
    others_wait_ns: int = 0

    @property
    def worker_id(self) -> str:
        return self.prefill.worker_id

    @property
    def full(self) -> bool:
        """Out of the choice, because its queue is as long as it may be."""
        return self.prefill.full or self.decode.full


C = TypeVar("C", Candidate, DecodeCandidate, MixedCandidate)


class CandidateMeasure(msgspec.Struct, Generic[C], frozen=True):
    """A number of a candidate; smaller is better."""

    words: str
    of: Callable[[C], int]
    unit: Literal["ns", "count"] = "count"


FIRST_TOKEN = CandidateMeasure[Candidate]("first token", lambda c: c.ttft_ns, "ns")
FIRST_TOKEN_AND_COPIES = CandidateMeasure[Candidate](
    "first token + copies", lambda c: c.ttft_ns + c.copies_ns, "ns"
)
TRANSFER = CandidateMeasure[Candidate]("transfer", lambda c: c.transfer_ns, "ns")
QUEUE = CandidateMeasure[Candidate]("queue", lambda c: c.queue_ns, "ns")
ORDERS = CandidateMeasure[Candidate]("orders", lambda c: c.orders)
#: Blocks still to compute, those of this prompt among them, and blocks in hand.
PREFILL_BLOCKS = CandidateMeasure[Candidate](
    "blocks to compute and in hand", lambda c: c.pending_blocks + c.prompt_blocks + c.uncached_blocks
)
#: LMetric's product: blocks to compute, those that wait before it among them, times the batch with this prompt in it.
BLOCKS_TIMES_BATCH = CandidateMeasure[Candidate](
    "blocks to compute, times prompts", lambda c: (c.pending_blocks + c.uncached_blocks) * (c.orders + 1)
)
MISSING_HERE = CandidateMeasure[Candidate]("prefix blocks lacking", lambda c: -c.local_blocks)

STEP = CandidateMeasure[DecodeCandidate]("time between tokens", lambda c: c.tbt_ns, "ns")
#: A prefix that is on the node already need not be pushed.
MISSING_PREFIX = CandidateMeasure[DecodeCandidate]("missing prefix blocks", lambda c: -c.prefix_blocks)
SEQUENCES = CandidateMeasure[DecodeCandidate]("sequences", lambda c: c.sequences)
KV_BLOCKS = CandidateMeasure[DecodeCandidate]("KV blocks", lambda c: c.reserved_blocks + c.blocks)


def of_prompt(measure: CandidateMeasure[Candidate]) -> CandidateMeasure[MixedCandidate]:
    """The measure of a mixed worker that is one of its prompt's half."""
    return CandidateMeasure(measure.words, lambda c: measure.of(c.prefill), measure.unit)


def of_answer(measure: CandidateMeasure[DecodeCandidate]) -> CandidateMeasure[MixedCandidate]:
    """The measure of a mixed worker that is one of its answer's half."""
    return CandidateMeasure(measure.words, lambda c: measure.of(c.decode), measure.unit)


# Of mixed workers.
MIXED_FIRST_TOKEN = of_prompt(FIRST_TOKEN_AND_COPIES)
MIXED_DELAYS = CandidateMeasure[MixedCandidate](
    "first token + copies + waits of others",
    lambda c: FIRST_TOKEN_AND_COPIES.of(c.prefill) + c.others_wait_ns,
    "ns",
)
MIXED_QUEUE = of_prompt(QUEUE)
MIXED_ORDERS = of_prompt(ORDERS)
MIXED_MISSING_HERE = of_prompt(MISSING_HERE)
MIXED_BLOCKS_TIMES_BATCH = of_prompt(BLOCKS_TIMES_BATCH)
MIXED_STEP = of_answer(STEP)
#: Dynamo's cost: blocks still to compute, those of this prompt among them, and blocks reserved for the batch.
MIXED_BLOCKS = CandidateMeasure[MixedCandidate](
    "blocks to compute, and KV blocks",
    lambda c: (
        c.prefill.pending_blocks + c.prefill.uncached_blocks + c.decode.reserved_blocks + c.decode.blocks
    ),
)
