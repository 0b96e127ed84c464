"""OpenAI's `/v1/responses`, read as a chat: field by field, nothing is kept between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.api.bodies import (
    ChatBody,
    ChatMessage,
    KvUse,
    Name,
    ResponseFormat,
    Slo,
    TokenCount,
    is_begun,
)
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest, decode_body, read_chat
from halfmoon.schemas.api.tool_bodies import FunctionName, NamedChoice, Tool, ToolCall

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class InputPart(msgspec.Struct, frozen=True):
    """One part of an item's content; only texts are understood."""

    type: str
    text: str | None = None


Parts = Annotated[list[InputPart], Meta(max_length=1024)]


class InputItem(msgspec.Struct, frozen=True):
    """One item: a `message`, which may leave its type out; a `function_call`, its `function_call_output`; `reasoning`,
    whose `encrypted_content` nobody here can read. `status`: whether it is whole.
    """

    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    type: str = "message"
    status: str | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; tools of other types are refused."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, frozen=True):
    """This function is to be called."""

    type: Literal["function"]
    name: FunctionName


class Reasoning(msgspec.Struct, frozen=True):
    """`effort` is the template's `reasoning_effort`."""

    effort: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """`text`, `json_object`, or `json_schema` with its fields beside it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """`format`: the structure that the answer must follow."""

    format: TextFormat | None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The input, and how the answer to it is generated."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None


class ResponsesBody(ResponseFields, frozen=True, kw_only=True):
    """`/v1/responses`. `store` and `metadata` change nothing here: an answer is not kept."""

    metadata: dict[str, str] | None = None
    store: bool | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    kv: KvUse | None = None
    tenant: Annotated[str, Meta(max_length=128)] | None = None
    slo: Slo | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    # Refused where they ask for something.
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    #: Beside log probabilities these name items that no answer here has, and thoughts, which every answer has.
    include: Annotated[list[Name], Meta(max_length=64)] | None = None
    top_logprobs: int | None = None


def parse_responses(payload: bytes) -> ApiRequest:
    """Raises ApiError."""
    return read_responses(decode_body(payload, ResponsesBody))


def read_responses(body: ResponsesBody) -> ApiRequest:
    """Raises ApiError."""
    for name, asks in (
        ("previous_response_id", body.previous_response_id is not None),
        ("conversation", body.conversation is not None),
        ("prompt", body.prompt is not None),
        ("background", bool(body.background)),
        ("include", _LOGPROBS in (body.include or [])),
        ("top_logprobs", bool(body.top_logprobs)),
    ):
        if asks:
            raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported")
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    items = [InputItem("user", body.input)] if isinstance(body.input, str) else body.input
    messages += _messages(items)
    # As vLLM: an answer that was cut goes on where it is the last item.
    begun = items[-1].status in ("in_progress", "incomplete") and is_begun(messages)
    return read_chat(
        ChatBody(
            model=body.model,
            messages=messages,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stream=body.stream,
            response_format=msgspec.convert(_format(body.text), ResponseFormat | None),
            reasoning_effort=body.reasoning.effort if body.reasoning else None,
            tools=[_tool(tool) for tool in body.tools or []] or None,
            tool_choice=_choice(body.tool_choice) if body.tools or body.tool_choice != "auto" else None,
            parallel_tool_calls=body.parallel_tool_calls,
            priority=body.priority,
            cache_salt=body.cache_salt,
            kv=body.kv,
            tenant=body.tenant,
            slo=body.slo,
            # By `truncation` a prompt that does not fit is cut at its begin.
            truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        )
    )


def _tool(tool: FunctionTool) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise ApiError(400, "tools: only functions with a name", param="tools", code="unsupported")
    return Tool.of(tool.name, tool.description, tool.parameters, strict=tool.strict)


def _choice(choice: Literal["none", "auto", "required"] | FunctionChoice | None) -> Any:
    if isinstance(choice, FunctionChoice):
        return NamedChoice.of(choice.name)
    return choice


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    """A chat's turns. Thoughts, text and calls that follow one another are one turn of the assistant."""
    messages: list[ChatMessage] = []
    for place, item in enumerate(items):
        match item.type:
            case "message" if item.role is not None:
                text = _text(f"input[{place}].content", item.content)
                last = messages[-1] if messages else None
                if last is not None and last.role == item.role == "assistant" and last.content is None:
                    messages[-1] = msgspec.structs.replace(last, content=text)
                else:
                    messages.append(ChatMessage(item.role, text))
            case "function_call" if item.name is not None:
                call = ToolCall.of(item.name, item.arguments or "{}", item.call_id or "")
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant":
                    messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or []), call])
                else:
                    messages.append(ChatMessage("assistant", tool_calls=[call]))
            case "function_call_output" if item.output is not None:
                text = _text(f"input[{place}].output", item.output)
                messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
            case "reasoning":
                thoughts = _text(f"input[{place}]", item.content or item.summary)
                if thoughts:
                    messages.append(ChatMessage("assistant", reasoning=thoughts))
            case _:
                known = "messages with a role, function calls with a name, outputs of calls and reasoning"
                message = f"input[{place}]: only {known} are understood"
                raise ApiError(400, message, param="input", code="unsupported")
    return messages


def _text(where: str, content: str | list[InputPart] | None) -> str | None:
    if not isinstance(content, list):
        return content
    if any(part.type not in _TEXTS or part.text is None for part in content):
        raise ApiError(400, f"{where}: only texts are understood", param="input", code="unsupported")
    return "\n".join(part.text or "" for part in content)


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    return {
        "type": "json_schema",
        "json_schema": {
            "name": text.format.name or "answer",
            "schema": text.format.schema or {},
            "strict": text.format.strict,
        },
    }
