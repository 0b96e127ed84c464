"""How refusals differ from vLLM's."""

from __future__ import annotations

from tests.vllm.row import Difference

#: Words of our refusals.
CODES = (
    "context_length_exceeded", "contradiction", "empty", "invalid", "invalid_json", "missing", "unsupported",
)  # fmt: skip
#: What we name and vLLM does not.
FIELDS = (
    "bad_words", "continue_final_message", "frequency_penalty", "input", "messages", "min_p", "min_tokens", "n",
    "presence_penalty", "prompt", "repetition_penalty", r"response_format\.json_schema", "stop",
    r"structured_outputs(\.(choice|grammar|regex))?", "top_k",
)  # fmt: skip

OF_ERRORS = [
    Difference(
        "an error's `code`",
        "the status, as a number",
        "a word, as OpenAI has it",
        "OpenAI's clients show `code` as text, and programs can tell refusals apart",
        ".*",
        rf"= \.body\.error\.code (400 -> ({'|'.join(CODES)})|404 -> model_not_found)",
    ),
    Difference(
        "an error's `type`",
        "`BadRequestError`, `Bad Request`, `NotFoundError`",
        "`invalid_request_error`, `not_found_error`",
        "OpenAI's and Anthropic's names",
        ".*",
        r"= \.body\.error\.type ((BadRequestError|Bad Request) -> invalid_request|NotFoundError -> not_found)_error",
    ),
    Difference(
        "an error's words",
        "its own",
        "ours, with the field before them",
        "they are for people",
        ".*",
        r"= \.body\.error\.message",
    ),
    Difference(
        "`error.param`, where a value is of a wrong type",
        "`body.seed`, `body.prompt.0`",
        "`seed`, `prompt`",
        "the field as the client wrote it",
        ".*",
        r"= \.body\.error\.param body\.([a-z_]+)(\.\S+)? -> \1(\.[a-z_]+)*",
    ),
    Difference(
        "`error.param`, where a value is out of range or contradicts another",
        "null, for most fields",
        "the field's name",
        "a refusal says what it is about",
        ".*",
        rf"\+ \.body\.error\.param ({'|'.join(FIELDS)})",
    ),
    Difference(
        "`error.param` of a body that is no JSON object",
        "`body`, `body.10`",
        "null",
        "no field is meant",
        "no JSON|no object",
        r"- \.body\.error\.param body(\.10)?",
    ),
    Difference(
        "`error.param` of `max_completion_tokens` and `max_output_tokens`",
        "`max_tokens`",
        "its own name",
        "the field as the client wrote it",
        "chat max_completion_tokens 1|(streamed )?response of max_output_tokens of 0",
        r"= \.body\.error\.param max_tokens -> max_(completion|output)_tokens",
    ),
    Difference(
        "`error.param` of a prompt that is too long by itself",
        "`max_tokens`",
        "`prompt`",
        "no `max_tokens` would help",
        "too long",
        r"= \.body\.error\.param max_tokens -> prompt",
    ),
    Difference(
        "`error.param` of two structures",
        "`structured_outputs`, or null",
        "`structured_outputs.choice`",
        "the second of them",
        "(chat|completion) (structured_outputs 3|of two at once)",
        r"= \.body\.error\.param structured_outputs -> structured_outputs\.choice",
    ),
    Difference(
        "no such path or method",
        '`{"detail"}`',
        '`{"error"}`, as for all refusals',
        "one form for clients to read",
        "unknown path|wrong method",
        r"[+-] \.body\.(detail|error\..*)",
    ),
    Difference(
        "`error.param` of a field within another",
        "`response_format`, `tool_choice.function`, the class that it was read by",
        "`response_format.json_schema`, `tool_choice`, `messages`",
        "structures by their own field, all else by the body's",
        "(chat|completion) of no json_schema|tools of a choice without a name"
        "|earlier a call whose arguments are an object",
        r"= \.body\.error\.param (response_format -> response_format\.json_schema|tool_choice\.function -> tool_choice"
        r"|body\.0\.ChatCompletionMessageFunctionToolCallParam\.function -> messages)",
    ),
    Difference(
        "`tools: []`",
        "400",
        "as absent; with `tool_choice: required` 400 for `tool_choice`",
        "no tools are none",
        "tools of (required of )?no tools",
        r"status 400 -> 200|= \.body\.error\.param tools -> tool_choice",
    ),
    Difference(
        "a structure that nothing satisfies",
        "500; streamed, an error behind a 200",
        "400 that names the field",
        "it is the client's mistake, and found before anything is computed",
        r"(streamed )?(chat|completion) of (circle of \$ref|a rule without an end|an expression without a match)"
        "|response of text format that nothing satisfies",
        "status (500|200) -> 400",
    ),
    Difference(
        "a function whose parameters nothing satisfies",
        "called, with any arguments",
        "400",
        "a call of it cannot be written",
        "tools of parameters that nothing satisfies",
        "status 200 -> 400",
    ),
    Difference(
        "a schema that is `true`",
        "400",
        "anything",
        "it is a JSON schema",
        "(chat|completion) of anything",
        "status 400 -> 200",
    ),
]
