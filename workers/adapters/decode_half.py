"""The adapter's machine in the role of a decode worker: the engine draws the answer to a prompt that another engine has
computed. Pure.

::

    order ─▶ its tokens, and PrefillResult ─▶ asked ─▶ first token: DecodeStarted ─▶ last one: RequestFinished
                                   ▲            └─ broke off: DecodeFailed, or asked once more, to compute the prompt
                                   └─ in either order, and even before the order itself

Where the KV is, as the prefill engine says, goes to this one word for word.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from halfmoon.schemas.events import DecodeFailed, PrefillFailed, WorkerHeartbeat
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.adapters.completion import FOR_NOW, kv_params_of
from halfmoon.workers.adapters.events import AnswerBroke, PromptOrdered
from halfmoon.workers.adapters.state import AdaptedRequest, AdapterState, HalfEvent
from halfmoon.workers.decode.events import DecodeOrdered

#: Results may overtake their StartDecode (another stream): those of this many orders are kept.
EARLY_RESULTS_MAX = 256


class DecodeAdapterState(AdapterState):
    """See the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: By order and author.
        self.early: OrderedDict[tuple[str, str], PrefillResult] = OrderedDict()
        #: Orders whose engine has refused what it was told of their KV, and computes their prompts.
        self.recomputed: set[str] = set()

    def on_half(self, event: HalfEvent) -> None:
        if isinstance(event, DecodeOrdered):
            self.begin(event.order)
            author_id = event.order.prefill_worker_id
            early = self.early.pop((event.order.order_id, author_id), None)
            if early is not None:
                self._hear(author_id, early)
        elif not isinstance(event, PromptOrdered) and isinstance(event.message, PrefillResult):
            self._hear(event.author_id, event.message)

    def _hear(self, author_id: str, result: PrefillResult) -> None:
        request = self.requests.get(result.order_id)
        if request is None:
            if result.order_id not in self.finished:
                self.early[result.order_id, author_id] = result
                while len(self.early) > EARLY_RESULTS_MAX:
                    self.early.popitem(last=False)
            return
        # Every prefill worker may write to this one, and knows its orders.
        if author_id == request.order.prefill_worker_id and request.sequence.result is None:
            request.sequence.result, request.sequence.result_ns = result, self.now_ns
            self.advance(request)

    def advance(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        if not sequence.taken or sequence.result is None:
            return
        self.replay(sequence)
        if sequence.finish_reason:
            self.finish(request)
        else:
            self.ask(request)

    def body(self, request: AdaptedRequest) -> dict[str, Any]:
        body, params = super().body(request), self._kv_params(request)
        return body | {"kv_transfer_params": params} if params else body

    def _kv_params(self, request: AdaptedRequest) -> dict[str, Any]:
        """The place of the prompt's KV; {}: the engine finds it by itself, or computes it."""
        sequence = request.sequence
        assert sequence.result is not None, sequence.order_id
        kept = sequence.result.engine_kv
        # KV of fewer or more tokens than are sent would be taken for theirs.
        if kept is None or kept.tokens != len(sequence.prompt) + len(sequence.replay):
            return {}
        return {} if sequence.order_id in self.recomputed else kv_params_of(kept.params)

    def first(self, request: AdaptedRequest, token: SampledToken) -> None:
        sequence = request.sequence
        self.first_ns = sequence.ready_ns = sequence.started_ns = self.now_ns
        sequence.ready_wall_ns = self.wall_ns

    def computes_prompt(self, request: AdaptedRequest) -> bool:
        return request.asked_ns is not None and not request.drawing

    def broke(self, request: AdaptedRequest, event: AnswerBroke) -> None:
        """An engine that cannot have the KV computes the prompt itself: asked once more, it is not told of any."""
        for_now = event.refusal is not None and event.refusal.status in FOR_NOW
        if request.drawing or for_now or request.forwarded or not self._kv_params(request):
            super().broke(request, event)
        else:
            self.recomputed.add(request.sequence.order_id)
            self.ask(request, event.reason)

    def failure(self, request: AdaptedRequest) -> type[PrefillFailed | DecodeFailed]:
        return DecodeFailed

    def forget(self, order_id: str) -> None:
        super().forget(order_id)
        self.recomputed.discard(order_id)

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        lacking = [order_id for order_id, one in self.requests.items() if one.sequence.result is None]
        return msgspec.structs.replace(super().heartbeat(obeyed_seq), lacking=lacking)

    def check_result(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        assert sequence.result is not None or not sequence.output, (
            "I82 tokens and no result",
            sequence.order_id,
        )
