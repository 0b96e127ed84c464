"""Counts the cost of rendering a chat template: steps, characters made, time. See `template_sandbox`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

STEPS_MAX = 1_000_000
"""Iterations, calls and operations, beside 16 for each character that the template is given."""

VALUE_MAX = 4 << 20
"""Characters of one value, beside 16 for each that the template is given; an item counts as `ITEM_CHARACTERS`."""

MADE_MAX = 256 << 20
"""Characters of all values together, beside 256 for each that the template is given."""

ITEM_CHARACTERS = 16
_STEPS_BETWEEN_LOOKS = 32
INTEGER_BITS_MAX = 4096


class TemplateLimit(Exception):
    """The template exceeded a limit; the text names it."""


class TemplateSlow(TemplateLimit):
    """The template took longer than this caller waits."""


class TemplateRefusal(Exception):
    """The template's own words, by `raise_exception`."""


class Meter:
    """Bounds of one rendering. `given`: size of the template's inputs; `seconds_max`: CPU time of this thread."""

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
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
            raise TemplateLimit(f"the chat template makes an integer of more than {INTEGER_BITS_MAX} bits")
        return size_of(value, self.value_max)

    def made(self, value: Any) -> Any:
        """`value`, charged with all that is inside of it."""
        self.charge(self.size(value))
        return value

    def picked(self, value: Any) -> Any:
        """`value`, charged by the number of its items only; the items were charged before."""
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
    """This meter counts for whatever this thread compiles and renders inside."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def current_meter() -> Meter:
    """The one of the rendering that this thread is in."""
    return _meter.get()
