"""Answers of one token, by the worker that computed the prompt: nobody decodes them. Pure.

A classifier, a scorer of given texts and a warmer of caches ask for one token. A decode worker could only pass it on,
once it had room for the prompt's KV and that KV had moved.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import RequestFinished
from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.tokens import Delivery, ResendReply, ResendRequest, TakeReply, Timing, TokensSampled
from halfmoon.workers.machines import Deliver, Report
from halfmoon.workers.prefill.actions import Actions
from halfmoon.workers.prefill.stages import JobRules
from halfmoon.workers.sample_requests import end_ids

#: Of an answer, beside the log probabilities of its prompt's tokens.
ANSWER_BYTES = 2_000


class JobWithToken(Protocol):
    """A `Job` that has its first token."""

    order: StartPrefill
    rules: JobRules
    reply: TakeReply


class FirstTokenAnswer(msgspec.Struct, frozen=True):
    """The whole answer to a request, as it is delivered, and delivered again when it was missed."""

    frontend_id: str
    delivery: Delivery

    @property
    def order_id(self) -> str:
        return self.delivery.order_id

    @property
    def host_bytes(self) -> int:
        return ANSWER_BYTES + len(self.delivery.tokens[0].prompt_logprobs)

    def resend(self, request: ResendRequest) -> ResendReply:
        """To its own frontend, from the index on that it asks for."""
        if request.frontend_id != self.frontend_id:
            return ResendReply(known=False)
        tokens = self.delivery.tokens[request.index :]
        rest = msgspec.structs.replace(self.delivery, index=request.index, tokens=tokens)
        return ResendReply(known=True, delivery=rest)


def answered(job: JobWithToken, result: PrefillResult, out: Actions) -> FirstTokenAnswer:
    """Deliver the token, unless the client has it from an earlier placement, and report the end of the request."""
    order, worker_id, sampling = job.order, job.rules.worker_id, job.reply.sampling
    had = unpack_tokens(job.reply.output_ids)
    token = SampledToken(token_id=had[0]) if had else result.first
    ends = token.token_id in end_ids(job.rules.eos_ids, sampling) and not (token.cut or sampling.min_tokens)
    finish_reason: Literal["stop", "length"] = "stop" if ends else "length"
    delivery = Delivery(
        request_id=order.request_id,
        order_id=order.order_id,
        index=0,
        tokens=[token],
        finish_reason=finish_reason,
        timing=Timing(
            queue_ns=result.queue_ns,
            transfer_ns=result.transfer_ns,
            prefill_ns=result.compute_ns,
            cached_tokens=result.cached_tokens,
            prefill_worker=worker_id,
            decode_worker=worker_id,
            similar=result.similar,
        ),
    )
    if not had:
        out.append(Deliver(order.frontend_id, TokensSampled(worker_id=worker_id, deliveries=[delivery])))
    finished = RequestFinished(
        order_id=order.order_id,
        request_id=order.request_id,
        worker_id=worker_id,
        finish_reason=finish_reason,
        completion_tokens=1,
        ttft_ns=result.queue_ns + result.compute_ns,  # transfers overlap both
    )
    out.append(Report(finished))
    return FirstTokenAnswer(order.frontend_id, delivery)
