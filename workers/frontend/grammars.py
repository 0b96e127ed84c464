"""From a structure that a client asked for to a grammar that workers draw by; what is no grammar is refused here.

The grammar is a client's, and anything may stand in it: what it takes to read is bounded in size (`BYTES_MAX`), by the
library's own limits, and in time; it is read in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.structures import Structure
from halfmoon.workers.frontend.productive import BY_NAME, endless_rule, satisfiable_schema
from halfmoon.workers.model.text.tokenizer import Tokenizer

# Imported with the first grammar: a frontend's start does not wait for it.
if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("halfmoon.frontend")

#: Of a grammar as it travels to the workers, within the messages that have its prompt.
BYTES_MAX = 48 << 10
#: Longest seen for what fits: 0.2 s.
READ_S = 5.0
_KEPT_MAX = 256
_NOTHING = "nothing can satisfy it"
#: Keywords of JSON Schema under which no schema stands.
_VALUES = frozenset(("enum", "const", "default", "examples"))


class GrammarReader:
    """`read` raises ApiError; what it made is kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        #: Made with the first grammar, which it takes half a second longer.
        self._library = functools.cache(lambda: _library_tokenizer(tokenizer))
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, structure: Structure) -> str:
        """As llguidance writes it. Raises ApiError 400 that names the field, in what it says the library's words."""
        param = structure.param
        try:
            asked = orjson.dumps(structure.asked)
        except TypeError:  # nested too deeply
            raise ApiError(400, f"{param}: nested too deeply", param=param, code="invalid") from None
        if len(asked) > BYTES_MAX:
            message = f"{param}: {len(asked)} bytes; at most {BYTES_MAX}"
            raise ApiError(400, message, param=param, code="too_long")
        options = (structure.any_whitespace, structure.whitespace_pattern, structure.additional_properties)
        mark = orjson.dumps([structure.kind, *options, structure.separators]) + asked
        grammar = self._kept.pop(mark, None)
        if grammar is None:
            grammar = await self._read(structure, param)
        self._kept[mark] = grammar
        while len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return grammar

    async def _read(self, structure: Structure, param: str) -> str:
        loop = asyncio.get_running_loop()
        # Not the client's: on a busy machine it once took longer than any structure may.
        library = await loop.run_in_executor(self._threads, self._library)
        try:
            async with asyncio.timeout(READ_S):
                grammar, problem = await loop.run_in_executor(self._threads, _checked, structure, library)
        except TimeoutError:
            message = f"{param}: not read within {READ_S:.0f} s"
            raise ApiError(400, message, param=param, code="too_complex") from None
        if problem:
            raise ApiError(400, f"{param}: {problem}", param=param, code="invalid")
        if len(grammar) > BYTES_MAX:
            message = f"{param}: {len(grammar)} bytes as a grammar; at most {BYTES_MAX}"
            raise ApiError(400, message, param=param, code="too_long")
        return grammar


def _library_tokenizer(tokenizer: Tokenizer) -> LLTokenizer | None:
    """None: the library cannot read this model's, and no worker could draw by a grammar."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(
            tokenizer.serialized(), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_ids)
        )
    except (ValueError, TypeError, RuntimeError) as error:
        log.warning("no structured outputs: the model's tokenizer: %s", _short(str(error)))
        return None


def _checked(structure: Structure, tokenizer: LLTokenizer | None) -> tuple[str, str]:
    """The grammar, and what is wrong with it."""
    from llguidance import LLMatcher

    from halfmoon.workers.model.grammar_masks import limits

    if tokenizer is None:
        return "", "not supported with this model's tokenizer"
    try:
        grammar = _grammar(structure)
        for text in _literals(structure):
            if tokenizer.decode_bytes(tokenizer.tokenize_str(text)) != text.encode():
                return "", f"the model has no tokens to write {text[:40]!r} with"
    # Whatever the library, and its reader of other dialects, raise for what a client wrote.
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, AssertionError) as error:
        return "", _short(str(error))
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "llguidance":
            raise
        return "", _short(str(error))
    problem = LLMatcher.validate_grammar(grammar, tokenizer, limits=limits())
    return grammar, _short(problem or _unsatisfied(structure, grammar, tokenizer))


def _unsatisfied(structure: Structure, grammar: str, tokenizer: LLTokenizer) -> str:
    """Why no answer can satisfy a grammar that is well written; "": one may."""
    from llguidance import LLMatcher

    from halfmoon.workers.model.grammar_masks import limits

    def failure(lark: str) -> str:
        """Where it allows no first token, and not the end either, the library has failed; so it has at a bound."""
        matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_logit_bias()
        error = matcher.get_error().partition("<state>")[0] if matcher.is_error() else ""
        return _NOTHING if "NoExtension" in error else error

    if structure.kind == "grammar" and (
        rule := endless_rule(grammar, lambda part: failure(part) == _NOTHING)
    ):
        return f"{_NOTHING}: no text comes to the end of the rule {rule}"
    return failure(grammar)


def _literals(structure: Structure) -> Iterator[str]:
    """Texts of which an answer must have one as it is. A vocabulary may lack bytes, and an answer would stand there."""
    asked = structure.asked
    if structure.kind == "choice":
        yield from asked
    elif structure.kind == "json":
        for schema in _schemas(orjson.loads(asked) if isinstance(asked, str) else asked):
            values = schema.get("enum", [])
            for value in (
                [schema["const"]] if "const" in schema else values if isinstance(values, list) else []
            ):
                yield orjson.dumps(value).decode()


def _grammar(structure: Structure) -> str:
    from llguidance import LLMatcher, grammar_from

    asked = structure.asked
    match structure.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(*_json(structure))
        case "regex":
            return LLMatcher.grammar_from_regex(asked)
        case "choice":
            if not asked:
                raise ValueError("an empty list")
            return grammar_from("choice", orjson.dumps(asked).decode())
        case "grammar":
            return grammar_from("grammar", asked)


def _json(structure: Structure) -> tuple[str, Any]:
    """The schema's text, and how JSON is written. Raises ValueError."""
    asked = structure.asked
    schema = orjson.loads(asked) if isinstance(asked, str) else asked
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object" if schema is not False else "nothing can be an answer")
    if not structure.additional_properties:
        for each in _schemas(schema):
            if ("properties" in each or "patternProperties" in each) and "additionalProperties" not in each:
                each["additionalProperties"] = False
    schema = satisfiable_schema(schema)
    options: dict[str, Any] = {"whitespace_flexible": structure.any_whitespace}
    options["item_separator"], options["key_separator"] = structure.separators
    if structure.whitespace_pattern is not None:
        options["whitespace_pattern"] = structure.whitespace_pattern
    return orjson.dumps(schema).decode(), options


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """The schema, and those within it."""
    if isinstance(value, dict):
        yield value
        for keyword, inner in value.items():
            if keyword in BY_NAME and isinstance(inner, dict):
                inner = list(inner.values())
            if keyword not in _VALUES:
                yield from _schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _schemas(inner)


def _short(problem: str) -> str:
    """One line of at most 300 characters."""
    return " ".join(problem.split())[:300]
