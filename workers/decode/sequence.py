"""One request in a decode worker: its tokens, its blocks, its KV, its deliveries."""

from __future__ import annotations

from enum import Enum

import msgspec

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import RequestFinished
from halfmoon.schemas.keys import token_array, unpack_tokens
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.lending import KvPart
from halfmoon.schemas.numbers import tbt_ns
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import Delivery, TakeReply, Timing
from halfmoon.store.kv_arrival import KvArrival
from halfmoon.workers.model.sampling_params import SamplingParams
from halfmoon.workers.model.segments import AWAY
from halfmoon.workers.sample_requests import end_ids, params_of

#: Of a sequence whose tokens have yet to come.
_SAMPLING, _PARAMS = Sampling(), SamplingParams()


#: Of an int in an array; of a `SampledToken`, its int and its float; and of each alternative that it names: a tuple.
TOKEN_ID_BYTES, SAMPLED_BYTES, ALTERNATIVE_BYTES = 4, 200, 120


class Stage(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # for tokens, KV or room
    RUNNING = "running"  # in the batch
    SWAPPED = "swapped"  # preempted: its KV lies in host memory
    ENDED = "ended"


class DecodeSequence:
    """Made by a StartDecode order. Times are monotonic ns unless a comment names another clock."""

    def __init__(self, order: StartDecode, layout: Layout, now_ns: int) -> None:
        self.order = order
        self.order_id = order.order_id
        self.stage = Stage.WAITING
        self.arrived_ns = now_ns
        # From the frontend.
        self.taken = False
        #: Empty where they are not needed: it has their KV.
        self.prompt = token_array(b"")
        self.prompt_tokens = 0
        self.block_keys = b""
        self.root_key = b""
        self.tenant = ""
        self.traceparent = ""
        self.sampling, self.params = _SAMPLING, _PARAMS
        self.end_ids: frozenset[int] = frozenset()
        self.max_tokens = order.max_tokens
        #: Output tokens that the client has from an earlier placement; they are replayed, not delivered.
        self.replay: list[int] = []
        # From the prefill worker and the stores.
        self.result: PrefillResult | None = None
        self.parts = parts_of(order)
        #: When their workers were asked to hold them; 0: they were not.
        self.asked_ns = 0
        self._segment_blocks, self._prompt_blocks = (
            layout.segment_blocks,
            order.prompt_tokens // layout.block_tokens,
        )
        #: Blocks that others hold, or will: the first ones of `table`. They grow when KV moves.
        self.away = self.blocks_away()
        self.kv = KvArrival(layout.layers, self.away)
        #: It keeps no KV here; the end of the prompt, which is no whole block, has yet to be sent where the rest is.
        self.elsewhere = bool(order.cache)
        self.tail_due = self.elsewhere and order.prompt_tokens % layout.block_tokens > 0
        if order.resumes:  # all of it is where it belongs already
            self.kv, self.tail_due = KvArrival(0), False
        #: Its lease on slots of the node's pool was given back; and lasted until all had been copied from them.
        self.released = self.lease_held = False
        #: Blocks of the engine's cache, AWAY where others hold them; while it is swapped out, the number of blocks that
        #: it needs again and their content.
        self.table: list[int] = []
        self.held_blocks = 0
        self.held: object = None
        #: Tokens of the prompt that no layer keeps the KV of.
        self.left_out = 0
        # What was generated.
        self.output: list[int] = []
        self.tokens: list[SampledToken] = []
        self.finish_reason = ""
        self.slo_checked = False
        #: Time when the first token came, and when nothing was missing any more (that by the wall clock too).
        self.result_ns = self.ready_ns = self.ready_wall_ns = 0
        self.started_ns = 0
        self.last_token_ns = 0
        self.intervals_ns: list[int] = []
        self.preemptions = 0

    @property
    def length(self) -> int:
        """Tokens whose KV is in the cache once the next step's input has been written, less one."""
        return self.position - self.left_out

    @property
    def position(self) -> int:
        """Where the next step's input stands in the text."""
        return self.prompt_tokens + len(self.output) - 1

    @property
    def replay_is_all(self) -> bool:
        """The tokens that the client has are the whole answer."""
        return bool(self.replay and self._ends_with(self.replay))

    @property
    def host_bytes(self) -> int:
        """Memory of its tokens and their log probabilities in this process, about. KV is not among it."""
        scores = len(self.tokens[0].prompt_logprobs) if self.tokens else 0
        each = SAMPLED_BYTES + ALTERNATIVE_BYTES * max(0, self.sampling.logprobs)
        return TOKEN_ID_BYTES * len(self.prompt) + each * len(self.tokens) + scores

    def blocks_of(self, part: KvPart) -> range:
        """Whole blocks of the prompt that a part has. Where the part grows, later tokens are sent to it."""
        first = part.first_segment * self._segment_blocks
        return range(first, first + part.size(self._prompt_blocks, self._segment_blocks))

    def blocks_away(self) -> int:
        """Blocks of the prompt that do not come here, the first ones."""
        return max((self.blocks_of(part).stop for part in self.parts), default=0)

    @property
    def loaded(self) -> bool:
        """All of its KV is where it is attended to: nothing of it is wanted of the node's pool any more."""
        return self.kv.complete and all(part.hold for part in self.parts) and not self.tail_due

    @property
    def ready(self) -> bool:
        """It may join the batch: tokens, first token and KV are here."""
        return self.taken and bool(self.output) and self.loaded

    @property
    def own_blocks(self) -> list[int]:
        """Those of `table` that are of this worker's cache."""
        return self.table[self.away :]

    def place(self, blocks: list[int]) -> None:
        """These are its own; the blocks before them are elsewhere."""
        self.table = [AWAY] * self.away + blocks

    def leave_out(self, layout: Layout) -> list[int]:
        """Expect no KV of the tokens that the prefill worker has left out. Blocks of `table` that are to spare."""
        reuse = self.result.similar if self.result is not None else None
        # The result may come again, when the table has blocks of generated tokens already.
        if reuse is None or not 0 < reuse.retained_tokens < self.order.prompt_tokens or self.left_out:
            return []
        self.left_out = self.order.prompt_tokens - reuse.retained_tokens
        blocks = layout.blocks(reuse.retained_tokens)
        self.kv.expect(blocks)
        spare = self.table[blocks:]
        del self.table[blocks:]
        return spare

    def take(self, reply: TakeReply, eos_ids: frozenset[int]) -> None:
        """The frontend's answer; `eos_ids` end the text unless the request ignores them."""
        self.taken = True
        self.prompt = token_array(reply.token_ids)
        self.prompt_tokens = len(self.prompt) or self.order.prompt_tokens
        self.replay = unpack_tokens(reply.output_ids)
        self.sampling = reply.sampling
        self.params = params_of(reply.sampling)
        self.end_ids = end_ids(eos_ids, reply.sampling)
        self.block_keys, self.root_key = reply.block_keys, reply.root_key
        self.tenant, self.traceparent = reply.tenant, reply.traceparent
        self.max_tokens = reply.max_tokens or self.order.max_tokens

    def go_on(self, now_ns: int, wall_ns: int) -> None:
        """Its tokens so far are those that the client has, whose KV but the last one's is where it was."""
        order = self.order
        self.result = PrefillResult(
            order_id=self.order_id,
            request_id=order.request_id,
            first=SampledToken(token_id=self.replay[0]),
            queue_ns=0,
            transfer_ns=0,
            compute_ns=0,
            cached_tokens=self.prompt_tokens,
            finished_at_ns=wall_ns,
        )
        self.result_ns = now_ns
        for token_id in self.replay:
            self.add(SampledToken(token_id=token_id), now_ns)

    def next_known(self) -> SampledToken | None:
        """The token that must come next because the client has it already."""
        index = len(self.output)
        return SampledToken(token_id=self.replay[index]) if index < len(self.replay) else None

    def add(self, token: SampledToken, now_ns: int) -> bool:
        """Append a token. True when it is new to the client."""
        fresh = len(self.output) >= len(self.replay)
        self.output.append(token.token_id)
        self.tokens.append(token)
        if fresh:
            if self.last_token_ns:
                self.intervals_ns.append(now_ns - self.last_token_ns)
            self.last_token_ns = now_ns
        self.finish_reason = "length" if token.cut else self._ends_with(self.output)
        return fresh

    def _ends_with(self, output: list[int]) -> str:
        """Why these tokens, at least one, are the whole answer; "": they are not."""
        if output[-1] in self.end_ids and len(output) > self.sampling.min_tokens:
            return "stop"
        return "length" if len(output) >= self.max_tokens else ""

    def tbt_ns(self) -> int:
        """Mean of the longest 10 % of token intervals (at least one)."""
        return tbt_ns(self.intervals_ns)

    @property
    def wait_ns(self) -> int:
        """From hearing of the first token to being ready, by this worker's clock alone: others may be set wrong."""
        return max(0, self.ready_ns - self.result_ns)

    def timing(self, decode_worker: str) -> Timing:
        """How the request went until it was ready to decode."""
        result = self.result
        assert result is not None
        return Timing(
            queue_ns=result.queue_ns,
            transfer_ns=result.transfer_ns,
            prefill_ns=result.compute_ns,
            decode_wait_ns=self.wait_ns,
            cached_tokens=result.cached_tokens,
            prefill_worker=self.order.prefill_worker_id,
            decode_worker=decode_worker,
            similar=result.similar,
        )

    def delivery(self, first: int, decode_worker: str, *, count: int | None = None) -> Delivery:
        """Output tokens from index `first` on, at most `count`; the last one has the finish reason with it."""
        tokens = self.tokens[first:] if count is None else self.tokens[first : first + count]
        finish_reason = self.finish_reason if first + len(tokens) >= len(self.tokens) else ""
        return Delivery(
            request_id=self.order.request_id,
            order_id=self.order_id,
            index=first,
            tokens=tokens,
            finish_reason=finish_reason,  # type: ignore[arg-type]
            timing=self.timing(decode_worker) if first == 0 or finish_reason else None,
        )

    def finished(self, worker_id: str, result: PrefillResult, now_ns: int) -> RequestFinished:
        """The answer to the order, once its last token is out."""
        return RequestFinished(
            order_id=self.order_id,
            request_id=self.order.request_id,
            worker_id=worker_id,
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            completion_tokens=len(self.output),
            ttft_ns=result.queue_ns + result.compute_ns,  # transfers overlap both
            tbt_ns=self.tbt_ns(),
            decode_ns=now_ns - self.started_ns if self.started_ns else 0,
            preemptions=self.preemptions,
        )


def parts_of(order: StartDecode) -> list[KvPart]:
    """The parts that are elsewhere: an order's loans, from the sequence's first segment on, or its whole cache."""
    if order.cache:
        return list(order.cache)
    parts: list[KvPart] = []
    for loan in order.loans:
        first = parts[-1].first_segment + parts[-1].segments if parts else 0
        parts.append(msgspec.structs.replace(loan, first_segment=first))
    return parts
