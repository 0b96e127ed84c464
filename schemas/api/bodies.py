"""Bodies of the API's requests, field by field.

The names are OpenAI's and vLLM's; `slo`, `tenant` and `request_id` are ours. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.api.tool_bodies import NamedChoice, Tool, ToolCall
from halfmoon.schemas.similar import DOCUMENTS_MAX
from halfmoon.schemas.types import Id

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]
NamedText = Annotated[str, Meta(min_length=1, max_length=4_194_304)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=1_048_576)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: A template's own switch. No control token fits in: a template writes its value as its own words.
TEMPLATE_WORD = r"[A-Za-z0-9_. -]{0,64}"
TemplateWord = Annotated[str, Meta(pattern=f"^{TEMPLATE_WORD}$")]
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
    # For templates that read them.
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=256)] | None = None
    #: Thoughts before an earlier answer; the second is the older name, which counts where the first is absent.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Refused unless empty.
    function_call: Any = None


def is_begun(messages: list[ChatMessage]) -> bool:
    """The last turn is a text of the assistant that an answer can go on with, in dialects that have this."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls:
        return False
    return isinstance(last.content, str) and bool(last.content.strip())


class Slo(msgspec.Struct, frozen=True):
    """The client's objectives; an absent one is the cluster's policy's."""

    ttft_ms: Milliseconds | None = None
    tbt_ms: Milliseconds | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk with the token counts; `continuous_usage_stats`: those so far in each one, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """OpenAI's `json_schema` of a response format; `name`, `description` and `strict` change nothing."""

    schema: str | dict[str, Any] | bool | None = None
    name: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's. `json_schema` with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's: exactly one of the first six, and how JSON is written."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Refused.
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class KvUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV of other prompts may be used. `similar`: where that is faster, KV of a prompt of the same tenant that is
    alike but not equal stands in for some of this one's; the answer is then near, not equal, to what it would be.
    `documents`: parts of the prompt, as texts or token ids, for which KV of other prompts that named them may stand in,
    wherever they are there. `retain`: where either does, each layer keeps the KV of this share of the tokens, and
    decoding attends to no others.
    """

    similar: bool | None = None
    documents: Annotated[list[NamedText | TokenIds], Meta(max_length=DOCUMENTS_MAX)] | None = None
    retain: Annotated[float, Meta(ge=0.1, le=1)] | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Drawing of tokens, and the end of an answer."""

    # 0: only of a completion with `echo`.
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[BiasToken, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    bad_words: Annotated[list[StopText], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None


class ShownFields(SamplingFields, frozen=True, kw_only=True):
    """Parts of an answer, and how they are shown."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=20)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logits_digest: bool | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


class StructureFields(ShownFields, frozen=True, kw_only=True):
    """Structures that an answer follows. vLLM's `guided_...` are older names for parts of `structured_outputs`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class RefusedFields(StructureFields, frozen=True, kw_only=True):
    """Refused where they ask for something: `requests.NOT_SUPPORTED`."""

    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None
    functions: Any = None
    function_call: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None


class GeneratingFields(RefusedFields, frozen=True, kw_only=True):
    """Fields of every generating request. `null` is the same as absent.

    The groups are a chain, since a struct has one base; in a body all fields stand side by side.
    """

    model: Name | None = None
    request_id: Id | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    tenant: Annotated[str, Meta(max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    slo: Slo | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    kv: KvUse | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GeneratingFields, frozen=True, kw_only=True):
    """`/v1/completions` and `halfmoon.v1.generate`."""

    prompt: str | Annotated[list[TokenId | str | list[TokenId]], Meta(max_length=4_194_304)]


class ChatBody(GeneratingFields, frozen=True, kw_only=True):
    """`/v1/chat/completions` and `halfmoon.v1.chat`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: TemplateWord | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    # Refused.
    chat_template: str | None = None
    documents: list[Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize` and `halfmoon.v1.tokenize`: one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/detokenize`."""

    tokens: list[TokenId]
    model: Name | None = None


class CancelBody(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: the answer's id, or the `request_id` that the client gave."""

    id: Id
