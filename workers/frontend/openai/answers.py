"""Answers in the API's JSON: ours (`generate`), OpenAI's completions and chat, whole or in chunks.

Chunks are written by hand around the one part that changes, because a stream makes one for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.frontend.openai.chat_parts import delta_of, message_of, parts_of
from halfmoon.workers.frontend.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from halfmoon.workers.frontend.openai.prompt_parts import echoed_logprobs, echoed_text, prompt_logprobs
from halfmoon.workers.model.text.tokenizer import Tokenizer

_MS = 1_000_000


# --- measures -----------------------------------------------------------------------------------------------


def usage(request: OpenRequest) -> dict[str, int]:
    return {
        "prompt_tokens": request.arrived.prompt_tokens,
        "cached_tokens": request.timing.cached_tokens if request.timing else 0,
        "completion_tokens": len(request.output_ids),
        **similar_usage([request]),
    }


def similar_usage(firsts: Sequence[OpenRequest]) -> dict[str, int]:
    """Tokens that KV of similar prompts, or of documents, stood in for; nothing where nobody let it."""
    if not any(request.ask.kv.allowed for request in firsts):
        return {}
    reuses = [request.timing.similar for request in firsts if request.timing and request.timing.similar]
    return {
        "similar_tokens": sum(reuse.tokens for reuse in reuses),
        "similar_computed_tokens": sum(reuse.computed_tokens for reuse in reuses),
        "similar_resemblance": min((reuse.resemblance for reuse in reuses), default=0),
        "similar_retained_tokens": sum(reuse.retained_tokens for reuse in reuses),
    }


def openai_usage(choices: Sequence[OpenRequest]) -> dict[str, Any]:
    """In the order of the choices: each prompt counts once, with its first one."""
    firsts = choices[:: choices[0].ask.n]
    prompt = sum(request.arrived.prompt_tokens for request in firsts)
    completion = sum(len(request.output_ids) for request in choices)
    cached = sum(request.timing.cached_tokens for request in firsts if request.timing)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, **similar_usage(firsts)},
    }


def measures(request: OpenRequest) -> dict[str, Any]:
    """`timing_ms`, `prefill_worker`, `decode_worker`. `tbt_mean` is over all intervals; 0 for a single token."""
    timing = request.timing
    intervals = len(request.output_ids) - 1
    return {
        "timing_ms": {
            "queue": timing.queue_ns / _MS if timing else 0.0,
            "transfer": timing.transfer_ns / _MS if timing else 0.0,
            "prefill": timing.prefill_ns / _MS if timing else 0.0,
            "ttft": max(0, request.first_at_ns - request.arrived_at_ns) / _MS,
            "tbt_mean": (request.last_at_ns - request.first_at_ns) / intervals / _MS
            if intervals > 0
            else 0.0,
            "total": max(0, request.last_at_ns - request.arrived_at_ns) / _MS,
        },
        "prefill_worker": timing.prefill_worker if timing else "",
        "decode_worker": request.decode_worker or (timing.decode_worker if timing else ""),
    }


# --- ours ---------------------------------------------------------------------------------------------------


def generate_answer(
    request: OpenRequest, tokenizer: Tokenizer, model: str, *, with_logprobs: bool = True
) -> bytes:
    """The JSON of `halfmoon generate`; also the last message of a NATS stream."""
    answer: dict[str, Any] = {
        "id": request.request_id,
        "done": True,
        "model": model,
        "text": request.text,
        "token_ids": request.output_ids,
        "finish_reason": request.finish_reason,
        "usage": usage(request),
        **measures(request),
    }
    if (parts := parts_of(request, tokenizer)) is not None:
        message = message_of(parts.whole(request.text), "")
        answer["finish_reason"] = parts.finish_reason(request.finish_reason)
        answer |= {name: message[name] for name in ("tool_calls", "reasoning_content") if name in message}
    sampling = request.ask.sampling
    if sampling.logprobs >= 0 and with_logprobs:
        answer["logprobs"] = chat_logprobs(
            tokenizer, request.samples, sampling.logprobs, request.text_tokens
        )["content"]
    if sampling.prompt_logprobs >= 0:
        answer["prompt_logprobs"] = prompt_logprobs(request, tokenizer)
    if sampling.logits_digest:
        answer["logits_digests"] = [sampled.logits_digest for sampled in request.samples]
    return orjson.dumps(answer)


def generate_chunk(request: OpenRequest, piece: Piece | None, tokenizer: Tokenizer) -> bytes:
    """`{"id", "index", "text", "token_ids"}` of a NATS stream; without a piece: nothing new, but alive."""
    if piece is None:
        piece = Piece("", len(request.output_ids), [], "")
    chunk: dict[str, Any] = {
        "id": request.request_id,
        "index": piece.first,
        "text": piece.text,
        "token_ids": [sampled.token_id for sampled in piece.tokens],
    }
    sampling = request.ask.sampling
    if sampling.logprobs >= 0:
        chunk["logprobs"] = chat_logprobs(tokenizer, piece.tokens, sampling.logprobs, request.text_tokens)[
            "content"
        ]
    return orjson.dumps(chunk)


# --- OpenAI's -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChoicePlace:
    """A choice among those of its answer, which has the id of its first one's request."""

    index: int = 0
    answer_id: str = ""
    #: It is the only one, and how long it took is told beside it and not within.
    alone: bool = True


class OpenAiFormatter:
    """One choice of an answer over HTTP. `created_s`: unix time."""

    def __init__(
        self,
        request: OpenRequest,
        tokenizer: Tokenizer,
        model: str,
        created_s: int,
        place: ChoicePlace,
        scored: OpenRequest | None = None,
    ) -> None:
        """`scored`: whose prompt's log probabilities are told (this one's)."""
        ask = request.ask
        self.request = request
        self._scored = request if scored is None else scored
        self._of_prompt = self._scored.ask.sampling.prompt_logprobs >= 0
        self.index = place.index
        self._tokenizer = tokenizer
        self._chat = ask.chat
        self._top = ask.sampling.logprobs
        self._ids = ask.answer.return_token_ids
        #: Made for the first tokens whose offsets are asked for.
        self._offsets: TextOffsets | None = None
        self._model = model
        self._created_s = created_s
        self._alone = place.alone
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + (place.answer_id or request.request_id)
        self._echoed = echoed_text(request, tokenizer) if ask.answer.echo else ""
        self._parts = parts_of(request, tokenizer)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": created_s, "model": model}
        self._answer = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._head = self._answer + b'{"index":%d,' % place.index
        self._unread = True

    # --- whole ----------------------------------------------------------------------------------------------

    def choice(self) -> dict[str, Any]:
        request = self.request
        choice: dict[str, Any] = {"index": self.index}
        text, reason = self._echoed + self._written(request.text), request.finish_reason
        if not self._chat:
            choice["text"] = text
        elif self._parts is None:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            parts = parts_of(request, self._tokenizer)
            assert parts is not None
            choice["message"] = message_of(parts.whole(request.text), self._echoed)
            reason = parts.finish_reason(reason)
        choice["logprobs"] = self._logprobs(request.samples)
        if self._of_prompt and not self._chat:
            choice["prompt_logprobs"] = prompt_logprobs(self._scored, self._tokenizer)
        choice["finish_reason"] = reason
        choice["stop_reason"] = request.stop_reason
        if self._ids:
            choice["token_ids"] = request.output_ids
            if not self._chat:
                choice["prompt_token_ids"] = self.prompt_ids()
        return choice if self._alone else {**choice, **measures(request)}

    def body(self, choices: Sequence[OpenAiFormatter] = ()) -> bytes:
        """The answer of these choices; without any, of itself."""
        choices = choices or [self]
        # As vLLM: of a chat beside the choices, of a completion within.
        of_prompt: dict[str, Any] = {}
        if self._of_prompt and self._chat:
            of_prompt["prompt_logprobs"] = prompt_logprobs(self._scored, self._tokenizer)
        if self._ids and self._chat:
            of_prompt["prompt_token_ids"] = self.prompt_ids()
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._created_s,
                "model": self._model,
                "choices": [each.choice() for each in choices],
                "usage": openai_usage([each.request for each in choices]),
                **of_prompt,
                **(measures(self.request) if self._alone else {}),
            }
        )

    def prompt_ids(self) -> list[int]:
        return unpack_tokens(self.request.packed_prompt)

    # --- a stream -------------------------------------------------------------------------------------------

    def first_event(self) -> bytes:
        """The role, before any text (chat only)."""
        if not self._chat:
            return b""
        end = self._end()
        if self._ids:
            end = end[:-1] + b',"prompt_token_ids":' + orjson.dumps(self.prompt_ids()) + b"}"
        return self._head + b'"delta":{"role":"assistant","content":""}' + end + b"\n\n"

    def event(self, piece: Piece) -> bytes:
        """The server-sent events of a piece; b"" when there is nothing to show yet.

        The last one has the finish reason, and how long all took: load generators count an event without text as a
        token. `last_events` follow when all choices have ended.
        """
        bodies = self._bodies(piece)
        if not bodies:
            if not piece.finish_reason and self._top < 0 and not self._ids:
                return b""
            bodies = [
                b'"delta":{}' if self._chat and (piece.finish_reason or self._parts) else self._text(b'""')
            ]
        bodies[0] += self._token_ids(piece)
        reason = piece.finish_reason
        if reason and self._parts is not None:
            reason = self._parts.finish_reason(reason)
        events = b""
        for place, body in enumerate(bodies):
            logprobs = self._logprobs_json(piece) if not place else b"null"
            last = reason if place == len(bodies) - 1 else ""
            events += self._head + body + self._end(logprobs, last) + b"\n\n"
        return events

    def last_events(self, requests: Sequence[OpenRequest]) -> bytes:
        """Usage of all choices, when asked for, and the end."""
        events = b""
        if self.request.ask.answer.include_usage:
            events = self._answer + b'],"usage":' + orjson.dumps(openai_usage(requests)) + b"}\n\n"
        return events + b"data: [DONE]\n\n"

    def _bodies(self, piece: Piece) -> list[bytes]:
        """A delta for each part of the piece's text."""
        text = self._written(piece.text)
        if self._unread:
            self._unread = False
            text_before = self._echoed
        else:
            text_before = ""
        if self._parts is None:
            text = text_before + text
            return [self._text(orjson.dumps(text))] if text else []
        deltas = [{"content": text_before}] if text_before else []
        deltas += map(delta_of, self._parts.push(text, final=bool(piece.finish_reason)))
        return [b'"delta":' + orjson.dumps(delta) for delta in deltas]

    def _written(self, text: str) -> str:
        """`text` of the answer, as far as it is shown."""
        return "" if self.request.ask.answer.echo_only else text

    def _text(self, text: bytes) -> bytes:
        return b'"delta":{"content":' + text + b"}" if self._chat else b'"text":' + text

    def _token_ids(self, piece: Piece) -> bytes:
        body = b""
        if self._ids:
            body = b',"token_ids":' + orjson.dumps([sampled.token_id for sampled in piece.tokens])
        # As in vLLM, an echo in a stream has them unasked.
        if not piece.first and not self._chat and (self._ids or self.request.ask.answer.echo):
            body += b',"prompt_token_ids":' + orjson.dumps(self.prompt_ids())
        return body

    def _end(self, logprobs: bytes = b"null", reason: str = "") -> bytes:
        end = (
            b',"logprobs":' + logprobs + b',"finish_reason":' + (orjson.dumps(reason) if reason else b"null")
        )
        if reason:
            end += b',"stop_reason":' + orjson.dumps(self.request.stop_reason)
        told = orjson.dumps(measures(self.request))[1:-1] if reason else b""
        if told and not self._alone:
            end += b"," + told
        end += b"}]"
        ask = self.request.ask
        if ask.answer.usage_so_far:
            end += b',"usage":' + orjson.dumps(openai_usage([self.request]))
        elif ask.answer.include_usage:
            end += b',"usage":null'
        if told and self._alone:
            end += b"," + told
        return end + b"}"

    # --- log probabilities ----------------------------------------------------------------------------------

    def _logprobs_json(self, piece: Piece) -> bytes:
        return b"null" if self._top < 0 else orjson.dumps(self._logprobs(piece.tokens))

    def _logprobs(self, samples: list[SampledToken]) -> dict[str, Any] | None:
        if self._top < 0:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, samples, self._top, self.request.text_tokens)
        if self.request.ask.answer.echo_only:
            samples = []
        before: dict[str, list[Any]] = {}
        if self._offsets is None:
            self._offsets = TextOffsets(self.request.new_detokenizer(), len(self._echoed))
            if self.request.ask.answer.echo:
                before = echoed_logprobs(self._scored, self._tokenizer, self._echoed, self._top)
        told = completion_logprobs(self._tokenizer, samples, self._top, self._offsets)
        return {name: before.get(name, []) + each for name, each in told.items()}
