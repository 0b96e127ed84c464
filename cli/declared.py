"""Options declared once: each field of a frozen struct is a flag, a variable of the environment, a key of TOML, a line
of the help and a row of docs/options.md.

A field's type and bounds say which values fit, its description is the help. `Meta(extra=...)` holds further words for
argparse.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta
from msgspec.structs import FieldInfo, fields

from halfmoon.cli.options import OptionInvalid

T = TypeVar("T", bound=msgspec.Struct)


def add_options(
    parser: argparse.ArgumentParser, *kinds: type[msgspec.Struct], only: Collection[str] = ()
) -> None:
    """The options of `kinds`, or those named in `only`. One that two kinds have is the first's."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for kind in kinds:
        known = {action.dest for action in parser._actions}
        for field in fields(kind):
            if field.name in known or (only and field.name not in only):
                continue
            title = "" if only else _title(kind, field.name)
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            groups[title].add_argument(flag(field.name), **_keywords(field))


def _title(kind: type[msgspec.Struct], name: str) -> str:
    """The heading of the class that declares a field; "": it has none."""
    owner = next(each for each in reversed(kind.__mro__) if name in get_annotations(each))
    return str(owner.__dict__.get("title", ""))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options_of(kind: type[T], args: argparse.Namespace, **changes: Any) -> T:
    """The options of `kind` as `args` and `changes` have them. Raises OptionInvalid, naming the flag."""
    given = {
        each.name: getattr(args, each.name) for each in fields(kind) if hasattr(args, each.name)
    } | changes
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as problem:
        for field in fields(kind):
            if re.search(rf"`\$\.{field.name}\b", str(problem)):
                value = given[field.name]
                text = ", ".join(value) if isinstance(value, list) else f"{value}"
                raise OptionInvalid(f"{flag(field.name)} {text[:20]}: {_allowed(field)}") from None
        raise


def default_of(field: FieldInfo) -> Any:
    """NODEFAULT: the option must be given."""
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def type_of(field: FieldInfo) -> tuple[Any, Meta]:
    """A field's type, and the declaration beside it."""
    if get_origin(field.type) is Annotated:
        kind, *metas = get_args(field.type)
        return kind, metas[-1]
    return field.type, Meta()


def _keywords(field: FieldInfo) -> dict[str, Any]:
    kind, meta = type_of(field)
    keywords: dict[str, Any] = {"help": meta.description}
    default = default_of(field)
    if kind is bool:
        keywords["action"] = "store_true"
    elif get_origin(kind) is tuple:
        keywords |= {"action": "append", "default": list(default)}
    elif default is NODEFAULT:
        keywords["required"] = True
    else:
        keywords["default"] = default
    if kind in (int, float):
        keywords["type"] = kind
    elif get_origin(kind) is Literal:
        keywords["choices"] = get_args(kind)
    return keywords | (meta.extra or {})


def _allowed(field: FieldInfo) -> str:
    """The values that fit, in words."""
    kind, meta = type_of(field)
    words: list[str] = []
    for each in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(each) is Annotated:
            each, meta = get_args(each)
        if get_origin(each) is Literal:
            words += map(str, get_args(each))
        elif meta.ge is not None:
            words.append(f"at least {meta.ge}" if meta.le is None else f"from {meta.ge} to {meta.le}")
        else:
            other = (meta.extra or {}).get("metavar", "a number")
            words.append(other if meta.gt is None else f"more than {meta.gt}")
    return ", or ".join(words)
