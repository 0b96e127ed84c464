"""Small models in the manner of families of models: each has one thing that others do not.

Templates are written for this table, short, with their family's peculiarity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One directory. `spaces`: `bytes` (byte-level BPE) or `pieces` (SentencePiece's kind, with a begin token)."""

    template: str
    special: tuple[str, ...]
    bos: str = ""
    eos: str = ""
    spaces: str = "bytes"
    settings: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    #: How transformers is given an earlier call, for this template to write it.
    arguments: str = "object"
    content: str | None = ""
    #: Asked only with what the template writes itself: else halfmoon tells the tools in its own words.
    tools: bool = False
    plain: tuple[str, ...] = ()
    #: Of the special tokens: they take the space around them.
    rstrip: bool = False
    lstrip: bool = False
    #: Set in tokenizer.json.
    tokenizer: dict[str, Any] = field(default_factory=dict)


_SPM: dict[str, Any] = {"special": ("<unk>", "<s>", "</s>"), "bos": "<s>", "eos": "</s>", "spaces": "pieces"}
_IM: dict[str, Any] = {"special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "eos": "<|im_end|>"}
_L3: dict[str, Any] = {
    "special": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
}
_GEMMA: dict[str, Any] = {
    "special": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "bos": "<bos>", "eos": "<eos>",
}  # fmt: skip
_R1: dict[str, Any] = {
    "special": ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|sep|>", "<|result|>"),
    "bos": "<|begin|>",
    "eos": "<|end|>",
}
_CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
_ASK_IM = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
_HERMES_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
"""
_HERMES_TURNS = """{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
_R1_CALLS = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ m.content }}{% endif %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% endif %}
    {%- if m.role == 'assistant' and CALLS %}
        {%- for tool in m['tool_calls'] %}
            {{- '<|Assistant|><|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n'
                + tool['function']['arguments'] + '\\n```<|end|>' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|Assistant|>' + content + '<|end|>' }}
    {%- endif %}
    {%- if m.role == 'tool' %}{{ '<|result|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

FAMILIES: dict[str, Family] = {
    "Llama 2, whose system stands in the first user's turn": Family(
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}" + _ALTERNATE +
        "{% if loop.index0 == 0 and system != false %}"
        "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
        "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}", **_SPM,
    ),
    "Llama 2, whose tokens stand in special_tokens_map.json": Family(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        special=("<unk>", "<s>", "</s>"), spaces="pieces",
        files={"special_tokens_map.json": {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False,
               "normalized": False, "single_word": False}, "eos_token": "</s>"}},
    ),
    "TinyLlama, whose turns end by the end token": Family(
        "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
        "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n"
        "{% else %}\n{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}", **_SPM,
    ),
    "Llama 3, trimmed, with the begin token before the first": Family(
        "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
        "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}", **_L3,
    ),
    "Llama 3.1, with a date, tools in the user's turn and one call a turn": Family(
        """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("26 Jul 2024") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- if not tools is none %}
    {%- set first = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""", tools=True, **_L3,
    ),
    "Mistral, which refuses what does not alternate": Family(
        "{{ bos_token }}{% for m in messages %}" + _ALTERNATE + "{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
        **_SPM,
    ),
    "Mistral v3, with tools before the last question and ids of nine characters": Family(
        """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message["content"]|string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
""", special=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
              "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), bos="<s>", eos="</s>", tools=True,
    ),
    "Qwen 2, with a system message of its own": Family(
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}" + _ASK_IM, **_IM,
    ),
    "Qwen 2.5, with tools": Family(_HERMES_TOOLS + _HERMES_TURNS + "{%- endif %}\n", tools=True, **_IM),
    "Qwen 3, with a switch for thoughts and a loop from the end": Family(
        _HERMES_TOOLS + """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set reasoning_content = reasoning_content.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""", tools=True, plain=("<think>", "</think>", "<tool_call>", "</tool_call>"), **_IM,
    ),
    "Qwen 3 Coder, which goes through the arguments": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<function="
        "{{ c.function.name }}>{% for k, v in c.function.arguments|items %}<parameter={{ k }}>"
        "{{ v | tojson | safe if v is mapping else v | string }}</parameter>{% endfor %}</function>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
        + _ASK_IM, tools=True, **_IM,
    ),
    "Gemma, whose assistant is the model and whose system is refused": Family(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}" + _ALTERNATE +
        "{% if (m['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = m['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim"
        " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        **_GEMMA,
    ),
    "Gemma 3, whose system stands before the first words": Family(
        """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}
    {%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
""", **_GEMMA,
    ),
    "Phi 3, whose tokens take the space behind them": Family(
        "{% for m in messages %}{{'<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>",
        rstrip=True,
    ),
    "tokens that take the space before them": Family(
        "{% for m in messages %}{{ m.role + ':\n' + m['content'] + '\n' + eos_token + ' ' }}{% endfor %}",
        special=("<|endoftext|>",), eos="<|endoftext|>", lstrip=True,
    ),
    "Phi 3.5, which closes by the end token": Family(
        "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}{{'<|system|>\n' + m['content'] + "
        "'<|end|>\n'}}{% elif m['role'] == 'user' %}{{'<|user|>\n' + m['content'] + '<|end|>\n'}}"
        "{% elif m['role'] == 'assistant' %}{{'<|assistant|>\n' + m['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>",
    ),
    "Phi 4, with a separator": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>",
    ),
    "DeepSeek R1, which knows a call by content that is null": Family(
        _R1_CALLS.replace("CALLS", "m.content is none"), arguments="text", content=None, **_R1
    ),
    "DeepSeek R1, which joins arguments": Family(
        _R1_CALLS.replace("CALLS", "m.tool_calls is defined and m.tool_calls"), arguments="text", **_R1
    ),
    "DeepSeek 2, in plain words": Family(
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
        "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        **_R1,
    ),
    "SmolLM 2, in ChatML": Family(_CHATML + _ASK_IM, **_IM),
    "SmolLM 3, marked for training": Family(
        """{%- set x = 1 %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\\n' + m.content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- set x = 2 %}
        {% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- x }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if enable_thinking is not defined else 'no thoughts') }}
{%- endif %}
""", plain=("<think>", "</think>"), **_IM,
    ),
    "Command R, with a template for tools by name": Family(
        "", settings={"chat_template": [
            {"name": "default", "template": _CHATML + _ASK_IM},
            {"name": "tool_use", "template": _HERMES_TOOLS + _HERMES_TURNS + "{%- endif %}\n"},
        ]}, tools=True, **_IM,
    ),
    "a template in a file, and another in the settings": Family(
        "{{ 'of the settings' }}", files={"chat_template.jinja": _CHATML + _ASK_IM + "\n"}, **_IM
    ),
    "templates in files, by name": Family(
        "", settings={"chat_template": None}, tools=True, **_IM,
        files={"chat_template.jinja": _CHATML, "additional_chat_templates/tool_use.jinja":
               _HERMES_TOOLS + _HERMES_TURNS + "{%- endif %}\n"},
    ),
    "blocks on lines of their own, whose lines vanish": Family(
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n    {% else %}\n"
        "\t{# no line #}\nA: {{ m.content }}\n\n    {% endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\n A:{% endif %}\n", **_IM,
    ),
    "Granite, with macros that call back": Family(
        "{% macro turn(role) %}<|im_start|>{{ role }}\n{{ caller(role) }}<|im_end|>{% endmacro %}"
        "{% for m in messages %}"
        "{% call(role) turn(m.role) %}{{ m.content }} ({{ loop.index }}/{{ loop.length }} {{ role }}"
        "{{ ' after ' ~ loop.previtem.role if loop.previtem is defined }}){% endcall %}"
        "{% if not loop.last and loop.nextitem.role != m.role %}{{ '\n' }}{% endif %}{% endfor %}", **_IM,
    ),
    "loops that end early": Family(
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.index > 2 %}{% break %}"
        "{% endif %}{% set block %}\n [{{ m.content | upper }}] {% endset %}{{ block | trim }}{% endfor %}", **_IM,
    ),
    "JSON in every form": Family(
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'b': 'ü<', 'a': [1, none, true]} | tojson("
        "ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}{{ [] | tojson(indent='\t') }}{{ 'é' | tojson }}",
        **_IM,
    ),
    "tokens beside begin and end": Family(
        "{{ pad_token }}{{ unk_token }}{% for m in messages %}{{ m.content + (eos_token if loop.last else sep_token) }}"
        "{% endfor %}{{ bos_token is defined }}{{ cls_token is defined }}",
        special=("<pad>", "<unk>", "<sep>", "<end>"), eos="<end>",
        settings={"pad_token": {"content": "<pad>", "__type": "AddedToken"}, "unk_token": "<unk>",
                               "sep_token": "<sep>"},
    ),
    "Falcon, with no token at all": Family(
        "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ m['role'].capitalize() + ': ' + "
        "m['content'].strip().replace('\r\n', '\n').replace('\n\n', '\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n' + 'Assistant:' }}{% endif %}", special=("<|endoftext|>",),
    ),
    "a tokenizer that was saved with truncation and padding": Family(
        _CHATML + _ASK_IM, **_IM,
        tokenizer={
            "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "<|endoftext|>"},
        },
    ),
    "pieces whose first alone has a space before it": Family(
        "{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{{ m.content + eos_token }}"
        "{% endfor %}", special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>", spaces="pieces",
        tokenizer={"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁",
                                                          "prepend_scheme": "first", "split": False}},
    ),
    "a begin token by the settings alone": Family(
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", **_SPM,
        settings={"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False},
        tokenizer={"post_processor": None},
    ),
    "no begin token by the settings": Family(
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", **_SPM,
        settings={"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": False},
    ),
}  # fmt: skip
