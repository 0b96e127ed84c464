"""Answers of an engine's `/v1/completions`: its lines, its errors. vLLM and SGLang answer alike. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.kv import ENGINE_PARAMS_MAX, KV_ORDER, KV_SOURCE
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.sampling import SampledToken

#: As vLLM writes the log probability of an impossible token.
_LOGPROB_MIN = -9999.0
_TOKEN_ID = "token_id:"  # noqa: S105
#: A request that is wrong in itself is wrong at every engine.
_WRONG = frozenset((400, 413, 422))
#: An engine that cannot take the request now; another one may, or this one later.
FOR_NOW = frozenset((404, 429, 503))
#: Statuses that a client gets as they are. Others are of the way from here to the engine: its key, its path.
_CLIENTS = _WRONG | FOR_NOW
_RETRY_AFTER_S_MAX = 86_400
_REASON_CHARACTERS_MAX, _PARAM_CHARACTERS_MAX = 300, 100
#: In the text of an engine's own check: the field follows, and the request itself, which is no part of a log.
_FIELD, _REPEATED = "'loc': ('body', '", ", 'input':"


class EngineRefused(Exception):
    """The engine answered with an error, or with something unreadable. `retryable`: another engine may do better.
    `refusal`: what its client is to get where none does.
    """

    def __init__(self, reason: str, *, retryable: bool, refusal: EngineRefusal | None = None) -> None:
        super().__init__(reason)
        self.retryable, self.refusal = retryable, refusal


class Heard(NamedTuple):
    """Tokens of one line, or of a whole answer; `finish_reason` with the last ones."""

    tokens: list[SampledToken]
    finish_reason: str = ""
    #: Where the engine keeps the prompt's KV for another engine, JSON; "": it does not say.
    kv_params: str = ""
    whole: bool = False


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _EngineChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Line(msgspec.Struct):
    choices: list[_EngineChoice] = []
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Line)


def kv_params_of(said: str) -> dict[str, Any]:
    """The `kv_transfer_params` that a prefill engine gave, from another process; {}: none that make sense."""
    try:
        params = msgspec.json.decode(said) if said else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return params if isinstance(params, dict) else {}


def named_place(said: str) -> dict[str, Any]:
    """The `kv_transfer_params` of an engine whose connector takes names of ours: with another name they hold for the
    next prompt. {}: it does not.
    """
    params = kv_params_of(said)
    named = all(isinstance(params.get(field), str) for field in (KV_ORDER, KV_SOURCE))
    return params if named else {}


def read_line(line: bytes, vocabulary: int) -> Heard | None:
    """Tokens, or the end, in a line of the stream; None: neither. Raises EngineRefused."""
    if not line.startswith(b"data:"):
        return None
    payload = line[5:].strip()
    return None if payload == b"[DONE]" else _heard(payload, vocabulary)


def read_answer(payload: bytes, vocabulary: int) -> Heard:
    """An answer that is not streamed. Raises EngineRefused."""
    heard = _heard(payload, vocabulary)
    if heard is None:
        raise EngineRefused("the engine's answer has no tokens", retryable=True)
    return heard


def _heard(payload: bytes, vocabulary: int) -> Heard | None:
    try:
        said = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise EngineRefused(f"the engine's answer is not understood: {problem}", retryable=True) from None
    if said.error is not None:
        code = said.error.get("code") if isinstance(said.error, dict) else None
        raise _refused(code if isinstance(code, int) else 0, said.error)
    # A client of a gateway may want several.
    choice = next((each for each in said.choices if each.index == 0), None)
    if choice is None:
        return None
    if choice.token_ids is None:
        if not choice.finish_reason:
            return None
        return Heard([], choice.finish_reason)
    for token_id in choice.token_ids:
        if not 0 <= token_id < vocabulary:
            raise EngineRefused(
                f"the engine's token {token_id} is none of the model's {vocabulary}", retryable=True
            )
    params = ""
    if said.kv_transfer_params:
        params = msgspec.json.encode(said.kv_transfer_params).decode()
        if len(params) > ENGINE_PARAMS_MAX:
            params = ""  # the decode engine computes the prompt
    return Heard(_tokens(choice.token_ids, choice.logprobs), choice.finish_reason or "", params)


def _tokens(token_ids: list[int], logprobs: _Logprobs | None) -> list[SampledToken]:
    if logprobs is None or len(logprobs.token_logprobs) != len(token_ids):
        return [SampledToken(token_id=token_id) for token_id in token_ids]
    tops = logprobs.top_logprobs or [None] * len(token_ids)
    return [
        SampledToken(token_id=token_id, logprob=max(one or 0.0, _LOGPROB_MIN), top_logprobs=_top(top))
        for token_id, one, top in zip(token_ids, logprobs.token_logprobs, tops, strict=False)
    ]


def _top(said: dict[str, float] | None) -> list[tuple[int, float]]:
    """Largest first."""
    found = [
        (int(name.removeprefix(_TOKEN_ID)), max(logprob, _LOGPROB_MIN))
        for name, logprob in (said or {}).items()
        if name.startswith(_TOKEN_ID) and name.removeprefix(_TOKEN_ID).isdecimal()
    ]
    return sorted(found, key=lambda one: (-one[1], one[0]))


def refusal_of(status: int, body: bytes, retry_after: str = "") -> EngineRefused:
    """The refusal for an answer that is no 200. `retry_after`: its header."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        said = None
    # vLLM's own form, that of its web framework, and the one of older releases.
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else None
    if error is None:
        error = body[:200].decode(errors="replace")
    return _refused(status, error, retry_after)


def _refused(status: int, error: Any, retry_after: str = "") -> EngineRefused:
    """`status` 0: none was said."""
    if isinstance(error, list) and error:
        error = error[0]
    text = error.get("message", error.get("msg", error)) if isinstance(error, dict) else error
    text = " ".join(str(text).split())
    refusal = None
    if status in _CLIENTS:
        wait_s = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 10 else 0
        refusal = EngineRefusal(
            status=status,
            param=_param_of(error, text)[:_PARAM_CHARACTERS_MAX],
            retry_after_ns=min(wait_s, _RETRY_AFTER_S_MAX) * SECOND_NS,
        )
    said = f"the engine answers {status}" if status else "the engine"
    reason = f"{said}: {text.partition(_REPEATED)[0][:_REASON_CHARACTERS_MAX]}"
    return EngineRefused(reason, retryable=status not in _WRONG, refusal=refusal)


def _param_of(error: Any, text: str) -> str:
    """The request's field that an error is about; "": it names none."""
    if isinstance(error, dict):
        if isinstance(param := error.get("param"), str) and param:
            return param.removeprefix("body.")
        if isinstance(path := error.get("loc"), list):
            return ".".join(str(part) for part in path if part != "body")
    # The first quoted word that is a name: a step of the engine's own may stand before it.
    words = text.partition(_FIELD)[2].split("'")[:3:2]
    return next((word for word in words if word.isidentifier()), "")
