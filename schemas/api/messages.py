"""Anthropic's `/v1/messages`, read as a chat: field by field, nothing is kept between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.api.bodies import ChatBody, ChatMessage, Name, ResponseFormat, Slo, StopText, TokenCount
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, decode_body, read_chat


class MessageBlock(msgspec.Struct, frozen=True):
    """One block of a message's content; only blocks of type `text` are understood."""

    type: str
    text: str | None = None


Blocks = Annotated[list[MessageBlock], Meta(max_length=1024)]


class MessageTurn(msgspec.Struct, frozen=True):
    """One turn, as Anthropic writes it."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Thinking(msgspec.Struct, frozen=True):
    """Refused unless it is off."""

    type: str


class OutputFormat(msgspec.Struct, frozen=True):
    """The answer follows the schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """`effort` is the template's `reasoning_effort`."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`."""

    model: Name
    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=4096)]
    system: str | Blocks | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused where they ask for something.
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """`/v1/messages`."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    tenant: Annotated[str, Meta(max_length=128)] | None = None
    slo: Slo | None = None


def parse_messages(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    body = decode_body(payload, MessagesBody)
    chat = _chat_of(body)
    return read_chat(
        msgspec.structs.replace(
            chat,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or None,
            stream=body.stream,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            cache_salt=body.cache_salt,
            tenant=body.tenant,
            slo=body.slo,
        )
    )


def parse_count_tokens(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    return read_chat(_chat_of(decode_body(payload, CountTokensBody)))


def _chat_of(body: CountTokensBody) -> ChatBody:
    for name, asks in (
        ("tools", bool(body.tools)),
        ("tool_choice", body.tool_choice is not None and body.tool_choice.get("type") != "none"),
        ("thinking", body.thinking is not None and body.thinking.type != "disabled"),
    ):
        if asks:
            raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported")
    messages = [] if body.system is None else [ChatMessage("system", _text(body.system, "system"))]
    for place, message in enumerate(body.messages):
        messages.append(ChatMessage(message.role, _text(message.content, f"messages[{place}].content")))
    wanted = body.output_config or OutputConfig()
    schema = None
    if wanted.format is not None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.format.schema}}
    return ChatBody(
        model=body.model,
        messages=messages,
        response_format=msgspec.convert(schema, ResponseFormat | None),
        reasoning_effort=wanted.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _text(content: str | list[MessageBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise ApiError(
                400,
                f"{where}: only blocks of type text are understood",
                param=where.partition("[")[0],
                code="unsupported",
            )
    return "\n".join(block.text or "" for block in content)
