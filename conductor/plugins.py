"""Policies of other packages: entry points of the group `halfmoon.policies` are added to the core's table.

Called once by each process that runs a core: conductors, replay, simulation. A package that cannot be used is passed
over with a warning: a log that needs it is then refused by its name, and no other. An error of a measure while it
decides is contained here, outside of the core, and equally in every conductor: the candidate ranks last by it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

import msgspec

from halfmoon.conductor.core.placement import measures
from halfmoon.conductor.core.placement.fetch_plan import FetchRule
from halfmoon.conductor.core.placement.measures import C, CandidateMeasure
from halfmoon.conductor.core.placement.policies import POLICIES, Drawn, InTurn, Least, PolicyRules
from halfmoon.schemas.codec import one_line
from halfmoon.schemas.policy import PLUGIN_PATTERN, PolicyName

GROUP = "halfmoon.policies"
#: The number of a candidate for which a measure has none: more than any time or count.
NO_NUMBER = 2**63 - 1
log = logging.getLogger(__name__)
#: (Policy, words of a measure, problem) → number of times that the measure gave no number.
failures: Counter[tuple[str, str, str]] = Counter()
_installed: dict[str, Plugin] = {}


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of another package. Its measures are pure functions of a candidate, in whole numbers.

    Equal names and versions choose alike, for ever: a log is replayed by them. A changed choice needs a new `version`.
    """

    name: str
    version: str
    rules: PolicyRules

    @property
    def title(self) -> str:
        return f"{self.name}@{self.version}"


def install_plugins() -> None:
    """Adds all that there are to the table of policies. A further call adds those that have come since."""
    for point in entry_points(group=GROUP):
        try:
            for plugin in _plugins_of(point):
                install(plugin)
        except Exception as problem:  # it is anybody's code
            log.warning("policy plug-in %s (%s): %s", point.name, point.value, one_line(problem))


def install(plugin: Plugin) -> None:
    """Adds one. Raises ValueError where it is no policy, or its title is another one's."""
    _check(plugin)
    if _installed.setdefault(plugin.title, plugin) != plugin:
        raise ValueError(f"there is another {plugin.title}")
    rules = plugin.rules
    POLICIES[plugin.title] = msgspec.structs.replace(
        rules,
        prefill=_contained(plugin.title, rules.prefill),
        decode=_contained(plugin.title, rules.decode),
        mixed=_contained(plugin.title, rules.mixed),
    )


def policy_title(name: str, plugins: Sequence[str]) -> str:
    """The log's name for the policy `name`: of the table, a title of `plugins`, or the last of these with that name.

    Raises ValueError.
    """
    if name in get_args(PolicyName) or name in plugins:
        return name
    versions = [title for title in plugins if title.partition("@")[0] == name]
    if not versions:
        known = ", ".join([*get_args(PolicyName), *plugins])
        raise ValueError(f"none of {known}")
    return versions[-1]


def failed(title: str) -> list[str]:
    """Faults of the measures of a plug-in in this process, in words, and how often."""
    return [
        f"policy {title}, measure {words!r}: {problem} ({count:,} times)"
        for (whose, words, problem), count in sorted(failures.items())
        if whose == title
    ]


def _plugins_of(point: EntryPoint) -> Sequence[Plugin]:
    """Raises ValueError, and whatever the package raises."""
    found = point.load()
    plugins: Sequence[Plugin] = found if isinstance(found, tuple) else (found,)
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            raise ValueError(f"it is {type(plugin).__name__}, not Plugin")
        if plugin.name != point.name:
            raise ValueError(f"it calls itself {plugin.name}")
    return plugins


def _check(plugin: Plugin) -> None:
    """Raises ValueError where a core could not decide by it."""
    if not re.fullmatch(PLUGIN_PATTERN, plugin.title):
        raise ValueError(f"{plugin.title!r} is no name and version")
    rules = plugin.rules
    if not isinstance(rules, PolicyRules) or rules.fetch not in get_args(FetchRule):
        raise ValueError("its rules are no PolicyRules")
    for choice in (rules.prefill, rules.decode, rules.mixed):
        used = choice.measures if isinstance(choice, Least) else ()
        if not isinstance(choice, Least | InTurn | Drawn) or not all(
            isinstance(measure, CandidateMeasure) for measure in used
        ):
            raise ValueError("its rules choose by something else than measures, turns or draws")


def _contained(title: str, choice: Least[C] | InTurn | Drawn) -> Least[C] | InTurn | Drawn:
    if not isinstance(choice, Least):
        return choice
    return Least(tuple(_guarded(title, measure) for measure in choice.measures))


def _guarded(title: str, measure: CandidateMeasure[C]) -> CandidateMeasure[C]:
    """`measure`, with a number whatever happens. Our own stay as they are, which the core's short cut knows."""
    if any(measure is ours for ours in vars(measures).values()):
        return measure
    number_of: Callable[[C], object] = measure.of

    def of(candidate: C) -> int:
        try:
            number = number_of(candidate)
        except Exception as raised:  # it is anybody's code
            return _no_number(title, measure.words, type(raised).__name__, one_line(raised))
        # A float differs from machine to machine, and a value that is no number orders nothing.
        if type(number) is int:
            return number
        return _no_number(title, measure.words, f"{type(number).__name__}, no int", "")

    return msgspec.structs.replace(measure, of=of)


def _no_number(title: str, words: str, problem: str, text: str) -> int:
    failures[title, words, problem] += 1
    if failures[title, words, problem] == 1:
        log.warning("policy %s, measure %r: %s %s: candidates rank last by it", title, words, problem, text)
    return NO_NUMBER
