"""Grammars that nothing satisfies: rules from which no text can come to an end.

The library that draws by a grammar finds most of them, but not a rule that always holds itself (`a: "x" a`, or a
schema whose required property is the schema again). Here a grammar is the needs of its rules: the alternatives of each,
and the rules that each alternative cannot do without. What is not understood counts as satisfiable: nothing is refused
that an answer could satisfy.

Source: Hopcroft, Motwani, Ullman, "Introduction to Automata Theory", 7.1 (generating symbols).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

Name = TypeVar("Name", bound=Hashable)
#: A rule's alternatives, each the rules that it cannot do without.
Rules = Mapping[Name, Sequence[frozenset[Name]]]
#: Of a schema within a schema: the keywords, names and indices that lead to it.
Place = tuple[str, ...]


def unproductive(rules: Rules[Name]) -> set[Name]:
    """The rules that no text satisfies, in time linear in their size. A need without a rule is satisfiable."""
    open_needs: dict[tuple[Name, int], int] = {}
    needed_by: dict[Name, list[tuple[Name, int]]] = {}
    productive: set[Name] = set()
    found: list[Name] = []

    def satisfied(name: Name) -> None:
        if name not in productive:
            productive.add(name)
            found.append(name)

    for name, alternatives in rules.items():
        for number, needs in enumerate(alternatives):
            with_rules = [need for need in needs if need in rules]
            open_needs[name, number] = len(with_rules)
            for need in with_rules:
                needed_by.setdefault(need, []).append((name, number))
            if not with_rules:
                satisfied(name)
    while found:
        for alternative in needed_by.get(found.pop(), ()):
            open_needs[alternative] -= 1
            if not open_needs[alternative]:
                satisfied(alternative[0])
    return set(rules) - productive


# --- JSON schemas -------------------------------------------------------------------------------------------

#: Keywords under which schemas have names, under which they stand in a list, and under which one stands.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def satisfiable_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, with `false` in the place of each schema that nothing satisfies. Raises ValueError where that is all.

    With `false` the library leaves out what may be left out; an answer that began with it would find no end.
    """
    rules: dict[Place, list[frozenset[Place]]] = {}
    _add_schema(schema, (), rules)
    dead = unproductive(rules)
    if () in dead:
        raise ValueError("nothing can satisfy it")
    return _without(schema, (), dead) if dead else schema


def _is_satisfiable(schema: Any) -> bool:
    try:
        if isinstance(schema, dict):
            satisfiable_schema(schema)
    except ValueError:
        return False
    return schema is not False


def _add_schema(schema: Any, place: Place, rules: dict[Place, list[frozenset[Place]]]) -> None:
    if not isinstance(schema, dict):
        rules[place] = [] if schema is False else [frozenset()]
        return
    for inner, at in _inner(schema, place):
        _add_schema(inner, at, rules)
    needs: set[Place] = set()
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        steps = unquote(reference[1:]).split("/")[1:]
        needs.add(tuple(step.replace("~1", "/").replace("~0", "~") for step in steps))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(among := schema.get(keyword), list):
            # A rule of its own, at a place where no schema is.
            rules[*place, keyword] = [frozenset([(*place, keyword, str(i))]) for i in range(len(among))]
            needs.add((*place, keyword))
    if isinstance(together := schema.get("allOf"), list):
        needs.update((*place, "allOf", str(i)) for i in range(len(together)))
    # What says nothing of its type may be of another, which needs none of these.
    if schema.get("type") in ("object", ["object"]):
        needs.update(_needs_of_object(schema, place))
    if schema.get("type") in ("array", ["array"]):
        needs.update(_needs_of_array(schema, place))
    rules[place] = [frozenset(needs)]


def _inner(schema: dict[str, Any], place: Place) -> Iterable[tuple[Any, Place]]:
    for keyword in BY_NAME:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((each, (*place, keyword, name)) for name, each in named.items())
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            yield from ((each, (*place, keyword, str(i))) for i, each in enumerate(listed))
    for keyword in _SINGLE:
        if isinstance(each := schema.get(keyword), dict | bool):
            yield each, (*place, keyword)


def _needs_of_object(schema: dict[str, Any], place: Place) -> Iterable[Place]:
    required, properties = schema.get("required"), schema.get("properties")
    for name in required if isinstance(required, list) else ():
        if isinstance(properties, dict) and name in properties:
            yield *place, "properties", name
        elif not schema.get("patternProperties"):
            yield *place, "additionalProperties"


def _needs_of_array(schema: dict[str, Any], place: Place) -> Iterable[Place]:
    least, first = schema.get("minItems"), schema.get("prefixItems")
    if not isinstance(least, int):
        return
    told = len(first) if isinstance(first, list) else 0
    yield from ((*place, "prefixItems", str(i)) for i in range(min(least, told)))
    if least > told:
        yield *place, "items"


def _without(schema: Any, place: Place, dead: set[Place]) -> Any:
    """A copy with `false` at the places that are dead."""
    if place in dead:
        return False
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for inner, at in _inner(schema, place):
        within = copy
        for step in at[len(place) : -1]:
            within[step] = within[step].copy()
            within = within[step]
        key: Any = int(at[-1]) if isinstance(within, list) else at[-1]
        within[key] = _without(inner, at, dead)
    return copy


# --- Lark grammars ------------------------------------------------------------------------------------------

_LARK = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*)
    | (?P<line>\n)
    | (?P<text>"(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\\n])+/[a-z]* | <[^>\n]+>)
    | (?P<directive>%[a-z]+)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<count>~\s*\d+(?:\s*\.\.\s*\d+)? | \{\s*\d*\s*(?:,\s*\d*\s*)?\})
    | (?P<mark>\.\.|->|[:|()\[\]?!*+@&~.,=-]|\d+)""",
    re.VERBOSE,
)
_ATTRIBUTES = re.compile(r"(?:\s*\[[^\]\n]*\])?(?:\.-?\d+)?\s*:")
_DIGITS = re.compile(r"\d+")


#: Expressions and terminals of one grammar that are looked at one by one, a millisecond each.
_ASKED_MAX = 64
#: Stands for what no text satisfies.
_NEVER = "(never"


class _NotUnderstood(Exception):
    """A grammar is written in more than is read here."""


class _Token(NamedTuple):
    kind: str
    text: str


def endless_rule(lark: str, matches_nothing: Callable[[str], bool]) -> str:
    """A rule that may be used, and that no text satisfies; "": none that is found.

    `matches_nothing`: of a grammar that is one expression or terminal, which the library can tell.
    """
    try:
        read = _LarkRules(lark, matches_nothing)
    except (_NotUnderstood, RecursionError):
        return ""
    dead = unproductive(read.rules)
    reached, waiting = {"start"}, ["start"]
    while waiting:
        fresh = read.mentions.get(waiting.pop(), set()) - reached
        reached |= fresh
        waiting += fresh
    return next((name for name in read.mentions if name in dead & reached), "")


class _LarkRules:
    """Reads `rules` as Lark writes them, and which rules each mentions, be they needed or not.

    A group is a rule of its own, whose name begins with a parenthesis.
    """

    def __init__(self, lark: str, matches_nothing: Callable[[str], bool]) -> None:
        """Raises _NotUnderstood."""
        self._matches_nothing = matches_nothing
        self._asked = 0
        self.rules: dict[str, list[frozenset[str]]] = {_NEVER: []}
        self.mentions: dict[str, set[str]] = {}
        self._tokens: list[_Token] = []
        #: Where each rule begins: its name, and the place of its first token.
        begins: list[tuple[str, int]] = []
        written_at: list[int] = []
        at, line_begins = 0, True
        while at < len(lark):
            found = _LARK.match(lark, at)
            if found is None:
                raise _NotUnderstood
            kind, text, at = found.lastgroup or "", found[0], found.end()
            if kind == "name" and line_begins and (colon := _ATTRIBUTES.match(lark, at)):
                begins.append((text, len(self._tokens)))
                written_at.append(found.start())
                at = colon.end()
            elif kind == "directive":
                if text in ("%ignore", "%import", "%llguidance"):  # behind a rule, not within
                    begins.append(("", len(self._tokens)))
                    written_at.append(found.start())
                at = self._directive(lark, text, at)
            elif kind not in ("space", "line") and not (line_begins and text in "?!"):
                never = kind == "text" and "[^" in text and self._is_empty(f"start: {text}")
                self._tokens.append(_Token("name", _NEVER) if never else _Token(kind, text))
            # Before a rule's name a mark may say how its tree is written, which is not done here.
            line_begins = kind == "line" or (line_begins and (kind == "space" or text in "?!"))
        ends = [place for _, place in begins[1:]] + [len(self._tokens)]
        for (name, self._at), self._end in zip(begins, ends, strict=True):
            if name:
                self._mentioned = self.mentions.setdefault(name, set())
                self.rules.setdefault(name, []).extend(self._alternatives())
                if self._at != self._end:
                    raise _NotUnderstood
        sources = [lark[one:other] for one, other in pairwise([*written_at, len(lark)])]
        terminals = {
            name: source for (name, _), source in zip(begins, sources, strict=True) if name[:1].isupper()
        }
        for name, source in terminals.items():
            # Only an intersection or a complement may leave nothing of what is something.
            if ("&" in source or "~" in source) and self._is_empty(
                f"start: {name}\n" + "\n".join(terminals.values())
            ):
                self.rules[name] = []

    def _is_empty(self, grammar: str) -> bool:
        self._asked += 1
        return self._asked <= _ASKED_MAX and self._matches_nothing(grammar)

    def _directive(self, lark: str, name: str, at: int) -> int:
        """Read past it: a text of which nothing is known, but that there may be none."""
        if name not in ("%json", "%regex", "%ignore", "%import", "%llguidance"):
            raise _NotUnderstood
        written = _Token("text", name)
        if name not in ("%ignore", "%import"):
            while lark[at : at + 1].isspace():
                at += 1
            try:
                content, at = json.JSONDecoder().raw_decode(lark, at)
            except ValueError:
                raise _NotUnderstood from None
            if name == "%json" and not _is_satisfiable(content):
                written = _Token("name", _NEVER)
        self._tokens.append(written)
        return at

    def _next(self) -> str:
        return self._tokens[self._at].text if self._at < self._end else ""

    def _alternatives(self) -> list[frozenset[str]]:
        found = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            found.append(self._sequence())
        return found

    def _sequence(self) -> frozenset[str]:
        needs: set[str] = set()
        while self._next() not in ("", "|", ")", "]"):
            needs |= self._item()
        return frozenset(needs)

    def _item(self) -> frozenset[str]:
        """The needs of one, with the marks behind it: none, where it may be left out."""
        if self._at >= self._end:
            raise _NotUnderstood
        kind, text = self._tokens[self._at]
        self._at += 1
        needs: frozenset[str] = frozenset()
        if kind == "name":
            needs = frozenset([text])
            self._mentioned.add(text)
        elif text in ("(", "["):
            needs = self._group(")" if text == "(" else "]")
        elif text in ("@", "->", "~", ".."):
            # Another grammar, a name for what was, a complement, the end of a range: nothing that is known.
            self._item()
        elif kind != "text" and text != "&":
            raise _NotUnderstood
        while (behind := self._next()) and self._at < self._end:
            count = self._tokens[self._at].kind == "count"
            if behind not in ("?", "*", "+") and not count:
                break
            self._at += 1
            least = _DIGITS.search(behind.split(",")[0])
            if behind in ("?", "*") or (count and (least is None or not int(least[0]))):
                needs = frozenset()
        return needs

    def _group(self, closing: str) -> frozenset[str]:
        alternatives = self._alternatives()
        if self._next() != closing:
            raise _NotUnderstood
        self._at += 1
        if closing == "]":
            return frozenset()
        name = f"({len(self.rules)}"
        self.rules[name] = alternatives
        return frozenset([name])
