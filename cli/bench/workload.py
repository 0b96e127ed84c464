"""The load of `halfmoon bench`: requests with times, prompts and answer lengths, drawn by a seed or from a trace.

A prompt is made of named parts, and a name always gives the same tokens: so prompts are equal exactly as far as their
parts are. A block of a trace is such a part, so blocks shared in the trace are shared here. Lengths of a trace are
divided by a scale, blocks too, so that its longest request fits the model's context.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.simulation.trace import TRACE_BLOCK_TOKENS, Arrival
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.types import KEY_BYTES

#: A trace's lengths are divided by these at most; a power of two, so that blocks stay whole.
SCALE_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to send. `parts`: (name, tokens) of its prompt, in order."""

    number: int
    #: When it should be sent, ns from the beginning; -1: when there is a free place (closed loop).
    at_ns: int = -1
    parts: tuple[tuple[bytes, int], ...]
    max_tokens: int
    priority: int = 0
    #: It is sent `think_ns` after the end of the request of this number, an earlier one; -1: at its time.
    follows: int = -1
    think_ns: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.parts)


class Texts:
    """Token ids by name. `vocab_size`: of the model; ids come from its middle, where no special tokens are."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._low, self._high = vocab_size // 8, max(vocab_size // 8 + 1, vocab_size * 7 // 8)
        self._seed = seed.to_bytes(8, "little")
        self._part = functools.lru_cache(maxsize=8192)(self._draw)

    def prompt(self, planned: Planned) -> list[int]:
        ids: list[int] = []
        for name, tokens in planned.parts:
            ids += self._part(name, tokens)
        return ids

    def _draw(self, name: bytes, tokens: int) -> list[int]:
        """A longer draw of the same name begins with the shorter one."""
        draw = np.random.default_rng(xxhash.xxh3_128_intdigest(self._seed + name))
        ids: list[int] = draw.integers(self._low, self._high, tokens, dtype=np.int64).tolist()
        return ids


# --- drawn --------------------------------------------------------------------------------------------------

_NUMBERS = {"uniform": 2, "normal": 2, "lognormal": 2}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length in tokens: `128` (fixed), `64-512` (uniform), `normal:MEAN,DEVIATION`,
    `lognormal:MEDIAN,SIGMA`.
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Raises OptionInvalid, naming `option`."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = ("uniform", text.replace("-", ",", 1)) if "-" in text[1:] else ("fixed", text)
        try:
            numbers = [float(number) for number in rest.split(",")]
        except ValueError:
            numbers = []
        if kind not in ("fixed", *_NUMBERS) or len(numbers) != _NUMBERS.get(kind, 1):
            raise OptionInvalid(f"{option} {text}: N, A-B, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA")
        made = cls(kind, *numbers)
        whole = kind in ("normal", "lognormal") or all(number == int(number) for number in numbers)
        upwards = kind != "uniform" or made.first <= made.second
        if not (whole and upwards and 1 <= made.first < 1e9 and 0 <= made.second < 1e9):
            raise OptionInvalid(f"{option} {text}: tokens are whole numbers from 1 upwards")
        return made

    @property
    def largest(self) -> int:
        """0: it has no limit of its own."""
        return {"fixed": int(self.first), "uniform": int(self.second)}.get(self.kind, 0)

    def draw(self, rng: np.random.Generator) -> int:
        match self.kind:
            case "fixed":
                return int(self.first)
            case "uniform":
                return int(rng.integers(int(self.first), int(self.second) + 1))
            case "normal":
                return max(1, round(float(rng.normal(self.first, self.second))))
            case _:
                exponent = min(math.log(self.first) + self.second * float(rng.standard_normal()), 30.0)
                return max(1, round(math.exp(exponent)))


@dataclass(frozen=True, kw_only=True)
class DrawnLoad:
    """Requests without end. `rate`: a second; 0: closed loop. `shared`: how much of a prompt is one of
    `prefixes`.
    """

    prompt: Lengths
    output: Lengths
    context: int
    rate: float = 0.0
    poisson: bool = True
    shared: float = 0.0
    prefixes: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raises OptionInvalid when the lengths cannot fit the context."""
        largest = max(1, self.prompt.largest) + max(1, self.output.largest)
        if largest > self.context:
            raise OptionInvalid(
                f"--prompt-tokens and --output-tokens: {largest} in all are more than the model's context of "
                f"{self.context} tokens"
            )

    def requests(self) -> Iterator[Planned]:
        """Requests within the context: a length that a distribution without an end draws too long is cut."""
        rng = np.random.default_rng(self.seed)
        at_s = 0.0
        for number in itertools.count():
            output = min(self.output.draw(rng), self.context - 1)
            prompt = min(self.prompt.draw(rng), self.context - output)
            prefix = int(self.shared * prompt)
            parts = [
                (b"prefix-%d" % int(rng.integers(self.prefixes)), prefix),
                (b"own-%d" % number, prompt - prefix),
            ]
            yield Planned(
                number=number,
                at_ns=int(at_s * SECOND_NS) if self.rate else -1,
                parts=tuple(part for part in parts if part[1]),
                max_tokens=output,
            )
            if self.rate:
                at_s += float(rng.exponential(1 / self.rate)) if self.poisson else 1 / self.rate


# --- out of a trace -----------------------------------------------------------------------------------------


def fitting_scale(arrivals: Sequence[Arrival], context: int) -> int:
    """The smallest power of two by which all lengths must be divided to fit. Raises OptionInvalid when none
    does.
    """
    scale = 1
    while scale <= SCALE_MAX:
        if all(sum(_scaled(arrival, scale)) <= context for arrival in arrivals):
            return scale
        scale *= 2
    raise OptionInvalid(f"--trace: a context of {context} tokens is too short even at --scale {SCALE_MAX}")


def traced(
    arrivals: Sequence[Arrival], *, scale: int, speed: float, context: int, closed_loop: bool = False
) -> Iterator[Planned]:
    """The trace's requests, `speed` times as fast; a prompt that is still too long at `scale` is cut at its end.
    `closed_loop`: turns wait for the answers before them.
    """
    block, first_ns = TRACE_BLOCK_TOKENS // scale, arrivals[0].at_ns
    for number, arrival in enumerate(arrivals):
        prompt, output = _scaled(arrival, scale)
        output = min(output, context - 1)
        prompt = min(prompt, context - output)
        keys = arrival.block_keys
        whole = min(len(keys) // KEY_BYTES, prompt // block)
        parts = [(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], block) for at in range(whole)]
        if rest := prompt - whole * block:  # less than a block: shared with nobody
            parts.append((b"own-%d" % number, rest))
        yield Planned(
            number=number,
            at_ns=int((arrival.at_ns - first_ns) / speed),
            parts=tuple(parts),
            max_tokens=output,
            priority=arrival.priority,
            follows=arrival.follows if closed_loop else -1,
            think_ns=int(arrival.think_ns / speed),
        )


def cut_short(arrivals: Sequence[Arrival], *, scale: int, context: int) -> int:
    """How many of them `traced` would shorten."""
    return sum(sum(_scaled(arrival, scale)) > context for arrival in arrivals)


def _scaled(arrival: Arrival, scale: int) -> tuple[int, int]:
    return max(1, arrival.prompt_tokens // scale), max(1, arrival.output_tokens // scale)
