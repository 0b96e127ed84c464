"""Answers of one token, by the worker that computed the prompt: nobody decodes them.

A classifier, a scorer of given texts and a warmer of caches ask for one token. A decode worker could only pass it on,
once it had room for the prompt's KV and that KV had moved.
"""

from __future__ import annotations

from typing import Protocol

from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.decode.deliveries import deliveries_of
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.machines import Report
from halfmoon.workers.prefill.actions import Actions
from halfmoon.workers.prefill.stages import JobRules


class Drawn(Protocol):
    """A `Job` that has its first token."""

    order: StartPrefill
    rules: JobRules
    reply: TakeReply


def answered(job: Drawn, result: PrefillResult, at_ns: int, out: Actions) -> DecodeSequence:
    """Deliver the token, unless the client has it from an earlier placement, and report the end of the request."""
    order, rules = job.order, job.rules
    half = StartDecode(
        order_id=order.order_id,
        request_id=order.request_id,
        frontend_id=order.frontend_id,
        worker_id=order.worker_id,
        prefill_worker_id=order.worker_id,
        prompt_tokens=order.prompt_tokens,
        max_tokens=1,
        tbt_slo_ns=0,
    )
    answer = DecodeSequence(half, rules.layout, at_ns)
    answer.take(job.reply, rules.eos_ids)
    answer.result, answer.result_ns = result, at_ns
    if answer.add(answer.next_known() or result.first, at_ns):
        for delivery in deliveries_of([(answer, 0)], rules.worker_id):
            out.append(delivery)
    assert answer.finish_reason, ("more than one token", order)
    out.append(Report(answer.finished(rules.worker_id, result, at_ns)))
    return answer
