"""Chat templates, put together from pieces of Jinja that nest, loop, grow and reach out; each renders a chat or is
refused, within bounds of time and memory.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from unittest import mock

from halfmoon.workers.model.loading.errors import ModelBroken
from halfmoon.workers.model.text import chat_template
from halfmoon.workers.model.text.chat_template import ChatTemplate, ChatTemplateError
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import mutated_bytes

TEST_INPUTS = 60
INPUTS_MEANT = 150_000
DEADLINE_S = 20.0
#: CPU time of one rendering here; what one step may take beside it.
_SECONDS, _STEP_SECONDS = 0.03, 4.0
_CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "<think>x</think>Hi"},
    {"role": "user", "content": "a" * 50},
]
_NAMES = [
    "messages",
    "m",
    "m.content",
    "m.role",
    "messages[0]",
    "ns.s",
    "ns",
    "bos_token",
    "loop.index",
    "loop",
    "x",
    "add_generation_prompt",
    "none",
    "true",
    "range",
    "dict",
    "namespace",
    "self",
    "caller",
    "f",
]
_VALUES = [
    "'x'",
    "''",
    "'ab\\n'",
    "0",
    "1",
    "-1",
    "7",
    "99999",
    "10**9",
    "2**64",
    "1.5",
    "[]",
    "{}",
    "()",
    "'__class__'",
    "'%s'",
    "'%9999d'",
    "'{0}'",
    "'{:9999}'",
    "'{0.x}'",
    "'\\ud800'",
]
_FILTERS = [
    "length",
    "trim",
    "tojson",
    "tojson(indent=9)",
    "join",
    "join('xy')",
    "list",
    "upper",
    "replace('a', 'bb')",
    "default('d')",
    "first",
    "last",
    "string",
    "int",
    "float",
    "items",
    "sort",
    "unique",
    "sum",
    "abs",
    "batch(3)",
    "indent(9)",
    "reverse",
    "dictsort",
    "map('length')",
    "map(attribute='role')",
    "selectattr('role')",
    "select",
    "reject",
    "groupby('role')",
    "format(1)",
    "center(99)",
    "round(2)",
    "min",
    "max",
    "truncate(9)",
    "title",
    "attr('x')",
    "map('tojson')",
    "map('list')",
    "wordcount",
    "e",
    "safe",
    "urlize",
]
_METHODS = [
    ".split()",
    ".split('a')",
    ".strip()",
    ".items()",
    ".get('role')",
    ".upper()",
    ".join(messages)",
    "()",
    "(1)",
    ".format(1)",
    ".replace('a', 'aaa')",
    ".center(99)",
    ".zfill(999)",
    ".keys()",
    ".count('a')",
    "[1:]",
    "[0]",
    "[::-1]",
    ".x",
    "['role']",
    ".encode()",
    ".append(1)",
    ".__class__",
    ".copy()",
    ".ljust(10**9)",
]
_OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "!="]
_TESTS = ["defined", "none", "string", "mapping", "iterable", "odd", "number", "sameas 1", "in [1]"]


def _expression(draw: random.Random, deep: int) -> str:
    if deep <= 0:
        return draw.choice(_NAMES if draw.random() < 0.5 else _VALUES)
    inner = _expression(draw, deep - 1)
    match draw.randrange(9):
        case 0 | 1:
            return f"{inner}|{draw.choice(_FILTERS)}"
        case 2:
            return inner + draw.choice(_METHODS)
        case 3 | 4:
            operator = draw.choice(_OPERATORS)
            other = draw.choice(_TESTS) if operator == "is" else _expression(draw, deep - 1)
            return f"({inner} {operator} {other})"
        case 5:
            return f"[{inner}, {_expression(draw, deep - 2)}]"
        case 6:
            return f"{{'a': {inner}, 'b': {inner}}}"
        case 7:
            return f"range({inner})" if draw.random() < 0.5 else f"f({inner})"
        case _:
            return f"({inner} if {_expression(draw, deep - 2)} else {_expression(draw, deep - 2)})"


def _statement(draw: random.Random, deep: int) -> str:
    value = _expression(draw, draw.randint(0, 4))
    body = "".join(_statement(draw, deep - 1) for _ in range(draw.randint(0, 2))) if deep > 0 else "x"
    match draw.randrange(10):
        case 0 | 1:
            return f"{{{{ {value} }}}}"
        case 2 | 3:
            kind = draw.choice(("", "", " recursive", " if m"))
            again = "{{ loop(m) }}" if kind == " recursive" else ""
            return f"{{% for m in {value} {kind} %}}{body}{again}{{% endfor %}}"
        case 4:
            return f"{{% for m in range(9999) %}}{body}{{% endfor %}}"
        case 5:
            grown = draw.choice(
                ("ns.s ~ ns.s", "ns.s + ns.s", "[ns.s, ns.s]", "ns.s * 9", "dict(a=ns.s, b=ns.s)", value)
            )
            return f"{{% set ns.s = {grown} %}}"
        case 6:
            return f"{{% if {value} %}}{body}{{% else %}}x{{% endif %}}"
        case 7:
            return f"{{% macro f(x) %}}{body}{{% endmacro %}}{{{{ f({value}) }}}}"
        case 8:
            return f"{{% set x %}}{body}{{% endset %}}{{% set y = {value} %}}"
        case _:
            odd = (
                "include 'x'",
                "break",
                "filter upper",
                "block a",
                "call f(1)",
                "import 'x' as y",
                "endfor",
                "raw",
            )
            return f"{{% {draw.choice(odd)} %}}"


def make(draw: random.Random) -> bytes:
    source = "{% set ns = namespace(s='x') %}" + "".join(
        _statement(draw, draw.choice((0, 0, 1, 1, 2, 4))) for _ in range(draw.choice((1, 1, 2, 4)))
    )
    content = source.encode(errors="surrogatepass")
    return mutated_bytes(draw, content) if draw.random() < 0.15 else content


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    def play(content: bytes) -> str:
        begin = time.thread_time()
        try:
            template = ChatTemplate(
                content.decode(errors="replace"), {"bos_token": "<s>", "eos_token": "</s>"}
            )
            text = template.render(_CHAT, add_generation_prompt=True, seconds_max=_SECONDS)
            outcome = "rendered"
            if len(text) > 5 << 20:
                raise Found(f"{len(text)} characters")
        except ModelBroken as error:
            line, outcome = str(error), "ModelBroken"
        except ChatTemplateError as error:
            line, outcome = str(error), "ChatTemplateError"
        if outcome != "rendered" and (not line or "\n" in line or len(line) > 500):
            raise Found(f"no line: {line!r}")
        if time.thread_time() - begin > _STEP_SECONDS:
            raise Found(f"took {time.thread_time() - begin:.1f} s of CPU")
        return outcome

    with mock.patch.object(chat_template, "SECONDS_MAX", _SECONDS):
        yield play
