"""The adapter's machine in the role of a prefill worker: the engine computes prompts and keeps their KV for a decode
engine. Pure.

::

    order ─▶ its tokens ─▶ asked for one token ─▶ PrefillResult to the decode adapter, PrefillFinished
                                          └─ broke off: PrefillFailed
"""

# The token that the engine draws goes to nobody: the decode engine draws the first one again, from the KV of the whole
# prompt but its last token, and all that follow. So the text, its log probabilities and its seed are one engine's. The
# price is one decode step more before the first token. The other way is an answer in which two engines draw: where they
# do not compute alike, or draw with a temperature, the second token would follow another first one than the client's.

from __future__ import annotations

from typing import Any

from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import DecodeFailed, PrefillFailed
from halfmoon.schemas.kv import EngineKv
from halfmoon.workers.adapters.actions import TellDecode
from halfmoon.workers.adapters.completion import prefill_body_of
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.events import PromptOrdered, TokensHeard
from halfmoon.workers.adapters.state import AdaptedRequest, AdapterState, HalfEvent
from halfmoon.workers.machines import Report


class PrefillAdapterState(AdapterState):
    """See the module."""

    draws = False

    def on_half(self, event: HalfEvent) -> None:
        if isinstance(event, PromptOrdered):
            self.begin(_as_decode(event.order))

    def advance(self, request: AdaptedRequest) -> None:
        self.ask(request)

    def body(self, request: AdaptedRequest) -> dict[str, Any]:
        sequence = request.sequence
        return prefill_body_of(
            self.engine_model,
            salt_of(sequence.root_key),
            sequence.prompt,
            sequence.replay,
            sequence.sampling,
        )

    def heard(self, request: AdaptedRequest, event: TokensHeard) -> None:
        sequence = request.sequence
        if not event.tokens or event.finish_reason not in ("stop", "length"):
            reason = f"the engine ended it by {event.finish_reason!r} after {len(event.tokens)} tokens"
            self.fail(request, reason, retryable=True)
            return
        kept = EngineKv(params=event.kv_params, tokens=len(sequence.prompt) + len(sequence.replay))
        told = self.prefilled(request, event.tokens[0], kept)
        assert sequence.result is not None, told
        self.out += [TellDecode(sequence.order.worker_id, sequence.result), Report(told)]
        self.forget(sequence.order_id)

    def failure(self, request: AdaptedRequest) -> type[PrefillFailed | DecodeFailed]:
        return PrefillFailed


def _as_decode(order: StartPrefill) -> StartDecode:
    """The decode half that it is of, as far as the prefill half needs it."""
    return StartDecode(
        order_id=order.order_id,
        request_id=order.request_id,
        frontend_id=order.frontend_id,
        worker_id=order.decode_worker_id,
        prefill_worker_id=order.worker_id,
        prompt_tokens=order.prompt_tokens,
        max_tokens=1,
        tbt_slo_ns=0,
        weight_version=order.weight_version,
    )
