"""Which tokens a grammar allows next. Imports no torch.

The generated tokens decide it, and nothing else: a matcher is kept from token to token only because that is cheaper,
and holds the tokens that it stands behind. A request that was preempted, or goes on at another worker after a
`kill -9`, gets a matcher that is fed its tokens again, and the same masks from there on.

A grammar is a client's: its cost to compile, and for each mask, is bounded (`limits`). One that runs into a bound
cuts the text there.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

# The library itself is imported with the first grammar: a worker's start does not wait for it.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger("halfmoon.grammar")

#: Grammars that are kept compiled, and requests whose matchers are.
COMPILED_MAX, MATCHERS_MAX = 64, 256


def limits() -> LLParserLimits:
    """The library's own bounds, but for the memory of one matcher (1 to 2 KB for each state of its lexer).

    A mask takes at most some 20 ms. Errors repeat no grammar.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class GrammarMask(NamedTuple):
    """`allowed`: a byte for each token id of the vocabulary, not 0 where it may come next. `cut`: the grammar ran into
    a bound, only the end of the text is allowed, and that is not where the grammar ends it.
    """

    allowed: bytes
    cut: bool


class _Matcher:
    """A matcher, and the tokens that it has consumed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher, self.consumed = matcher, list[int]()

    def follow(self, output_ids: Sequence[int]) -> None:
        fresh = list(output_ids[len(self.consumed) :])
        if fresh and not self.matcher.is_stopped():
            self.matcher.consume_tokens(fresh)
        self.consumed += fresh


class GrammarMasks:
    """`prepare` may be called on any thread; `mask` is the compute thread's."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """`load` is called once, when the first grammar comes: it takes half a second."""
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[tuple[str, str], _Matcher] = OrderedDict()

    def prepare(self, grammar: str) -> None:
        """Compile it, which takes up to a second, unless that was done."""
        self._new(grammar)

    def mask(self, grammar: str, name: str, output_ids: Sequence[int]) -> GrammarMask:
        """Which tokens may follow `output_ids`. `name`: of the request, under which its matcher is kept."""
        mark = grammar, name
        kept = self._matchers.pop(mark, None)
        if kept is None or list(output_ids[: len(kept.consumed)]) != kept.consumed:
            kept = _Matcher(self._new(grammar))
        kept.follow(output_ids)
        allowed = kept.matcher.compute_logit_bias()
        cut = kept.matcher.is_error()
        if cut:
            log.warning("request %s: %s", name, kept.matcher.get_error()[:200])
        elif output_ids:  # the first token is mostly drawn where the others are not
            self._matchers[mark] = kept
            while len(self._matchers) > MATCHERS_MAX:
                self._matchers.popitem(last=False)
        return GrammarMask(allowed, cut)

    def _new(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            self._compiled[grammar] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()
