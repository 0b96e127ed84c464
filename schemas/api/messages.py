"""Anthropic's `/v1/messages`, read as a chat: field by field, nothing is kept between requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, assert_never

import msgspec
from msgspec import Meta

from halfmoon.schemas.api.bodies import (
    ChatBody,
    ChatMessage,
    KvUse,
    Name,
    ResponseFormat,
    Slo,
    StopText,
    TokenCount,
    is_begun,
)
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, decode_body, read_chat
from halfmoon.schemas.api.tool_bodies import NamedChoice, Tool, ToolCall

#: Anthropic's are longer than OpenAI's.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$(?!\n)")]


#: A line of a system prompt that begins so is no instruction.
BILLING = "x-anthropic-billing-header:"


class ResultBlock(msgspec.Struct, frozen=True):
    """One block of a tool's result; only texts are understood."""

    type: str
    text: str | None = None


class MessageBlock(msgspec.Struct, frozen=True):
    """One block of a message's content: `text`; the assistant's `thinking` and `tool_use`; the user's `tool_result`.
    `redacted_thinking` is taken and left out: nobody here can read it. Others are refused.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | Annotated[list[ResultBlock], Meta(max_length=1024)] | None = None


Blocks = Annotated[list[MessageBlock], Meta(max_length=1024)]


class MessageTurn(msgspec.Struct, frozen=True):
    """One turn, as Anthropic writes it."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Thinking(msgspec.Struct, frozen=True):
    """The template's switch `enable_thinking`, where it has one; absent: its own default. A budget is not kept."""

    type: Literal["enabled", "adaptive", "disabled"]


class MessagesTool(msgspec.Struct, frozen=True):
    """A function that the model may call; tools of the vendor's own types are refused."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str = "custom"


class MessagesChoice(msgspec.Struct, frozen=True):
    """`any` is some tool, `tool` the one that is named."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


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
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: MessagesChoice | None = None
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
    kv: KvUse | None = None
    tenant: Annotated[str, Meta(max_length=128)] | None = None
    slo: Slo | None = None
    # Refused where they ask for something.
    container: Any = None
    mcp_servers: list[Any] | None = None


def parse_messages(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    body = decode_body(payload, MessagesBody)
    for name, asks in (("container", bool(body.container)), ("mcp_servers", bool(body.mcp_servers))):
        if asks:
            raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported")
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
            kv=body.kv,
            tenant=body.tenant,
            slo=body.slo,
        )
    )


def parse_count_tokens(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    return read_chat(_chat_of(decode_body(payload, CountTokensBody)))


def _chat_of(body: CountTokensBody) -> ChatBody:
    messages = []
    system = _text("system", _without_billing(body.system or ""))
    if system:
        messages.append(ChatMessage("system", system))
    for place, turn in enumerate(body.messages):
        messages += _turn(f"messages[{place}].content", turn)
    if messages[-1] == ChatMessage("assistant", "") and len(messages) > 1:
        messages.pop()  # an answer that has not begun
    begun = is_begun(messages)
    wanted = body.output_config or OutputConfig()
    schema = None
    if wanted.format is not None:
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.format.schema}}
    switches = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        switches.setdefault("enable_thinking", body.thinking.type != "disabled")
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=messages,
        add_generation_prompt=not begun,
        continue_final_message=begun,
        response_format=msgspec.convert(schema, ResponseFormat | None),
        reasoning_effort=wanted.effort,
        chat_template_kwargs=switches or None,
        tools=[_tool(tool) for tool in body.tools or []] or None,
        tool_choice=_choice(choice) if choice is not None and (body.tools or choice.type != "auto") else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
    )


def _without_billing(system: str | list[MessageBlock]) -> str | list[MessageBlock]:
    """Without the line that Anthropic's own client writes at the begin for its vendor. It changes with every request,
    and no KV behind it would be found.
    """
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(BILLING) else system
    kept = []
    for block in system:
        text = block.text or ""
        if text.startswith(BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
            block = msgspec.structs.replace(block, text=text)
        kept.append(block)
    return kept


def _tool(tool: MessagesTool) -> Tool:
    if tool.type != "custom" or tool.input_schema is None:
        message = f"tools: {tool.name} is no function with an input_schema"
        raise ApiError(400, message, param="tools", code="unsupported")
    return Tool.of(tool.name, tool.description, tool.input_schema)


def _choice(choice: MessagesChoice) -> Any:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise ApiError(400, "tool_choice: no name", param="tool_choice", code="missing")
            return NamedChoice.of(choice.name)
        case _:
            assert_never(choice.type)


def _turn(where: str, turn: MessageTurn) -> list[ChatMessage]:
    """A chat's turns: each result is one, then the user's other text; an assistant's turn is one."""
    if isinstance(turn.content, str):
        return [ChatMessage(turn.role, turn.content)]
    texts: list[MessageBlock] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results: list[ChatMessage] = []
    for block in turn.content:
        match block.type, turn.role:
            case "tool_use", "assistant" if block.name is not None:
                calls.append(ToolCall.of(block.name, _arguments(block.input or {}), block.id or ""))
            case "tool_result", "user":
                results.append(
                    ChatMessage("tool", _text(where, block.content or ""), tool_call_id=block.tool_use_id)
                )
            case "thinking", "assistant":
                thoughts.append(block.thinking or "")
            case "redacted_thinking", "assistant":
                pass
            case _:
                texts.append(block)
    text = _text(where, texts)
    if results and not texts:
        return results
    told = ChatMessage(turn.role, text, tool_calls=calls or None, reasoning="\n".join(thoughts) or None)
    return [*results, told]


def _arguments(given: dict[str, Any]) -> str:
    """A call's arguments, with the spaces that models put into JSON: so an earlier answer mostly has its text again.

    Text that was no object (a call that was cut) stands under the name "": it is that text again.
    """
    match given:
        case {"": str(text)} if len(given) == 1:
            return text
        case _:
            return json.dumps(given, ensure_ascii=False)


def _text(where: str, content: str | Sequence[MessageBlock] | Sequence[ResultBlock]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            message = f"{where}: a block of type {block.type[:40]} is not understood here"
            raise ApiError(400, message, param=where.partition("[")[0], code="unsupported")
    return "\n".join(block.text or "" for block in content)
