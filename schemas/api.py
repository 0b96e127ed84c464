"""What clients ask for: the API's request bodies, their checks, and the errors that answer them.

A body goes through three steps: the typed decoder (wrong type, out of range, too long: 400 with the field's name),
`_ask` (fields that contradict each other or mean nothing: 422), and the frontend (needs the tokenizer: vocabulary,
context). The names are OpenAI's; `slo`, `tenant` and `request_id` are ours. Unknown fields are ignored; known fields
that would change the answer and that we cannot honour (`n` > 1, `tools`, ...) are refused by name.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from halfmoon.schemas.numbers import MS_NS
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.types import Id

_SEED_MASK = 2**63 - 1
#: HTTP status of a client that left before its answer (nginx's number); it appears in metrics only.
CLIENT_GONE = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal or failure as the client sees it, on either edge."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_ns: int = 0,
    ) -> None:
        #: A client's words may be in it, and be no Unicode.
        self.message = message.encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.status = status
        self.kind = _TYPES.get(status, "server_error")
        self.param = param
        self.code = code
        #: When to try again; 0: not said.
        self.retry_after_ns = retry_after_ns
        #: More fields of the error object (a rejection's prediction).
        self.extra: dict[str, Any] = {}

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return orjson.dumps({"error": error})

    def retry_headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds (at least 1) and `retry-after-ms`; empty when there is nothing to say."""
        if not self.retry_after_ns:
            return {}
        milliseconds = max(1, -(-self.retry_after_ns // MS_NS))
        return {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}


TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: JSON names of tokens are strings.
BiasToken = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only parts of type `text` are understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation, as OpenAI writes it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None


class Slo(msgspec.Struct, frozen=True):
    """What the client wants; what is absent is by the cluster's policy."""

    ttft_ms: Milliseconds | None = None
    tbt_ms: Milliseconds | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every generating request. `null` is the same as absent."""

    model: Name | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[BiasToken, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    tenant: Annotated[str, Meta(max_length=128)] | None = None
    slo: Slo | None = None
    request_id: Id | None = None
    logits_digest: bool | None = None
    # Refused unless they ask for what happens anyway.
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(_Body, frozen=True, kw_only=True):
    """`/v1/completions` and `halfmoon.v1.generate`."""

    prompt: str | list[TokenId | str | list[TokenId]]


class ChatBody(_Body, frozen=True, kw_only=True):
    """`/v1/chat/completions` and `halfmoon.v1.chat`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize` and `halfmoon.v1.tokenize`: one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None


class CancelBody(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: the answer's id, or the `request_id` that the client gave."""

    id: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A checked request, the same for both edges. One of `text`, `token_ids`, `messages` is set."""

    chat: bool
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    model: str
    #: None: as many as the frontend gives when nothing is said.
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ttft_slo_ns: int
    tbt_slo_ns: int
    tenant: str
    cache_salt: str
    priority: int
    request_id: str


B = TypeVar("B")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(([A-Za-z_0-9.]*)[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")  # of the body itself


def decode_body(payload: bytes, kind: type[B]) -> B:
    """The body in `payload`. Raises ApiError 400, with the field's name in `param`."""
    try:
        return _decoder(kind).decode(payload)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except msgspec.ValidationError as problem:
        text = str(problem)
        if (missing := _MISSING.fullmatch(text)) is not None:
            raise ApiError(400, f"{missing[1]} is missing", param=missing[1], code="missing") from None
        path = _PATH.search(text)
        where, param = (path[1] or "the body", path[2] or None) if path else ("the body", None)
        reason = text.partition(" - at `")[0]
        raise ApiError(
            400, f"{where}: {reason[:1].lower()}{reason[1:]}", param=param, code="invalid"
        ) from None
    except msgspec.DecodeError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}", code="invalid_json") from None


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[B]) -> msgspec.json.Decoder[B]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


def parse_completion(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    body = decode_body(payload, CompletionBody)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(422, "prompt: one prompt a request", param="prompt", code="several_prompts")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _ask(body, body.max_tokens, chat=False, text=prompt)
    if not all(isinstance(token, int) for token in prompt):  # a mixture of numbers and texts
        raise ApiError(400, "prompt: a text, or a list of token ids", param="prompt", code="invalid")
    return _ask(body, body.max_tokens, chat=False, token_ids=prompt)


def parse_chat(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    body = decode_body(payload, ChatBody)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _ask(body, max_tokens, chat=True, messages=plain_messages(body.messages))


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """As the chat template takes them. Raises ApiError for content that is no text."""
    plain = []
    for position, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    reason = f"messages[{position}].content: only parts of type text are understood"
                    raise ApiError(400, reason, param="messages", code="unsupported")
            content = "".join(part.text or "" for part in content)
        plain.append(
            {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
        )
    return plain


def _ask(body: _Body, max_tokens: int | None, *, chat: bool, **prompt: Any) -> ApiRequest:
    if body.response_format is not None and body.response_format.get("type", "text") != "text":
        raise ApiError(
            400, "response_format: only type text is supported", param="response_format", code="unsupported"
        )
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        reason = f"min_tokens ({body.min_tokens}) is larger than max_tokens ({max_tokens})"
        raise ApiError(422, reason, param="min_tokens", code="contradiction")
    if body.top_logprobs and body.logprobs is False:
        raise ApiError(
            422, "top_logprobs needs logprobs to be true", param="top_logprobs", code="contradiction"
        )
    stop = body.stop
    slo = body.slo
    return ApiRequest(
        chat=chat,
        model=body.model or "",
        max_tokens=max_tokens,
        sampling=_sampling(body),
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ttft_slo_ns=round((slo.ttft_ms or 0) * MS_NS) if slo else 0,
        tbt_slo_ns=round((slo.tbt_ms or 0) * MS_NS) if slo else 0,
        tenant=body.tenant or "",
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        request_id=body.request_id or "",
        **prompt,
    )


def _sampling(body: _Body) -> Sampling:
    logprobs = -1
    if body.logprobs is True:
        logprobs = body.top_logprobs or 0
    elif body.logprobs is not None and body.logprobs is not False:
        logprobs = body.logprobs
    elif body.top_logprobs:
        logprobs = body.top_logprobs
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=(random.getrandbits(63) if body.seed is None else body.seed) & _SEED_MASK,
        logprobs=logprobs,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()} if body.logit_bias else {},
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or [],
        logits_digest=bool(body.logits_digest),
    )
