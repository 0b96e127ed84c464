"""How completions, chats and what tells of the server differ from vLLM's."""

from __future__ import annotations

from tests.vllm.row import Difference

#: Requests with functions that are not strict, and a choice that asks for one.
ASKED_CALLS = (
    "(streamed )?(tools (required|named)( and cut)?|message of tools (any|named)|response of tools (required|named))"
)  # fmt: skip

#: Requests with structures whose text is the same in fewer tokens.
FEWER_TOKENS = (
    "(completion|chat) of (choice|json as text)|completion of grammar of (Lark|llama\\.cpp)"
    "|tools (content before a call|none, and a call|one call( that is no JSON)?|two calls(, not parallel)?"
    "|required, strict)"
)

OF_ANSWERS = [
    Difference(
        "measures",
        "none",
        "`timing_ms`, `prefill_worker`, `decode_worker`",
        "who serves in two pools wants to see where the time went; clients ignore what they do not know",
        ".*",
        r"\+ \.(body|events\[\])(\.choices\[\])?\.(timing_ms\..*|prefill_worker|decode_worker)",
    ),
    Difference(
        "cached tokens",
        "`prompt_tokens_details` only with an option",
        "always there",
        "reuse is what this cluster is for",
        ".*",
        r"\+ .*(prompt_tokens_details\.cached_tokens|cache_read_input_tokens)",
    ),
    Difference(
        "`/health`",
        "empty",
        '`{"status": "ok"}`',
        "its status counts; the body is for people",
        "health",
        r"[+-] \.body(\.status)?",
    ),
    Difference(
        "`/v1/models`",
        "no `vocab_size`",
        "`vocab_size`",
        "who sends token ids must know the range",
        "models",
        r"\+ .*vocab_size",
    ),
    Difference(
        "numbers as text",
        '`"max_tokens": "5"` is 5',
        "400",
        "a wrong type is a client's mistake, and the field is named",
        "(chat|completion) max_tokens 3",
        "status 200 -> 400",
    ),
    Difference(
        "`logprobs: 5` in a chat",
        "400",
        "true, with five alternatives",
        "one field for both kinds of request, over NATS too",
        "chat logprobs 2",
        "status 400 -> 200",
    ),
    Difference(
        "`top_logprobs` without `logprobs`",
        "400",
        "alternatives are given",
        "what was asked for is clear",
        "chat top_logprobs 0",
        "status 400 -> 200",
    ),
    Difference(
        "`stream_options` without `stream`",
        "400",
        "no effect",
        "clients set them once for all requests",
        "(chat|completion) stream_options 0",
        "status 400 -> 200",
    ),
    Difference(
        '`cache_salt: ""`',
        "400",
        "as absent",
        "no salt is the empty salt",
        "(chat|completion) cache_salt 1",
        "status 400 -> 200",
    ),
    Difference(
        "`logit_bias` beyond ±100",
        "cut to ±100",
        "400",
        "OpenAI's range; nothing is changed in silence",
        "(chat|completion) logit_bias 2",
        "status 200 -> 400",
    ),
    Difference(
        "unknown role",
        "given to the template",
        "400",
        "a template makes anything of a role that it does not know",
        "chat messages 2",
        "status 200 -> 400",
    ),
    Difference(
        "`prompt_logprobs: 0` of a stream",
        "no effect",
        "400",
        "a stream has no place for them, as for those of 1 and more",
        "streamed prompt_logprobs of no others",
        "status 200 -> 400",
    ),
    Difference(
        "`echo` of a chat",
        "`prompt_logprobs`, unasked",
        "only where they are asked for",
        "all of the prompt is computed for them, without any cache",
        "chat's echo",
        r"- \.body\.prompt_logprobs.*",
    ),
    Difference(
        "`echo` with `return_token_ids`",
        "the prompt's text is left out",
        "it is there",
        "it was asked for",
        "echo with token ids",
        r"= \.body\.choices\[\]\.text",
    ),
    Difference(
        "`echo` with more `prompt_logprobs` than `logprobs`",
        "one alternative too many, where the prompt's token is a likely one itself",
        "as many as `logprobs` says",
        "its own count, whatever the other one is",
        "echo and prompt_logprobs",
        r"= \.body\.choices\[\]\.logprobs\.top_logprobs\[\]\.\*",
    ),
    Difference(
        "`best_of`",
        "ignored",
        "400 `unsupported`",
        "what would change an answer is not ignored",
        "completion best_of 0",
        "status 200 -> 400",
    ),
    Difference(
        "control tokens in a chat's content",
        "read as control tokens",
        "text",
        "a user's text must not end the user's turn",
        "chat messages 9",
        r"= \.body\.usage\.(prompt|total)_tokens",
    ),
    Difference(
        "`add_generation_prompt: false`",
        "`role` is the last message's",
        "`assistant`",
        "what is generated is the assistant's",
        "chat add_generation_prompt 0",
        r"= .*role",
    ),
    Difference(
        "the chunks of a stream's text",
        "a token each, or those that have come meanwhile; an empty one, where a stop string or a character may have "
        "begun",
        "a token each, or those that a structure leaves no choice of",
        "the texts together are the same",
        "streamed .*",
        r"~ .*",
    ),
    Difference(
        "draws",
        "its own generator",
        "ours, the same for a seed on every worker",
        "no two engines draw alike",
        "(chat|completion) temperature 1",
        r"= .*(text|content)",
    ),
    Difference(
        "`logprobs` of tokens that are a part of a character",
        'the last part is the character, all others `""`, which several alternatives share: one entry is left',
        "in a completion `bytes:\\xf0\\x9f`, in a chat `�`; of two tokens with one text one is `token_id:N`",
        "no alternative is lost, and the drawn token's entry is its own",
        "(streamed )?logprobs of (parts of a character|a (chat's )?moon)",
        r"= \.(body|events\[\])\.choices\[\]\.logprobs\.(tokens\[\]|top_logprobs\[\]\.\*|content\[\]\.token)",
    ),
    Difference(
        "an answer that begins within a character",
        "the prompt's part of it is shown again",
        "`�` for the answer's part",
        "a prompt is no part of an answer",
        "(streamed )?logprobs of parts of a character",
        r"= \.(body|events\[\])\.choices\[\]\.text",
    ),
    Difference(
        "`text_offset`",
        "adds the lengths of the tokens as they are shown in `logprobs`",
        "characters of the answer's text",
        "a control token that is left out has no length there, nor has a part of a character",
        "(streamed )?logprobs of parts of a character|control tokens that are not shown",
        r"= \.(body|events\[\])\.choices\[\]\.logprobs\.text_offset\[\]",
    ),
    Difference(
        "`bytes` of tokens in a chat's `logprobs`",
        "of what stands beside them as the token: the last part of a character has all of it, "
        "a control token that is left out its name",
        "what the token adds to the answer's text",
        "each part has its own bytes, and joined they are the text, as OpenAI means them",
        "a chat's control tokens that are not shown|(streamed )?logprobs of a chat's moon",
        r"= \.(body|events\[\])\.choices\[\]\.logprobs\.content\[\]\.bytes\[\]",
    ),
    Difference(
        "a streamed call whose arguments are no JSON",
        "`finish_reason` is `tool_calls`, other than of the whole answer; the arguments have the call's last brace too",
        "`stop`, as of the whole answer; the arguments alone",
        "such a call is none to carry out",
        "streamed tools one call that is no JSON",
        r"= \.events\[\]\.choices\[\]\.(finish_reason|delta\.tool_calls\[\]\.function\.arguments)",
    ),
    Difference(
        "a streamed call that is cut behind its arguments",
        "`finish_reason` is `length`, other than of the whole answer",
        "`tool_calls`, as of the whole answer",
        "it is whole",
        "streamed tools one call that is cut in its arguments",
        r"= \.events\[\]\.choices\[\]\.finish_reason",
    ),
    Difference("`/version`", "its own", "ours", "another program", "version", r"= \.body\.version"),
    Difference(
        "`tool_choice` that asks for a call, of a function that is not `strict`",
        "the model's own form of a call, with any arguments",
        "a list of calls, or the arguments alone, by the function's parameters",
        "arguments that the function does not take are of no use",
        ASKED_CALLS,
        r"[+-] \.body\.choices\[\]\.message\.(content|tool_calls\[\]\.(type|function\.(name|arguments)))"
        r"|[+-] \.body\.content\[\]\.(text|name|input\.city)"
        r"|[+-] \.body\.output\[\]\.(arguments|name|role|content\[\]\.(text|type|annotations\[\]))"
        r"|\+ \.events\[\]\.choices\[\]\.delta\.tool_calls\[\]\.(index|type|function\.(name|arguments))"
        r"|\+ \.body\.content\[\]\.input\.[a-z_]+"
        r"|= \.body\.(content\[\]\.type|output\[\]\.type|stop_reason|status)"
        r"|= \.body\.usage\.(completion|output|total)_tokens"
        r"|= \.body\.choices\[\]\.(finish_reason|message\.content)"
        r"|= \.events\[\]\.choices\[\]\.(finish_reason|delta\.tool_calls\[\]\.function\.arguments)"
        r"|= \.events\[\]\.(type|index|delta\.(type|stop_reason|partial_json)|usage\.output_tokens)"
        r"|- \.(body|events\[\]\.response)\.incomplete_details\.reason"
        r"|= \.events\[\]\.((item\.|response\.output\[\]\.)?arguments|delta|output_index|sequence_number)"
        r"|= \.events\[\]\.response\.(status|usage\.(output|total)_tokens)",
    ),
    Difference(
        "`content` beside calls that were asked for",
        '`""`',
        "null",
        "there is none, as beside any call",
        "tools (required|named), strict",
        r"- \.body\.choices\[\]\.message\.content",
    ),
    Difference(
        "a call that is cut before its name, streamed",
        "nothing",
        "content, as in the whole answer",
        "no text is lost",
        "streamed tools one call that is cut",
        r"= \.events\[\]\.choices\[\]\.delta\.content",
    ),
    Difference(
        "tokens of what a structure leaves no choice of",
        "any that spell it, as the model draws them",
        "the tokenizer's own",
        "fewer steps for the same text",
        FEWER_TOKENS,
        r"= \.body\.usage\.(completion|total)_tokens",
    ),
    Difference(
        "an answer with a structure that is cut",
        "cut earlier",
        "longer by what those fewer tokens leave room for",
        "the same count of tokens",
        "tools one call that is cut",
        r"= \.body\.choices\[\]\.message\.content",
    ),
    Difference(
        "whitespace of JSON, and what is drawn behind it",
        "as the model draws it behind such tokens",
        "as it draws it behind others",
        "a schema leaves whitespace free",
        "(streamed )?(completion|chat) of json(_schema(, strict)?)?|response of text format",
        r"= \.(body|events\[\])\.choices\[\]\.(text|finish_reason|(message|delta)\.content)"
        r"|= \.body\.(output\[\]\.content\[\]\.text|usage\.(completion|output|total)_tokens)",
    ),
    Difference(
        "arguments of a strict function that was asked for",
        "JSON with any whitespace",
        "JSON on one line, and what is drawn behind such tokens",
        "whitespace in arguments is of no use",
        "(streamed )?tools named, strict|streamed tools required, strict",
        r"= \.(body|events\[\])\.choices\[\]\.(message|delta)\.tool_calls\[\]\.function\.arguments"
        r"|= \.body\.usage\.(completion|total)_tokens",
    ),
    Difference(
        "a function without a description or parameters, in the prompt",
        "both are null",
        "absent, as they were sent",
        "transformers renders what was sent",
        "tools of no parameters",
        r"= \.body\.(usage\.(prompt|total)_tokens|choices\[\]\.message\.content)",
    ),
    Difference(
        "an earlier call whose arguments are no JSON object",
        "`{}`",
        "the text that they are",
        "what was said is not changed",
        "earlier a call (without arguments|whose arguments are (a list|no JSON))"
        "|response of tools used with broken arguments",
        r"= \.body\.(usage\.(prompt|input|total)_tokens|choices\[\]\.message\.content|output\[\]\.content\[\]\.text)",
    ),
]
