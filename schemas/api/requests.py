"""From a body to a checked request.

A body goes through three steps: the typed decoder (wrong type, out of range, too long: 400 with the field's name),
`_ask` (fields that contradict each other, or mean nothing, and known ones that would change the answer and that we
cannot honour: 400), and the frontend (needs the tokenizer: vocabulary, context).
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from halfmoon.schemas.api.bodies import (
    TEMPLATE_WORD,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GeneratingFields,
    KvUse,
)
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.structures import Structure, structure_of
from halfmoon.schemas.api.tool_bodies import ToolCall
from halfmoon.schemas.api.tools import ToolUse, structure_of_calls, tool_use_of
from halfmoon.schemas.keys import pack_decoded
from halfmoon.schemas.numbers import MS_NS
from halfmoon.schemas.sampling import Sampling

_SEED_MASK = 2**63 - 1
#: Larger priorities, either way, count as this.
PRIORITY_MAX = 1000
#: Of one request.
PROMPTS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRendering:
    """How the chat template is used. `continue_final`: the last message is not closed, the answer goes on with it."""

    add_generation_prompt: bool = True
    continue_final: bool = False
    #: The template's own switches.
    switches: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """The source of a prompt's tokens. One of `text`, `packed`, `messages` is set."""

    text: str | None = None
    #: Token ids of the client's own, as `pack_tokens` has them.
    packed: bytes | None = None
    messages: list[dict[str, Any]] | None = None
    #: The chat template tells of them.
    tools: list[dict[str, Any]] | None = None
    rendering: ChatRendering = ChatRendering()
    #: Put the model's special tokens around a text.
    add_special_tokens: bool = True
    #: Number of the last tokens to keep; -1: as many as the context holds; None: all.
    truncate_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The parts of the answer that the client is sent, and their form."""

    stream: bool = False
    #: A stream ends with its usage.
    include_usage: bool = False
    #: Each of its events has the usage so far.
    usage_so_far: bool = False
    return_token_ids: bool = False
    #: The prompt (of a chat, the message of `continue_final`) is part of the answer's text.
    echo: bool = False
    #: Nothing else is; a token is drawn all the same, as in vLLM, and not shown.
    echo_only: bool = False
    #: The stop string that ended the answer is part of its text.
    include_stop: bool = False
    #: Control tokens are no text of the answer.
    skip_special_tokens: bool = True
    #: A gateway has it from the engine.
    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class KvReuse:
    """How KV of other prompts may be used.

    `similar`: that of a similar prompt may stand in for some of this one's; None: as the frontend has it for the
    tenant. `documents`: parts of the prompt for which KV of other prompts may stand in: texts, or tokens as
    `pack_tokens` has them. `retain_percent`: where either does, each layer keeps the KV of so many percent of the
    tokens; 0: of all.
    """

    similar: bool | None = None
    documents: tuple[str | bytes, ...] = ()
    retain_percent: int = 0

    @property
    def allowed(self) -> bool:
        """Something may stand in."""
        return bool(self.similar or self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A checked request, the same for both edges."""

    chat: bool
    prompt: AskedPrompt
    #: Completions: further prompts, which are answered by choices of their own.
    more_prompts: tuple[AskedPrompt, ...] = ()
    tool_use: ToolUse | None = None
    #: Choices of each prompt.
    n: int = 1
    answer: AnswerForm
    model: str
    #: None: the frontend's default.
    max_tokens: int | None
    sampling: Sampling
    #: Fields of `MODEL_DEFAULTS` that the request does not name: the model's makers may have values for them.
    unsaid: frozenset[str] = frozenset()
    #: Structure that the answer must have; None: any.
    structure: Structure | None = None
    bad_words: tuple[str, ...] = ()
    stops: tuple[str, ...]
    ttft_slo_ns: int
    tbt_slo_ns: int
    tenant: str
    cache_salt: str
    kv: KvReuse = KvReuse()
    priority: int
    request_id: str


#: Fields of a request whose defaults a model's generation_config.json may change.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

B = TypeVar("B")
_TEMPLATE_WORD = re.compile(TEMPLATE_WORD)
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
    more: list[Any] = []
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt, *more = prompt
    if any(isinstance(each, int) for each in more) or len(more) >= PROMPTS_MAX:
        message = f"prompt: a text, a list of token ids, or up to {PROMPTS_MAX} of these"
        raise ApiError(400, message, param="prompt", code="invalid")
    return _ask(body, body.max_tokens, [_completed(each, body) for each in (prompt, *more)])


def _completed(prompt: str | list[int], body: CompletionBody) -> AskedPrompt:
    """Raises ApiError."""
    try:  # of a mixture of numbers and texts; no Python loop over tokens
        text, packed = (prompt, None) if isinstance(prompt, str) else (None, pack_decoded(prompt))
    except TypeError:
        message = "prompt: a text, or a list of token ids"
        raise ApiError(400, message, param="prompt", code="invalid") from None
    return AskedPrompt(
        text=text,
        packed=packed,
        add_special_tokens=body.add_special_tokens is not False,
        truncate_tokens=body.truncate_prompt_tokens,
    )


def parse_chat(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    return read_chat(decode_body(payload, ChatBody))


def read_chat(body: ChatBody) -> ApiRequest:
    """Raises ApiError."""
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.add_special_tokens:
        raise special_tokens_in_chat()
    switches = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        switches.setdefault("reasoning_effort", body.reasoning_effort)
    rendering = chat_rendering(
        body.add_generation_prompt, continue_final=bool(body.continue_final_message), switches=switches
    )
    messages = plain_messages(body.messages)
    use = tool_use_of(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    prompt = AskedPrompt(
        messages=messages,
        tools=use.tools if use is not None else None,
        rendering=rendering,
        truncate_tokens=body.truncate_prompt_tokens,
    )
    return _ask(body, max_tokens, [prompt], chat=True, use=use)


_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"))


def chat_rendering(
    add_generation_prompt: bool | None, *, continue_final: bool, switches: dict[str, Any]
) -> ChatRendering:
    """Raises ApiError for fields that contradict each other, and for switches that may be more than switches."""
    if continue_final and add_generation_prompt is not False:
        raise ApiError(
            400,
            "continue_final_message: needs add_generation_prompt to be false",
            param="continue_final_message",
            code="contradiction",
        )
    for name, value in switches.items():
        plain = value is None or isinstance(value, bool | int | float)
        word = isinstance(value, str) and _TEMPLATE_WORD.fullmatch(value) is not None
        if name in _RESERVED or not (plain or word):
            raise ApiError(
                400,
                f"chat_template_kwargs.{name[:64]}: a switch of the template is a number, true, false, null or a short "
                "word",
                param="chat_template_kwargs",
                code="invalid",
            )
    return ChatRendering(
        add_generation_prompt=add_generation_prompt is not False,
        continue_final=continue_final,
        switches=switches,
    )


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """As the chat template takes them. Raises ApiError for content that is no text."""
    plain = []
    for position, message in enumerate(messages):
        if message.function_call:
            reason = f"messages[{position}].function_call is not supported"
            raise ApiError(400, reason, param="messages", code="unsupported")
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    reason = f"messages[{position}].content: only parts of type text are understood"
                    raise ApiError(400, reason, param="messages", code="unsupported")
            content = "\n".join(part.text or "" for part in content)  # as vLLM, line by line
        read: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content or "",
        }
        if message.name is not None:
            read["name"] = message.name
        if message.tool_call_id is not None:
            read["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            read["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        thoughts = message.reasoning if message.reasoning is not None else message.reasoning_content
        if thoughts and message.role == "assistant":
            # Templates read them by either name, and most leave those of earlier turns out.
            read["reasoning"] = read["reasoning_content"] = thoughts
        plain.append(read)
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Its arguments are the text that the model wrote, JSON or not: each template is given them as it takes them."""
    function = call.function
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


def _not_none(choice: Any) -> bool:
    return bool(choice != "none")


def _always(value: Any) -> bool:
    return True


#: Fields that would change the answer, and whether a value asks for that.
NOT_SUPPORTED: dict[str, Callable[[Any], bool]] = {
    "suffix": bool,
    "functions": bool,
    "function_call": _not_none,
    "use_beam_search": bool,
    "length_penalty": lambda penalty: penalty != 1.0,
    # Of chats only.
    "chat_template": _always,
    "documents": bool,
}


def special_tokens_in_chat() -> ApiError:
    """The refusal of `add_special_tokens` in a chat."""
    return _not_supported("add_special_tokens", " in chats: the template has them")


def _not_supported(name: str, why: str = "") -> ApiError:
    return ApiError(400, f"{name} is not supported{why}", param=name, code="unsupported")


def _ask(
    body: GeneratingFields,
    max_tokens: int | None,
    prompts: list[AskedPrompt],
    *,
    chat: bool = False,
    use: ToolUse | None = None,
) -> ApiRequest:
    for name, asks in NOT_SUPPORTED.items():
        if (value := getattr(body, name, None)) is not None and asks(value):
            raise _not_supported(name)
    n = body.n or 1
    if body.best_of not in (None, n):
        # vLLM has it no more.
        raise ApiError(400, "best_of: only what n says is supported", param="best_of", code="unsupported")
    if n > 1 and body.temperature == 0:
        message = f"n: {n} greedy choices would be the same one"
        raise ApiError(400, message, param="n", code="contradiction")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs: not of a stream; a completion may have them in its echo, with logprobs"
        raise ApiError(400, message, param="prompt_logprobs", code="contradiction")
    if body.max_tokens == 0 and (chat or not body.echo):
        message = "max_tokens: at least 1; 0 only of a completion with echo"
        raise ApiError(400, message, param="max_tokens", code="invalid")
    echo_only = max_tokens == 0
    if echo_only:
        max_tokens = 1
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        reason = f"min_tokens ({body.min_tokens}) is larger than max_tokens ({max_tokens})"
        raise ApiError(400, reason, param="min_tokens", code="contradiction")
    if body.top_logprobs and body.logprobs is False:
        raise ApiError(
            400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="contradiction"
        )
    stop, slo = body.stop, body.slo
    sampling = _sampling(body, chat=chat)
    return ApiRequest(
        chat=chat,
        prompt=prompts[0],
        more_prompts=tuple(prompts[1:]),
        tool_use=use,
        n=n,
        answer=_answer_form(body, echo_only=echo_only),
        model=body.model or "",
        max_tokens=max_tokens,
        sampling=sampling,
        unsaid=frozenset(name for name in MODEL_DEFAULTS if getattr(body, name) is None),
        structure=_structure(body, use),
        bad_words=tuple(body.bad_words or ()),
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        ttft_slo_ns=round((slo.ttft_ms or 0) * MS_NS) if slo else 0,
        tbt_slo_ns=round((slo.tbt_ms or 0) * MS_NS) if slo else 0,
        tenant=body.tenant or "",
        cache_salt=_cache_salt(body, sampling),
        kv=_kv_reuse(body.kv) if body.kv else KvReuse(),
        # As vLLM has it, a smaller number is earlier; within the cluster a larger one is.
        priority=-min(max(body.priority or 0, -PRIORITY_MAX), PRIORITY_MAX),
        request_id=body.request_id or "",
    )


def _kv_reuse(use: KvUse) -> KvReuse:
    """Raises ApiError where tokens are to be left out and nothing could stand in for them."""
    if use.retain is not None and not (use.similar or use.documents):
        message = (
            "kv.retain: tokens are left out where other KV stands in: it needs kv.similar or kv.documents"
        )
        raise ApiError(400, message, param="kv", code="contradiction")
    return KvReuse(
        similar=use.similar,
        documents=tuple(one if isinstance(one, str) else pack_decoded(one) for one in use.documents or ()),
        retain_percent=round((use.retain or 0) * 100) % 100,
    )


def _answer_form(body: GeneratingFields, *, echo_only: bool) -> AnswerForm:
    options = body.stream_options
    return AnswerForm(
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        usage_so_far=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        echo_only=echo_only,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _structure(body: GeneratingFields, use: ToolUse | None) -> Structure | None:
    """Raises ApiError where answer and calls of tools would have to be one text."""
    asked = structure_of(body)
    of_calls = structure_of_calls(use) if use is not None else None
    if asked is not None and of_calls is not None:
        message = f"tool_choice: the answer is a call, and {asked.param} asks for another text"
        raise ApiError(400, message, param="tool_choice", code="contradiction")
    return asked or of_calls


def _cache_salt(body: GeneratingFields, sampling: Sampling) -> str:
    """A salt that nobody else has where the prompt's own log probabilities are wanted: all of it is computed, and
    cached blocks of it must not count as a hit where it is placed. Choices of one request share it.
    """
    salt = body.cache_salt or ""
    return salt if sampling.prompt_logprobs < 0 else f"{salt}\0{uuid.uuid4().hex}"


def _sampling(body: GeneratingFields, *, chat: bool) -> Sampling:
    logprobs = -1
    if body.logprobs is True:
        logprobs = body.top_logprobs or 0
    elif body.logprobs is not None and body.logprobs is not False:
        logprobs = body.logprobs
    elif body.top_logprobs:
        logprobs = body.top_logprobs
    prompt_logprobs = body.prompt_logprobs
    # As in vLLM: an echoed prompt has log probabilities where the answer has them.
    if prompt_logprobs is None:
        prompt_logprobs = logprobs if body.echo and not chat else -1
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=(random.getrandbits(63) if body.seed is None else body.seed) & _SEED_MASK,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()} if body.logit_bias else {},
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or [],
        allowed_token_ids=body.allowed_token_ids or [],
        logits_digest=bool(body.logits_digest),
    )
