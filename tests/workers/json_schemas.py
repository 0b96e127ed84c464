"""Random JSON schemas by seed, of the keywords that people write, each of which some value fulfils."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "tags", "köln", "a b", "x-1", "items", "id", "value", "größe", "notes", "kind")
_PATTERNS = (
    r"^[A-Z]{2}[0-9]{3}$",
    r"^(red|green|blue)$",
    r"^[a-z]{1,6}@[a-z]{1,6}\.org$",
    r"^\d{4}-\d{2}$",
    r"^x?y{0,9}z$",
)


def random_schema(seed: int) -> dict[str, Any]:
    """An object at the top in two of three; every fourth has a definition that it refers to, some to itself."""
    draw = random.Random(seed)
    schema = _object(draw, 3) if draw.random() < 0.67 else _schema(draw, 3)
    if draw.random() < 0.25:
        tree = {
            "type": "object",
            "properties": {
                "leaf": _scalar(draw),
                "children": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/tree"},
                    "maxItems": draw.randint(1, 2),
                },
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
        schema = {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/tree"}, "rest": schema},
            "required": ["tree"],
            "additionalProperties": False,
            "$defs": {"tree": tree},
        }
    return schema


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_scalar] if depth == 0 else [_scalar, _scalar, _nested, _nested, _choice]
    return draw.choice(kinds)(draw, depth) if depth else _scalar(draw)


def _nested(draw: random.Random, depth: int) -> dict[str, Any]:
    return draw.choice((_object, _array))(draw, depth)


def _choice(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(0, 5))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        **(
            {"additionalProperties": draw.choice((False, {"type": "integer"}))} if draw.random() < 0.8 else {}
        ),
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    schema: dict[str, Any] = {
        "type": "array",
        "items": _schema(draw, depth - 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }
    if draw.random() < 0.2:
        schema["prefixItems"] = [_scalar(draw)]
    return schema


def _scalar(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    kinds: list[dict[str, Any]] = [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + 10},
        {"type": "number"},
        {"type": "string"},
        {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 12)},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "string", "format": draw.choice(("date", "time", "uuid", "ipv4"))},
        {"enum": draw.sample([1, "one", None, True, 2.5, "zwölf", [1], {"a": 1}], draw.randint(1, 4))},
        {"const": draw.choice(("yes", 7, None, {"deep": ["x", 1]}))},
        {"type": ["string", "null"], "maxLength": 5},
    ]
    return draw.choice(kinds)
