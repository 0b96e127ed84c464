"""Jinja with a meter: a template that loops, grows or recurses without end is stopped, with the reason.

Templates come with models, from anywhere, and are rendered for every chat. Jinja's own sandbox keeps them from the
process's objects; it bounds neither time nor memory. Here every iteration, call, filter, literal and operation goes
through a :class:`Meter`, which counts it and its result. So no value can grow large, and an operation on values that
are not large comes back to the meter soon: that is why time can be bounded without killing a thread.

Rules: an operation is charged for its value *before* where the size can be known, else right after; a value inside of
two others counts twice, as it would when it is written out. Filters are a list of our own: those whose cost can be
foreseen. A statement that reads other files is refused when the template is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfmoon.workers.model.text.template_filters import (
    charge_method,
    check_percent,
    joined_size,
    metered_filters,
)
from halfmoon.workers.model.text.template_meter import (
    INTEGER_BITS_MAX,
    TemplateLimit,
    TemplateRefusal,
    current_meter,
)

_FORMAT_CHARACTERS_MAX = 200


def _metering(node: nodes.Node) -> nodes.Node:
    """Sends nodes that Jinja compiles to plain Python (loops, literals, `~`, slices …) through filters of ours."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _metering(value))
        elif isinstance(value, list):
            value[:] = [_metering(each) if isinstance(each, nodes.Node) else each for each in value]
    match node:
        case nodes.For():
            node.iter = _through("counted", node.iter)
        case nodes.Concat():
            return _through("concatenated", nodes.List(node.nodes, lineno=node.lineno))
        case nodes.Getitem(arg=nodes.Slice()):
            return _through("picked", node)
        case nodes.Compare():
            return _through("compared", node)
        # A literal of constants alone is as large as its source.
        case nodes.List() | nodes.Dict() if not _constant(node):
            return _through("made", node)
        case nodes.Tuple(ctx="load") if not _constant(node):
            return _through("made", node)
        case _:
            pass
    return node


def _constant(node: nodes.Node) -> bool:
    return node.find(nodes.Name) is None and node.find(nodes.Filter) is None


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, f"halfmoon_{name}", [], [], None, None, lineno=node.lineno)


_REFUSED = {
    nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "from", nodes.Extends: "extends",
}  # fmt: skip


def _charged_join(pieces: Iterable[str]) -> str:
    """In place of `"".join`, by which Jinja puts together macros, blocks and the whole output."""
    meter = current_meter()
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


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: the model's own text, marked for training. It renders its body.

    As in transformers, a variable that is set inside is not set behind it.
    """

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


_PICKS = {"copy", "get", "partition", "rpartition", "rsplit", "split", "splitlines"}
"""Methods of dicts, lists and texts whose result holds nothing more often than they do."""


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders within :class:`metered` only."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    concat = staticmethod(_charged_join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters = metered_filters(self.filters) | {
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
        _metering(tree)
        return tree

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
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
                meter.charge(joined_size(owner, args[0]))
            else:
                charge_method(owner, name, (*args, *kwargs.values()))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, Iterator):
            return meter.counted(result)
        picks = owner is not None and method.__name__ in _PICKS
        return meter.picked(result) if picks else meter.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = current_meter()
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
                if right > 0 and left.bit_length() * right > INTEGER_BITS_MAX:
                    raise TemplateLimit(
                        f"the chat template makes an integer of more than {INTEGER_BITS_MAX} bits"
                    )
            case "%" if isinstance(left, str):
                check_percent(left)
                meter.charge(sizes[0] + left.count("%") * sizes[1])
            case _:
                pass
        return meter.made(super().call_binop(context, operator, left, right))


def _counted(values: Any) -> Iterable[Any]:
    if isinstance(values, Undefined):
        return values
    return current_meter().counted(iter(values))


def _made(value: Any) -> Any:
    meter = current_meter()
    meter.step()
    return meter.made(value)


def _picked(value: Any) -> Any:
    meter = current_meter()
    meter.step()
    return meter.picked(value)


def _compared(value: Any) -> Any:
    current_meter().step()
    return value


def _concatenated(values: list[Any]) -> str:
    meter = current_meter()
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
