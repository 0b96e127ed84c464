"""Chat templates that loop, grow, recurse or reach out: refused in one line, in bounded time and memory. Templates as
models have them render as Jinja alone renders them.
"""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfmoon.workers.model.loading.errors import ModelBroken
from halfmoon.workers.model.text import chat_template, template_meter
from halfmoon.workers.model.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateSlow

SPECIALS = {"bos_token": "<|go|>", "eos_token": "<|end|>"}
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hello\nthere"},
    {"role": "assistant", "content": "<think>hm</think>Hi!"},
    {"role": "user", "content": "What is a half moon?"},
]

#: Name to template and a word of the refusal. Where it needs no chat to show, the model is refused at once.
BOMBS = {
    "nested ranges": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "than",
    ),
    "an empty loop over a filter": (
        "{% for j in range(99999) %}{{ range(99999)|select('eq', -1)|first }}{% endfor %}",
        "steps",
    ),
    "an empty loop over a filter of a dict's values": (
        "{% set d = {}.fromkeys(range(9999), 1) %}{% for j in range(99999) %}"
        "{{ d.values()|select('eq', -1)|first }}{% endfor %}",
        "steps",
    ),
    "a product": ("{{ 'x' * 10**9 }}", "value of more"),
    "a product of a list": ("{{ (['x'] * 10**9)|length }}", "value of more"),
    "a power": ("{{ 9 ** 99999 }}", "integer"),
    "a growing number": (
        "{% set n = namespace(v=9) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}",
        "integer",
    ),
    "center": ("{{ 'x'|center(10**9) }}", "width"),
    "center, the method": ("{{ 'x'.center(10**9) }}", "width"),
    "zfill": ("{{ 'x'.zfill(10**9) }}", "width"),
    "expandtabs": ("{{ '\t'.expandtabs(10**9) }}", "width"),
    "indent": ("{{ 'x\ny'|indent(10**9) }}", "width"),
    "tojson's indent": ("{{ messages|tojson(indent=10**9) }}", "width"),
    "a format of a width": ("{{ '%1000000000d'|format(1) }}", "width"),
    "a format of a width, the operator": ("{{ '%1000000000d' % 1 }}", "width"),
    "a format of a width that is an argument": ("{{ '%*d' % (10**9, 1) }}", "width"),
    "braces with a width": ("{{ '{:1000000000}'.format(1) }}", "width"),
    "braces with a width that is an argument": ("{{ '{:{}}'.format(1, 10**9) }}", "width"),
    "braces with a width in a map": ("{{ '{a:{b}}'.format_map({'a': 1, 'b': 10**9}) }}", "width"),
    "braces that repeat": ("{{ ('{0}' * 9999).format('x' * 99999) }}", "value of more"),
    "join": ("{{ range(99999)|join('x' * 99999) }}", "value of more"),
    "join, the method": ("{{ ('x' * 99999).join(['a'] * 99999) }}", "value of more"),
    "replace": ("{{ ('a' * 99999)|replace('a', 'b' * 99999) }}", "value of more"),
    "replace of nothing": ("{{ ('a' * 99999).replace('', 'b' * 99999) }}", "value of more"),
    "translate": ("{{ 'a'.translate({97: 'b' * 999999}) }}", "translate"),
    "a text that doubles": (
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "value of more",
    ),
    "a text that doubles by +": (
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "value of more",
    ),
    "a block that doubles": (
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set x %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = x %}{% endfor %}",
        "value of more",
    ),
    "a list that holds itself twice": (
        "{% set n = namespace(s=['x']) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "value of more",
    ),
    "lists that are compared": (
        "{% set n = namespace(s=[0], t=[0]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}"
        "{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}",
        "value of more",
    ),
    "an object that holds itself twice": (
        "{% set n = namespace(s={}) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
        "value of more",
    ),
    "fromkeys": ("{{ {}.fromkeys(range(99999), 'x' * 99999) }}", "value of more"),
    "output without end": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "value of more"),
    "many large values": (
        "{% set s = 'x' * 4000000 %}{% for i in range(99999) %}{% if s[1:] %}{% endif %}{% endfor %}",
        "characters in all",
    ),
    "a search in a large value": (
        "{% set s = 'x' * 2000000 ~ 'y' %}{% for i in range(99999) %}{% if 'xz' in s %}{% endif %}{% endfor %}",
        "than",
    ),
    "a sum of lists": ("{{ range(99999)|list|batch(1)|sum(start=[]) }}", "than"),
    "bytes of a number": ("{{ (10).to_bytes(10**9, 'big') }}", "method of a number"),
    "bytes": ("{{ 'x'.encode().zfill(10**9) }}", "bytes"),
    "a time in a large form": ("{{ strftime_now('%Y' * 99999) }}", "time"),
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "than",
    ),
    "loops that call twice": (
        "{% for x in [[[[[[[[[[[[[1]]]]]]]]]]]]] * 9 recursive %}{% if x is iterable %}{{ loop(x * 9) }}"
        "{% endif %}{% endfor %}",
        "than",
    ),
}

#: Of these a single step may go over a value near the bound: few steps show that time ends them.
DEAR_STEPS = {
    "a search in a large value",
    "a sum of lists",
    "macros that call twice",
    "loops that call twice",
}

#: Refused when the template is compiled.
NO_TEMPLATES = {
    "syntax": "{% if %}",
    "a filter that is not offered": "{{ 'a'|urlize }}",
    "a test of no name": "{{ 1 is moon }}",
    "include": "{% include 'x' %}",
    "include in a macro": "{% macro a() %}{% include x %}{% endmacro %}",
    "import": "{% import 'x' as y %}",
    "from": "{% from 'x' import y %}",
    "extends": "{% extends x %}",
    "25 loops": "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "5000 brackets": "{{ " + "(" * 5000,
    "5000 lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "5000 digits": "{{ " + "9" * 5000 + " }}",
    "5000 nots": "{{ " + "not " * 5000 + "1 }}",
    "a tag that is not offered": "{% trans %}x{% endtrans %}",
}

#: Fails for a chat, each in one line.
UNFIT = [
    "{{ 1 // 0 }}",
    "{{ x.y }}",
    "{{ messages[0].content.x.y }}",
    "{{ 1() }}",
    "{{ -'a' }}",
    "{{ 'a' + 1 }}",
    "{{ 1|length }}",
    "{{ lipsum(n=99999) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('user first\nplease') }}",
    "{{ raise_exception(5) }}",
    "{{ range(10**9) }}",
    "{{ messages|map('nothing')|list }}",
    "{{ {}[[]] }}",
    "{{ {[]: 1} }}",
    "{{ 'a' < 1 }}",
    "{{ messages|tojson(separators=('x' * 99, 'y')) }}",
    "{{ messages|tojson(indent='x' * 9999) }}",
    "{{ '%d' % 'a' }}",
    "{{ '{x}'.format() }}",
    "{{ ''.join([1]) }}",
    "{{ cycler }}{{ joiner() }}",
    "{{ super() }}",
    "{{ caller() }}",
    "{{ messages|sort|first }}",
    "{{ 10.0 ** 400 }}",
    "{% for a in 5 %}{% endfor %}",
    "{% set a, b = [1] %}",
    "{{ namespace(1) }}",
    "{{ strftime_now(5) }}",
    "{{ 5|items|list }}",
]


class CountedClock:
    """Stands for the thread's CPU time: each look takes so many seconds. None comes after the bound is seen passed."""

    def __init__(self, look_s: float, bound_s: float) -> None:
        self.looks, self._look_s = 0, look_s
        #: A template is compiled under one meter and rendered under another, and its end is a look, too.
        self._looks_max = 2 * (bound_s / look_s + 2)

    def thread_time(self) -> float:
        self.looks += 1
        if self.looks > self._looks_max:
            pytest.fail("the meter looks at the clock again after its end")
        return self.looks * self._look_s


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_end_is_refused_in_bounded_steps_and_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS_MAX", 0.2)
    monkeypatch.setattr(template_meter, "STEPS_MAX", 250_000)
    clock = CountedClock(0.05 if name in DEAR_STEPS else 0.00005, 0.2)
    monkeypatch.setattr(template_meter, "time", clock)
    source, words = BOMBS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelBroken, match=words) as caught:
        ChatTemplate(source, SPECIALS)
    assert caught.value.field == "chat_template"
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("name", NO_TEMPLATES)
def test_what_is_no_template_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelBroken, match="chat_template is no template: ") as caught:
        ChatTemplate(NO_TEMPLATES[name], SPECIALS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", UNFIT)
def test_what_fails_for_a_chat_is_an_error_of_one_line(source: str) -> None:
    template = ChatTemplate(source, SPECIALS)
    try:
        answer = template.render(CHAT, add_generation_prompt=True)
        # What Jinja lets pass prints nothing of ours.
        assert "0x" not in answer
    except ChatTemplateError as error:
        answer = str(error)
    assert "\n" not in answer
    assert len(answer) < 400


ESCAPES = [
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ ''['__class__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ messages|groupby('__class__')|list }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ loop.__init__ }}",
    "{% set x = ''.format %}{{ x.__self__ }}",
    "{{ (messages|first).items.__self__.__class__ }}",
    "{% macro f() %}{% endmacro %}{{ f.__init__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__class__ }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ ['__class__']|map('attr', '__base__')|list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_reaches_the_process(source: str) -> None:
    template = ChatTemplate(source, SPECIALS)
    try:
        text = template.render(CHAT, add_generation_prompt=True)
    except ChatTemplateError:
        return
    assert "class" not in text.replace("'content'", "") or text.startswith("[{")
    assert "object" not in text
    assert "function" not in text


#: In the manner of models' own: loops with loop's fields, macros, tools, thinking, dates, namespaces, slices.
TEMPLATES = [
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ 'S' }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|a|>' }}{% endif %}",
    "{{- bos_token }}\n{%- if messages[0].role == 'system' %}\n    {%- set system = messages[0].content | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n{{- system }}\n"
    "{%- for message in messages %}\n    "
    "{{- '[' ~ message.role ~ ']' ~ message.content | trim ~ eos_token }}\n{%- endfor %}",
    "{%- set ns = namespace(last=messages|length - 1, multi=true) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi and m.role == 'user' %}"
    "{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}"
    "{%- for m in messages %}{%- set c = m.content %}{%- if '</think>' in c %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{ loop.index }}/{{ loop.length }}:{{ c }}"
    "{%- if not loop.last %}, {% endif %}{%- endfor %}",
    "{% macro say(who, what='') -%}{{ who|upper }}: {{ what }}{%- endmacro %}"
    "{% for m in messages if m.role != 'system' %}"
    "{{ say(m.role, m.content) }}{% if loop.nextitem is defined %}|{% endif %}{% else %}none{% endfor %}",
    "{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ messages[0]|tojson(ensure_ascii=true) }}"
    "{{ messages|tojson(indent='\t', sort_keys=true, separators=(',', ':')) }}",
    "{% macro each(sep) %}{% for m in messages %}{{ caller(m) }}{{ sep }}{% endfor %}{% endmacro %}"
    "{% call(m) each('|') %}{{ m.role }}{% endcall %}{% for m in messages %}{{ loop.previtem.role if loop.previtem }}"
    "{{ loop.changed(m.role) }}{{ loop.revindex }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'eq', 'user')|list|length }}"
    "{{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='content')|map('trim')|list }}{{ messages|last }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k, v in messages[0]|dictsort %}{{ k }}{% endfor %}"
    "{{ messages[-1].content.replace('l', 'L')|replace('o', '0') }}{{ messages[-1].content.splitlines()|length }}",
    "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}"
    "{{ m.content|title }}{% endfor %}{{ '%s-%d' % ('a', 3) }}{{ '{}{:>4}'.format('b', 5) }}{{ 7 // 2 }}{{ 2 ** 10 }}",
    "{% if tools is defined and tools is not none %}T{% endif %}{{ (messages|length) % 2 == 0 }}"
    "{{ [1, 2] + [3] }}{{ 'ab' * 3 }}"
    "{{ messages|map(attribute='content')|map('length')|sum }}{{ range(5)|list }}{{ {'a': [1, (2, 3)]} }}{{ none }}",
    "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text|length }}{{ text|indent(3) }}"
    "{{ messages|groupby('role')|list|length }}"
    "{{ messages|map(attribute='role')|unique|sort|reverse|list }}{{ 3.7|round|int }}",
    "{% for row in [1, [2, [3]]] recursive %}{% if row is iterable %}({{ loop(row) }}){% else %}"
    "{{ row }}{% endif %}{% endfor %}"
    "{{ range(6)|batch(4, 0)|list }}{{ 'x'|center(5) }}{{ '%05.1f'|format(2.25) }}{{ missing|default('d') }}",
    "{% filter upper %}{% for m in messages %}{{ m.role[0] }}{% endfor %}{% endfilter %}{{ ', '.join(['a', 'b']) }}",
]


def alone(source: str, messages: list[dict[str, Any]]) -> str:
    """Jinja's own sandbox, with the functions that every reader of chat templates gives."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    return environment.from_string(source).render(
        messages=messages, add_generation_prompt=True, tools=None, **SPECIALS
    )


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_usual_template_renders_as_jinja_alone_does(source: str) -> None:
    for chat in (CHAT, CHAT[1:], CHAT[:1], CHAT * 20):
        assert ChatTemplate(source, SPECIALS).render(chat, add_generation_prompt=True) == alone(source, chat)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}", "userassistant"),
        ("{% for m in messages %}\n {%- generation -%}\n {{ m.content }}\n {%- endgeneration %}\n{% endfor %}", "ab"),
        ("{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}", "12"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}", "2"),
        ("{% macro m() %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endmacro %}{{ m() }}", "a"),
    ],
)  # fmt: skip
def test_what_a_template_marks_for_training_is_rendered(source: str, text: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(source, SPECIALS).render(chat, add_generation_prompt=True) == text


def test_what_is_marked_for_training_is_metered_as_all_else() -> None:
    with pytest.raises(ModelBroken, match="than"):
        ChatTemplate("{% generation %}" + BOMBS["nested ranges"][0] + "{% endgeneration %}", SPECIALS)
    with pytest.raises(ModelBroken, match="include is not offered"):
        ChatTemplate("{% generation %}{% include 'x' %}{% endgeneration %}", SPECIALS)


def test_the_bounds_grow_with_the_chat() -> None:
    """A text put together message by message is copied with each: a long chat of long messages still passes."""
    source = "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.content %}{% endfor %}{{ n.s }}"
    chat = [{"role": "user", "content": "x" * 2000} for _ in range(400)]
    assert ChatTemplate(source, SPECIALS).render(chat, add_generation_prompt=False) == "x" * 800_000
    every_character = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    text = ChatTemplate(every_character, SPECIALS).render(chat, add_generation_prompt=False)
    assert text == "x" * 800_000


def test_a_caller_that_waits_for_less_is_told_that_it_is_slow() -> None:
    source = (
        "{% for m in messages %}{% for c in range(m.n) %}{% for d in range(100) %}{% endfor %}{% endfor %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source.replace("m.n", "m.n or 0"), SPECIALS)
    chat = [{"role": "user", "content": "a", "n": 3000}]
    with pytest.raises(ChatTemplateSlow):
        template.render(chat, add_generation_prompt=True, seconds_max=0.001)
    assert template.render(chat, add_generation_prompt=True, seconds_max=60) == ""
