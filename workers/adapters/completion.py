"""One order in the words of vLLM's `/v1/completions`: the request, and the lines of the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.kv import ENGINE_PARAMS_MAX, KV_ORDER, KV_SOURCE
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.sampling import SampledToken, Sampling

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


class Unanswerable(ValueError):
    """The engine lacks something that a request asks for; the text names the field. `param`: where it is one alone."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.param = param


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


def body_of(
    model: str, salt: str, prompt: Sequence[int], known: list[int], max_tokens: int, sampling: Sampling
) -> dict[str, Any]:
    """The request's body. `known`: tokens of the answer that the client has already; they are part of the prompt.

    Raises Unanswerable.
    """
    _check(sampling)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*prompt, *known],
        "max_tokens": max_tokens - len(known),
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
        # All are named: the engine takes an unnamed one from the model's own generation_config.json.
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": max(0, sampling.min_tokens - len(known)),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sampling.stop_token_ids,
    }
    if sampling.temperature:
        body["seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = sampling.allowed_token_ids
    if sampling.logprobs >= 0:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


def forwarded_body_of(model: str, salt: str) -> dict[str, Any]:
    """Fields that are set in a client's own request, which a gateway sends: the engine tells the tokens, and counts its
    blocks as the cluster's.
    """
    return {"model": model, "cache_salt": salt, "return_token_ids": True}


def prefill_body_of(
    model: str, salt: str, prompt: Sequence[int], known: list[int], sampling: Sampling, kv_name: str
) -> dict[str, Any]:
    """The request that has an engine compute the prompt and keep its KV for another one, under this name where it
    knows names ("": its own). Raises Unanswerable.
    """
    # Its token goes to nobody. But older releases keep KV for another engine only where the length has ended an answer,
    # so nothing else may end it.
    drawn = msgspec.structs.replace(sampling, ignore_eos=True, stop_token_ids=[], min_tokens=0, logprobs=-1)
    return body_of(model, salt, prompt, known, len(known) + 1, drawn) | {
        # Lines of a stream have no kv_transfer_params.
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        | ({KV_ORDER: kv_name} if kv_name else {}),
    }


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


def _check(sampling: Sampling) -> None:
    """Raises Unanswerable for a field that vLLM's API takes as text alone, or not at all."""
    lacking = "not over an engine behind an adapter"
    if sampling.grammar:
        raise Unanswerable(f"a grammar (response_format, tools): {lacking}", "")
    for field, wanted in (
        ("bad_words", bool(sampling.bad_words)),
        ("prompt_logprobs", sampling.prompt_logprobs >= 0),
        ("logits_digest", sampling.logits_digest),
    ):
        if wanted:
            raise Unanswerable(f"{field}: {lacking}", field)


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
