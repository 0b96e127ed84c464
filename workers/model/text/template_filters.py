"""Filters of chat templates, and methods of texts: those whose cost can be foreseen, charged before they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.utils import _PassArg, pass_environment, pass_eval_context

from halfmoon.workers.model.text.template_meter import TemplateLimit, current_meter

_WIDTH_MAX = 1000


def width_of(value: Any) -> int:
    """An argument that is the width of a result."""
    if isinstance(value, int) and abs(value) > _WIDTH_MAX:
        raise TemplateLimit(f"the chat template asks for a width of more than {_WIDTH_MAX}")
    return int(value) if isinstance(value, int | float) else 0


def joined_size(separator: Any, values: list[Any]) -> int:
    meter = current_meter()
    return sum(meter.size(value) for value in values) + len(str(separator)) * len(values)


def replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _check_form(form: str) -> None:
    """A format may ask for any width, in digits or by `*` and nested braces."""
    digits = 0
    for character in form:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 3:
            raise TemplateLimit(f"the chat template asks for a width of more than {_WIDTH_MAX}")


def check_percent(form: str) -> None:
    _check_form(form)
    if "*" in form:
        raise TemplateLimit("the chat template formats with a width that is an argument")


def _check_braces(form: str) -> None:
    _check_form(form)
    depth = 0
    for character in form.replace("{{", "").replace("}}", ""):
        depth += (character == "{") - (character == "}")
        if depth > 1:
            raise TemplateLimit("the chat template formats with a width that is an argument")


def charge_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Charges a method of a text whose result may be longer than the text. Raises TemplateLimit."""
    meter = current_meter()
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            meter.charge(len(text) + width_of(arguments[0] if arguments else 0))
        case "expandtabs":
            meter.charge(len(text) + text.count("\t") * width_of(arguments[0] if arguments else 8))
        case "replace" if len(arguments) >= 2 and all(isinstance(each, str) for each in arguments[:2]):
            meter.charge(replaced_size(text, arguments[0], arguments[1]))
        case "translate":
            raise TemplateLimit("the chat template calls translate(), which is not offered")
        case "format" | "format_map":
            _check_braces(text)
            pieces = text.count("{") or 1
            meter.charge(len(text) + pieces * sum(meter.size(each) for each in arguments))
        case _:
            return


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' `tojson`: no HTML escapes."""
    meter = current_meter()
    margin = len(indent) if isinstance(indent, str) else width_of(indent or 0)
    if margin > _WIDTH_MAX or (separators is not None and sum(map(len, separators)) > 8):
        raise TypeError("tojson: indent and separators must be short")
    # An item takes a line of its own, indented by its depth; a character six where it is escaped.
    meter.charge(meter.size(value) * (6 + margin))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    plain = str(text)
    margin = width if isinstance(width, str) else " " * width_of(width)
    current_meter().charge(len(plain) + (plain.count("\n") + 1) * len(margin))
    return jinja2.filters.do_indent(plain, margin, first, blank)


@pass_eval_context
def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    values = list(current_meter().counted(value))
    current_meter().charge(joined_size(d, values))
    return str(jinja2.filters.do_join(eval_ctx, values, d, attribute))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    plain, old, new = str(text), str(old), str(new)
    current_meter().charge(replaced_size(plain, old, new))
    return plain.replace(old, new, -1 if count is None else count)


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(str(form))
    meter = current_meter()
    meter.charge(len(str(form)) + str(form).count("%") * meter.size([*args, kwargs]))
    return jinja2.filters.do_format(str(form), *args, **kwargs)


@pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    meter = current_meter()
    values: Iterable[Any] = meter.counted(iterable)
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    # Each of the sums is made: of lists that is quadratic.
    for value in values:
        start = meter.made(start + value)
    return start


def _center(text: Any, width: int = 80) -> str:
    return str(text).center(width_of(width))


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[Any]:
    width_of(linecount)
    return list(jinja2.filters.do_batch(value, linecount, fill_with))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    width_of(precision)
    return jinja2.filters.do_round(value, precision, method)


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": _to_json, "indent": _indent, "join": _join, "replace": _replace, "format": _format, "center": _center,
    "batch": _batch, "round": _round, "sum": _sum,
}  # fmt: skip
_TAKEN_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe",
    "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
_WALKS = {
    "batch", "dictsort", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr", "sort", "sum", "title", "unique",
}  # fmt: skip
"""Filters that look at every item before, or without, giving one on."""

_NESTS = {"batch", "groupby", "list", "map", "sum"}
"""Filters whose result may hold a value more often than their input does."""


def _metered_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose call is a step, whose items are steps, and whose result is charged."""
    passed = _PassArg.from_obj(inner)
    place = 0 if passed is None else 1

    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.step()
        if name in _WALKS and len(args) > place and isinstance(args[place], Collection):
            meter.step(len(args[place]))
        result = inner(*args, **kwargs)
        if isinstance(result, Iterator):
            return meter.counted(result)
        return meter.made(result) if name in _NESTS else meter.picked(result)

    if passed is not None:
        run.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return run


def metered_filters(jinjas: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """All that templates may use, each charged; `jinjas` are Jinja's own."""
    taken = {name: jinjas[name] for name in _TAKEN_FILTERS}
    return {name: _metered_filter(name, inner) for name, inner in (taken | _OWN_FILTERS).items()}
