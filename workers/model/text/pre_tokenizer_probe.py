"""Tries the regular expressions of a tokenizer that a model brings along, before any user's text reaches them.

An expression such as `(a+)+$` takes ages over some texts, and nothing can stop it once it runs. A step that is known to
be quick is let pass; any other is timed on a few texts, ever longer, and refused when it is slow on one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import tokenizers

from halfmoon.workers.model.loading.errors import ModelBroken, ModelError, shown

SECONDS_MAX = 0.25
"""Of CPU for one text of at most `LENGTHS[-1]` characters; the usual expressions take a millisecond."""
_SURELY_SLOW_S = 4 * SECONDS_MAX

LENGTHS = (16, 24, 32, 64, 128, 256, 512, 1024, 2048)
PATTERN_CHARACTERS_MAX = 4096
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: GPT-4o, gpt-oss, Llama 4.
O200K = _CASED % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _REST
#: Mistral NeMo and later.
TEKKEN = _CASED % ("", "") + r"\p{N}" + _REST
#: DeepSeek V3 and later, behind the two of `PARTIAL`. CR and LF are the characters themselves.
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
#: Each cuts a text at every place of `pieces`.
FULL = frozenset({_GPT2, LLAMA3, QWEN2, O200K, TEKKEN, DEEPSEEK3})
#: These match no whitespace, and look at nothing around.
PARTIAL = frozenset({r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+"})
_QUICK = FULL | PARTIAL
"""No repeat in these stands inside of another."""

_ALWAYS = " \n1aé-'"


def probe(text: str, built: tokenizers.Tokenizer) -> bool:
    """Whether all expressions of the tokenizer.json `text` are known to be quick; else `built` is tried.

    Raises `ModelBroken` for an expression that is too long, fails, or is slow on one of the texts tried.
    """
    patterns = list(_patterns(json.loads(text)))
    for pattern in patterns:
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            raise ModelBroken("Regex", f"has {len(pattern)} characters; at most {PATTERN_CHARACTERS_MAX}")
    unknown = [pattern for pattern in patterns if pattern not in _QUICK]
    if unknown:
        letters = re.sub(r"\\[a-zA-Z]|\W|_", "", "".join(unknown))
        for character in dict.fromkeys(_ALWAYS + letters[:32]):
            for end in ("", "!"):
                _try(built, character, end, unknown)
    return not unknown


def _patterns(content: dict[str, Any]) -> Iterator[str]:
    """Every expression in the steps before the model."""
    left: list[Any] = [content.get("normalizer"), content.get("pre_tokenizer")]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(value.get("Regex"), str):
                yield value["Regex"]
            left += value.values()
        elif isinstance(value, list):
            left += value


def _try(built: tokenizers.Tokenizer, character: str, end: str, patterns: list[str]) -> None:
    for length in LENGTHS:
        words = f"{length} times {character!r}"
        try:
            took = _cpu_seconds(built, character * length + end)
            if SECONDS_MAX < took < _SURELY_SLOW_S:
                # A machine that shares its processor counts another machine's time as ours.
                took = min(took, _cpu_seconds(built, character * length + end))
        except (ModelError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            problem = f"fails on {words}: {str(error)[:120]}"
            raise ModelBroken(f"Regex {shown(patterns[0])}", problem) from None
        if took > SECONDS_MAX:
            raise ModelBroken(f"Regex {shown(patterns[0])}", f"takes {took:.1f} s for {words}")


def _cpu_seconds(built: tokenizers.Tokenizer, sample: str) -> float:
    begin = time.thread_time()
    with quiet_panics():
        normal = built.normalizer.normalize_str(sample) if built.normalizer else sample
        if built.pre_tokenizer:
            built.pre_tokenizer.pre_tokenize_str(normal)
    return time.thread_time() - begin


@contextlib.contextmanager
def quiet_panics() -> Iterator[None]:
    """Holds back the library's panic messages on file descriptor 2: the error has the same in one line.

    For a process that loads its model and does nothing else yet: the descriptor belongs to the whole process.
    """
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed: there is nothing to hold back
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
