"""One request in a decode worker: its tokens, its blocks, how much of its KV has arrived, what was delivered."""

from __future__ import annotations

from enum import Enum

import numpy as np

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.slo import tbt_ns
from halfmoon.schemas.tokens import Delivery, Timing
from halfmoon.workers.model.sampling_params import SamplingParams


class Stage(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # for tokens, KV or room
    RUNNING = "running"  # in the batch
    SWAPPED = "swapped"  # preempted: its KV lies in host memory
    ENDED = "ended"


class Sequence:
    """Made by a StartDecode order. Times are monotonic ns unless they say otherwise."""

    def __init__(self, order: StartDecode, now_ns: int) -> None:
        self.order = order
        self.stage = Stage.WAITING
        self.arrived_ns = now_ns
        self.prompt: list[int] = []
        self.block_keys = b""
        self.root_key = b""
        self.tenant = ""
        self.traceparent = ""
        self.sampling = Sampling()
        self.params = SamplingParams()
        self.end_ids: frozenset[int] = frozenset()
        self.max_tokens = order.max_tokens
        self.taken = False
        #: Output tokens that the client has from an earlier placement; they are replayed, not delivered.
        self.replay: list[int] = []
        self.output: list[int] = []
        self.tokens: list[SampledToken] = []
        self.result: PrefillResult | None = None
        self.slots: list[int] = []
        self.table: list[int] = []
        self.swapped: list[np.ndarray] = []
        self.loading = 0
        self.to_load: list[tuple[int, int]] = []
        #: arrived[layer, block]: its copy into the engine's cache was started.
        self.arrived: np.ndarray | None = None
        self.loaded = 0
        self.refusal_checked = False
        self.ready_wall_ns = 0
        self.started_ns = 0
        self.last_token_ns = 0
        self.intervals_ns: list[int] = []
        self.preemptions = 0
        self.finish_reason = ""

    @property
    def order_id(self) -> str:
        return self.order.order_id

    @property
    def length(self) -> int:
        """Tokens whose KV is in the cache once the next step's input has been written, less one."""
        return len(self.prompt) + len(self.output) - 1

    def kv_complete(self, layers: int) -> bool:
        return self.arrived is not None and self.loaded == layers * len(self.slots)

    def kv_announced(self, layers: int) -> bool:
        """Everything was heard to be readable in the node's pool, loaded or not."""
        if self.arrived is None:
            return False
        blocks = len(self.slots)
        waiting = {
            (layer, block)
            for layer, block in self.to_load
            if block < blocks and not self.arrived[layer, block]
        }
        return int(self.arrived.sum()) + len(waiting) == layers * blocks

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
        if token.token_id in self.end_ids and len(self.output) > self.sampling.min_tokens:
            self.finish_reason = "stop"
        elif len(self.output) >= self.max_tokens:
            self.finish_reason = "length"
        return fresh

    def tbt_ns(self) -> int:
        """Mean of the longest 10 % of token intervals (at least one)."""
        return tbt_ns(self.intervals_ns)

    def timing(self, decode_worker: str) -> Timing:
        result = self.result
        assert result is not None
        return Timing(
            queue_ns=result.queue_ns,
            transfer_ns=result.transfer_ns,
            prefill_ns=result.compute_ns,
            decode_wait_ns=max(0, self.ready_wall_ns - result.finished_at_ns),
            cached_tokens=result.cached_tokens,
            prefill_worker=self.order.prefill_worker_id,
            decode_worker=decode_worker,
        )

    def delivery(self, first: int, decode_worker: str) -> Delivery:
        """Output tokens from index `first` on."""
        return Delivery(
            request_id=self.order.request_id,
            order_id=self.order_id,
            index=first,
            tokens=self.tokens[first:],
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            timing=self.timing(decode_worker) if first == 0 or self.finish_reason else None,
        )
