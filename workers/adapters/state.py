"""The adapter's machine: orders of a mixed worker, obeyed by an engine that is asked over HTTP. Events in, actions out.
Pure. `prefill_half` and `decode_half` have the machines of the other two roles, which differ in little.

::

    order ─▶ its tokens ─▶ asked ─▶ first token: PrefillFinished ─▶ last one: RequestFinished
                             └─ broke off: PrefillFailed, or DecodeFailed where its first token was out

All orders go to the engine at once: it queues, batches and preempts as it does for its own clients. Tokens that the
client has already, from an engine that is gone, are the end of the prompt here; so greedy text goes on as it was, and
random draws do not.

The engine reports no times, so they are inferred. Prompts are computed one after another: one has waited until the one
before it had its first token. A step's time is the one between two tokens of the sequence that has run longest, where
no prompt was computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import EngineRefusal, StartDecode
from halfmoon.schemas.events import (
    DecodeFailed,
    PrefillFailed,
    PrefillFinished,
    WorkerHeartbeat,
)
from halfmoon.schemas.kv import EngineKv, PrefillResult
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import TakeReply
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.adapters.actions import Action, AskEngine, HangUp, StepSeen
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.engines.words import EngineCompletion, EngineWords, Unanswerable
from halfmoon.workers.adapters.events import (
    AnswerBroke,
    EngineAsked,
    EngineLooked,
    Event,
    PromptOrdered,
    TokensHeard,
)
from halfmoon.workers.decode.actions import EndSpan
from halfmoon.workers.decode.deliveries import deliveries_of, resend_reply
from halfmoon.workers.decode.events import DecodeOrdered, KvHeard
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.decode.step_times import StepTimes
from halfmoon.workers.finished_orders import FinishedOrders
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    OrderCancelled,
    Report,
    ResendRequested,
    TakeTokens,
    TokensTaken,
    WorkerFacts,
    WorkerStopped,
    refusal,
)
from halfmoon.workers.mixed.events import MixedOrdered
from halfmoon.workers.mixed.request import decode_half

REASON_CHARACTERS_MAX = 500
#: Of an order's one half.
HalfEvent = PromptOrdered | DecodeOrdered | KvHeard


def completion_of(sequence: DecodeSequence) -> EngineCompletion:
    return EngineCompletion(
        salt_of(sequence.root_key), sequence.prompt, sequence.replay, sequence.max_tokens, sequence.sampling
    )


class AdaptedRequest:
    """One order. Times are monotonic ns."""

    def __init__(self, order: StartDecode, layout: Layout, now_ns: int) -> None:
        self.order = order
        self.sequence = DecodeSequence(order, layout, now_ns)
        #: None: the engine was not asked yet.
        self.asked_ns: int | None = None
        self.cached_blocks = 0
        #: A gateway asks the engine.
        self.forwarded = False
        #: Its answer came in one piece.
        self.whole = False

    @property
    def drawing(self) -> bool:
        """It has tokens that its client had not."""
        return len(self.sequence.output) > len(self.sequence.replay)


class AdapterState:
    """See the module. `requests` are the open orders by id, in the order of their arrival."""

    #: The engine draws what the client gets.
    draws = True

    def __init__(self, worker: WorkerFacts, profile: CostProfile, *, words: EngineWords) -> None:
        self.worker_id, self.incarnation = worker.worker_id, worker.incarnation
        self.layout, self.kv_blocks = worker.layout, worker.kv_blocks
        self.requests: dict[str, AdaptedRequest] = {}
        self.finished = FinishedOrders[DecodeSequence]()
        self.profile = profile
        self.times = StepTimes(profile)
        self.cache_percent = 0.0
        #: The newest first token of any order.
        self.first_ns = 0
        #: Order whose tokens give the time of a step, and the time of its last token.
        self.paced_by, self.paced_ns = "", 0
        self.stopped = False
        self.now_ns = self.wall_ns = 0
        self.out: list[Action] = []
        #: Those whose KV the engine could not have from the one that computed it.
        self.prompts_recomputed = 0
        #: Those whose decode engine was asked before they were computed.
        self.prompts_overlapped = 0
        self.words, self._eos_ids = words, worker.eos_ids

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from `event`, in the order in which they must be begun."""
        self.now_ns, self.wall_ns, self.out = event.at_ns, event.wall_ns, []
        match event:
            case TokensHeard():
                if (request := self.requests.get(event.order_id)) is not None:
                    self.heard(request, event)
            case MixedOrdered():
                self.begin(decode_half(event.order))
            case TokensTaken():
                self._taken(event)
            case EngineAsked():
                if (request := self.requests.get(event.order_id)) is not None:
                    request.asked_ns, request.cached_blocks = event.at_ns, event.cached_blocks
            case AnswerBroke():
                if (request := self.requests.get(event.order_id)) is not None:
                    self.broke(request, event)
            case OrderCancelled():
                if (request := self.requests.get(event.order_id)) is not None:
                    self._drop(request)
            case ResendRequested():
                known = self._known(event.request.order_id)
                return [AnswerResend(resend_reply(known, event.request, self.worker_id))]
            case EngineLooked():
                self.cache_percent = event.cache_percent
            case AnnounceRequested():
                self._drop_all()
                self.out.append(Announce())
            case WorkerStopped():
                self.stopped = True
                self._drop_all()
            case PromptOrdered() | DecodeOrdered() | KvHeard():
                self.on_half(event)
        return self.out

    def on_half(self, event: HalfEvent) -> None:
        """A mixed worker never has one half of an order alone."""

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the engine's cache, in ours."""
        return min(self.kv_blocks, int(self.kv_blocks * self.cache_percent / 100))

    def orders_open(self) -> int:
        return len(self.requests)

    def heartbeat(self, obeyed_seq: int) -> WorkerHeartbeat:
        """How the worker is; the step figures begin again."""
        steps, step_ns, sequences, context = self.times.take()
        running = sum(1 for request in self.requests.values() if request.drawing)
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            queued=len(self.requests) - running,
            running=running,
            kv_blocks_used=self.kv_blocks_used,
            steps=steps,
            step_ns=step_ns,
            step_sequences=sequences,
            step_context_tokens=context,
            orders=list(self.requests),
            obeyed_seq=obeyed_seq,
        )

    # --- an order arrives -----------------------------------------------------------------------------------

    def begin(self, order: StartDecode) -> None:
        """Nothing, if it is known already."""
        if self.stopped or self._known(order.order_id) is not None:
            return
        self.requests[order.order_id] = AdaptedRequest(order, self.layout, self.now_ns)
        self.out.append(
            TakeTokens(order_id=order.order_id, request_id=order.request_id, frontend_id=order.frontend_id)
        )

    def _known(self, order_id: str) -> DecodeSequence | None:
        request = self.requests.get(order_id)
        return self.finished.get(order_id) if request is None else request.sequence

    def _taken(self, event: TokensTaken) -> None:
        request, reply = self.requests.get(event.order_id), event.reply
        if request is None or request.sequence.taken:
            return
        if reply is None or reply.gone:
            self.fail(request, refusal(reply), retryable=reply is None)
            return
        sequence = request.sequence
        sequence.take(reply, self._eos_ids)
        request.forwarded = reply.forwarded and self.draws
        problem = self._problem(request, reply)
        if problem:
            self.fail(request, problem, retryable=False)
            return
        self.advance(request)

    def advance(self, request: AdaptedRequest) -> None:
        """It has its tokens."""
        sequence = request.sequence
        self.replay(sequence)
        if sequence.finish_reason:  # its client has all of it, but for the word that it is over
            self.first(request, sequence.tokens[0])
            self.finish(request)
        else:
            self.ask(request)

    def replay(self, sequence: DecodeSequence) -> None:
        """Its client has these tokens."""
        for token_id in sequence.replay:
            sequence.add(SampledToken(token_id=token_id), self.now_ns)

    def ask(self, request: AdaptedRequest, computes_again: str = "") -> None:
        sequence = request.sequence
        try:
            body = self.body(request)
        except Unanswerable as lack:
            wrong = EngineRefusal(status=400, param=lack.param)
            self.fail(request, str(lack), retryable=False, refusal=wrong)
            return
        self.prompts_recomputed += bool(computes_again)
        order, gateway_of = request.order, request.order.frontend_id if request.forwarded else ""
        self.out.append(
            AskEngine(order.order_id, order.request_id, body, sequence.block_keys, computes_again, gateway_of)
        )

    def body(self, request: AdaptedRequest) -> dict[str, Any]:
        """The request to the engine; of one that a gateway sends, what is to be set in it. Raises Unanswerable."""
        sequence = request.sequence
        if request.forwarded:
            return self.words.forwarded(salt_of(sequence.root_key))
        return self.words.body(completion_of(sequence))

    def _problem(self, request: AdaptedRequest, reply: TakeReply) -> str:
        """Why the tokens are not those of the order; "": they are."""
        tokens, keys = len(request.sequence.prompt), len(reply.block_keys) // KEY_BYTES
        if tokens != request.order.prompt_tokens:
            return "the frontend's tokens are not those of the order"
        if keys not in (0, tokens // self.layout.block_tokens):
            return f"--block-tokens: {self.layout.block_tokens} here, and something else at the frontend"
        if reply.weight_version != request.order.weight_version:
            # An engine would read blocks of other weights by that root.
            return "the frontend's block keys are not of the order's weight version"
        if not reply.root_key:
            return "the frontend names no root of the request's block keys"
        return ""

    # --- the engine answers ---------------------------------------------------------------------------------

    def heard(self, request: AdaptedRequest, event: TokensHeard) -> None:
        sequence = request.sequence
        index = len(sequence.output)
        first = not request.drawing and bool(event.tokens)
        request.whole = event.whole
        self._pace(request, len(event.tokens), first=first)
        for token in event.tokens:
            if sequence.finish_reason:
                break  # it drew on behind the end that the request has
            sequence.add(token, self.now_ns)
        if event.finish_reason and not sequence.finish_reason:
            if event.finish_reason not in ("stop", "length") or not (request.drawing or first):
                reason = f"the engine ended it by {event.finish_reason!r} after {len(sequence.output)} tokens"
                self.broke(
                    request,
                    AnswerBroke(at_ns=self.now_ns, order_id=sequence.order_id, reason=reason, retryable=True),
                )
                return
            sequence.finish_reason = event.finish_reason
        if first:
            self.first(request, event.tokens[0])
        if len(sequence.output) > index or sequence.finish_reason:
            self.out += deliveries_of([(sequence, index)], self.worker_id)
        if sequence.finish_reason:
            if not event.finish_reason:
                self.out.append(HangUp(event.order_id))
            self.finish(request)

    def broke(self, request: AdaptedRequest, event: AnswerBroke) -> None:
        """No more will come of the answer."""
        self.fail(request, event.reason, retryable=event.retryable, refusal=event.refusal)

    def first(self, request: AdaptedRequest, token: SampledToken) -> None:
        """Its first new token is there, and perhaps others: its prompt is computed."""
        sequence = request.sequence
        told = self.prefilled(request, token, decodes=not sequence.finish_reason)
        sequence.result_ns = sequence.ready_ns = sequence.started_ns = self.now_ns
        sequence.ready_wall_ns = self.wall_ns
        self.out.append(Report(told))

    def prefilled(
        self,
        request: AdaptedRequest,
        token: SampledToken,
        engine_kv: EngineKv | None = None,
        *,
        decodes: bool = False,
    ) -> PrefillFinished:
        """Sets the request's result. The prompt is computed, and `token` drawn; the answer may go on here."""
        order, sequence = request.order, request.sequence
        asked_ns = self.now_ns if request.asked_ns is None else request.asked_ns
        began_ns = min(self.now_ns, max(asked_ns, self.first_ns))
        cached = min(request.cached_blocks * self.layout.block_tokens, len(sequence.prompt) - 1)
        queue_ns, compute_ns = began_ns - sequence.arrived_ns, self.now_ns - began_ns
        if request.whole:
            # Its first token came with its last one: most of that time is not the prompt's.
            compute_ns = min(compute_ns, self.profile.prefill_ns(len(sequence.prompt), cached))
        else:
            self.first_ns = self.now_ns
        sequence.result = PrefillResult(
            order_id=order.order_id,
            request_id=order.request_id,
            first=token,
            queue_ns=queue_ns,
            transfer_ns=0,
            compute_ns=compute_ns,
            cached_tokens=cached,
            finished_at_ns=self.wall_ns,
            engine_kv=engine_kv,
        )
        return PrefillFinished(
            order_id=order.order_id,
            request_id=order.request_id,
            worker_id=self.worker_id,
            queue_ns=queue_ns,
            transfer_ns=0,
            compute_ns=compute_ns,
            cached_local_tokens=cached,
            # A prompt that nobody had to compute tells nothing of the time that they take.
            prompt_tokens=0 if sequence.replay_is_all else len(sequence.prompt) + len(sequence.replay),
            decodes=decodes,
        )

    def _pace(self, request: AdaptedRequest, tokens: int, *, first: bool) -> None:
        """Take the time of a step, where this sequence's tokens give it."""
        sequence = request.sequence
        running = [one.sequence for one in self.requests.values() if one.drawing]
        if self.paced_by not in self.requests:
            self.paced_by, self.paced_ns = sequence.order_id if not first else "", 0
        if sequence.order_id != self.paced_by or not tokens:
            return
        prompts = any(self.computes_prompt(one) for one in self.requests.values())
        alone = not prompts and self.first_ns <= self.paced_ns
        if self.paced_ns and alone:
            context = sum(len(one.prompt) + len(one.output) for one in running)
            step_ns = (self.now_ns - self.paced_ns) // tokens
            self.times.observe(step_ns, len(running), context)
            self.out.append(StepSeen(step_ns, len(running), context))
        self.paced_ns = self.now_ns

    def computes_prompt(self, request: AdaptedRequest) -> bool:
        """Its prompt may be computed beside the steps of others."""
        return not request.drawing

    # --- the end of an order --------------------------------------------------------------------------------

    def finish(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        assert sequence.result is not None, sequence.order_id
        self._end_span(sequence)
        told = sequence.finished(self.worker_id, sequence.result, self.now_ns)
        # It had its first token when the prompt was computed and, where another worker did that, drawn from here.
        self.out.append(Report(msgspec.structs.replace(told, ttft_ns=told.ttft_ns + sequence.wait_ns)))
        self.finished.keep(sequence)
        self.forget(sequence.order_id)

    def fail(
        self,
        request: AdaptedRequest,
        reason: str,
        *,
        retryable: bool,
        refusal: EngineRefusal | None = None,
    ) -> None:
        order, reason = request.order, reason[:REASON_CHARACTERS_MAX]
        failed = self.failure(request)
        if request.asked_ns is not None:
            self.out.append(HangUp(order.order_id))
        if request.sequence.result is not None:
            self._end_span(request.sequence, error=reason)
        self.out.append(
            Report(
                failed(
                    order_id=order.order_id,
                    request_id=order.request_id,
                    worker_id=self.worker_id,
                    reason=reason,
                    retryable=retryable,
                    refusal=refusal,
                )
            )
        )
        self.forget(order.order_id)

    def failure(self, request: AdaptedRequest) -> Callable[..., PrefillFailed | DecodeFailed]:
        """The half that fails."""
        return DecodeFailed if request.drawing else PrefillFailed

    def _drop(self, request: AdaptedRequest) -> None:
        """By the conductor, or with the worker: no answer."""
        if request.sequence.result is not None:
            self._end_span(request.sequence, cancelled=True)
        self.out.append(HangUp(request.order.order_id))
        self.forget(request.order.order_id)

    def forget(self, order_id: str) -> None:
        """It is not open any more."""
        del self.requests[order_id]

    def _drop_all(self) -> None:
        for request in list(self.requests.values()):
            self._drop(request)

    def _end_span(self, sequence: DecodeSequence, *, error: str = "", cancelled: bool = False) -> None:
        if sequence.traceparent:
            self.out.append(EndSpan(sequence, error, cancelled))

    def validate(self) -> None:
        """Raises AssertionError, with values, when an invariant does not hold."""
        assert not (self.stopped and self.requests), (
            "I75 open orders of a stopped worker",
            list(self.requests),
        )
        for order_id, request in self.requests.items():
            sequence = request.sequence
            assert not sequence.finish_reason, ("I82 ended and still open", order_id)
            assert order_id not in self.finished, ("I82 open and finished", order_id)
            self.check_result(request)

    def check_result(self, request: AdaptedRequest) -> None:
        """Raises AssertionError unless it has its result when it has tokens."""
        has_result = request.sequence.result is not None
        assert has_result == request.drawing, ("I82 first token and result", request.sequence.order_id)
