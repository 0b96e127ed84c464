"""The adapter's machine in the role of a prefill worker: the engine computes prompts and keeps their KV for a decode
engine. Pure.

::

    order ─▶ its tokens ─▶ asked for one token ─▶ PrefillResult to the decode adapter, PrefillFinished
                                    │     └─ broke off: PrefillFailed
                                    └─ its KV can be told of already: KvPromised to the decode adapter

A promise needs a name of ours for the prompt's KV. A vLLM takes names where its connector does (`HalfmoonConnector`),
as its first answer shows. Then the decode engine is asked while the prompt is computed, and the KV of each layer comes
as soon as it is there. SGLangs always do, and compute no prompt before the decode engine was asked.
"""

# The token that a vLLM draws goes to nobody: the decode engine draws the first one again, from the KV of the whole
# prompt but its last token, and all that follow. So the text, its log probabilities and its seed are one engine's. The
# price is one decode step more before the first token. The other way is an answer in which two engines draw: where they
# do not compute alike, or draw with a temperature, the second token would follow another first one than the client's.
# SGLangs go that way, and hand the token over themselves: all that the client gets is the decode engine's word.
#
# Of a vLLM only the prompt that was asked for first is promised: engines compute prompts in that order. Those behind it
# may wait for long, and a decode engine that was asked keeps room in its cache for all of the prompt. SGLangs are all
# promised at once: which one is computed next is what the engines find out between them.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from halfmoon.schemas.decisions import StartDecode, StartPrefill
from halfmoon.schemas.events import DecodeFailed, PrefillFailed
from halfmoon.schemas.kv import EngineKv, KvPromised
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.adapters.actions import Action, TellDecode
from halfmoon.workers.adapters.events import Event, PromptOrdered, TokensHeard
from halfmoon.workers.adapters.state import AdaptedRequest, AdapterState, HalfEvent, completion_of
from halfmoon.workers.machines import Report


class PrefillAdapterState(AdapterState):
    """See the module."""

    draws = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Where the engine keeps KV; {}: it takes no names for it, as far as is known.
        self.place = self.words.place
        #: Orders whose KV a vLLM was given a name for, in the order in which it was asked.
        self.named: list[str] = []
        self.promised = ""

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        if self.named and self.named[0] != self.promised:
            self.promised = self.named[0]
            actions.append(self._promise(self.requests[self.promised]))
        return actions

    def _promise(self, request: AdaptedRequest) -> TellDecode:
        order = request.order
        place = self.words.kv_params(self.place, self._kv_name(order.order_id))
        told = KvPromised(
            order_id=order.order_id,
            request_id=order.request_id,
            engine_kv=EngineKv(params=msgspec.json.encode(place).decode(), tokens=_tokens(request)),
        )
        return TellDecode(order.worker_id, told)

    def _kv_name(self, order_id: str) -> str:
        """An engine outlives logs, and knows names for a while: another log's orders have others."""
        return f"{order_id}-{self.incarnation}"

    def on_half(self, event: HalfEvent) -> None:
        if isinstance(event, PromptOrdered):
            self.begin(_as_decode(event.order))

    def advance(self, request: AdaptedRequest) -> None:
        sequence = request.sequence
        if sequence.replay_is_all:
            # There is nothing to draw, and nobody asks for KV.
            self._computed(request, SampledToken(token_id=sequence.replay[-1]), "")
        else:
            self.ask(request)

    def ask(self, request: AdaptedRequest, computes_again: str = "") -> None:
        super().ask(request, computes_again)
        order_id = request.order.order_id
        if not self.place or order_id not in self.requests:
            return
        if self.words.both_at_once:
            self.out.append(self._promise(request))
        else:
            self.named.append(order_id)

    def body(self, request: AdaptedRequest) -> dict[str, Any]:
        name = self._kv_name(request.order.order_id) if self.place else ""
        return self.words.prefill_body(completion_of(request.sequence), name)

    def heard(self, request: AdaptedRequest, event: TokensHeard) -> None:
        if not event.tokens or event.finish_reason not in ("stop", "length"):
            reason = f"the engine ended it by {event.finish_reason!r} after {len(event.tokens)} tokens"
            self.fail(request, reason, retryable=True)
            return
        self.place = self.words.place_after(event.kv_params)
        self._computed(request, event.tokens[0], event.kv_params)

    def _computed(self, request: AdaptedRequest, drawn: SampledToken, kv_params: str) -> None:
        sequence = request.sequence
        told = self.prefilled(request, drawn, EngineKv(params=kv_params, tokens=_tokens(request)))
        assert sequence.result is not None, told
        self.out += [TellDecode(sequence.order.worker_id, sequence.result), Report(told)]
        self.forget(sequence.order_id)

    def forget(self, order_id: str) -> None:
        super().forget(order_id)
        if order_id in self.named:
            self.named.remove(order_id)

    def failure(self, request: AdaptedRequest) -> Callable[..., PrefillFailed | DecodeFailed]:
        return PrefillFailed


def _tokens(request: AdaptedRequest) -> int:
    """Those that the engine computes: the prompt, and what its client has of the answer."""
    return len(request.sequence.prompt) + len(request.sequence.replay)


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
