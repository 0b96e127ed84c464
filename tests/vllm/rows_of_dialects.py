"""How `/v1/messages`, `/v1/responses`, `/tokenize` and `/detokenize` differ from vLLM's."""

from __future__ import annotations

from tests.vllm.row import Difference

RESPONSE = "(streamed )?response( of .*)?"
#: Where a response stands, whole and in a stream.
IN_RESPONSE = r"\.(body|events\[\]\.response)"

OF_DIALECTS = [
    Difference(
        "`type` of what `/v1/messages` refuses",
        "none, for what validation refuses",
        '`{"type": "error", "error"}`',
        "Anthropic's form",
        "message without max_tokens"
        "|(streamed )?message of (a tool without a schema|another block|another role|hot|max_tokens of 0)",
        r"\+ \.body\.type",
    ),
    Difference(
        "`code` and `param` of what `/v1/messages` refuses",
        "none, where it has Anthropic's form",
        "always there",
        "programs can tell refusals apart",
        "message('s tokens)? of (too long|no messages|another model)",
        r"\+ \.body\.error\.(code (invalid|model_not_found|context_length_exceeded)|param (max_tokens|messages|model))",
    ),
    Difference(
        "`tool_choice` of `/v1/messages` without `tools`",
        "no effect",
        "400, as in a chat",
        "what was asked for cannot be",
        "message of a choice without tools",
        "status 200 -> 400",
    ),
    Difference(
        "`usage` of a response",
        "counts by turn, of tools, of cache writes",
        "OpenAI's own fields",
        "no turns are kept here",
        RESPONSE,
        rf"- {IN_RESPONSE}\.usage\.("
        r"input_tokens_details\.(cache_write_tokens|(cached|input)_tokens_per_turn\[\])"
        r"|output_tokens_details\.((tool_)?output_tokens_per_turn\[\]|tool_output_tokens))",
    ),
    Difference(
        "`store` and `text` of a response",
        "absent, unless `text` was sent",
        "`store` is false, `text.format` is there",
        "OpenAI's fields; nothing is stored here",
        RESPONSE,
        rf"\+ {IN_RESPONSE}\.(store|text\.format\.type)",
    ),
    Difference(
        "`logprobs` of a response's text",
        "absent",
        "`[]`",
        "OpenAI's form of a text without them",
        RESPONSE,
        r"\+ \.(body|events\[\](\.response)?)(\.output\[\]|\.item)\.content\[\]\.logprobs\[\]",
    ),
    Difference(
        "`include: message.output_text.logprobs`, `top_logprobs` of a response",
        "log probabilities",
        "400 `unsupported`",
        "not built; chats have them",
        "response of include of logprobs",
        "status 200 -> 400",
    ),
    Difference(
        "`previous_response_id`",
        "404: it keeps none unless it is told to",
        "400 `unsupported`",
        "no response is kept here",
        "response of an earlier response",
        "status 404 -> 400",
    ),
    Difference(
        "a token id that the model has not, in `/detokenize`",
        '`""`',
        "400",
        "a wrong id is a client's mistake",
        "detokenize no such token",
        "status 200 -> 400",
    ),
    Difference(
        "blocks of `system` in `/v1/messages`",
        "written with nothing between them",
        "a line each, as the blocks of a turn",
        "two blocks are no one word",
        "message('s tokens)? of system blocks",
        r"= \.body\.(usage\.input_tokens|input_tokens|context_management\.original_input_tokens)",
    ),
    Difference(
        "a last message of the assistant in `/v1/messages`",
        "ended, and another begun",
        "gone on with",
        "Anthropic's meaning",
        "message of begun answer",
        r"= \.body\.(content\[\]\.text|usage\.input_tokens)",
    ),
    Difference(
        "`tool_choice` of a response without tools",
        "`none`",
        "`auto`",
        "OpenAI's default",
        RESPONSE,
        rf"= {IN_RESPONSE}\.tool_choice",
    ),
    Difference(
        "`cached_tokens` of a response",
        "blocks of 32 tokens",
        "blocks of 256",
        "caches differ",
        RESPONSE,
        rf"= {IN_RESPONSE}\.usage\.input_tokens_details\.cached_tokens",
    ),
    Difference(
        "an item of an answer that was cut",
        "`completed`",
        "`incomplete`",
        "OpenAI's form",
        RESPONSE,
        r"= \.(body|events\[\]\.response)\.output\[\]\.status|= \.events\[\]\.item\.status",
    ),
    Difference(
        "the last event of a stream that was cut",
        "`response.completed`",
        "`response.incomplete`",
        "OpenAI's form",
        "streamed response( of .*)?",
        r"= \.events\[\]\.type",
    ),
    Difference(
        "`logprobs` of the part that a stream ends",
        "null",
        "`[]`",
        "OpenAI's form of a text without them",
        "streamed response( of .*)?",
        r"= \.events\[\]\.part\.logprobs\[\]",
    ),
]
