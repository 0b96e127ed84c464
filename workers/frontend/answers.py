"""Answers in the API's JSON: ours (`generate`), OpenAI's completions and chat, whole or in chunks.

Chunks are written by hand around the one part that changes, because a stream makes one for every token.
"""

from __future__ import annotations

from typing import Any

import orjson

from halfmoon.schemas.keys import unpack_tokens
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.frontend.open_request import OpenRequest, Piece
from halfmoon.workers.model.text.tokenizer import Tokenizer

_MS = 1_000_000


# --- measures -----------------------------------------------------------------------------------------------


def usage(request: OpenRequest) -> dict[str, int]:
    return {
        "prompt_tokens": request.arrived.prompt_tokens,
        "cached_tokens": request.timing.cached_tokens if request.timing else 0,
        "completion_tokens": len(request.output_ids),
    }


def openai_usage(request: OpenRequest) -> dict[str, Any]:
    prompt, completion = request.arrived.prompt_tokens, len(request.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": request.timing.cached_tokens if request.timing else 0},
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


# --- log probabilities --------------------------------------------------------------------------------------


def chat_logprobs(tokenizer: Tokenizer, samples: list[SampledToken], top: int) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(sampled.token_id, sampled.logprob),
                "top_logprobs": [entry(*other) for other in sampled.top_logprobs[:top]],
            }
            for sampled in samples
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, samples: list[SampledToken], top: int, offset: int
) -> dict[str, Any]:
    """OpenAI's `logprobs` of a completion choice; `offset`: characters of the tokens before these."""
    tokens = [tokenizer.decode([sampled.token_id]) for sampled in samples]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(sampled.logprob, -9999.0) for sampled in samples],
        "top_logprobs": [
            {
                tokenizer.decode([other]): max(logprob, -9999.0)
                for other, logprob in sampled.top_logprobs[:top]
            }
            for sampled in samples
        ]
        if top
        else None,
        "text_offset": offsets,
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
    sampling = request.ask.sampling
    if sampling.logprobs >= 0 and with_logprobs:
        answer["logprobs"] = chat_logprobs(tokenizer, request.samples, sampling.logprobs)["content"]
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
        chunk["logprobs"] = chat_logprobs(tokenizer, piece.tokens, sampling.logprobs)["content"]
    return orjson.dumps(chunk)


# --- OpenAI's -----------------------------------------------------------------------------------------------


class OpenAiFormatter:
    """How one request is answered over HTTP. `created_s`: unix time."""

    def __init__(self, request: OpenRequest, tokenizer: Tokenizer, model: str, created_s: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._chat = request.ask.chat
        self._top = request.ask.sampling.logprobs
        self._ids = request.ask.return_token_ids
        self._characters = 0
        self._model = model
        self._created_s = created_s
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + request.request_id
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": created_s, "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":0,'
        usage_field = b',"usage":null' if request.ask.include_usage else b""
        self._end = b',"logprobs":null,"finish_reason":null}]' + usage_field + b"}\n\n"

    def body(self) -> bytes:
        request = self._request
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": request.text}
        else:
            choice["text"] = request.text
        choice["logprobs"] = self._logprobs(request.samples)
        choice["finish_reason"] = request.finish_reason
        prompt_ids: dict[str, list[int]] = {}
        if self._ids:
            choice["token_ids"] = request.output_ids
            # As vLLM: of a chat beside the choices, of a completion within.
            (prompt_ids if self._chat else choice)["prompt_token_ids"] = self._prompt_ids()
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._created_s,
                "model": self._model,
                "choices": [choice],
                "usage": openai_usage(request),
                **prompt_ids,
                **measures(request),
            }
        )

    def _prompt_ids(self) -> list[int]:
        return unpack_tokens(self._request.packed_prompt)

    def first_event(self) -> bytes:
        """The role, before any text (chat only)."""
        if not self._chat:
            return b""
        end = self._end
        if self._ids:
            prompt_ids = b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids()) + b"}\n\n"
            end = end.removesuffix(b"}\n\n") + prompt_ids
        return self._head + b'"delta":{"role":"assistant","content":""}' + end

    def event(self, piece: Piece) -> bytes:
        """The server-sent event of a piece; b"" when there is nothing to show yet.

        The last one has the finish reason, and how long all took: load generators count an event without text as a
        token. Behind it come usage, when asked for, and `[DONE]`.
        """
        if piece.finish_reason:
            return self._last_events(piece)
        if not piece.text and self._top < 0 and not self._ids:
            return b""
        if self._top < 0:
            return self._head + self._body(piece) + self._end
        return self._head + self._body(piece) + self._end.replace(b"null", self._logprobs_json(piece), 1)

    def _body(self, piece: Piece) -> bytes:
        text = orjson.dumps(piece.text)
        body = b'"delta":{"content":' + text + b"}" if self._chat else b'"text":' + text
        if self._ids:
            body += b',"token_ids":' + orjson.dumps([sampled.token_id for sampled in piece.tokens])
            if not piece.first and not self._chat:
                body += b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids())
        return body

    def _logprobs_json(self, piece: Piece) -> bytes:
        return b"null" if self._top < 0 else orjson.dumps(self._logprobs(piece.tokens))

    def _last_events(self, piece: Piece) -> bytes:
        request = self._request
        reason = b',"logprobs":' + self._logprobs_json(piece)
        reason += b',"finish_reason":"' + piece.finish_reason.encode() + b'"}]'
        if request.ask.include_usage:
            reason += b',"usage":null'
        body = b'"delta":{}' if self._chat and not piece.text and not self._ids else self._body(piece)
        events = self._head + body + reason + b"," + orjson.dumps(measures(request))[1:] + b"\n\n"
        if request.ask.include_usage:
            head = self._head.partition(b'"choices":')[0]
            events += head + b'"choices":[],"usage":' + orjson.dumps(openai_usage(request)) + b"}\n\n"
        return events + b"data: [DONE]\n\n"

    def _logprobs(self, samples: list[SampledToken]) -> dict[str, Any] | None:
        if self._top < 0:
            return None
        if self._chat:
            return chat_logprobs(self._tokenizer, samples, self._top)
        entries = completion_logprobs(self._tokenizer, samples, self._top, self._characters)
        self._characters += sum(len(token) for token in entries["tokens"])
        return entries
