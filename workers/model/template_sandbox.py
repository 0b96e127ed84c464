"""Jinja with a meter: a template that loops, grows or recurses without end is stopped, and the reason is said.

Templates come with models, from anywhere, and are rendered for every chat. Jinja's own sandbox keeps them from the
process's objects; it bounds neither time nor memory. Here every iteration, call, filter, literal and operation goes
through a :class:`Meter`, which counts it and its result. So no value can grow large, and what works on values that are
not large comes back to the meter soon: that is why time can be bounded without killing a thread.

Rules: whatever makes a value is charged for it *before* where its size can be known, else right after; a value inside
of two others counts twice, as it would when it is written out. Filters are a list of our own: those whose cost can be
foreseen. What reads other files is refused when the template is compiled.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg, pass_environment, pass_eval_context
from jinja2.visitor import NodeTransformer

STEPS_MAX = 1_000_000
"""Iterations, calls and operations, beside 16 for each character that the template is given."""

VALUE_MAX = 4 << 20
"""Characters of one value, beside 16 for each that the template is given; an item counts as `ITEM_CHARACTERS`."""

MADE_MAX = 256 << 20
"""Characters of all values together, beside 256 for each that the template is given."""

ITEM_CHARACTERS = 16
_STEPS_BETWEEN_LOOKS = 32
_INTEGER_BITS_MAX = 4096
_WIDTH_MAX = 1000
_FORMAT_CHARACTERS_MAX = 200


class TemplateLimit(Exception):
    """The template did more than one may; the text says of what."""


class TemplateSlow(TemplateLimit):
    """The template took longer than this caller waits."""


class TemplateRefusal(Exception):
    """The template's own words, by `raise_exception`."""


class Meter:
    """Bounds of one rendering. `given`: size of what the template is given; `seconds_max`: CPU time of this thread."""

    def __init__(self, given: int, seconds_max: float) -> None:
        self._steps = self._made = 0
        self._steps_max = STEPS_MAX + 16 * given
        self.value_max = VALUE_MAX + 16 * given
        self._made_max = MADE_MAX + 256 * given
        self._seconds_max = seconds_max
        self._end = time.thread_time() + seconds_max

    def step(self, count: int = 1) -> None:
        before, self._steps = self._steps, self._steps + count
        if self._steps > self._steps_max:
            raise TemplateLimit(f"the chat template takes more than {self._steps_max} steps")
        looks = self._steps // _STEPS_BETWEEN_LOOKS != before // _STEPS_BETWEEN_LOOKS
        if looks and time.thread_time() > self._end:
            raise TemplateSlow(f"the chat template takes longer than {self._seconds_max:g} s")

    def charge(self, size: int) -> None:
        """A value of this size is, or is about to be, made."""
        if size > self.value_max:
            raise TemplateLimit(f"the chat template makes a value of more than {self.value_max} characters")
        self._made += size
        if self._made > self._made_max:
            raise TemplateLimit(f"the chat template makes more than {self._made_max} characters in all")

    def size(self, value: Any) -> int:
        """Characters that `value` would be, written out. Raises TemplateLimit for an integer that is too long."""
        if isinstance(value, int) and value.bit_length() > _INTEGER_BITS_MAX:
            raise TemplateLimit(f"the chat template makes an integer of more than {_INTEGER_BITS_MAX} bits")
        return size_of(value, self.value_max)

    def made(self, value: Any) -> Any:
        """`value`, charged with all that is inside of it."""
        self.charge(self.size(value))
        return value

    def picked(self, value: Any) -> Any:
        """`value`, charged; what is inside of it was there before."""
        sized = isinstance(value, list | tuple | dict | set)
        self.charge(ITEM_CHARACTERS * len(value) if sized else self.size(value))
        return value

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each a step."""
        for value in values:
            self.step()
            yield value


def size_of(value: Any, most: int) -> int:
    """Characters of a value written out, about; stops counting somewhere above `most`.

    Lists that hold each other several times over count several times: so no walk over a value that passed is long.
    """
    if isinstance(value, str | bytes):
        return len(value)
    size, left = 0, [value]
    while left and size + ITEM_CHARACTERS * len(left) <= most:
        each = left.pop()
        size += ITEM_CHARACTERS
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            left += each
    return size + ITEM_CHARACTERS * len(left)


_meter: ContextVar[Meter] = ContextVar("meter")


@contextlib.contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """What this thread compiles and renders inside goes by this meter."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


# --- what a result will need ----------------------------------------------------------------------------------


def _width(value: Any) -> int:
    """An argument that says how wide a result is to be."""
    if isinstance(value, int) and abs(value) > _WIDTH_MAX:
        raise TemplateLimit(f"the chat template asks for a width of more than {_WIDTH_MAX}")
    return int(value) if isinstance(value, int | float) else 0


def _joined_size(separator: Any, values: list[Any]) -> int:
    meter = _meter.get()
    return sum(meter.size(value) for value in values) + len(str(separator)) * len(values)


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _check_form(form: str) -> None:
    """A format may ask for any width, in digits or by `*` and nested braces."""
    digits = 0
    for character in form:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 3:
            raise TemplateLimit(f"the chat template asks for a width of more than {_WIDTH_MAX}")


def _check_percent(form: str) -> None:
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


def _charge_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Charges a method of a text whose result may be longer than the text. Raises TemplateLimit."""
    meter = _meter.get()
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            meter.charge(len(text) + _width(arguments[0] if arguments else 0))
        case "expandtabs":
            meter.charge(len(text) + text.count("\t") * _width(arguments[0] if arguments else 8))
        case "replace" if len(arguments) >= 2 and all(isinstance(each, str) for each in arguments[:2]):
            meter.charge(_replaced_size(text, arguments[0], arguments[1]))
        case "translate":
            raise TemplateLimit("the chat template calls translate(), which is not offered")
        case "format" | "format_map":
            _check_braces(text)
            pieces = text.count("{") or 1
            meter.charge(len(text) + pieces * sum(meter.size(each) for each in arguments))
        case _:
            return


# --- filters --------------------------------------------------------------------------------------------------


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' `tojson`: no HTML escapes."""
    meter = _meter.get()
    if isinstance(indent, str) or (separators is not None and sum(map(len, separators)) > 8):
        raise TypeError("tojson: indent must be a number, and separators short")
    # An item takes a line of its own, indented by its depth; a character six where it is escaped.
    meter.charge(meter.size(value) * (6 + _width(indent or 0)))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    plain = str(text)
    margin = width if isinstance(width, str) else " " * _width(width)
    _meter.get().charge(len(plain) + (plain.count("\n") + 1) * len(margin))
    return jinja2.filters.do_indent(plain, margin, first, blank)


@pass_eval_context
def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    values = list(_meter.get().counted(value))
    _meter.get().charge(_joined_size(d, values))
    return str(jinja2.filters.do_join(eval_ctx, values, d, attribute))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    plain, old, new = str(text), str(old), str(new)
    _meter.get().charge(_replaced_size(plain, old, new))
    return plain.replace(old, new, -1 if count is None else count)


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(form))
    meter = _meter.get()
    meter.charge(len(str(form)) + str(form).count("%") * meter.size([*args, kwargs]))
    return jinja2.filters.do_format(str(form), *args, **kwargs)


@pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    meter = _meter.get()
    values: Iterable[Any] = meter.counted(iterable)
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    # Each of the sums is made: of lists that is quadratic.
    for value in values:
        start = meter.made(start + value)
    return start


def _center(text: Any, width: int = 80) -> str:
    return str(text).center(_width(width))


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[Any]:
    _width(linecount)
    return list(jinja2.filters.do_batch(value, linecount, fill_with))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    _width(precision)
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
        meter = _meter.get()
        meter.step()
        if name in _WALKS and len(args) > place and isinstance(args[place], str | list | tuple | dict):
            meter.step(len(args[place]))
        result = inner(*args, **kwargs)
        if isinstance(result, Iterator):
            return meter.counted(result)
        return meter.made(result) if name in _NESTS else meter.picked(result)

    if passed is not None:
        run.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return run


# --- the environment ------------------------------------------------------------------------------------------


class _Metering(NodeTransformer):
    """Sends through filters of ours what Jinja compiles to plain Python: loops, literals, `~`, slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("counted", node.iter)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return node if node.ctx == "store" else self._literal(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._through("picked", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return self._through("compared", node)

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        # A literal of constants is as large as its source.
        return self._through("made", node) if list(node.find_all((nodes.Name, nodes.Filter))) else node

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, f"halfmoon_{name}", [], [], None, None, lineno=node.lineno)


_REFUSED = {
    nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "from", nodes.Extends: "extends",
}  # fmt: skip


def _charged_join(pieces: Iterable[str]) -> str:
    """In place of `"".join`, by which Jinja puts together macros, blocks and the whole output."""
    meter = _meter.get()
    found: list[str] = []
    size = 0
    for piece in pieces:
        meter.step()
        size += len(piece)
        if size > meter.value_max:
            meter.charge(size)
        found.append(piece)
    meter.charge(size)
    return "".join(found)


_PICKS = {"copy", "get", "partition", "rpartition", "rsplit", "split", "splitlines"}
"""Methods of dicts, lists and texts whose result holds nothing more often than they do."""


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders within :class:`metered` only."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(_charged_join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        taken = {name: self.filters[name] for name in _TAKEN_FILTERS}
        self.filters = {name: _metered_filter(name, inner) for name, inner in (taken | _OWN_FILTERS).items()}
        self.filters |= {
            "halfmoon_counted": _counted,
            "halfmoon_made": _made,
            "halfmoon_concatenated": _concatenated,
            "halfmoon_compared": _compared,
            "halfmoon_picked": _picked,
        }
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for kind, word in _REFUSED.items():
            if (found := tree.find(kind)) is not None:
                raise jinja2.TemplateAssertionError(f"{word} is not offered", found.lineno)
        changed: nodes.Template = _Metering().visit(tree)
        return changed

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.step()
        # The sandbox gives `format` and `format_map` as functions of its own, around those of the text.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, int | float | bytes):
            raise TemplateLimit(
                "the chat template calls a method of a number or of bytes, which is not offered"
            )
        if isinstance(function, LoopContext) and args:  # a recursive loop is given new items
            args = (meter.counted(args[0]), *args[1:])
        elif isinstance(owner, str):
            name = str(method.__name__)
            if name == "join" and args:
                args = (list(meter.counted(args[0])), *args[1:])
                meter.charge(_joined_size(owner, args[0]))
            else:
                _charge_method(owner, name, (*args, *kwargs.values()))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, Iterator):
            return meter.counted(result)
        picks = owner is not None and method.__name__ in _PICKS
        return meter.picked(result) if picks else meter.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        meter.step()
        sizes = meter.size(left), meter.size(right)
        match operator:
            case "*" if isinstance(left, int) != isinstance(right, int):
                times, size = (left, sizes[1]) if isinstance(left, int) else (right, sizes[0])
                if isinstance(times, int):
                    meter.charge(max(times, 0) * size)
            case "+":
                meter.charge(sum(sizes))
            case "**" if isinstance(left, int) and isinstance(right, int):
                if right > 0 and left.bit_length() * right > _INTEGER_BITS_MAX:
                    raise TemplateLimit(
                        f"the chat template makes an integer of more than {_INTEGER_BITS_MAX} bits"
                    )
            case "%" if isinstance(left, str):
                _check_percent(left)
                meter.charge(sizes[0] + left.count("%") * sizes[1])
            case _:
                pass
        return meter.made(super().call_binop(context, operator, left, right))


def _counted(values: Any) -> Iterable[Any]:
    if isinstance(values, Undefined):
        return values
    return _meter.get().counted(iter(values))


def _made(value: Any) -> Any:
    meter = _meter.get()
    meter.step()
    return meter.made(value)


def _picked(value: Any) -> Any:
    meter = _meter.get()
    meter.step()
    return meter.picked(value)


def _compared(value: Any) -> Any:
    _meter.get().step()
    return value


def _concatenated(values: list[Any]) -> str:
    meter = _meter.get()
    meter.step()
    meter.charge(sum(meter.size(value) for value in values))
    text: str = meter.made("".join([str(value) for value in values]))
    return text


def _raise(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > _FORMAT_CHARACTERS_MAX:
        raise TemplateLimit(
            f"the chat template formats a time with more than {_FORMAT_CHARACTERS_MAX} characters"
        )
    return datetime.now().strftime(form)
