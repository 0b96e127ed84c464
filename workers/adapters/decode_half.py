"""The adapter's machine in the role of a decode worker: the engine draws the answer to a prompt that another engine has
computed. Pure.

::

    order ─▶ its tokens, and PrefillResult ─▶ asked ─▶ first token: DecodeStarted ─▶ last one: RequestFinished
                                   ▲            └─ broke off: DecodeFailed, or asked once more, to compute the prompt
                                   └─ in either order, and even before the order itself

    order ─▶ its tokens, and KvPromised ─▶ asked ─▶ what it says is kept ─▶ PrefillResult ─▶ as above
                                                        └─ broke off: as if nothing had been promised

Where the KV is, as the prefill engine says, goes to this one word for word. Nothing is reported, and no token goes to
the client, before the prompt is computed: the core sees a prefill and then a decode, whenever the engine was asked.

Of engines that must be asked both at once (SGLang's) each prompt is promised, and an order that breaks off fails: no
such engine computes a prompt for itself, and the other one waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halfmoon.schemas.events import DecodeFailed, DecodeStarted, PrefillFailed, WorkerHeartbeat
from halfmoon.schemas.kv import EngineKv, KvMessage, KvPromised, PrefillResult
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.adapters.engines.completion import FOR_NOW, kv_params_of
from halfmoon.workers.adapters.events import AnswerBroke, TokensHeard
from halfmoon.workers.adapters.state import AdaptedRequest, AdapterState, HalfEvent
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard
from halfmoon.workers.machines import Report

#: What a prefill worker tells may overtake the StartDecode (another stream): so much of it is kept.
EARLY_MAX = 256
_NOWHERE = (
    "the prefill engine's word on the prompt's KV makes no sense to this one, of another kind or other tokens"
)
_Told = PrefillResult | KvPromised


class _KvNowhere(Exception):
    """The engine cannot have the prompt's KV, and does not compute it."""


@dataclass(slots=True)
class _Promise:
    """The KV that comes while the prompt is computed. `asked`: the engine was. `held`: what it has said."""

    engine_kv: EngineKv
    asked: bool = False
    held: list[TokensHeard] = field(default_factory=list)


class DecodeAdapterState(AdapterState):
    """See the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: By order, author and type.
        self.early: OrderedDict[tuple[str, str, type[KvMessage]], _Told] = OrderedDict()
        #: Orders whose engine has refused what it was told of their KV, and computes their prompts.
        self.recomputed: set[str] = set()
        #: By order, until its result is there.
        self.promises: dict[str, _Promise] = {}

    def on_half(self, event: HalfEvent) -> None:
        if isinstance(event, DecodeOrdered):
            self.begin(event.order)
            author_id = event.order.prefill_worker_id
            for kind in (KvPromised, PrefillResult):
                early = self.early.pop((event.order.order_id, author_id, kind), None)
                if early is not None:
                    self._hear(author_id, early)
        elif isinstance(event, KvHeard) and isinstance(event.message, PrefillResult | KvPromised):
            self._hear(event.author_id, event.message)

    def _hear(self, author_id: str, told: _Told) -> None:
        order_id = told.order_id
        request = self.requests.get(order_id)
        if request is None:
            if order_id not in self.finished:
                self.early[order_id, author_id, type(told)] = told
                while len(self.early) > EARLY_MAX:
                    self.early.popitem(last=False)
            return
        # Every prefill worker may write to this one, and knows its orders.
        if author_id != request.order.prefill_worker_id or request.sequence.result is not None:
            return
        if isinstance(told, PrefillResult):
            request.sequence.result, request.sequence.result_ns = told, self.now_ns
        else:
            self.promises.setdefault(order_id, _Promise(told.engine_kv))
        self.advance(request)

    def advance(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        if not sequence.taken:
            return
        if sequence.result is None:
            self._ask_early(request)
            return
        promise = self.promises.pop(sequence.order_id, None)
        self.replay(sequence)
        if sequence.finish_reason:
            self.finish(request)
        elif promise is None or not promise.asked:
            self.ask(request)
        else:
            for event in promise.held:
                if sequence.order_id in self.requests:
                    self.heard(request, event)

    def _ask_early(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        promise = self.promises.get(sequence.order_id)
        # What its client has of an answer that was begun elsewhere may be all of it.
        if promise is None or promise.asked or sequence.replay_is_all or self._kv_fields(request) == {}:
            return
        # A gateway sends a request once, whatever becomes of the KV.
        if request.forwarded and not self.words.both_at_once:
            return
        promise.asked = True
        self.prompts_overlapped += 1
        self.ask(request)

    def heard(self, request: AdaptedRequest, event: TokensHeard) -> None:
        if request.sequence.result is None:
            self.promises[event.order_id].held.append(event)
        else:
            super().heard(request, event)

    def ask(self, request: AdaptedRequest, computes_again: str = "") -> None:
        try:
            super().ask(request, computes_again)
        except _KvNowhere:
            self.fail(request, _NOWHERE, retryable=True)

    def body(self, request: AdaptedRequest) -> dict[str, Any]:
        fields = self._kv_fields(request)
        if fields is None:
            raise _KvNowhere
        return super().body(request) | fields

    def _kv_fields(self, request: AdaptedRequest) -> dict[str, Any] | None:
        """Where the engine gets the prompt's KV; {}: it finds or computes it; None: it can do neither."""
        sequence = request.sequence
        kept = (sequence.result or self.promises[sequence.order_id]).engine_kv
        # KV of fewer or more tokens than are sent would be taken for theirs.
        tokens = len(sequence.prompt) + len(sequence.replay)
        if kept is None or kept.tokens != tokens or sequence.order_id in self.recomputed:
            return self.words.decode_fields({})
        return self.words.decode_fields(kv_params_of(kept.params))

    def first(self, request: AdaptedRequest, token: SampledToken) -> None:
        sequence = request.sequence
        self.first_ns = sequence.ready_ns = sequence.started_ns = self.now_ns
        sequence.ready_wall_ns = self.wall_ns
        if not sequence.finish_reason:
            started = DecodeStarted(
                order_id=request.order.order_id,
                request_id=request.order.request_id,
                worker_id=self.worker_id,
                wait_ns=sequence.wait_ns,
            )
            self.out.append(Report(started))

    def computes_prompt(self, request: AdaptedRequest) -> bool:
        waits = request.asked_ns is None or request.sequence.result is None
        return not waits and not request.drawing

    def broke(self, request: AdaptedRequest, event: AnswerBroke) -> None:
        """An engine that cannot have the KV computes the prompt itself: asked once more, it is not told of any."""
        order_id = request.order.order_id
        if self.words.both_at_once:
            super().broke(request, event)
            return
        if request.sequence.result is None:
            request.asked_ns = None
            self.promises[order_id] = _Promise(EngineKv())  # no other one of this order counts
            return
        for_now = event.refusal is not None and event.refusal.status in FOR_NOW
        if request.drawing or for_now or request.forwarded or not self._kv_fields(request):
            super().broke(request, event)
        else:
            self.recomputed.add(order_id)
            self.ask(request, event.reason)

    def failure(self, request: AdaptedRequest) -> Callable[..., PrefillFailed | DecodeFailed]:
        # Where both engines are asked at once, KV that does not come fails both, and either may be heard of first. With
        # the decode worker alone avoided, the same prefill engine could lose the KV at every placement.
        return _failed_in_doubt if self.words.both_at_once and not request.drawing else DecodeFailed

    def forget(self, order_id: str) -> None:
        super().forget(order_id)
        self.recomputed.discard(order_id)
        self.promises.pop(order_id, None)

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        lacking = [order_id for order_id, one in self.requests.items() if one.sequence.result is None]
        return msgspec.structs.replace(super().heartbeat(obeyed_seq), lacking=lacking)

    def check_result(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        assert sequence.result is not None or not sequence.output, (
            "I82 tokens and no result",
            sequence.order_id,
        )


def _failed_in_doubt(**fields: Any) -> DecodeFailed:
    return DecodeFailed(prefill_in_doubt=True, **fields)
