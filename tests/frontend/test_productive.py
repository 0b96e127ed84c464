"""A structure that nothing satisfies is refused by its field; what something satisfies is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.structures import Structure
from halfmoon.workers.frontend.grammars import GrammarReader
from halfmoon.workers.frontend.productive import endless_rule, satisfiable_schema, unproductive
from halfmoon.workers.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Iterator[GrammarReader]:
    made = GrammarReader(tokenizer)
    yield made
    made.close()


def refusal(reader: GrammarReader, kind: Any, asked: Any) -> ApiError | None:
    try:
        asyncio.run(reader.read(Structure(kind=kind, asked=asked, param="the_field")))
    except ApiError as error:
        return error
    return None


SELF = {"$ref": "#"}
#: Satisfied by nothing: each object holds another.
NEVER = {"type": "object", "properties": {"next": {"$ref": "#/$defs/never"}}, "required": ["next"]}
CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"$ref": "#/$defs/a", "$defs": CIRCLE},
        {"$ref": "#/$defs/never", "$defs": {"never": NEVER}},
        {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
        {"type": "object", "additionalProperties": SELF, "required": ["a"]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2},
        {"anyOf": [SELF, {"$ref": "#/anyOf/0"}]},
        {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a"}], "$defs": CIRCLE},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": []},
        {"anyOf": []},
        {"not": {}},
        False,
        {"const": 1, "type": "string"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": r"^[^\s\S]$"},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "object", "minProperties": 3, "maxProperties": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 4},
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused(reader: GrammarReader, schema: Any) -> None:
    error = refusal(reader, "json", schema)
    assert error is not None
    assert (error.status, error.param, error.code) == (400, "the_field", "invalid")
    assert str(error).startswith("the_field: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["next"]},
        {"type": "object", "properties": {"next": SELF}},
        {"type": "array", "items": SELF},
        {"properties": {"a": SELF}, "required": ["a"]},  # a number is such a one
        {"anyOf": [SELF, {"type": "null"}]},
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "required": ["a"]},
        {"type": "object", "properties": {"a~b/c": {"type": "null"}, "d": {"$ref": "#/properties/a~0b~1c"}}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x%20y"}},
            "$defs": {"x y": {"type": "null"}},
        },
        {"type": "object", "properties": {"properties": {"type": "null"}}, "required": ["properties"]},
    ],
)
def test_a_schema_that_something_satisfies_is_taken(reader: GrammarReader, schema: Any) -> None:
    assert satisfiable_schema(schema) in (schema, {"anyOf": [False, {"type": "null"}]})
    assert refusal(reader, "json", schema) is None


def test_what_may_be_left_out_is_left_out_where_nothing_satisfies_it(reader: GrammarReader) -> None:
    """Or an answer could begin with it, and find no end."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/never"}},
        "anyOf": [{"$ref": "#/$defs/never"}, {"type": "object"}],
        "$defs": {"never": NEVER},
    }
    kept = satisfiable_schema(schema)
    assert kept["properties"] == {"a": {"type": "integer"}, "b": False}
    assert kept["anyOf"] == [False, {"type": "object"}]
    assert schema["properties"]["b"] == {"$ref": "#/$defs/never"}, "the client's own is as it was"
    assert refusal(reader, "json", schema) is None


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: start "a"', "start"),
        ('start: a\na: "x" b\nb: "y" a', "start"),
        ('start: "x" | "y" dead\ndead: "z" dead', "dead"),
        ('start: a? "b"\na: "x" a', "a"),
        ('start: (a | "b")+\n?a: "x" a ~2..3', "a"),
        ('start: "b" (a "c")*\n// a: "x"\na: ("x" | a "y") a', "a"),
        ('start: "a" b\nb: %json {"$ref": "#"}\n', "start"),
        ('root ::= "x" a\na ::= "y" a | "z" a', "start"),
        ('start: "q" A\nA: "x" & "y"', "start"),
        ('start: "q" A?\nB: /[a-c]+/\n%ignore " "\nA: B & /d+/ // as B\n', "A"),
        (r'start: "q" /a[^\s\S]/', "start"),
    ],
)
def test_a_rule_without_an_end_is_refused_by_name(reader: GrammarReader, grammar: str, rule: str) -> None:
    error = refusal(reader, "grammar", grammar)
    assert error is not None
    assert (error.status, error.param) == (400, "the_field")
    assert str(error).endswith(f"the end of the rule {rule}")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: a\na: "x" b | "q"\nb: "y" a',
        'start: a\na: "x" a?',
        'start: a\na: "x" a*\n  | ["w" a] "z"',
        'start: a{0,2} "b"\na: "c" a{,1}',
        'start: a~0..2 "b"\na: "c" a ~0..1',
        'start: b\nb[capture]: /a\\/b:/ b2 // c: c\n  | "q"\nb2: b\n%ignore / /',
        'start: A B\nA: /[^a]/ & /[b:]/\nB: "a".."c" | "unused"',
        'start: "q" (A | /[^b]/)\nA: "x" & ~"y"',
        r'start: "q" ("b" | /[^\s\S]/)',
        'start: "a" %json {"type": "object", "properties": {"x": {"type": "null"}}}\n  | start',
        'root ::= "a" root | [a-z]+ "b"?',
        "start: ",
    ],
)
def test_a_grammar_with_an_end_is_taken(reader: GrammarReader, grammar: str) -> None:
    error = refusal(reader, "grammar", grammar)
    # What the library itself does not take says nothing here.
    assert error is None, error
    if "::=" not in grammar:
        assert endless_rule(grammar, lambda _: False) == ""


@pytest.mark.parametrize("expression", [r"[^\s\S]", r"a[^\s\S]", "a^b", "(?=a)b"])
def test_an_expression_that_matches_nothing_is_refused(reader: GrammarReader, expression: str) -> None:
    error = refusal(reader, "regex", expression)
    assert error is not None
    assert (error.status, error.param) == (400, "the_field")


def test_a_text_that_the_model_has_no_tokens_for_is_refused(
    reader: GrammarReader, tokenizer: Tokenizer
) -> None:
    """An answer that had begun with it would find no end."""
    control, rare = "a\x04", "a\U00040000"
    for text in (control, rare):
        assert tokenizer.decode(tokenizer.encode(text)) != text, "or the test shows nothing"
    for kind, asked in (
        ("choice", ["b", control]),
        ("choice", ["b", rare]),
        ("json", {"enum": ["b", rare]}),
        ("json", {"type": "object", "properties": {"a": {"const": {"b": rare}}}}),
    ):
        error = refusal(reader, kind, asked)
        assert error is not None, asked
        assert (error.status, error.param) == (400, "the_field")
        assert "has no tokens" in str(error)
    assert refusal(reader, "json", {"const": control}) is None, "JSON writes it as an escape"
    assert refusal(reader, "choice", ["naïve 🌑", "<|im_end|>"]) is None


def test_a_schema_that_is_nested_beyond_reading_is_refused(reader: GrammarReader) -> None:
    for deep in ('{"x": ' + "[" * 1000 + "]" * 1000 + "}", '{"not": ' * 1000 + "{}" + "}" * 1000):
        error = refusal(reader, "json", deep)
        assert error is not None
        assert (error.status, error.param) == (400, "the_field")


def test_the_empty_text_satisfies_something(reader: GrammarReader) -> None:
    assert refusal(reader, "regex", "") is None
    assert refusal(reader, "choice", [""]) is None
    assert refusal(reader, "choice", []) is not None


def test_drawn_grammars_have_the_rules_that_are_found_step_by_step() -> None:
    for seed in range(500):
        draw = random.Random(seed)
        names = range(draw.randint(1, 8))
        rules = {
            name: [
                frozenset(draw.choices([*names, "a text"], k=draw.randint(0, 3)))
                for _ in range(draw.randint(0, 3))
            ]
            for name in names
        }
        satisfied: set[Any] = {"a text"}
        for _ in names:
            satisfied |= {name for name, ways in rules.items() if any(way <= satisfied for way in ways)}
        assert unproductive(rules) == set(rules) - satisfied, seed


def test_a_long_chain_is_read_in_little_time(reader: GrammarReader) -> None:
    pairs = [(f"r{i}", f"r{(i + 1) % 2000}") for i in range(2000)]
    lark = "start: r0\n" + "\n".join(f'{one}: "a" {other}' for one, other in pairs)
    assert endless_rule(lark, lambda _: False) == "start"
    assert endless_rule(lark + '\nr1: "b"', lambda _: False) == ""
    chain = {one: {"$ref": f"#/$defs/{other}"} for one, other in pairs}
    with pytest.raises(ValueError, match="nothing can satisfy it"):
        satisfiable_schema({"$ref": "#/$defs/r0", "$defs": chain})
